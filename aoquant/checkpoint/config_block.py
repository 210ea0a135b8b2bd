"""The `quantization_config` of a config.json: what it says, and which tensors would agree with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from aoquant.checkpoint.files import quoted
from aoquant.checkpoint.header import attribute_text
from aoquant.checkpoint.tensors import LOW_BIT, Entry


class _Fit(NamedTuple):
    """Classes that a torchao config makes, and whether their tensors quantize activations (None: either)."""

    kinds: frozenset[str]
    activations: bool | None = None


def _fit(*kinds: str, activations: bool | None = None) -> _Fit:
    return _Fit(frozenset(kinds), activations)


# torchao 0.15 to 0.18; AffineQuantizedTensor and LinearActivationQuantizedTensor are the oldest of these.
_FITS: Mapping[str, _Fit] = {
    "Int8WeightOnlyConfig": _fit("Int8Tensor", "AffineQuantizedTensor", activations=False),
    "Int8DynamicActivationInt8WeightConfig": _fit(
        "Int8Tensor", "LinearActivationQuantizedTensor", activations=True
    ),
    "Float8WeightOnlyConfig": _fit("Float8Tensor", "AffineQuantizedTensor", activations=False),
    "Float8DynamicActivationFloat8WeightConfig": _fit(
        "Float8Tensor", "LinearActivationQuantizedTensor", activations=True
    ),
    "Float8DynamicActivationInt4WeightConfig": _fit("Int4Tensor", "Int4PreshuffledTensor"),
    "Int4WeightOnlyConfig": _fit(
        "Int4Tensor", "Int4TilePackedTo4dTensor", "Int4PlainInt32Tensor", "Int4PreshuffledTensor",
        "Int4MarlinSparseTensor", "Int4OpaqueTensor", "AffineQuantizedTensor",
    ),
    "IntxWeightOnlyConfig": _fit("IntxUnpackedToInt8Tensor", "AffineQuantizedTensor"),
    "AoquantLowBitConfig": _fit(LOW_BIT),
    "UIntXWeightOnlyConfig": _fit("AffineQuantizedTensor"),
    "Int8DynamicActivationIntxWeightConfig": _fit(
        "IntxUnpackedToInt8Tensor", "IntxOpaqueTensor", "LinearActivationQuantizedTensor"
    ),
    "Int8DynamicActivationInt4WeightConfig": _fit("LinearActivationQuantizedTensor"),
    "MXDynamicActivationMXWeightConfig": _fit("MXTensor"),
    "NVFP4DynamicActivationNVFP4WeightConfig": _fit("NVFP4Tensor"),
}  # fmt: skip
_ACTIVATION_ATTRIBUTE = "act_quant_kwargs"
_ACTIVATION_KINDS = frozenset({"Int8Tensor", "Float8Tensor"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigBlock:
    """A quantization_config. method: `torchao`, `bitsandbytes` …. text: the whole of it, readable.

    types: the torchao configs in it, one but for a FqnToConfig. version: torchao's version of the config's
    own format, empty if there is none. legacy_name: what older diffusers wrote instead, such as `int8wo`.
    """

    method: str
    text: str
    types: tuple[str, ...]
    version: str
    legacy_name: str = ""


def read_config_block(config: Mapping[str, Any]) -> ConfigBlock | None:
    """The quantization_config of a component's config.json, None if it has none. Never raises."""
    block = config.get("quantization_config")
    if block is None:
        return None
    if not isinstance(block, dict):
        return ConfigBlock(method="unknown", text=quoted(block, quote=False), types=(), version="")
    method = quoted(block.get("quant_method", "unknown"), quote=False)
    quant_type = block.get("quant_type")
    if method != "torchao":
        settings = {key: value for key, value in block.items() if key != "quant_method" and value not in (None, False)}
        shown = attribute_text({"_type": method, "_data": settings})
        return ConfigBlock(method=method, text=shown if settings else method, types=(), version="")
    if isinstance(quant_type, str):
        return ConfigBlock(
            method=method,
            text=f"torchao {quoted(quant_type)} (as older diffusers wrote it)",
            types=(),
            version="",
            legacy_name=quoted(quant_type, quote=False),
        )
    default = quant_type.get("default") if isinstance(quant_type, dict) else None
    if not isinstance(default, dict) or not isinstance(default.get("_type"), str):
        return ConfigBlock(method=method, text="torchao, in no known form", types=(), version="")
    data = default.get("_data")
    types = [default["_type"]]
    if types == ["FqnToConfig"] or types == ["ModuleFqnToConfig"]:
        by_name = _by_name(data)
        default = {**default, "_data": {key: value or "None" for key, value in by_name.items()}}
        types = [value["_type"] for value in by_name.values() if isinstance(value, dict) and "_type" in value]
    text = f"torchao {attribute_text(default)}"
    skipped = block.get("modules_to_not_convert")
    if isinstance(skipped, list) and skipped:
        text += f", not {attribute_text(skipped)}"
    version = default.get("_version")
    return ConfigBlock(
        method=method,
        text=text,
        types=tuple(dict.fromkeys(str(name) for name in types)),
        version="" if version is None else quoted(version, quote=False),
    )


def unknown_types(block: ConfigBlock) -> list[str]:
    """The torchao configs of the block that are not known here: of another version, or misspelt."""
    return [quoted(name) for name in block.types if name not in _FITS]


def disagreements(block: ConfigBlock, entries: Iterable[Entry]) -> list[str]:
    """How the tensors disagree with the config, a line each; none for a config that is not known here."""
    quantized = [entry for entry in entries if not entry.is_plain]
    if block.method != "torchao":
        return [f"config.json says {block.method}, yet tensors are torchao's"] if quantized else []
    if not quantized:
        return ["config.json says that the weights are quantized, and no tensor is"]
    fits = [_FITS[name] for name in block.types if name in _FITS]
    if not fits or len(fits) != len(block.types):
        return []
    named = " or ".join(block.types)
    wrong = [entry for entry in quantized if not any(entry.kind in fit.kinds for fit in fits)]
    if wrong:
        first = f"the first is {quoted(wrong[0].name)}, {_article(wrong[0].kind)}"
        return [f"config.json says {named}, yet {len(wrong)} tensors are none that it makes, {first}"]
    activations = {fit.activations for fit in fits}
    if len(activations) != 1 or None in activations:
        return []
    (expected,) = activations
    odd = [
        entry
        for entry in quantized
        if entry.kind in _ACTIVATION_KINDS and (_ACTIVATION_ATTRIBUTE in entry.attributes) is not expected
    ]
    if not odd:
        return []
    what = "do not quantize activations" if expected else "quantize activations too"
    return [f"config.json says {named}, yet {len(odd)} tensors {what}, the first is {quoted(odd[0].name)}"]


def _by_name(data: Any) -> dict[str, Any]:
    """Module pattern → config of a FqnToConfig, which writes the same map under two names."""
    if isinstance(data, dict):
        for key in ("fqn_to_config", "module_fqn_to_config"):
            if isinstance(data.get(key), dict):
                found: dict[str, Any] = data[key]
                return found
    return {}


def _article(kind: str) -> str:
    shown = quoted(kind, quote=False)
    return f"{'an' if shown[:1] in 'AEIOU' else 'a'} {shown}"
