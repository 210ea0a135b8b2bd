"""One component on the meta device: what the stock loader would do with each of its tensors.

Nothing is guessed from names. The component's own class is built from its config without storage, and the library's
own quantizer is asked which weights it would hand to torchao, which modules stay in float32 and which names are tied.
The private corners of diffusers and transformers that this takes are all in this module.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn

from aoquant.checkpoint.tensors import Entry
from aoquant.engine import libraries
from aoquant.engine.libraries import Library
from aoquant.errors import CheckpointError
from aoquant.source import ComponentSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One tensor of the module's state dict, as the stock loader would fill it.

    dtype: what its values are cast to before anything else. linear: the weight of an nn.Linear. quantizable: stock
    hands it to torchao; else `reason` says why not (empty for tensors that are no Linear weight).
    """

    name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    linear: bool
    quantizable: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A component's class, built on the meta device, and what it expects of a checkpoint.

    targets: module name → Target. renames: stored name → module name, for every stored name that the library reads.
    unexpected: stored names that the library ignores. tied: names that repeat another one → that one; only the latter
    is stored. default_skips: the patterns by which transformers, told nothing, leaves modules unquantized.
    whole_reason: why the tensors cannot be streamed one by one; empty when they can.
    """

    source: ComponentSource
    module: nn.Module
    dtype: torch.dtype
    targets: Mapping[str, Target]
    renames: Mapping[str, str]
    unexpected: Collection[str]
    tied: Mapping[str, str]
    default_skips: Sequence[str]
    whole_reason: str

    @property
    def library(self) -> Library:
        return self.source.library


class _Stock(Protocol):
    """What differs between the two libraries."""

    module: nn.Module
    default_skips: Sequence[str]

    def dtype_of(self, name: str, expected: torch.Tensor, *, quantized: bool) -> torch.dtype | None: ...
    def offers(self, name: str) -> bool: ...
    def rename(self, stored: Collection[str], expected: Mapping[str, torch.Tensor]) -> tuple[dict[str, str], str]: ...
    def tied(self) -> dict[str, str]: ...
    def optional(self, name: str) -> bool: ...


def build(source: ComponentSource, entries: Mapping[str, Entry], *, sharded: bool, dtype: torch.dtype) -> Component:
    """Build the component of `source` on the meta device, to be loaded in `dtype`.

    entries: what its weight files hold. Raises CheckpointError if the class cannot be built or tensors are missing.
    """
    with libraries.quiet():
        try:
            if source.library == "diffusers":
                stock: _Stock = _Diffusers(source, sharded=sharded, dtype=dtype)
            else:
                stock = _Transformers(source, dtype=dtype)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{_title(source)}: {source.class_name} cannot be built from its config.json: {_one_line(error)}",
                hint=f"does the installed {source.library} fit the one that wrote it?",
            ) from error
    expected = stock.module.state_dict()
    renames, whole_reason = stock.rename(entries, expected)
    unexpected = sorted(set(entries) - set(renames))
    places = {name: _place(entries[stored]) for stored, name in renames.items()}
    tied = _stored_ties(stock.tied(), dict.fromkeys(expected) if whole_reason else places)
    if not whole_reason:
        _check_complete(source, stock, expected, renames, tied)
    is_linear = _torchao_filter()
    targets = {}
    for name, tensor in expected.items():
        owner = stock.module.get_submodule(name.rpartition(".")[0])
        linear = isinstance(owner, nn.Linear) and name.rpartition(".")[2] == "weight"
        offered = linear and stock.offers(name)
        quantizable = offered and bool(is_linear(owner))
        target_dtype = stock.dtype_of(name, tensor, quantized=offered)
        targets[name] = Target(
            name=name,
            dtype=target_dtype,
            shape=tuple(tensor.shape),
            linear=linear,
            quantizable=quantizable,
            reason=_why_kept(owner, source, offered, target_dtype, dtype) if linear and not quantizable else "",
        )
    return Component(
        source=source,
        module=stock.module,
        dtype=dtype,
        targets=targets,
        renames=renames,
        unexpected=unexpected,
        tied=tied,
        default_skips=stock.default_skips,
        whole_reason=whole_reason,
    )


def load_whole(component: Component, *, variant: str | None) -> dict[str, torch.Tensor]:
    """Let the library itself load the component, unquantized, into memory: module name → tensor.

    For checkpoints whose tensors must be merged, split or transposed on the way. Memory: the whole component.
    """
    source = component.source
    model_class: Any = libraries.find_class(source.library, source.class_name)
    with libraries.quiet():
        try:
            model = model_class.from_pretrained(str(source.folder), dtype=component.dtype, variant=variant)
        except Exception as error:
            raise CheckpointError(f"{_title(source)}: {source.library} cannot load it: {_one_line(error)}") from error
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def assemble(component: Component, state: Mapping[str, Any]) -> nn.Module:
    """A module of the component's class whose tensors are those of `state` (stored name → tensor): none copied or cast.

    It is built as the stock loaders build it, with storage for nothing but buffers that no checkpoint holds. Raises
    CheckpointError if `state` does not fill it, or the library would change tensors on the way.
    """
    from accelerate import init_empty_weights

    source = component.source
    if component.whole_reason:
        raise CheckpointError(
            f"{_title(source)} cannot be put together by hand: {component.whole_reason}", hint="ask for safetensors"
        )
    model_class: Any = libraries.find_class(source.library, source.class_name)
    with libraries.quiet(), _default_dtype(component.dtype), init_empty_weights(include_buffers=False):
        if source.library == "diffusers":
            module: Any = _remapped(model_class, source).from_config(dict(source.config))
        else:
            config = model_class.config_class.from_pretrained(str(source.folder), local_files_only=True)
            module = model_class._from_config(config, dtype=component.dtype)
    module.requires_grad_(False)  # else torch refuses integers for what would want gradients
    filled = {component.renames[name]: tensor for name, tensor in state.items() if name in component.renames}
    filled |= {name: filled[kept] for name, kept in component.tied.items() if kept in filled}
    try:
        module.load_state_dict(filled, strict=True, assign=True)
    except Exception as error:
        raise CheckpointError(
            f"{_title(source)} does not take its tensors: {_one_line(error)}",
            hint="config.json and the weights do not belong together",
        ) from error
    if component.tied:
        module.tie_weights()
    return cast(nn.Module, module.eval())


def config_text(component: Component, quantization: Any, *, kept: Sequence[str]) -> str:
    """config.json as the stock saver writes it, with the quantization block of `quantization` (a torchao config).

    kept: modules that stay unquantized although stock, told nothing, would quantize them.
    """
    module: Any = component.module
    if component.library == "diffusers":
        config = json.loads(module.to_json_string())
    else:
        settings = copy.deepcopy(module.config)
        settings.architectures = [type(module).__name__]
        settings.dtype = str(component.dtype).removeprefix("torch.")
        config = json.loads(settings.to_json_string())
    config.pop("_name_or_path", None)  # may be a path of this machine
    with libraries.quiet():  # torchao 0.18 announces that FqnToConfig's `_default` will go one day
        config["quantization_config"] = _quantization(component, quantization, kept).to_dict()
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def _quantization(component: Component, quantization: Any, kept: Sequence[str]) -> Any:
    """The library's TorchAoConfig that leaves exactly `kept` out, on top of what it leaves out by itself.

    diffusers matches `modules_to_not_convert` as substrings, so `proj_out` would take every `…proj_out` along: there
    the config goes by module name. transformers 5.24 would then hand it biases as well, but matches patterns.
    """
    stock: Any = libraries.load(component.library).TorchAoConfig
    if not kept:
        return stock(quantization)
    if component.library == "transformers":
        return stock(quantization, modules_to_not_convert=[*component.default_skips, *map(re.escape, kept)])
    by_module: Any = libraries.load("torchao.quantization").FqnToConfig
    return stock(by_module({"_default": quantization, **dict.fromkeys(kept)}))


def _torchao_filter() -> Any:
    # quantize_'s default filter: it passes over torch.nn.modules.linear.NonDynamicallyQuantizableLinear.
    from torchao.quantization.quant_api import _is_linear

    return _is_linear


def _why_kept(
    owner: nn.Module, source: ComponentSource, offered: bool, target: torch.dtype | None, dtype: torch.dtype
) -> str:
    if offered:
        return f"torchao does not quantize {type(owner).__name__}"
    if target == torch.float32 and dtype != torch.float32:
        return f"{source.class_name} keeps it in float32"
    return f"{source.library} leaves it unquantized in {source.class_name}"


def _check_complete(
    source: ComponentSource,
    stock: _Stock,
    expected: Mapping[str, torch.Tensor],
    renames: Mapping[str, str],
    tied: Mapping[str, str],
) -> None:
    present = set(renames.values())
    missing = [
        name for name in expected if name not in present and tied.get(name) not in present and not stock.optional(name)
    ]
    if missing:
        raise CheckpointError(
            f"{_title(source)}: {len(missing)} of {len(expected)} tensors of {source.class_name} are missing, "
            f"first {missing[0]}",
            hint="the checkpoint is incomplete, or was written for another class or version",
        )


def _place(entry: Entry) -> tuple[object, ...]:
    """Where an entry's values lie: equal places hold equal values."""
    return tuple((part.file, part.offset, part.shape, part.stride) for part in entry.parts.values())


