"""The table of config names: what each means, its options, and the older spellings that lead to it. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aoquant.errors import UsageError

Family = Literal["int8", "float8", "int4", "intx", "lowbit"]
Value = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One `key=value` that a config takes. `default` None, spelled `row`, means: not grouped, one scale per row."""

    name: str
    choices: tuple[Value, ...]
    default: Value | None
    meaning: str

    @property
    def values(self) -> tuple[Value | None, ...]:
        """Everything that may be chosen, the default first."""
        return (self.default, *(choice for choice in self.choices if choice != self.default))

    def spelled(self, value: Value | None) -> str:
        """`value` as a user types it."""
        return "row" if value is None else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRow:
    """One config name. The engine reads `family` and `traits`; everything else is for people.

    bits: stored bits per weight, scales left out. torchao: import path of the config class that the checkpoint's
    config.json names; unpacked: of the one that it names with `layout=unpacked`. runs_on: where the quantized weight
    multiplies fast, or at all.
    """

    name: str
    meaning: str
    bits: int
    family: Family
    traits: Mapping[str, Value] = field(default_factory=dict)
    options: tuple[Option, ...] = ()
    torchao: str
    unpacked: str = ""
    runs_on: str
    wants_compile: bool = False


_GROUP_SIZES = (16, 32, 64, 128, 256, 512)


def _group(default: int | None, choices: tuple[int, ...] = _GROUP_SIZES) -> Option:
    meaning = "weights along in_features that share one scale"
    return Option(name="group_size", choices=choices, default=default, meaning=meaning)


def _split(default: str, *choices: str) -> Option:
    return Option(name="dtype", choices=choices, default=default, meaning="exponent and mantissa bits")


# Bits → how they are split where nothing is said. Two bits of exponent had the smallest error at every width on the
# Linear weights of a trained text encoder (all-MiniLM-L6-v2): 0.030 for e2m3, 0.052 for e3m2, 0.037 for e1m4.
_FLOATS: Mapping[int, str] = {3: "e2m0", 4: "e2m1", 5: "e2m2", 6: "e2m3", 7: "e2m4"}
# What the same names without `wo` meant in diffusers.
_FORMER_FLOATS: Mapping[int, str] = {3: "e1m1", 4: "e2m1", 5: "e2m2", 6: "e3m2", 7: "e3m3"}


def _splits(bits: int) -> tuple[str, ...]:
    return tuple(f"e{exponent}m{bits - 1 - exponent}" for exponent in range(1, bits))


def _float_config(bits: int, split: str) -> str:
    return f"fp{bits}wo" if split == _FLOATS[bits] else f"fp{bits}wo:dtype={split}"


_LAYOUT = Option(
    name="layout", choices=("packed", "unpacked"), default="packed", meaning="or a byte each, for torchao alone"
)
_INT4_LAYOUT = Option(
    name="layout", choices=("plain", "tile_packed"), default="plain", meaning="or as CUDA's tinygemm has it, made there"
)
_LOW_BIT = "aoquant.lowbit.AoquantLowBitConfig"
_AFTER_IMPORT = "anywhere, after `import aoquant.lowbit`"

