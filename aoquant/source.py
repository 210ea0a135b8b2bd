"""MODEL → component folders and files, on disk or yet to come.

A local folder needs nothing but the standard library. From the Hub come the small files first (model_index.json,
config.json, shard indexes), of weights only the parts that describe them, and, once all of that has shown that the
job can be done, the weights of the components asked for and no others, all of one exact commit.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from aoquant import hub
from aoquant.checkpoint.files import Opener, open_file, quoted
from aoquant.checkpoint.layout import (
    CONFIG,
    MODEL_INDEX,
    Library,
    WeightFiles,
    choose,
    find_weights,
    read_index,
    read_json,
)
from aoquant.checkpoint.manifest import CARD, CARRIED, MANIFEST
from aoquant.errors import AoquantError, CheckpointError, SourceError, UsageError
from aoquant.models import MODELS, find_model

# How the classes of a pipeline's weightless parts end, in diffusers 0.42 and transformers 5 (the backends are
# the classes that transformers 5 writes for tokenizers without one of their own).
_WEIGHTLESS = (
    "Tokenizer", "TokenizerFast", "Scheduler", "FeatureExtractor", "Processor", "ProcessorFast", "Backend",
)  # fmt: skip
_WEIGHT_SUFFIXES = frozenset({
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".onnx_data", ".gguf",
})  # fmt: skip
_HUB = "https://huggingface.co"  # where a card's links lead, whichever mirror HF_ENDPOINT names
_SHARD_INDEX = re.compile(r"\.index(\.[^.]+)?\.json$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSource:
    """One component, and where its weights are or will be.

    name: its name in the pipeline, empty where the source is a flat component folder. class_name: the class
    of `library` that `config` (the parsed config.json) is for.
    """

    name: str
    folder: Path
    library: Library
    class_name: str
    config: Mapping[str, Any]
    weights: WeightFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An opened MODEL: where it is, and which components it has.

    alias: the bare name by which `repo_id` was asked for, None if it was written out.
    model: the repository's id or the folder's own name, fit to be written into a result (never a path of this
    machine). revision: the exact commit, None for a local folder. model_index: the parsed model_index.json,
    None for a single component. components: all that hold weights, in the pipeline's order; for a single
    component the name that was asked for, if any. snapshot: the commit on the Hub, whose weight files `arriving`
    brings; None for a local folder. card: what its model card says that goes for what is made from it too, `CARRIED`.
    """

    kind: Literal["pipeline", "component"]
    model: str
    repo_id: str | None
    alias: str | None
    revision: str | None
    folder: Path
    model_index: Mapping[str, Any] | None
    components: tuple[str, ...]
    variant: str | None
    snapshot: hub.Snapshot | None
    card: Mapping[str, str]

    @property
    def pipeline_class(self) -> str | None:
        """The class that model_index.json names; None for a single component, and where it names none."""
        name = (self.model_index or {}).get("_class_name")
        return name if isinstance(name, str) and name.isidentifier() else None

    @property
    def opener(self) -> Opener:
        """Opens the source's files, those too that have not arrived."""
        return open_file if self.snapshot is None else hub.opener(self.snapshot)

    def other_files(self, *, quantized: Collection[str]) -> dict[PurePosixPath, tuple[Path, int]]:
        """What makes a whole pipeline of its `quantized` components: path in the pipeline → (file, bytes).

        All files of its other parts, of their weights one format and variant, and of its root but the model
        card; nothing for a single component. Raises CheckpointError if a part is missing.
        """
        snapshot = self.snapshot
        if snapshot is None:
            paths = (path for path in self.folder.rglob("*") if path.is_file())
            files = {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in paths}
        else:
            files = {path: file.size for path, file in snapshot.files.items()}
        wanted = _other_paths(self, files, quantized=quantized)
        return {PurePosixPath(path): (self.folder / path, files[path]) for path in wanted}

    @property
    def cache(self) -> Path | None:
        """Where files arrive that are not on this disk yet; None for a local folder."""
        return None if self.snapshot is None else hub.cache_folder()

    def bytes_to_download(self, paths: Collection[Path]) -> int:
        """How many bytes of the files at `paths` are not on this disk yet."""
        return 0 if self.snapshot is None else hub.bytes_to_download(self.snapshot, paths)

    def arriving(
        self, paths: Collection[Path], *, on_progress: hub.OnProgress | None = None
    ) -> AbstractContextManager[Callable[[Path], None]]:
        """As `hub.arriving`: a function that waits for one of `paths`. A local folder has them all."""
        if self.snapshot is None:
            return nullcontext(lambda _: None)
        return hub.arriving(self.snapshot, paths, on_progress=on_progress)