def _stored_ties(ties: Mapping[str, str], places: Mapping[str, object]) -> dict[str, str]:
    """Which names need not be stored: name → the stored name it repeats.

    places: name → where the checkpoint holds it. The library's own choice is `{copy: original}`; where a checkpoint
    only has the copy, the two change places. Where it holds both and not in one place, both are stored, as stock
    would then compare their values and may untie them.
    """
    kept: dict[str, str] = {}  # original → the name that is stored for it
    for copy_name, original in ties.items():
        kept.setdefault(original, original if original in places or copy_name not in places else copy_name)
    stored = {}
    for copy_name, original in ties.items():
        keeper = kept[original]
        for name in (copy_name, original):
            if name != keeper and (name not in places or places[name] == places.get(keeper)):
                stored[name] = keeper
    return stored


def _title(source: ComponentSource) -> str:
    return source.name or source.class_name


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "…"


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _any_config() -> Any:
    # Which weights are quantized does not depend on the config; the stock quantizers only need one to exist.
    return libraries.load("torchao.quantization").Int8WeightOnlyConfig()


class _Diffusers:
    """diffusers' `ModelMixin.from_pretrained`, followed without reading a weight (0.42.1)."""

    module: nn.Module

    def __init__(self, source: ComponentSource, *, sharded: bool, dtype: torch.dtype) -> None:
        diffusers = libraries.load("diffusers")
        from diffusers.quantizers import DiffusersAutoQuantizer

        model_class: Any = libraries.find_class("diffusers", source.class_name)
        model_class = _remapped(model_class, source)
        self.module = _on_meta(model_class, source.config, dtype)
        self.default_skips: Sequence[str] = ()
        self._fixes_names = not sharded  # as stock does: deprecated attention names are only mended in single files
        self._dtype = dtype
        keep = model_class._keep_in_fp32_modules or []
        self._float32_modules = [keep] if isinstance(keep, str) else list(keep)
        self._quantizer = DiffusersAutoQuantizer.from_config(
            diffusers.TorchAoConfig(_any_config()), pre_quantized=False
        )
        self._quantizer.validate_environment(torch_dtype=dtype, device_map=None)
        self._quantizer.preprocess_model(self.module, device_map=None, keep_in_fp32_modules=list(self._float32_modules))

    def dtype_of(self, name: str, expected: torch.Tensor, *, quantized: bool) -> torch.dtype | None:  # noqa: ARG002
        if any(part in self._float32_modules for part in name.split(".")):
            return torch.float32
        return self._dtype if expected.is_floating_point() else None

    def offers(self, name: str) -> bool:
        return bool(
            self._quantizer.check_if_quantized_param(self.module, None, name, state_dict={}, param_device="cpu")
        )

    def rename(self, stored: Collection[str], expected: Mapping[str, torch.Tensor]) -> tuple[dict[str, str], str]:
        names: dict[str, str] = {name: name for name in stored}
        if self._fixes_names:
            self.module._fix_state_dict_keys_on_load(names)  # type: ignore[operator]
        return {original: name for name, original in names.items() if name in expected}, ""

    def tied(self) -> dict[str, str]:
        return {}

    def optional(self, name: str) -> bool:  # noqa: ARG002
        return False


