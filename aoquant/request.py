"""What a user asks of `quantize` and `plan`, checked as far as words and numbers go. No torch."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal, TypedDict, get_args

from aoquant.configs import QuantConfig, parse_config
from aoquant.errors import UsageError

Format = Literal["bin", "safetensors"]
DType = Literal["bfloat16", "float16", "float32"]

_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)
_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:[0-9]{1,2})?")


class Options(TypedDict, total=False):
    """What may be said beyond the model and its components.

    output: the folder to write; default `./<model name>-<configs>`. format: of the weight files, `bin` or
    `safetensors`. max_shard_size: the most bytes of tensors in one file, a number or a text such as `10GB` (GB is
    10⁹, GiB 2³⁰). device: where the arithmetic runs: `auto`, `cpu`, `cuda[:N]`, `xpu[:N]`, `mps`. dtype: what
    weights are cast to first, and what stays unquantized is stored in (torch's own objects do for both). skip:
    patterns of modules to leave unquantized. full: write the pipeline's other components too. revision: branch, tag
    or commit on the Hub. variant: such as `fp16`. offline: use the Hub's cache alone. overwrite: replace an
    existing output that aoquant wrote. max_size: refuse an output of more bytes, a number or a text as for
    max_shard_size. push_to: upload the finished folder to this repository of the Hub, `org/name`; private: make it a
    private one.
    """

    output: str | Path | None
    format: str
    max_shard_size: str | int
    device: str
    dtype: str
    skip: Sequence[str]
    full: bool
    revision: str | None
    variant: str | None
    offline: bool
    overwrite: bool
    max_size: str | int | None
    push_to: str | None
    private: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A checked request. configs: component name → config, in the order in which they were asked for."""

    model: str
    configs: Mapping[str, QuantConfig]
    output: Path
    format: Format
    max_shard_bytes: int
    device: str
    dtype: DType
    skip: tuple[str, ...]
    full: bool
    revision: str | None
    variant: str | None
    offline: bool
    overwrite: bool
    max_bytes: int | None
    push_to: str | None
    private: bool


def make_request(model: str, components: Mapping[str, str], options: Options) -> Request:
    """Check everything that can be checked without looking at the model. Raises UsageError."""
    if unknown := sorted(set(options) - set(Options.__annotations__)):
        raise UsageError(f"'{unknown[0]}' is not an option", hint=f"options are {', '.join(Options.__annotations__)}")
    texts = [*components.keys(), *components.values()] if isinstance(components, Mapping) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise UsageError("components are not names and configs", hint='write for example {"transformer": "int8wo"}')
    if not model.strip():
        raise UsageError("the model has no name", hint="name a folder or org/name")
    if not components:
        raise UsageError("no component to quantize was named", hint="say for example --transformer int8wo")
    configs = {name: parse_config(text) for name, text in components.items()}
    format_ = options.get("format", "bin")
    dtype = str(options.get("dtype", "bfloat16")).removeprefix("torch.")
    device = str(options.get("device", "auto"))
    if format_ not in get_args(Format):
        raise UsageError(f"'{format_}' is not a format", hint="--format is bin or safetensors")
    if dtype not in get_args(DType):
        raise UsageError(f"'{dtype}' is not a dtype", hint=f"--dtype is {', '.join(get_args(DType))}")
    if not _DEVICE.fullmatch(device):
        raise UsageError(f"'{device}' is not a device", hint="--device is auto, cpu, cuda, cuda:N, xpu or mps")
    if options.get("private") and not options.get("push_to"):
        raise UsageError("--private says how to upload, and nothing is uploaded", hint="say --push-to org/name too")
    output = options.get("output")
    if output is not None and (not isinstance(output, str | os.PathLike) or not str(output).strip()):
        raise UsageError(f"{output!r} is no folder's name", hint="leave --output out, or name a folder")
    return Request(
        model=model,
        configs=configs,
        output=_home(output) if output is not None else Path(default_output(model, list(configs.values()))),
        format="safetensors" if format_ == "safetensors" else "bin",
        max_shard_bytes=parse_size(options.get("max_shard_size", "10GB")),
        device=device,
        dtype="float16" if dtype == "float16" else "float32" if dtype == "float32" else "bfloat16",
        skip=_skip(options.get("skip", ())),
        full=options.get("full", False),
        revision=options.get("revision"),
        variant=options.get("variant"),
        offline=options.get("offline", False),
        overwrite=options.get("overwrite", False),
        max_bytes=parse_size(max_size) if (max_size := options.get("max_size")) is not None else None,
        push_to=options.get("push_to"),
        private=options.get("private", False),
    )


def _skip(patterns: str | Sequence[str]) -> tuple[str, ...]:
    found = (patterns,) if isinstance(patterns, str) or not isinstance(patterns, Iterable) else tuple(patterns)
    if not all(isinstance(pattern, str) for pattern in found):
        raise UsageError("--skip takes patterns of module names", hint="write for example --skip proj_out")
    return found


def default_output(model: str, configs: Sequence[QuantConfig]) -> str:
    """`<model name>-<configs>`: `FLUX.1-dev-int8wo`, each config once."""
    name = model.partition("@")[0].rstrip("/").rpartition("/")[2]
    with contextlib.suppress(OSError, ValueError):  # too long for a path: `open_source` says so
        folder = _home(model)
        name = folder.resolve().name if folder.is_dir() else name
    texts = dict.fromkeys(re.sub("[:,]", "-", str(config)).replace("=", "") for config in configs)
    return "-".join([name or "model", *texts])


def _home(path: str | Path) -> Path:
    """A path with its `~` read, which a shell leaves alone in `--output=~/x`; as it is if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def parse_size(text: str | int) -> int:
    """`10GB`, `512MiB`, `1.5 GB` or a plain number of bytes: bytes, at least 1. Raises UsageError."""
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise UsageError(f"'{text}' is not a size", hint="write for example 10GB, 512MB or 4GiB")
    number, prefix, binary = match.groups()
    unit = (1024 if binary else 1000) ** " kmgt".index(prefix.lower() if prefix else " ")
    num_bytes = int(Fraction(number) * unit)
    if num_bytes < 1:
        raise UsageError(f"a size of {text} holds nothing", hint="write for example 10GB")
    return num_bytes
