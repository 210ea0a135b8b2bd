"""The Hub: one exact commit of a repository, its files brought into the Hub's own cache, its errors plain.

The only module that talks to the Hub. huggingface_hub is imported when a function here is called, not before.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import logging
import re
import threading
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aoquant.checkpoint.files import Opener, Seekable, open_file, quoted, read_json
from aoquant.checkpoint.manifest import listed_files
from aoquant.errors import AoquantError, CheckpointError, ResourceError, SourceError, UsageError

OnProgress = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done so far and the bytes there are to do."""

_ALONE_BYTES = 10_000_000  # files from this size are uploaded by themselves, so that there is progress to tell
_CARD_BYTES = 1_000_000  # more is no model card
_COMMIT = re.compile(r"[0-9a-f]{40}")
_RANGE_BYTES = 1 << 14  # the least that a request by range asks for
_PARALLEL = 4  # files at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """size: in bytes. blob: its contents' name in the cache, empty if unknown."""

    size: int
    blob: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One exact commit of a repository.

    folder: where the cache keeps the commit's files, those that have been fetched. files: all of its files by
    their paths; offline, those in the cache.
    """

    repo_id: str
    commit: str
    folder: Path
    files: Mapping[str, RemoteFile]
    offline: bool


def resolve(repo_id: str, *, revision: str | None, offline: bool, anchors: tuple[str, ...]) -> Snapshot:
    """Find the commit that `revision` (default: main) names, and fetch the first of `anchors` that it has.

    Offline (also when HF_HUB_OFFLINE is set) it is the commit that the name stood for when it was last
    fetched. Raises SourceError, and CheckpointError if the commit has none of the anchors.
    """
    with _hub_errors(repo_id, revision=revision):
        from huggingface_hub import HfApi, constants

        revision = revision or constants.DEFAULT_REVISION
        if offline or constants.HF_HUB_OFFLINE:
            return _resolve_cached(repo_id, revision=revision, anchors=anchors)
        info = HfApi().model_info(repo_id, revision=revision, files_metadata=True)
    if info.sha is None or _COMMIT.fullmatch(info.sha) is None:
        raise _not_a_hub()
    listed = info.siblings or []
    unsized = [file.rfilename for file in listed if file.size is None]
    sizes = _sizes(repo_id, unsized, commit=info.sha)
    files = {
        file.rfilename: RemoteFile(
            size=sizes[file.rfilename] if file.size is None else file.size,
            blob=(file.lfs.sha256 if file.lfs else file.blob_id) or "",
        )
        for file in listed
    }
    anchor = next((name for name in anchors if name in files), None)
    if anchor is None:
        raise CheckpointError(
            f"{repo_id} holds neither {' nor '.join(anchors)}",
            hint="name the repository of a diffusers pipeline, or of one component of it",
        )
    # By its name first: that is what makes the cache remember the name, for --offline. If the branch moved in
    # between, the commit that was listed is the one that counts.
    folder = _fetch(repo_id, anchor, revision=revision).parent
    if folder.name != info.sha:
        folder = _fetch(repo_id, anchor, revision=info.sha).parent
    return Snapshot(repo_id=repo_id, commit=info.sha, folder=folder, files=files, offline=False)


def _sizes(repo_id: str, paths: list[str], *, commit: str) -> dict[str, int]:
    """The bytes of files, each asked for by itself: mirrors of the Hub list files without their sizes."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    def size(path: str) -> int:
        with _hub_errors(repo_id, revision=commit):
            return get_hf_file_metadata(hf_hub_url(repo_id, path, revision=commit)).size or 0

    with ThreadPoolExecutor(_PARALLEL) as pool:
        return dict(zip(paths, pool.map(size, paths), strict=True))


def cached_repositories() -> list[str]:
    """The ids, `org/name`, of the models of which the Hub's cache holds at least one commit. Asks nobody."""
    from huggingface_hub import constants

    try:
        commits = [path for path in Path(constants.HF_HUB_CACHE).glob("models--*--*/snapshots/*") if path.is_dir()]
    except OSError:  # a cache that cannot be read holds nothing for us
        return []
    return sorted({"/".join(path.parents[1].name.split("--")[1:]) for path in commits})


def fetch(snapshot: Snapshot, path: str) -> Path:
    """One small file of the commit, on disk. Raises as `absent` if the commit lacks it, else SourceError."""
    if path not in snapshot.files:
        raise absent(snapshot, [path])
    if snapshot.offline:
        return snapshot.folder / path
    return _fetch(snapshot.repo_id, path, revision=snapshot.commit)