def open_source(
    model: str,
    *,
    components: Collection[str],
    revision: str | None = None,
    variant: str | None = None,
    offline: bool = False,
) -> Source:
    """Find `model`, and bring the small files that describe `components` onto this disk. No weights.

    model: an existing folder (a pipeline or one component), else `org/name[@revision]` on the Hub, else a name
    of `aoquant.models`, else the name of the only such repository in the cache. offline: take everything from
    the Hub's cache (so does HF_HUB_OFFLINE).

    Raises UsageError for a component that the model lacks or for contradicting revisions; SourceError if the
    model cannot be had; CheckpointError if what is there cannot be used.
    """
    folder = _local_folder(model)
    if folder is not None:
        if revision is not None:
            raise UsageError(
                f"{quoted(model)} is a local folder, which has no revision {quoted(revision)}",
                hint="leave out the revision, or name the repository as org/name",
            )
        return _open_local(folder, components=components, variant=variant)
    repo_id, revision = _parse_repository(model, revision=revision)
    snapshot = hub.resolve(repo_id, revision=revision, offline=offline, anchors=(MODEL_INDEX, CONFIG))
    source = _open_folder(
        snapshot.folder,
        model=repo_id,
        alias=name if (name := model.partition("@")[0]) != repo_id else None,
        snapshot=snapshot,
        files=snapshot.files,
        components=components,
        variant=variant,
    )
    for name in components:
        _fetch_small_files(snapshot, source, name)
    return source


def open_component(source: Source, name: str) -> ComponentSource:
    """The component `name` of an opened source.

    Raises UsageError if the pipeline has no such component, or a single one is called what it cannot be;
    CheckpointError if its class is not one of diffusers or transformers, its config is missing, contradicts
    model_index.json or is already quantized, or its weights are incomplete.
    """
    library, class_name, config = _identify(source, name)
    is_pipeline = source.model_index is not None
    folder = source.folder / name if is_pipeline else source.folder
    listing = None
    if source.snapshot is not None:
        sizes = {source.folder / path: file.size for path, file in source.snapshot.files.items()}
        listing = {path.name: size for path, size in sizes.items() if path.parent == folder}
    return ComponentSource(
        name=name if is_pipeline else "",
        folder=folder,
        library=library,
        class_name=class_name,
        config=config,
        weights=find_weights(folder, variant=source.variant, listing=listing),
    )


def _local_folder(model: str) -> Path | None:
    """The existing folder that `model` names, if it does. Raises SourceError for a file."""
    try:
        path = Path(model).expanduser()
        if model and path.is_dir():
            return path
        is_file = path.is_file()
    except (OSError, RuntimeError):  # too long for a path, or `~` of an unknown user
        return None
    if is_file:
        raise SourceError(
            f"{quoted(model)} is a file, not a folder",
            hint=f"name the folder that holds it, with its {CONFIG} beside it",
        )
    return None


def _parse_repository(model: str, *, revision: str | None) -> tuple[str, str | None]:
    """`org/name[@revision]` or `name[@revision]` → the repository's id and the revision.

    Raises SourceError for a path, an address, or a bare name that does not stand for one repository.
    """
    name, at, typed = model.partition("@")
    if "://" in model:
        raise SourceError(f"{quoted(model)} is an address, not a model", hint="write org/name, or org/name@revision")
    if not name or name[0] in "./~" or "\\" in name or name.endswith("/") or name.count("/") > 1:
        raise SourceError(f"no such folder: {quoted(model)}", hint="check the path, or write org/name for the Hub")
    if "/" not in name:
        if at and Path(name).is_dir():
            raise UsageError(f"{quoted(name)} is a local folder, which has no revision", hint=f"leave out @{typed}")
        name = _repository_named(name)
    if at and not typed:
        raise SourceError(f"{quoted(model)} names no revision after its @", hint=f"write {name}@main")
    if typed and revision is not None and typed != revision:
        raise UsageError(
            f"two revisions were given for {name}: {quoted(typed)} and {quoted(revision)}",
            hint="give one of them",
        )
    return name, typed or revision


