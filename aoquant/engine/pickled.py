"""Loading `.bin` files: what torch may be allowed to unpickle, and the documented way where it cannot be enough."""

from __future__ import annotations

import contextlib
import enum
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aoquant.engine import libraries
from aoquant.errors import CheckpointError

_BLOCKED = re.compile(r"Unsupported (?:global: GLOBAL|class) ([\w.]+)")
# Modules of torchao whose classes only describe tensors: not all are registered with torch by every version.
_MODULES = (
    "torchao.quantization", "torchao.quantization.granularity", "torchao.quantization.quant_primitives",
    "torchao.quantization.quantize_.common", "torchao.quantization.linear_activation_quantized_tensor",
    "torchao.dtypes", "torchao.dtypes.utils", "torchao.dtypes.affine_quantized_tensor",
)  # fmt: skip


@contextlib.contextmanager
def harmless_allowed() -> Iterator[None]:
    """Let torch's weights-only unpickler take what is known to be harmless, while the context lasts.

    That is torch's sub-byte dtypes (torch 2.6 knows `torch.int4` and does not unpickle it), torchao's tensor classes
    and the plain data in them, and aoquant's own class. Nothing stays allowed that was not before.
    """
    # Both register classes of torchao when they are imported. If that came about within the context, its end would take
    # them away again: torch removes what the context brought, whoever else brought it too.
    for name in ("diffusers.quantizers", "transformers.quantizers.quantizer_torchao"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    before = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([one for one in _harmless() if one not in before]):
        yield


def _harmless() -> list[Any]:
    from torchao.utils import TorchAOBaseTensor

    from aoquant.lowbit import LowBitTensor

    found: list[Any] = [LowBitTensor]
    for bits in range(1, 8):
        for name in (f"int{bits}", f"uint{bits}"):
            if hasattr(torch, name):
                found.append((getattr(torch, name), f"torch.{name}"))
    for module_name in _MODULES:
        with contextlib.suppress(ImportError):
            for value in vars(importlib.import_module(module_name)).values():
                if (
                    isinstance(value, type)
                    and value.__module__.startswith("torchao.")
                    and (issubclass(value, TorchAOBaseTensor | enum.Enum) or hasattr(value, "__dataclass_fields__"))
                ):
                    found.append(value)
    return found


def blocked_global(error: BaseException | None) -> str:
    """What was refused somewhere behind `error`: the name that torch's weights-only unpickler did not take, or all of
    it, where transformers takes no `.bin` with torch before 2.6. Empty if it was something else."""
    while error is not None:
        if "CVE-2025-32434" in str(error):
            return "any .bin"
        if match := _BLOCKED.search(str(error)):
            return match[1].rstrip(".")
        error = error.__cause__ or error.__context__
    return ""


def load_trusted(model_class: Any, library: str, folder: Path, files: Sequence[str]) -> nn.Module:
    """Unpickle whatever the files hold, and assign it to a model built empty from config.json.

    This runs code that the files name: for those that the user trusts. files: names in `folder`. Raises CheckpointError
    if what they hold does not fit the model.
    """
    from accelerate import init_empty_weights

    state: dict[str, Any] = {}
    for name in files:
        loaded = torch.load(folder / name, map_location="cpu", weights_only=False)
        state.update(loaded.get("state_dict", loaded))
    with libraries.quiet(), init_empty_weights():
        if library == "diffusers":
            module: nn.Module = model_class.from_config(model_class.load_config(str(folder), local_files_only=True))
        else:
            config = model_class.config_class.from_pretrained(str(folder), local_files_only=True)
            config.quantization_config = None
            module = model_class(config)
    try:
        missing, unexpected = module.load_state_dict(_renamed(module, state), strict=False, assign=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"{model_class.__name__}: {' '.join(str(error).split())[:200]}", hint="config.json and the weights differ"
        ) from error
    tie: Any = getattr(module, "tie_weights", None)
    if tie is not None:
        tie()
    empty = [name for name in missing if _is_meta(module, name)]
    if empty or unexpected:
        what = f"lacks {empty[0]}" if empty else f"has no place for {unexpected[0]}"
        raise CheckpointError(
            f"{model_class.__name__} {what} of the weights", hint="config.json and the weights do not belong together"
        )
    return module.eval()


def _renamed(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Names as the module has them, where all of the file's differ by one leading part (`text_model.`, `model.`)."""
    expected = module.state_dict().keys()
    if set(state) & set(expected):
        return dict(state)
    for prefix in {name.partition(".")[0] + "." for name in [*state, *expected]}:
        for renamed in (
            {name.removeprefix(prefix): value for name, value in state.items()},
            {prefix + name: value for name, value in state.items()},
        ):
            if set(renamed) & set(expected):
                return renamed
    return dict(state)


def _is_meta(module: nn.Module, name: str) -> bool:
    owner = module.get_submodule(name.rpartition(".")[0])
    tensor: torch.Tensor = getattr(owner, name.rpartition(".")[2])
    return tensor.device.type == "meta"