def front_matter(card: Path) -> dict[str, Any]:
    """What a model card says at its top, in YAML; empty if it says nothing there, or nothing that can be read."""
    try:
        if not card.is_file() or card.stat().st_size > _CARD_BYTES:
            return {}
        from huggingface_hub.repocard import metadata_load

        return metadata_load(card) or {}
    except Exception:  # of the disk, of text, or of YAML: the card is anyone's, and no weights depend on it
        return {}


def opener(snapshot: Snapshot) -> Opener:
    """Opens the commit's files where they will lie: from the cache if they are there, else by ranges over the network.

    A range is a few kilobytes around what is read, so that the header of a file costs little more than its own bytes.
    """

    @contextmanager
    def open_there(path: Path) -> Iterator[tuple[Seekable, int]]:
        name = path.relative_to(snapshot.folder).as_posix()
        file = snapshot.files.get(name)
        if path.is_file() or snapshot.offline or file is None:
            with open_file(path) as opened:
                yield opened
        elif (blob := _cached_blob(snapshot, file)) is not None:
            with open_file(blob) as opened:
                yield opened
        else:
            yield _Ranges(snapshot, name), file.size

    return open_there


class _Ranges:
    """A file on the Hub, of which only the ranges that are read are transferred. Not for several threads."""

    def __init__(self, snapshot: Snapshot, name: str) -> None:
        self._snapshot = snapshot
        self._name = name
        self._size = snapshot.files[name].size
        self._position = 0
        self._start = 0
        self._kept = b""
        self._whole: Path | None = None

    def seek(self, offset: int, /) -> int:
        self._position = offset
        return offset

    def read(self, size: int, /) -> bytes:
        start, stop = self._position, min(self._position + size, self._size)
        if stop <= start:
            return b""
        if start < self._start or stop > self._start + len(self._kept):
            self._kept = self._transfer(start, min(max(stop, start + _RANGE_BYTES), self._size))
            self._start = start
        content = self._kept[start - self._start : stop - self._start]
        self._position += len(content)
        return content

    def _transfer(self, start: int, stop: int) -> bytes:
        if self._whole is None:
            part = self._ask_for(start, stop)
            if part is not None:
                return part
            # Some mirrors send whole files, whatever is asked: then the file may as well come into the cache.
            self._whole = _fetch(self._snapshot.repo_id, self._name, revision=self._snapshot.commit)
        with self._whole.open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def _ask_for(self, start: int, stop: int) -> bytes | None:
        """The bytes, or None from an endpoint that gives no parts of files; nothing is read of a whole one."""
        repo_id, commit = self._snapshot.repo_id, self._snapshot.commit
        with _hub_errors(repo_id, revision=commit), contextlib.ExitStack() as stack:
            from huggingface_hub import hf_hub_url, utils

            web: Any = utils  # what it documents is not all in its __all__
            url = hf_hub_url(repo_id, self._name, revision=commit)
            headers = {**web.build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}
            if hasattr(web, "http_stream_backoff"):
                response = stack.enter_context(web.http_stream_backoff("GET", url, headers=headers))
            else:  # before huggingface_hub 1.0
                response = stack.enter_context(web.http_backoff("GET", url, headers=headers, stream=True))
            web.hf_raise_for_status(response)
            if response.status_code != 206:
                return None
            content: bytes = response.read() if hasattr(response, "read") else response.content
        if len(content) != stop - start:
            raise SourceError(
                f"{_host()} gave {len(content):,} bytes of {self._name} where {stop - start:,} were asked for",
                hint="run it again; or download the repository with `hf download`, and name its folder",
            )
        return content


def bytes_to_download(snapshot: Snapshot, paths: Collection[Path]) -> int:
    """How many bytes of the files at `paths`, in the commit's folder, are not in the cache yet."""
    return sum(_missing(snapshot, paths).values())


def cache_folder() -> Path:
    """Where the Hub's cache is; it need not exist yet."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _missing(snapshot: Snapshot, paths: Collection[Path]) -> dict[str, int]:
    """Name → bytes to transfer, of those files that the commit's folder lacks; 0 where the contents are cached."""
    if snapshot.offline:
        return {}
    names = [path.relative_to(snapshot.folder).as_posix() for path in paths if not path.is_file()]
    files = {name: snapshot.files[name] for name in names}
    return {name: file.size if _cached_blob(snapshot, file) is None else 0 for name, file in files.items()}


