"""Folders as aoquant writes them, made without torch: real weight files, a real manifest and its card."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from aoquant.checkpoint.manifest import (
    CARD,
    MANIFEST,
    ComponentRecord,
    FileRecord,
    Manifest,
    Origin,
    model_card,
)
from tests.light.bad_input import write
from tests.light.forge import TorchFile
from tests.light.test_inspection import DIFFUSERS, INT8WO

WEIGHTS = "diffusion_pytorch_model.bin"
LARGE = 200_000

ORIGIN = Origin(
    model="acme/tiny-flux",
    repo_id="acme/tiny-flux",
    revision="0123456789abcdef0123456789abcdef01234567",
    variant=None,
    card={"license": "other", "license_name": "tiny", "license_link": "https://example.org/license"},
)
MADE = Manifest(
    origin=ORIGIN,
    writer="0.1.0",
    versions={"torch": "2.13.0", "torchao": "0.18.0"},
    format="bin",
    dtype="bfloat16",
    components=(),
    files=(),
)


def record(name: str, *, needs: str = "") -> ComponentRecord:
    return ComponentRecord(
        name=name,
        library="diffusers",
        class_name="FluxTransformer2DModel",
        config="int4wo" if needs else "int8wo",
        needs=needs,
        num_quantized=1,
        kept={"--skip proj_out": 1},
        num_other=1,
    )


def checkpoint(
    folder: Path,
    *names: str,
    made: Manifest = MADE,
    others: Mapping[str, bytes] | None = None,
    needs: str = "",
    rows: int = 4,
) -> Path:
    """A folder of one component for each of `names` ("" for a flat one), with `others` beside them as `--full` has.

    rows: of the one weight, [rows, 8] in int8; `LARGE` makes a file that is linked and not copied.
    """
    for name in names:
        file = TorchFile()
        file.state = {"a.weight": file.int8(rows, 8), "a.bias": file.tensor("BFloat16Storage", (rows,))}
        config = {**DIFFUSERS, "quantization_config": INT8WO}
        write(folder / name, {"config.json": config})
        file.write(folder / name / WEIGHTS)
    write(folder, dict(others or {}))
    return write_texts(folder, *names, made=made, needs=needs)


def write_texts(folder: Path, *names: str, made: Manifest = MADE, needs: str = "") -> Path:
    """The card and the manifest of whatever lies in a folder."""
    components = tuple(record(name, needs=needs) for name in names)
    manifest = replace(made, components=components, files=files_in(folder))
    (folder / CARD).write_text(model_card(manifest, title=folder.name))
    (folder / MANIFEST).write_text(replace(manifest, files=files_in(folder)).text())
    return folder


def files_in(folder: Path) -> tuple[FileRecord, ...]:
    return tuple(
        FileRecord(
            path=PurePosixPath(path.relative_to(folder).as_posix()),
            num_bytes=path.stat().st_size,
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    )