_ROWS = (
    ConfigRow(
        name="int8wo",
        meaning="int8 weights, one scale per row or group",
        bits=8,
        family="int8",
        options=(_group(None),),
        torchao="torchao.quantization.Int8WeightOnlyConfig",
        runs_on="anywhere",
    ),
    ConfigRow(
        name="int8dq",
        meaning="int8 weights per row, activations to int8 per token as they come",
        bits=8,
        family="int8",
        traits={"dynamic": 1},
        torchao="torchao.quantization.Int8DynamicActivationInt8WeightConfig",
        runs_on="anywhere; fast on CUDA with torch.compile",
        wants_compile=True,
    ),
    ConfigRow(
        name="fp8wo",
        meaning="float8 weights, one scale per row",
        bits=8,
        family="float8",
        options=(_split("e4m3", "e4m3", "e5m2"),),
        torchao="torchao.quantization.Float8WeightOnlyConfig",
        runs_on="anywhere",
    ),
    ConfigRow(
        name="fp8dq",
        meaning="float8 weights and activations, one scale per tensor",
        bits=8,
        family="float8",
        traits={"dynamic": 1, "per_tensor": 1},
        torchao="torchao.quantization.Float8DynamicActivationFloat8WeightConfig",
        runs_on="fast on a GPU of compute capability 8.9 or more; slow elsewhere",
        wants_compile=True,
    ),
    ConfigRow(
        name="fp8dqrow",
        meaning="float8 weights and activations, one scale per row",
        bits=8,
        family="float8",
        traits={"dynamic": 1},
        torchao="torchao.quantization.Float8DynamicActivationFloat8WeightConfig",
        runs_on="fast on a GPU of compute capability 8.9 or more; slow elsewhere",
        wants_compile=True,
    ),
    ConfigRow(
        name="int4wo",
        meaning="int4 weights, two a byte, scale and zero per group",
        bits=4,
        family="int4",
        options=(_group(128, (32, 64, 128, 256)), _INT4_LAYOUT),
        torchao="torchao.quantization.Int4WeightOnlyConfig",
        runs_on="anywhere through `aoquant.load`; by plain `from_pretrained`, CUDA with mslk",
    ),
    ConfigRow(
        name="int4dq",
        meaning="4-bit weights in a byte each, scale per group; activations to int8 per token",
        bits=8,
        family="intx",
        traits={"weight_bits": 4, "symmetric": 1, "dynamic": 1},
        options=(_group(32),),
        torchao="torchao.quantization.Int8DynamicActivationIntxWeightConfig",
        runs_on="anywhere",
    ),
    *(
        ConfigRow(
            name=f"uint{bits}wo",
            meaning=f"{bits}-bit weights, packed, scale and zero point per group",
            bits=bits,
            family="lowbit",
            traits={"weight_bits": bits},
            options=(_group(64), _LAYOUT),
            torchao=_LOW_BIT,
            unpacked="torchao.quantization.IntxWeightOnlyConfig",
            runs_on=_AFTER_IMPORT,
        )
        for bits in range(1, 8)
    ),
    *(
        ConfigRow(
            name=f"fp{bits}wo",
            meaning=f"{bits}-bit float weights, packed, one scale per row",
            bits=bits,
            family="lowbit",
            traits={"weight_bits": bits},
            options=(_split(split, *_splits(bits)),),
            torchao=_LOW_BIT,
            runs_on=_AFTER_IMPORT,
        )
        for bits, split in _FLOATS.items()
    ),
)

CONFIGS: Mapping[str, ConfigRow] = {row.name: row for row in _ROWS}