def _cached_blob(snapshot: Snapshot, file: RemoteFile) -> Path | None:
    """Contents that another commit shares are in the cache already, under the same name."""
    blob = snapshot.folder.parent.parent / "blobs" / file.blob
    return blob if file.blob and blob.is_file() else None


@contextmanager
def arriving(
    snapshot: Snapshot, paths: Collection[Path], *, on_progress: OnProgress | None = None
) -> Iterator[Callable[[Path], None]]:
    """Bring those of the files at `paths` that are not cached yet, in their order and a few at a time, meanwhile.

    Gives a function that waits until one of them is there, and raises SourceError or ResourceError if it cannot be had.
    Leaving the context stops what is still under way; huggingface_hub takes it up again another time.
    """
    download = _Download(snapshot, _missing(snapshot, paths), on_progress)
    try:
        yield download.wait
    finally:
        download.stop()


class _Stopped(Exception):  # noqa: N818  (no error: the download is no longer wanted)
    pass


class _Download:
    """A few threads that take one file after the other. They are daemons: an interrupt waits for no network."""

    def __init__(self, snapshot: Snapshot, sizes: Mapping[str, int], on_progress: OnProgress | None) -> None:
        self._snapshot = snapshot
        self._results: dict[str, Future[None]] = {name: Future() for name in sizes}
        self._todo = deque(sizes)
        self._sizes = sizes
        self._done = dict.fromkeys(sizes, 0)
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._stopped = False
        for number in range(min(_PARALLEL, len(sizes))):
            threading.Thread(target=self._work, name=f"aoquant-download-{number}", daemon=True).start()

    def wait(self, path: Path) -> None:
        result = self._results.get(path.relative_to(self._snapshot.folder).as_posix())
        if result is not None:
            result.result()

    def stop(self) -> None:
        self._stopped = True

    def _work(self) -> None:
        from huggingface_hub import hf_hub_download

        snapshot = self._snapshot
        while not self._stopped:
            try:
                name = self._todo.popleft()
            except IndexError:
                return
            try:
                with _hub_errors(snapshot.repo_id, revision=snapshot.commit):
                    bar = _quiet(functools.partial(self._count, name))
                    hf_hub_download(snapshot.repo_id, name, revision=snapshot.commit, **bar)
                self._count(name, self._sizes[name])
            except BaseException as error:
                self._fail(name, error)
            else:
                self._results[name].set_result(None)

    def _fail(self, name: str, error: BaseException) -> None:
        """End it for all: nobody waits for a file that is not to come."""
        self._results[name].set_exception(error)
        with contextlib.suppress(IndexError):
            while True:
                self._results[self._todo.popleft()].set_exception(error)

    def _count(self, name: str, num_bytes: int) -> None:
        """Count bytes of a file that arrived: negative when a retry starts it anew."""
        if self._stopped:
            raise _Stopped
        with self._lock:
            self._done[name] = max(0, min(self._done[name] + num_bytes, self._sizes[name]))
            if self._on_progress is not None:
                stage = f"downloading {self._snapshot.repo_id}"
                self._on_progress(stage, sum(self._done.values()), sum(self._sizes.values()))


def absent(snapshot: Snapshot, what: list[str]) -> AoquantError:
    """The error for files that a commit lacks (CheckpointError), or offline its cached copy (SourceError)."""
    shown = ", ".join(quoted(item, quote=False) for item in what[:3])
    if len(what) > 3:
        shown += f" and {len(what) - 3} more"
    where = f"{snapshot.repo_id} at {snapshot.commit[:12]}"
    if snapshot.offline:
        return SourceError(
            f"offline, and the cache of {where} lacks {shown}",
            hint="run it once without --offline (and without HF_HUB_OFFLINE) to fetch that",
        )
    return CheckpointError(f"{where} lacks {shown}", hint="the repository is incomplete: try another --revision")


