"""The table of config names: what parses, what a text says again, and what is answered to anything else."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aoquant.configs import ALIASES, CONFIGS, ConfigRow, Option, QuantConfig, configs_json, parse_config
from aoquant.errors import UsageError

ROWS = pytest.mark.parametrize("row", CONFIGS.values(), ids=lambda row: row.name)


def choices() -> list[tuple[ConfigRow, Option, int | str]]:
    return [(row, option, choice) for row in CONFIGS.values() for option in row.options for choice in option.choices]


@ROWS
def test_every_name_parses_with_its_defaults(row: ConfigRow) -> None:
    config = parse_config(row.name)
    assert config.row is row
    assert config.options == {option.name: option.default for option in row.options}
    assert str(config) == row.name


@pytest.mark.parametrize(("row", "option", "choice"), choices(), ids=str)
def test_every_option_parses_and_says_itself_again(row: ConfigRow, option: Option, choice: int | str) -> None:
    config = parse_config(f"{row.name}:{option.name}={choice}")
    assert (config.row, config.options[option.name]) == (row, choice)
    assert (str(config) == row.name) is (choice == option.default)
    assert parse_config(str(config)) == config


@pytest.mark.parametrize(("alias", "target"), ALIASES.items())
def test_every_alias_is_its_target(alias: str, target: str) -> None:
    assert parse_config(alias) == parse_config(target)
    assert str(parse_config(alias)) == target


def test_the_spellings_that_torchao_and_diffusers_used_are_aliases() -> None:
    """diffusers 0.37's TorchAoConfig._get_torchao_quant_type_to_method, those of its names that are made here."""
    for older, name in {
        "int4wo": "int4wo", "int4_weight_only": "int4wo", "int8wo": "int8wo", "int8_weight_only": "int8wo",
        "int8dq": "int8dq", "int8_dynamic_activation_int8_weight": "int8dq", "float8wo": "fp8wo",
        "float8_weight_only": "fp8wo", "float8dq": "fp8dq", "float8_dynamic_activation_float8_weight": "fp8dq",
        "float8dq_e4m3_tensor": "fp8dq", "float8dq_e4m3_row": "fp8dqrow", "uint4_weight_only": "uint4wo",
        "uintx_weight_only:dtype=torch.uint3": "uint3wo", "uint7wo": "uint7wo",
    }.items():  # fmt: skip
        assert parse_config(older).row.name == name


def test_aliases_shadow_no_name_and_lead_to_one_in_one_step() -> None:
    assert ALIASES.keys() & CONFIGS.keys() == set()
    assert {target.partition(":")[0] for target in ALIASES.values()} <= CONFIGS.keys()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" int8wo ", "int8wo"),
        ("INT8WO", "int8wo"),
        ("int4wo: group_size = 64 ", "int4wo:group_size=64"),
        ("int4wo:group_size=64,", "int4wo:group_size=64"),
        ("int4wo:group_size=128", "int4wo"),
        ("int4_weight_only:group_size=32", "int4wo:group_size=32"),
        ("uintx:dtype=uint4,group_size=32", "uint4wo:group_size=32"),
        ("uintx:group_size=32,dtype=torch.uint2", "uint2wo:group_size=32"),
    ],
)
def test_spaces_case_and_defaults_do_not_matter(text: str, expected: str) -> None:
    assert str(parse_config(text)) == expected


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("int9wo", "'int9wo'", "did you mean int8wo?"),
        ("in8wo", "'in8wo'", "did you mean int8wo?"),
        ("fp8", "'fp8'", "did you mean fp8wo?"),
        ("float8dq_e4m3_rows", "'float8dq_e4m3_rows'", "did you mean fp8dqrow?"),
        ("uint8wo", "'uint8wo'", "wo?"),
        ("uintx", "'uintx'", "uint1wo to uint7wo"),
        ("zzz", "'zzz'", "`aoquant configs` lists all"),
        ("", "''", "`aoquant configs` lists all"),
        (":group_size=64", "''", "`aoquant configs` lists all"),
        ("int8dq:group_size=64", "'group_size' is not an option of int8dq", "int8dq takes no options"),
        ("int4wo:size=64", "'size' is not an option of int4wo", "int4wo takes group_size"),
        ("int4wo:group_size=16", "group_size=16", "32, 64, 128, 256"),
        ("int4wo:group_size=064", "group_size=064", "32, 64, 128, 256"),
        ("int4wo:group_size=", "'group_size='", "group_size=64"),
        ("int4wo:64", "'64'", "group_size=64"),
        ("int4wo:=64", "'=64'", "group_size=64"),
        ("int4wo:group_size=64,group_size=64", "twice", "once"),
        ("fp8wo:dtype=e4m4", "dtype=e4m4", "e4m3, e5m2"),
    ],
)
def test_a_wrong_text_is_answered_with_what_would_be_right(text: str, words: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_config(text)
    assert words in raised.value.message and hint in raised.value.hint


PIECES = st.sampled_from(
    [*CONFIGS, *ALIASES, ":", ",", "=", "group_size", "dtype", "64", "uint4", " ", "torch.", "e5m2"]
)


@given(st.one_of(st.text(), st.lists(PIECES).map("".join)))
@example("İ:ß=ſ")
@example("int8wo:group_size=٦٤")
def test_any_text_parses_to_what_it_says_again_or_is_a_usage_error(text: str) -> None:
    try:
        config = parse_config(text)
    except UsageError as error:
        assert error.message and error.hint
        return
    assert isinstance(config, QuantConfig)
    assert parse_config(str(config)) == config
    assert all(config.options[option.name] in (option.default, *option.choices) for option in config.row.options)


def test_group_size_is_that_of_the_option_or_none() -> None:
    assert parse_config("int8wo").group_size is None
    assert parse_config("int8wo:group_size=64").group_size == 64
    assert parse_config("int4wo").group_size == 128
    assert parse_config("uint3wo").group_size == 64
    assert parse_config("fp8wo:dtype=e5m2").group_size is None


def test_float_splits() -> None:
    assert str(parse_config("fp6_e2m3wo")) == str(parse_config("fp6wo")) == "fp6wo"
    assert str(parse_config("fp6_e3m2wo")) == str(parse_config("fp6")) == "fp6wo:dtype=e3m2"
    assert parse_config("fp3wo").options == {"dtype": "e2m0"}


@ROWS
def test_every_row_says_what_a_person_needs(row: ConfigRow) -> None:
    assert row.meaning and row.runs_on and 1 <= row.bits <= 8
    assert row.torchao.startswith(("torchao.", "aoquant.lowbit."))
    assert all(option.meaning and (option.default in (None, *option.choices)) for option in row.options)


def test_json_holds_the_whole_table() -> None:
    document = json.loads(json.dumps(configs_json()))
    assert document["schema"] == "aoquant.configs/1"
    assert [row["name"] for row in document["configs"]] == list(CONFIGS)
    assert sorted(alias for row in document["configs"] for alias in row["aliases"]) == sorted(ALIASES)
    (int4wo,) = (row for row in document["configs"] if row["name"] == "int4wo")
    assert int4wo["options"] == {
        "group_size": {"choices": [32, 64, 128, 256], "default": 128},
        "layout": {"choices": ["plain", "tile_packed"], "default": "plain"},
    }
