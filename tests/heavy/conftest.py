"""What every heavy test gets: no network, no token, one thread, and tiny models saved once a session."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch and huggingface_hub are imported: both read the environment once.
_HF_HOME = tempfile.mkdtemp(prefix="hf-home-")
atexit.register(shutil.rmtree, _HF_HOME, ignore_errors=True)
os.environ.update(
    HF_HOME=_HF_HOME, HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", NO_COLOR="1",
    COLUMNS="100", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false",
)  # fmt: skip
for _name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "HF_HUB_CACHE", "HF_TOKEN_PATH"):
    os.environ.pop(_name, None)

import diffusers  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

import aoquant  # noqa: E402
from aoquant.engine.run import Result  # noqa: E402
from tests.heavy import stock, tiny  # noqa: E402

torch.set_num_threads(1)  # two workers of pytest-xdist share two cores
gc.set_threshold(100_000)  # as the command does: a collection walks all of torch
for _logging in (diffusers.utils.logging, transformers.utils.logging):
    _logging.set_verbosity_error()
    _logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_folder(name, **options of tiny.save)` → a component folder, written once a session. Do not write
    there."""
    folders: dict[str, Path] = {}

    def get(name: str, **options: Any) -> Path:
        key = f"{name} {sorted(options.items())}"
        if key not in folders:
            folders[key] = tiny.save(name, tmp_path_factory.mktemp(name, numbered=True), **options)
        return folders[key]

    return get


@pytest.fixture(scope="session")
def stock_model(tiny_folder: Callable[..., Path]) -> Callable[..., Any]:
    """`stock_model(name, config_text, dtype=…)` → that tiny model as stock quantizes it, once a session. Do
    not change it.

    The Linears whose width the config's group size does not divide are skipped by their exact names.
    """
    models: dict[tuple[str, str, torch.dtype], Any] = {}

    def get(name: str, config_text: str, *, dtype: torch.dtype = torch.bfloat16) -> Any:
        key = (name, config_text, dtype)
        if key not in models:
            row = tiny.MODELS[name]
            where = (tiny_folder(name), row.library, row.class_name)
            skip = stock.indivisible(*where, stock.group_size(config_text))
            models[key] = stock.quantize(*where, config_text, dtype=dtype, skip=skip)
        return models[key]

    return get


@pytest.fixture(scope="session")
def stock_folder(stock_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`stock_folder(name, config_text, file_format)` → `stock_model` saved by `stock.save`, once a
    session."""
    folders: dict[tuple[str, str, str], Path] = {}

    def get(name: str, config_text: str, file_format: str) -> Path:
        key = (name, config_text, file_format)
        if key not in folders:
            folder = tmp_path_factory.mktemp(f"stock-{name}", numbered=True)
            model = stock_model(name, config_text)
            folders[key] = stock.save(model, folder, tiny.MODELS[name].library, file_format)
        return folders[key]

    return get


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Flux transformer with some weights of about 400,000 values. Do not write there."""
    folder = tmp_path_factory.mktemp("wide")
    model = diffusers.FluxTransformer2DModel(**dict(tiny.MODELS["flux"].config) | {
        "attention_head_dim": 128, "num_attention_heads": 2, "axes_dims_rope": (32, 48, 48),
        "joint_attention_dim": 272, "in_channels": 48,
    })  # fmt: skip
    tiny.fill(model)
    model.to(torch.bfloat16).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def made(tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """`made(name, config_text, source={…options of tiny.save…}, **options of aoquant.quantize)` → the Result for
    that tiny component, made once a session. Do not write into its folder."""
    results: dict[str, Result] = {}

    def get(name: str, config_text: str, *, source: dict[str, Any] | None = None, **options: Any) -> Result:
        key = f"{name} {config_text} {sorted((source or {}).items())} {sorted(options.items())}"
        if key not in results:
            results[key] = aoquant.quantize(
                tiny_folder(name, **source or {}),
                {tiny.MODELS[name].component: config_text},
                output=tmp_path_factory.mktemp(f"made-{name}", numbered=True) / "out",
                variant=(source or {}).get("variant"),
                **options,
            )
        return results[key]

    return get