def _resolve_cached(repo_id: str, *, revision: str, anchors: tuple[str, ...]) -> Snapshot:
    """`resolve` from the cache alone. Raises LocalEntryNotFoundError if it has none of the anchors."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    for anchor in anchors:
        try:
            path = hf_hub_download(repo_id, anchor, revision=revision, local_files_only=True)
        except LocalEntryNotFoundError:
            continue
        folder = Path(path).parent
        files = {
            file.relative_to(folder).as_posix(): RemoteFile(size=file.stat().st_size, blob="")
            for file in folder.rglob("*")
            if file.is_file()
        }
        return Snapshot(repo_id=repo_id, commit=folder.name, folder=folder, files=files, offline=True)
    raise LocalEntryNotFoundError(f"{repo_id} at {revision} is not cached")


def _fetch(repo_id: str, path: str, *, revision: str) -> Path:
    with _hub_errors(repo_id, revision=revision):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repo_id, path, revision=revision, **_quiet(None)))


def _quiet(on_bytes: Callable[[int], None] | None) -> dict[str, Any]:
    """The argument that keeps hf_hub_download from drawing its bar, and reports its bytes to `on_bytes`.

    Versions that do not take it yet draw their bar on stderr and report nothing.
    """
    from huggingface_hub import hf_hub_download

    if "tqdm_class" not in inspect.signature(hf_hub_download).parameters:
        return {}

    class SilentBar:
        """What huggingface_hub uses of a bar, as its own silent_tqdm and _AggregatedTqdm have it."""

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, n: float | None = 1) -> None:
            if on_bytes is not None:
                on_bytes(int(n or 0))

        def ignore(self, *_: object, **__: object) -> None:
            """Of the bytes that xet moves, only those that reach the file count."""

        close = refresh = update_transfer = ignore
        set_description = set_description_str = set_postfix_str = set_transfer_postfix_str = ignore

    return {"tqdm_class": SilentBar}


# Uploads.


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What `push` has made. pull_request: its address, empty where the commit went to main itself."""

    repo_url: str
    oid: str
    pull_request: str
    private: bool


def check_push(repo_id: str) -> None:
    """Raise SourceError where an upload to `repo_id` could not even begin: no such name, no token, offline."""
    with _hub_errors(repo_id, revision=None):
        from huggingface_hub import constants
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented there

        validate_repo_id(repo_id)
    if repo_id.count("/") != 1:
        raise SourceError(f"{quoted(repo_id)} does not say whose repository it is", hint=f"write org/{repo_id}")
    if not _has_token():
        raise SourceError(
            f"uploading to {_host()} needs a Hub token, and there is none here",
            hint="run `hf auth login`, or set HF_TOKEN to a token that may write",
        )
    if constants.HF_HUB_OFFLINE:
        raise SourceError("HF_HUB_OFFLINE is set, and uploading needs the Hub", hint="unset it")


def push(
    repo_id: str,
    files: Mapping[str, Path | bytes],
    *,
    message: str,
    listing: str,
    private: bool = False,
    create_pr: bool = False,
    on_progress: OnProgress | None = None,
) -> Commit:
    """Make one commit of `files` (path in the repository → file or contents), in a repository made if it is not there.

    listing: the JSON file among them that lists them. What the repository's own copy of it lists, and `files` lack, is
    removed. Large files are transferred first, one after the other: until the commit nothing of them is to be seen.
    Raises SourceError; UsageError if the repository was to be private and is a public one.
    """
    with _push_errors(repo_id), _silent_client():
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        api = HfApi()
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        info = api.model_info(repo_id)
        if private and not info.private:
            raise UsageError(
                f"{repo_id} exists, and is public",
                hint=f"make it private at {_endpoint()}/{repo_id}/settings, or leave out --private",
            )
        there = {file.rfilename for file in info.siblings or ()}
        stale = _listed(repo_id, listing, revision=info.sha or "main") & there if listing in there else set()
        additions = [
            CommitOperationAdd(path_in_repo=name, path_or_fileobj=file if isinstance(file, bytes) else str(file))
            for name, file in files.items()
        ]
        total = sum(addition.upload_info.size for addition in additions)
        done = 0
        for addition in additions:
            if addition.upload_info.size >= _ALONE_BYTES:
                _report(on_progress, f"uploading {addition.path_in_repo}", done, total)
                api.preupload_lfs_files(repo_id, [addition], create_pr=create_pr, free_memory=False)
                done += addition.upload_info.size
        _report(on_progress, f"uploading to {repo_id}", done, total)
        commit = api.create_commit(
            repo_id,
            [*additions, *(CommitOperationDelete(path_in_repo=name) for name in sorted(stale - files.keys()))],
            commit_message=message,
            create_pr=create_pr,
        )
        _report(on_progress, f"uploading to {repo_id}", total, total)
    return Commit(
        repo_url=f"{_endpoint()}/{repo_id}",
        oid=commit.oid,
        pull_request=commit.pr_url or "",
        private=bool(info.private),
    )


def _report(on_progress: OnProgress | None, stage: str, done: int, total: int) -> None:
    if on_progress is not None:
        on_progress(stage, done, total)


