"""The heavy libraries, imported once and without the noise that they print on the way."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from importlib import metadata
from types import ModuleType
from typing import Any, Literal

from aoquant.errors import CheckpointError

Library = Literal["diffusers", "transformers"]

# Loggers that speak while torch 2.13, torchao 0.18 and diffusers 0.42 are imported on a machine without a GPU, or while
# a checkpoint loads whose faults `loading` reports itself.
_NOISY = (
    "torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer", "diffusers.configuration_utils",
    "diffusers.models.modeling_utils", "diffusers.models.model_loading_utils", "transformers.modeling_utils",
    "transformers.utils.loading_report", "transformers.utils.import_utils",
)  # fmt: skip


class _Silence(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:  # noqa: ARG002
        return False


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back what torchao and friends print while they are imported and while they load (not with AOQUANT_DEBUG=1).

    Only the talk is stopped, and every logger, filter and bar is as it was afterwards.
    """
    if os.environ.get("AOQUANT_DEBUG"):
        yield
        return
    silence = _Silence()
    loggers = [logging.getLogger(name) for name in _NOISY]
    for logger in loggers:
        logger.addFilter(silence)
    try:
        with warnings.catch_warnings(), _no_bars():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(silence)


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Hold back the progress bars of diffusers and transformers, where they are imported already."""
    bars: list[Any] = [sys.modules.get(f"{name}.utils.logging") for name in ("diffusers", "transformers")]
    shown = [bar for bar in bars if bar is not None and bar.is_progress_bar_enabled()]
    for bar in shown:
        bar.disable_progress_bar()
    try:
        yield
    finally:
        for bar in shown:
            bar.enable_progress_bar()


@functools.cache
def load(name: Literal["diffusers", "transformers", "torchao.quantization"]) -> ModuleType:
    """Import a heavy library; with torchao first, so that its loggers are quiet for everyone."""
    with quiet():
        importlib.import_module("torchao.quantization")
        importlib.import_module("aoquant.lowbit")  # which makes its tensor class known to stock loaders
        return importlib.import_module(name)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection: one of them walks all of torch, which takes longer than loading a component does."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def versions() -> dict[str, str]:
    """Versions of everything that shapes a checkpoint, as the manifest records them."""
    return {name: _version(name) for name in ("torch", "torchao", "diffusers", "transformers", "safetensors")}


_version = functools.cache(metadata.version)


@functools.cache
def has_safetensors() -> bool:
    """Whether the installed torchao reads and writes safetensors that stock loaders take: from 0.16 on."""
    return "Int8Tensor" in safetensors_classes()


def safetensors_classes() -> Mapping[str, type]:
    """Name → class of what torchao makes from safetensors."""
    load("torchao.quantization")
    with quiet():
        known = importlib.import_module("torchao.prototype.safetensors.safetensors_utils")
    classes: Mapping[str, type] = known.ALLOWED_CLASSES
    return classes


def config_modules() -> list[str]:
    """The modules in which torchao looks up what a config.json names; those that are imported already come first."""
    load("torchao.quantization")
    modules: set[str] = importlib.import_module("torchao.core.config").ALLOWED_AO_MODULES
    return sorted(modules, key=lambda name: (name not in sys.modules, name))


def find_class(library: Library, class_name: str) -> type:
    """The model class that a config.json or model_index.json names. Raises CheckpointError if this version lacks it."""
    module = load(library)
    with quiet():  # both libraries import a class's module when it is first asked for
        found = getattr(module, class_name, None)
        base = module.ModelMixin if library == "diffusers" else module.PreTrainedModel
    if not (isinstance(found, type) and issubclass(found, base)):
        raise CheckpointError(
            f"{library} {metadata.version(library)} has no model class {class_name}",
            hint=f"a newer {library} may have it: pip install -U {library}",
        )
    return found
