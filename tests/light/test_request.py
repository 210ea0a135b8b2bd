"""What a user asks for, checked as far as words and numbers go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aoquant.errors import UsageError
from aoquant.request import default_output, make_request, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("10GB", 10 * 10**9),
        ("10 gb", 10 * 10**9),
        ("10g", 10 * 10**9),
        ("4GiB", 4 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5MB", 1_500_000),
        ("2kB", 2000),
        ("2KiB", 2048),
        ("1T", 10**12),
        ("7", 7),
        ("7B", 7),
        (" 7 ", 7),
        (7, 7),
        (2**63 - 1, 2**63 - 1),
        ("0.0000001GB", 100),
    ],
)
def test_sizes(text: str | int, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    ["", "GB", "ten", "-1GB", "+1", "1e9", "1,5GB", ".5GB", "1.GB", "1 G B", "1GBB", "1iB", "1PB", "0", "0GB", "0.1",
     "-1", "9" * 400, "1\n2", "٣GB", "inf", "nan"],
)  # fmt: skip
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_size(text)
    assert raised.value.hint


@given(st.one_of(st.text(), st.integers(), st.from_regex(r"\A\d+(\.\d+)? ?[kKmMgGtT]?i?[bB]?\Z")))
@example("9" * 5000)
@example(0)
def test_any_size_is_a_number_of_bytes_or_a_usage_error(text: str | int) -> None:
    try:
        assert parse_size(text) >= 1
    except UsageError as error:
        assert error.message and error.hint


@pytest.mark.parametrize(
    ("model", "configs", "name"),
    [
        ("acme/flux", ["int8wo"], "flux-int8wo"),
        ("acme/flux@v2", ["int8wo"], "flux-int8wo"),
        ("acme/flux@refs/pr/1", ["int8wo"], "flux-int8wo"),
        ("FLUX.1-dev@refs/pr/1", ["int8wo"], "FLUX.1-dev-int8wo"),
        ("flux", ["int8wo", "int8wo", "fp8wo"], "flux-int8wo-fp8wo"),
        ("acme/flux", ["int4wo:group_size=64"], "flux-int4wo-group_size64"),
        ("/no/such/flux/", ["int8wo"], "flux-int8wo"),
        ("x" * 5000, ["int8wo"], "x" * 5000 + "-int8wo"),
        ("~nobody-like-that/flux", ["int8wo"], "flux-int8wo"),
        ("a\0b", ["int8wo"], "a\0b-int8wo"),
        ("/", ["int8wo"], "model-int8wo"),
    ],
)
def test_the_default_output_is_named_after_model_and_configs(model: str, configs: list[str], name: str) -> None:
    request = make_request(model, dict(zip("abc", configs, strict=False)), {})
    assert str(request.output) == name == default_output(model, list(request.configs.values()))


@pytest.mark.parametrize("model", [".", "sub/..", "../flux.1-dev", "./sub/../"])
def test_the_default_output_names_a_folder_however_it_is_written(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "flux.1-dev"
    (folder / "sub").mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert make_request(model, {"unet": "int8wo"}, {}).output == Path("flux.1-dev-int8wo")


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("~/out", Path.home() / "out"),
        ("out", Path("out")),
        (Path("a/b"), Path("a/b")),
        ("~nobody-like-that/x", Path("~nobody-like-that/x")),
    ],
)
def test_the_home_folder_is_read_in_an_output(output: str | Path, expected: Path) -> None:
    assert make_request("m", {"unet": "int8wo"}, {"output": output}).output == expected


def test_nothing_said_means_the_defaults() -> None:
    request = make_request("acme/flux", {"transformer": "int8wo"}, {})
    assert (request.format, request.dtype, request.device) == ("bin", "bfloat16", "auto")
    assert (request.max_shard_bytes, request.skip, request.revision, request.variant) == (10**10, (), None, None)
    assert (request.full, request.offline, request.overwrite) == (False, False, False)


def test_components_keep_the_order_in_which_they_were_asked_for() -> None:
    asked = {"vae": "int8wo", "transformer": "fp8wo", "text_encoder": "int8wo"}
    assert list(make_request("m", asked, {}).configs) == list(asked)


@pytest.mark.parametrize("device", ["auto", "cpu", "mps", "cuda", "cuda:0", "cuda:15", "xpu", "xpu:1"])
def test_devices(device: str) -> None:
    assert make_request("m", {"unet": "int8wo"}, {"device": device}).device == device


@pytest.mark.parametrize(
    ("components", "options", "words"),
    [
        ({}, {}, "no component"),
        ({"unet": "int9wo"}, {}, "'int9wo'"),
        ({"unet": "int8wo"}, {"format": "pt"}, "'pt'"),
        ({"unet": "int8wo"}, {"format": ""}, "''"),
        ({"unet": "int8wo"}, {"dtype": "half"}, "'half'"),
        ({"unet": "int8wo"}, {"max_shard_size": "0"}, "holds nothing"),
        ({"unet": "int8wo"}, {"device": "cuda:"}, "'cuda:'"),
        ({"unet": "int8wo"}, {"device": "cuda:x"}, "'cuda:x'"),
        ({"unet": "int8wo"}, {"device": "cuda:٣"}, "is not a device"),
        ({"unet": "int8wo"}, {"device": "cuda:999"}, "is not a device"),
        ({"unet": "int8wo"}, {"device": "cpu:0"}, "'cpu:0'"),
        ({"unet": "int8wo"}, {"device": "CUDA"}, "'CUDA'"),
        ({"unet": "int8wo"}, {"device": "cuda\n"}, "is not a device"),
        ("int8wo", {}, "not names and configs"),
        ({"unet": 8}, {}, "not names and configs"),
        ({"unet": "int8wo"}, {"dtype": 16}, "'16'"),
        ({"unet": "int8wo"}, {"device": 0}, "'0'"),
        ({"unet": "int8wo"}, {"skip": [1]}, "patterns"),
        ({"unet": "int8wo"}, {"skip": 3}, "patterns"),
        ({4: "int8wo"}, {}, "not names and configs"),
        ({"unet": "int8wo"}, {"output": " "}, "no folder's name"),
        ({"unet": "int8wo"}, {"output": 5}, "no folder's name"),
        ({"unet": "int8wo"}, {"max_shard_size": None}, "not a size"),
    ],
)  # fmt: skip
def test_what_is_refused_before_the_model_is_looked_at(components: Any, options: Any, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        make_request("m", components, options)
    assert words in raised.value.message and raised.value.hint


@pytest.mark.parametrize("model", ["", " ", "\t"])
def test_a_model_has_a_name(model: str) -> None:
    with pytest.raises(UsageError, match="no name"):
        make_request(model, {"unet": "int8wo"}, {})


def test_an_unknown_keyword_is_an_error() -> None:
    with pytest.raises(UsageError, match="'formt' is not an option"):
        make_request("m", {"transformer": "int8wo"}, {"formt": "safetensors"})  # type: ignore[typeddict-unknown-key]