def _listed(repo_id: str, listing: str, *, revision: str) -> set[str]:
    """The paths that a repository's own aoquant.json lists; none if it cannot be read."""
    with contextlib.suppress(CheckpointError):
        return {str(path) for path, _ in listed_files(read_json(_fetch(repo_id, listing, revision=revision))) if path}
    return set()


@contextmanager
def _silent_client() -> Iterator[None]:
    """Keep huggingface_hub's bars, log lines and warnings off stderr."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented there, though not in __all__
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    logger = logging.getLogger("huggingface_hub")
    level, had_bars = logger.level, not are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        disable_progress_bars()
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
            if had_bars:
                enable_progress_bars()


@contextmanager
def _push_errors(repo_id: str) -> Iterator[None]:
    """As `_hub_errors`, in the words of an upload."""
    try:
        yield
    except AoquantError:
        raise
    except Exception as error:
        translated = _translate_push(error, repo_id)
        if translated is None:
            raise
        raise translated from error


def _translate_push(error: BaseException, repo_id: str) -> AoquantError | None:
    from huggingface_hub import errors

    cause = error.__cause__
    if isinstance(error, RuntimeError) and cause is not None:  # what huggingface_hub wraps the failure of one file in
        return _translate_push(cause, repo_id)
    tokens = f"{_endpoint()}/settings/tokens"
    if isinstance(error, errors.HfHubHTTPError) and not isinstance(error, errors.DisabledRepoError):
        status = error.response.status_code if error.response is not None else 0
        if status == 403:
            return SourceError(
                f"your Hub token may not write to {repo_id} (HTTP 403)",
                hint=f"see what it permits at {tokens}; for another's repository, --create-pr",
            )
        if status == 401 and not isinstance(error, errors.RepositoryNotFoundError):
            return _translate(error, repo_id, revision="main")
        if status in (401, 404):
            return SourceError(
                f"{_host()} knows no {repo_id} that your Hub token may write to (HTTP {status})",
                hint=f"check the spelling, and the token's permissions at {tokens}",
            )
        if status == 409:
            return SourceError(f"{repo_id} is being changed by someone else (HTTP 409)", hint="push it again")
        if status in (400, 413, 422):
            return SourceError(f"{_host()} refuses the upload to {repo_id} (HTTP {status})", hint=_reason(error))
    if isinstance(error, ValueError) and "README.md" in str(error):
        return CheckpointError("the front matter of README.md is not what the Hub takes", hint="mend its YAML")
    if isinstance(error, OSError) and error.filename is not None:
        return CheckpointError(f"{error.filename} cannot be read: {error.strerror}", hint="check its permissions")
    if isinstance(error, RuntimeError):  # from the compiled half of hf_xet
        return SourceError(
            f"the upload to {repo_id} broke off", hint="push it again; HF_HUB_DISABLE_XET=1 takes the plain way"
        )
    return _translate(error, repo_id, revision="main")


def _reason(error: Any) -> str:
    """What the Hub itself says of a refusal, in one short line."""
    from huggingface_hub import get_token

    said: str = getattr(error, "server_message", None) or ""
    if not said or (get_token() or "") in said:
        return "see the repository's settings, and the limits of its owner's account"
    return quoted(said, quote=False, limit=200)


def _endpoint() -> str:
    """The Hub's address, without a user name or password that HF_ENDPOINT may hold."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")


def _host() -> str:
    return urlsplit(_endpoint()).netloc