def _repository_named(name: str) -> str:
    """The repository that a bare name stands for: by the table, else the only one of that name in the Hub's cache.

    Never what a search finds: anyone can publish a look-alike. Raises SourceError.
    """
    if (row := find_model(name)) is not None:
        return row.repo_id
    cached = hub.cached_repositories()
    same = [repo_id for repo_id in cached if repo_id.partition("/")[2].casefold() == name.casefold()]
    if len(same) == 1:
        return same[0]
    if same:
        raise SourceError(
            f"{quoted(name)} is {len(same)} repositories in the Hub's cache: {', '.join(same)}",
            hint=f"say which: write {same[0]}, for example",
        )
    near = _close_names(name, cached)
    suggestion = f"did you mean {' or '.join(near)}? " if near else ""
    raise SourceError(
        f"{quoted(name)} is neither a folder here nor a name that stands for one repository",
        hint=f"{suggestion}`aoquant models` lists the names; write org/{quoted(name, quote=False)} for the Hub",
    )


def _close_names(name: str, cached: list[str]) -> list[str]:
    """Up to three names like `name` that stand for repositories, one for each."""
    meant = {repo_id.partition("/")[2]: repo_id for repo_id in cached}
    meant |= {spelling: row.repo_id for row in MODELS.values() for spelling in row.spellings}
    folded = {spelling.casefold(): spelling for spelling in meant}
    near = [folded[match] for match in difflib.get_close_matches(name.casefold(), folded, n=9)]
    return list({meant[spelling]: spelling for spelling in reversed(near)}.values())[::-1][:3]


def _open_local(folder: Path, *, components: Collection[str], variant: str | None) -> Source:
    if not (folder / MODEL_INDEX).is_file() and not (folder / CONFIG).is_file():
        if (folder / MANIFEST).is_file():
            raise CheckpointError(
                f"already quantized: {quoted(str(folder))} was written by aoquant",
                hint="name the model that it was made from; its aoquant.json says which",
            )
        raise CheckpointError(
            f"{quoted(str(folder))} holds neither {MODEL_INDEX} nor {CONFIG}",
            hint="name the folder of a diffusers pipeline, or of one component of it",
        )
    files = {path.relative_to(folder).as_posix() for path in folder.glob("*/*") if path.is_file()}
    return _open_folder(
        folder,
        model=folder.resolve().name or "model",
        alias=None,
        snapshot=None,
        files=files,
        components=components,
        variant=variant,
    )


def _open_folder(
    folder: Path,
    *,
    model: str,
    alias: str | None,
    snapshot: hub.Snapshot | None,
    files: Collection[str],
    components: Collection[str],
    variant: str | None,
) -> Source:
    """The Source of a folder whose model_index.json or config.json is there; `files` may be yet to come."""
    model_index = read_json(folder / MODEL_INDEX) if (folder / MODEL_INDEX).is_file() else None
    if model_index is None:
        if len(components) > 1:
            raise UsageError(
                f"{model} is a single component, and {len(components)} were named: {', '.join(components)}",
                hint="give a config for one of them",
            )
        have = tuple(components)
    else:
        parts = _parts(model_index)
        have = tuple(name for name, (_, class_name) in parts.items() if _holds_weights(name, class_name, files))
        for name in components:
            if name not in have:
                raise _lacks(model, name, have)
    return Source(
        kind="component" if model_index is None else "pipeline",
        model=model,
        repo_id=snapshot.repo_id if snapshot is not None else None,
        alias=alias,
        revision=snapshot.commit if snapshot is not None else None,
        folder=folder,
        model_index=model_index,
        components=have,
        variant=variant,
        snapshot=snapshot,
        card=_card(folder, snapshot),
    )


def _card(folder: Path, snapshot: hub.Snapshot | None) -> dict[str, str]:
    """`Source.card`. A link to a file of a repository becomes one that holds from anywhere."""
    if snapshot is not None and CARD in snapshot.files:
        hub.fetch(snapshot, CARD)
    said = hub.front_matter(folder / CARD)
    card = {key: said[key] for key in CARRIED if isinstance(said.get(key), str) and said[key].isprintable()}
    link = card.get("license_link")
    if link and snapshot is not None and "://" not in link:
        card["license_link"] = f"{_HUB}/{snapshot.repo_id}/blob/{snapshot.commit}/{link.removeprefix('./').lstrip('/')}"
    return card