# Spellings that torchao and diffusers used for the same thing, up to diffusers 0.37. A key may carry one option.
ALIASES: Mapping[str, str] = {
    "int8_weight_only": "int8wo",
    "int8_dynamic_activation_int8_weight": "int8dq",
    "int4_weight_only": "int4wo",
    "int8_dynamic_activation_int4_weight": "int4dq",
    "int8da_int4w": "int4dq",
    "float8wo": "fp8wo",
    "float8_weight_only": "fp8wo",
    "float8wo_e4m3": "fp8wo",
    "float8wo_e5m2": "fp8wo:dtype=e5m2",
    "fp8wo_e4m3": "fp8wo",
    "fp8wo_e5m2": "fp8wo:dtype=e5m2",
    "float8dq": "fp8dq",
    "float8dq_e4m3": "fp8dq",
    "float8dq_e4m3_tensor": "fp8dq",
    "float8dq_tensor": "fp8dq",
    "fp8dqtensor": "fp8dq",
    "float8_dynamic_activation_float8_weight": "fp8dq",
    "float8dq_e4m3_row": "fp8dqrow",
    "float8dq_row": "fp8dqrow",
    "float8dqrow": "fp8dqrow",
    **{f"uint{bits}_weight_only": f"uint{bits}wo" for bits in range(1, 8)},
    **{f"fp{bits}": _float_config(bits, split) for bits, split in _FORMER_FLOATS.items()},
    **{
        spelling.format(bits, split): _float_config(bits, split)
        for bits in _FLOATS
        for split in _splits(bits)
        for spelling in ("fp{}_{}wo", "fp{}wo_{}", "fp{}_{}")
    },
    **{
        f"{name}:dtype={spelling}": f"uint{bits}wo"
        for bits in range(1, 8)
        for name in ("uintx", "uintxwo", "uintx_weight_only")
        for spelling in (f"uint{bits}", f"torch.uint{bits}")
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """A config as chosen: a row of the table and the value of each of its options."""

    row: ConfigRow
    options: Mapping[str, Value | None]

    def __str__(self) -> str:
        given = [
            f"{option.name}={self.options[option.name]}"
            for option in self.row.options
            if self.options[option.name] != option.default
        ]
        return self.row.name + (":" + ",".join(given) if given else "")

    @property
    def torchao(self) -> str:
        """Import path of the config class that config.json names."""
        return self.row.unpacked if self.options.get("layout") == "unpacked" else self.row.torchao

    @property
    def is_packed(self) -> bool:
        """Whether the checkpoint holds aoquant's own tensor class."""
        return self.torchao == _LOW_BIT

    @property
    def group_size(self) -> int | None:
        value = self.options.get("group_size")
        return value if isinstance(value, int) else None


def parse_config(text: str) -> QuantConfig:
    """Read `NAME` or `NAME:key=value,key=value`. Raises UsageError with the nearest match."""
    name, colon, tail = text.strip().partition(":")
    if colon and not tail.strip(", "):
        raise UsageError(f"'{text}' names no option after its colon", hint="write for example int4wo:group_size=64")
    name = name.strip().lower()
    given = _parse_options(text, tail)
    for key, value in list(given.items()):
        if (target := ALIASES.get(f"{name}:{key}={value}")) is not None:
            name = target
            del given[key]
    alias, _, alias_tail = ALIASES.get(name, name).partition(":")
    for key, value in _parse_options(text, alias_tail).items():
        if given.setdefault(key, value) != value:
            raise UsageError(f"'{text}' says {key} twice: {value} and {given[key]}", hint="say it once")
    row = CONFIGS.get(alias)
    if row is None:
        raise UsageError(f"'{name}' is not a config name", hint=_nearest(name))
    known = {option.name: option for option in row.options}
    values: dict[str, Value | None] = {option.name: option.default for option in row.options}
    for key, value in given.items():
        if key not in known:
            takes = ", ".join(known) or "no options"
            raise UsageError(f"'{key}' is not an option of {row.name}", hint=f"{row.name} takes {takes}")
        values[key] = _read_value(row, known[key], value)
    return QuantConfig(row=row, options=values)


def configs_json() -> dict[str, Any]:
    """The table as one JSON document."""
    return {
        "schema": "aoquant.configs/1",
        "configs": [
            {
                "name": row.name,
                "meaning": row.meaning,
                "bits": row.bits,
                "options": {
                    option.name: {"choices": list(option.choices), "default": option.default} for option in row.options
                },
                "torchao": row.torchao,
                "runs_on": row.runs_on,
                "wants_compile": row.wants_compile,
                "aliases": sorted(alias for alias, target in ALIASES.items() if target.partition(":")[0] == row.name),
            }
            for row in CONFIGS.values()
        ],
    }


def _parse_options(text: str, tail: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for item in filter(None, (piece.strip() for piece in tail.split(","))):
        key, equals, value = (piece.strip().lower() for piece in item.partition("="))
        if not equals or not key or not value:
            raise UsageError(f"'{item}' in '{text}' is not key=value", hint="write for example int4wo:group_size=64")
        if key in given:
            raise UsageError(f"'{key}' is given twice in '{text}'", hint="give each option once")
        given[key] = value
    return given


def _read_value(row: ConfigRow, option: Option, text: str) -> Value | None:
    for choice in option.values:
        if option.spelled(choice) == text:
            return choice
    choices = ", ".join(option.spelled(choice) for choice in sorted(option.values, key=_order))
    raise UsageError(f"{row.name} cannot take {option.name}={text}", hint=f"{option.name} is one of {choices}")


def _order(value: Value | None) -> tuple[int, str]:
    return (value if isinstance(value, int) else 0, str(value))


def _nearest(name: str) -> str:
    spellings = [*CONFIGS, *(alias for alias in ALIASES if ":" not in alias)]
    if name in ("uintx", "uintxwo", "uintx_weight_only"):
        return "say how many bits: uint1wo to uint7wo"
    matches = difflib.get_close_matches(name, spellings, n=1, cutoff=0.5)
    meant = f"did you mean {ALIASES.get(matches[0], matches[0])}? " if matches else ""
    return f"{meant}`aoquant configs` lists all"