@contextmanager
def _hub_errors(repo_id: str, *, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub raises into an error of ours. Only calls into it belong inside."""
    try:
        yield
    except AoquantError:
        raise
    except Exception as error:
        translated = _translate(error, repo_id, revision=revision or "main")
        if translated is None:
            raise
        raise translated from error


def _translate(error: BaseException, repo_id: str, *, revision: str) -> AoquantError | None:
    """The error that tells a user the same, or None for one not of the Hub. Repeats none of its text."""
    from huggingface_hub import errors

    page = f"{_endpoint()}/{repo_id}"
    has_token = _has_token()
    if isinstance(error, errors.HFValidationError):
        return SourceError(
            f"{quoted(repo_id)} cannot be a repository's id",
            hint="write org/name; names have letters, digits, '-', '_' and '.'",
        )
    if isinstance(error, errors.GatedRepoError):
        if has_token:
            return SourceError(
                f"{repo_id} is gated, and the account of your Hub token has no access to it",
                hint=f"accept its licence at {page} with that account, then run this again",
            )
        return SourceError(
            f"{repo_id} is gated, and there is no Hub token here",
            hint=f"accept its licence at {page}, then run `hf auth login` or set HF_TOKEN",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        what = "check that the token's account may read it" if has_token else "if it is private, set HF_TOKEN"
        return SourceError(
            f"no repository {repo_id} on {_host()}, or it is private", hint=f"check the spelling; {what}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return SourceError(
            f"{repo_id} has no revision {quoted(revision)}",
            hint=f"its branches and tags are at {page}/tree/main",
        )
    if isinstance(error, errors.DisabledRepoError):
        return SourceError(f"{repo_id} has been disabled on {_host()}", hint=f"{page} may say why")
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        cause = error.__cause__
        if cause is not None and not isinstance(cause, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
            return _translate(cause, repo_id, revision=revision) or _unreachable()
        return SourceError(
            f"offline, and {repo_id} at {quoted(revision)} is not in the Hub's cache",
            hint="run it once without --offline (and without HF_HUB_OFFLINE), or name a local copy's folder",
        )
    if isinstance(error, errors.HfHubHTTPError):
        return _translate_status(error, repo_id, has_token=has_token)
    if isinstance(error, errors.FileMetadataError | ValueError | KeyError):
        return _not_a_hub()
    return _translate_io(error, repo_id)


def _has_token() -> bool:
    from huggingface_hub import get_token

    try:
        return get_token() is not None
    except OSError:  # its file cannot be read, which may be the very error at hand
        return False


def _translate_status(error: Any, repo_id: str, *, has_token: bool) -> SourceError:
    response = error.response
    status: int = response.status_code if response is not None else 0
    if status == 429:
        wait = response.headers.get("Retry-After", "")
        pause = f"wait {wait} s" if wait.isdigit() and wait != "0" else "wait a few minutes"
        more = "" if has_token else "; with a token (HF_TOKEN) the limit is higher"
        return SourceError(f"{_host()} limits the rate of requests (HTTP 429) for {repo_id}", hint=f"{pause}{more}")
    if status == 401:
        return SourceError(
            f"{_host()} does not accept your Hub token (HTTP 401)",
            hint="set HF_TOKEN to a valid one, or run `hf auth login`",
        )
    if status == 403:
        return SourceError(
            f"your Hub token does not permit reading {repo_id} (HTTP 403)",
            hint=f"see the token's permissions at {_endpoint()}/settings/tokens",
        )
    if status == 404:
        return SourceError(f"a file of {repo_id} is gone from {_host()} (HTTP 404)", hint="run it again")
    if status >= 500:
        return SourceError(f"{_host()} failed to answer for {repo_id} (HTTP {status})", hint="try again later")
    return SourceError(f"{_host()} refused a request for {repo_id} (HTTP {status})", hint="check the name and HF_TOKEN")


def _translate_io(error: BaseException, repo_id: str) -> AoquantError | None:
    """Errors of the disk, and those that come from the HTTP library as they are, whichever it is.

    huggingface_hub used requests before 1.0, then httpx, then its successor; its own HTTP error is derived
    from that library's root error in each.
    """
    from huggingface_hub import errors

    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return ResourceError(
            f"the disk filled up while {repo_id} was downloaded",
            hint="free some space, or set HF_HOME to a folder on a larger disk",
        )
    if isinstance(error, OSError) and error.filename is not None:
        return SourceError(
            f"the Hub's cache cannot be used: {error.strerror}: {error.filename}",
            hint="set HF_HOME to a folder that can be written",
        )
    if isinstance(error, OSError) and str(error).startswith("Consistency check failed"):
        return SourceError(f"a file of {repo_id} arrived with the wrong size", hint="run it again")
    if isinstance(error, (OSError, *errors.HfHubHTTPError.__bases__)):
        return _unreachable()
    if isinstance(error, RuntimeError):
        # hf_xet raises these from its compiled half.
        return SourceError(
            f"the download of {repo_id} broke off",
            hint="run it again; HF_HUB_DISABLE_XET=1 takes the plain way",
        )
    return None


def _not_a_hub() -> SourceError:
    return SourceError(
        f"{_endpoint()} does not answer as a Hub does",
        hint="check HF_ENDPOINT, and whether a proxy stands in between",
    )


def _unreachable() -> SourceError:
    return SourceError(
        f"{_endpoint()} cannot be reached",
        hint="check the network and HF_ENDPOINT; --offline uses what is cached",
    )