def _parts(model_index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """What a model_index.json names: part → (library, class). Options and absent parts are left out."""
    parts = {}
    for name, value in model_index.items():
        if name.startswith("_") or not isinstance(value, list) or len(value) != 2:
            continue
        library, class_name = value
        if not isinstance(library, str) or not isinstance(class_name, str):
            continue
        if name.startswith(".") or any(char in name for char in "/\\:"):
            raise CheckpointError(
                f"{MODEL_INDEX} names a component {quoted(name)}, which cannot be a folder",
                hint="do not use this model: its files are not what diffusers writes",
            )
        parts[name] = (library, class_name)
    return parts


def _holds_weights(name: str, class_name: str, files: Collection[str]) -> bool:
    """Whether a part is a model: its class is not called like a tokenizer, and its folder is not like one.

    A folder that is missing altogether still counts, so that the error is about the damage.
    """
    if class_name.endswith(_WEIGHTLESS):
        return False
    own = [file for file in files if file.startswith(f"{name}/")]
    return not own or any(file == f"{name}/{CONFIG}" or _is_weight_file(file) for file in own)


def _is_weight_file(path: str) -> bool:
    """Whether a file holds weights for whatever framework, or is the index of some."""
    return PurePosixPath(path).suffix in _WEIGHT_SUFFIXES or _SHARD_INDEX.search(path) is not None


def _lacks(model: str, name: str, have: tuple[str, ...]) -> UsageError:
    nearest = difflib.get_close_matches(name, have, n=1)
    suggestion = f"did you mean {nearest[0]}? " if nearest else ""
    return UsageError(
        f"{model} has no component {quoted(name)} that holds weights",
        hint=f"{suggestion}it has {', '.join(have) or 'none'}",
    )


def _incomplete(model: str, path: str) -> CheckpointError:
    return CheckpointError(
        f"{model} has no {path}, though its {MODEL_INDEX} names {path.partition('/')[0]}",
        hint="the copy is incomplete: download or copy it again, whole",
    )


def _identify(source: Source, name: str) -> tuple[Library, str, Mapping[str, Any]]:
    """Library, class and config of a component, from its small files. Raises as `open_component` does."""
    if source.model_index is None:
        config = read_json(source.folder / CONFIG)
        library, class_name = _class_in_config(config, model=source.model)
        _refuse_misnamed(name, library, class_name, model=source.model)
        _refuse_quantized(config, where=CONFIG)
        return library, class_name, config
    if name not in source.components:
        raise _lacks(source.model, name, source.components)
    library_name, class_name = _parts(source.model_index)[name]
    libraries: Mapping[str, Library] = {"diffusers": "diffusers", "transformers": "transformers"}
    if library_name not in libraries:
        raise CheckpointError(
            f"{name} of {source.model} is a {quoted(class_name, quote=False)} of {quoted(library_name)}, "
            "which is neither diffusers nor transformers",
            hint="only components whose class belongs to diffusers or transformers can be quantized",
        )
    if not (source.folder / name / CONFIG).is_file():
        raise _incomplete(source.model, f"{name}/{CONFIG}")
    config = read_json(source.folder / name / CONFIG)
    own_class = config.get("_class_name")
    if library_name == "diffusers" and own_class not in (None, class_name):
        raise CheckpointError(
            f"{name}/{CONFIG} says {quoted(own_class, quote=False)}, "
            f"and {MODEL_INDEX} says {quoted(class_name, quote=False)}",
            hint="the folder mixes two models: restore the file that does not belong",
        )
    _refuse_quantized(config, where=f"{name}/{CONFIG}")
    return libraries[library_name], class_name, config


def _class_in_config(config: Mapping[str, Any], *, model: str) -> tuple[Library, str]:
    class_name = config.get("_class_name")
    if isinstance(class_name, str):
        return "diffusers", class_name
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        return "transformers", architectures[0]
    raise CheckpointError(
        f"{CONFIG} of {model} names no class: it has neither '_class_name' nor 'architectures'",
        hint="name the pipeline's folder instead, whose model_index.json gives the class",
    )


def _refuse_misnamed(name: str, library: Library, class_name: str, *, model: str) -> None:
    """Raise UsageError where a single component is called what it cannot be."""
    of_transformers = name.startswith(("text_encoder", "image_encoder"))
    of_diffusers = name.startswith(("transformer", "unet", "controlnet", "vae"))
    if (of_transformers and library == "diffusers") or (of_diffusers and library == "transformers"):
        kinds = {"diffusers": "transformer, unet, controlnet or vae", "transformers": "text_encoder or image_encoder"}
        raise UsageError(
            f"{model} is a {class_name} of {library}, not a {name}", hint=f"call it a {kinds[library]}, or what it is"
        )


def _refuse_quantized(config: Mapping[str, Any], *, where: str) -> None:
    # Composite transformers models keep the block at the top; compressed-tensors once wrote a key of its own.
    block = config.get("quantization_config") or config.get("compression_config")
    if not block:
        return
    method = block.get("quant_method") if isinstance(block, Mapping) else None
    raise CheckpointError(
        f"already quantized: {where} has a quantization_config (method {quoted(method or 'unknown', quote=False)})",
        hint="start from the unquantized checkpoint that it was made from",
    )


# Which files a job needs.


def _fetch_small_files(snapshot: hub.Snapshot, source: Source, name: str) -> None:
    """Fetch what describes one component, and refuse what it shows to be unfit."""
    folder = name if source.model_index is not None else ""
    hub.fetch(snapshot, f"{folder}/{CONFIG}".lstrip("/"))
    _identify(source, name)
    _weight_paths(snapshot, folder, variant=source.variant)


def _weight_paths(snapshot: hub.Snapshot, folder: str, *, variant: str | None) -> list[str]:
    """The weight files of a component, with their index, as paths in the repository."""
    prefix = f"{folder}/" if folder else ""
    names = [
        path.removeprefix(prefix)
        for path in snapshot.files
        if path.startswith(prefix) and "/" not in path.removeprefix(prefix)
    ]
    if snapshot.offline and not any(_is_weight_file(name) for name in names):
        raise hub.absent(snapshot, [f"the weights of {folder}" if folder else "the weights"])
    try:
        choice = choose(names, variant=variant)
    except CheckpointError as error:
        where = f"{folder} of {snapshot.repo_id}" if folder else snapshot.repo_id
        raise CheckpointError(f"{where}: {error.message}", hint=error.hint) from None
    if choice.index is None:
        return [f"{prefix}{choice.file}"]
    index = f"{prefix}{choice.index}"
    shards = [f"{prefix}{name}" for name in read_index(hub.fetch(snapshot, index)).files]
    missing = [shard for shard in shards if shard not in snapshot.files]
    if missing:
        raise hub.absent(snapshot, missing)
    return [index, *shards]


def _local_weight_paths(folder: Path, name: str, *, variant: str | None) -> list[str]:
    weights = find_weights(folder / name, variant=variant)
    return [f"{name}/{path.name}" for path in (weights.index, *weights.files) if path is not None]


def _other_paths(source: Source, files: Collection[str], *, quantized: Collection[str]) -> list[str]:
    """The paths of `Source.other_files` among `files`, those of the folder or of the repository."""
    if source.model_index is None:
        return []

    def weight_paths(name: str, variant: str | None) -> list[str]:
        if source.snapshot is None:
            return _local_weight_paths(source.folder, name, variant=variant)
        return _weight_paths(source.snapshot, name, variant=variant)

    def absent(name: str) -> AoquantError:
        if source.snapshot is None:
            return _incomplete(source.model, name)
        return hub.absent(source.snapshot, [f"{name}/"])

    shown = [path for path in files if not any(part.startswith(".") for part in path.split("/"))]
    wanted = [path for path in shown if "/" not in path and path != CARD and not _is_weight_file(path)]
    for name in _parts(source.model_index):
        if name in quantized:
            continue
        own = [path for path in shown if path.startswith(f"{name}/")]
        if not own:
            raise absent(name)
        wanted += [path for path in own if not _is_weight_file(path)]
        if name not in source.components:
            continue
        try:
            wanted += weight_paths(name, source.variant)
        except CheckpointError:
            # As in diffusers, a variant need not exist for every component.
            if source.variant is None:
                raise
            wanted += weight_paths(name, None)
    return wanted