def _on_meta(model_class: Any, config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """A diffusers class without storage, buffers included: SD3.5's table of positions alone takes 0.9 GB to compute.

    A class that looks at values while it is built fails there; then, as in stock, only its parameters go without.
    """
    from accelerate import init_empty_weights

    with _default_dtype(dtype), init_empty_weights():
        try:
            with torch.device("meta"):
                module: nn.Module = model_class.from_config(dict(config))
        except Exception:  # of whatever kind; what is wrong with the config itself is raised again
            module = model_class.from_config(dict(config))
    return module


def _remapped(model_class: Any, source: ComponentSource) -> Any:
    """Old `Transformer2DModel` checkpoints (PixArt, DiT) name a class that diffusers has since split."""
    legacy = libraries.load("diffusers").models.modeling_utils.LegacyModelMixin
    if not issubclass(model_class, legacy):
        return model_class
    from diffusers.models.model_loading_utils import _fetch_remapped_cls_from_config

    return _fetch_remapped_cls_from_config(source.config, model_class)


class _Transformers:
    """transformers' `PreTrainedModel.from_pretrained`, followed without reading a weight (5.24)."""

    def __init__(self, source: ComponentSource, *, dtype: torch.dtype) -> None:
        transformers = libraries.load("transformers")
        from transformers.quantizers.auto import AutoHfQuantizer

        model_class: Any = libraries.find_class("transformers", source.class_name)
        config = model_class.config_class.from_pretrained(str(source.folder), local_files_only=True)
        with torch.device("meta"):
            self.module: nn.Module = model_class._from_config(config, dtype=dtype)
        self._dtype = dtype
        module: Any = self.module
        self._quantizer = AutoHfQuantizer.from_config(transformers.TorchAoConfig(_any_config()), pre_quantized=False)
        self._quantizer.preprocess_model(model=module, dtype=dtype, device_map={"": "cpu"}, checkpoint_files=None)
        self.default_skips: Sequence[str] = sorted(self._quantizer.modules_to_not_convert)
        self._dtype_plan = module._get_dtype_plan(dtype)

    def dtype_of(self, name: str, expected: torch.Tensor, *, quantized: bool) -> torch.dtype | None:
        from transformers.core_model_loading import build_glob_alternation

        if self._dtype_plan:
            pattern, by_group, _ = build_glob_alternation(list(self._dtype_plan))
            match = pattern.search(name)
            if match is not None and match.lastgroup is not None:
                planned: torch.dtype = self._dtype_plan[by_group[match.lastgroup]]
                return planned
        return self._dtype if quantized else expected.dtype

    def offers(self, name: str) -> bool:
        return bool(self._quantizer.param_needs_quantization(self.module, name))

    def rename(self, stored: Collection[str], expected: Mapping[str, torch.Tensor]) -> tuple[dict[str, str], str]:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        module: Any = self.module
        conversions = get_model_conversion_mapping(module, None, self._quantizer)
        renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        prefix = module.base_model_prefix
        renames: dict[str, str] = {}
        converted = []
        for original in stored:
            name, pattern = rename_source_key(original, renamings, converters, prefix, expected)
            if name not in expected and original in expected:
                name, pattern = rename_source_key(original, [], [], prefix, expected)
            if name not in expected:
                continue
            if pattern is not None:
                converted.append(original)
            renames[original] = name
        if converted:
            return (
                renames,
                f"transformers merges or splits {len(converted)} of its tensors, first {converted[0]}",
            )
        if len(set(renames.values())) != len(renames):
            return renames, "several stored tensors go by the same name"
        return renames, ""

    def tied(self) -> dict[str, str]:
        module: Any = self.module
        return dict(module.all_tied_weights_keys)

    def optional(self, name: str) -> bool:
        module: Any = self.module
        patterns = module._keys_to_ignore_on_load_missing or ()
        return any(re.search(pattern, name) for pattern in patterns)
