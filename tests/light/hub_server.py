"""A Hub on loopback: folders served through the routes that huggingface_hub reads models by.

    with HubServer() as hub:
        commit = hub.publish("org/name", folder)
        ... HF_ENDPOINT=hub.url ...
        hub.downloaded("org/name")

Written after the routes and headers that huggingface_hub 2.4 asks for (hf_api.model_info and list_repo_tree,
file_download.get_hf_file_metadata and http_get, utils/_http.hf_raise_for_status).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE_SUFFIXES = (".safetensors", ".bin")
"""Files that the Hub keeps by their SHA-256 rather than in git."""

_CHUNK_BYTES = 64 * 1024


@dataclass(kw_only=True)
class ServedRepo:
    """One repository and how it misbehaves; tests flip the switches at any time.

    gated: only tokens in `accepted_tokens` may read files (anyone may list them, as on the Hub). private:
    only those may even see it. disabled: taken down. unsized: list files without
    sizes, as mirrors do. no_ranges: send whole files, whatever is asked. not_a_hub:
    answer everything with a web page.
    api_status, file_status: answer every listing or file request with this status. cut_after: send that many
    bytes of a large file and close, once per file. stall_after: send that many bytes and then nothing until
    `release` is set; of stall_at alone, if it names a file. fail_at: a file that is listed, and answered with 404.
    Requests by range are not held up.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    not_a_hub: bool = False
    no_ranges: bool = False
    unsized: bool = False
    disabled: bool = False
    accepted_tokens: set[str] = field(default_factory=set)
    api_status: int | None = None
    file_status: int | None = None
    cut_after: int | None = None
    stall_after: int | None = None
    stall_at: str = ""
    fail_at: str = ""
    release: threading.Event = field(default_factory=threading.Event)
    stalled: threading.Event = field(default_factory=threading.Event)
    already_cut: set[str] = field(default_factory=set)


class HubServer:
    """Serves what is published to it, takes what is uploaded, counts what is asked for, until the end of its block.

    requests: (method, path) of every request in order. sent_bytes: body bytes sent, by repository path
    (`org/name/file`). rejected_tokens: bearer tokens that the Hub itself does not know. writers: bearer token → the
    owners in whose name it may write. upload_status: step of an upload (create, validate, preupload, batch, put,
    commit) → the status that it is answered with. hold: a step to be held up until the end, `held` is set when one is.
    uploaded: contents of large files, by SHA-256. messages: of the
    commits that were uploaded.
    """

    def __init__(self) -> None:
        self.repos: dict[str, ServedRepo] = {}
        self.requests: list[tuple[str, str]] = []
        self.sent_bytes: Counter[str] = Counter()
        self.rejected_tokens: set[str] = set()
        self.writers: dict[str, set[str]] = {}
        self.upload_status: dict[str, int] = {}
        self.hold = ""
        self.held = threading.Event()
        self.released = threading.Event()
        self.uploaded: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_for(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.released.set()
        for repo in self.repos.values():
            repo.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def publish(self, repo_id: str, folder: Path, *, revision: str = "main") -> str:
        """Make a commit of all files of `folder`, let `revision` name it, and give its hash."""
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        return self.add_commit(self.repos.setdefault(repo_id, ServedRepo()), files, revision=revision)

    def add_commit(self, repo: ServedRepo, files: dict[str, bytes], *, revision: str = "main") -> str:
        digest = hashlib.sha1()
        for name, content in files.items():
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        commit = digest.hexdigest()
        repo.commits[commit] = files
        repo.revisions[revision] = commit
        return commit

    def downloaded(self, repo_id: str) -> set[str]:
        """The files of a repository of which at least one byte was sent."""
        return {
            path.removeprefix(f"{repo_id}/")
            for path, count in self.sent_bytes.items()
            if count and path.startswith(f"{repo_id}/")
        }

    def forget(self) -> None:
        """Start counting anew."""
        with self.lock:
            self.requests.clear()
            self.sent_bytes.clear()


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def _etag(name: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if name.endswith(LARGE_SUFFIXES) else _blob_id(content)


class _Answered(Exception):  # noqa: N818 - not an error
    """The request has had its answer."""


def _handler_for(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # head and body are sent apart: each would wait 40 ms for the other's receipt

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._serve()

        def do_GET(self) -> None:
            self._serve()

        def do_POST(self) -> None:
            self._serve()

        def do_PUT(self) -> None:
            self._serve()

        def _serve(self) -> None:
            with hub.lock:
                hub.requests.append((self.command, self.path))
            with contextlib.suppress(_Answered, BrokenPipeError, ConnectionResetError):
                if self.command in ("POST", "PUT"):
                    self._take(self._body_sent())
                self._route()

        def _route(self) -> None:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query)
            api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(?:/(.*))?)?", parts.path)
            if api:
                repo_id, kind, revision, folder = (unquote(part or "") for part in api.groups())
                repo = self._repo(repo_id)
                self._fail_with(repo.api_status)
                commit = self._commit(repo, revision or "main")
                if kind == "tree":
                    self._json(_tree(repo.commits[commit], folder, recursive="true" in query.get("recursive", ())))
                self._json(_info(repo_id, repo, commit, blobs="blobs" in query and not repo.unsized))
            resolve = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", parts.path)
            if resolve:
                repo_id, revision, name = (unquote(part) for part in resolve.groups())
                repo = self._repo(repo_id)
                self._fail_with(repo.file_status)
                self._check_gate(repo_id, repo)
                commit = self._commit(repo, revision)
                content = repo.commits[commit].get(name)
                if content is None or (name == repo.fail_at and not self._is_plan()):
                    self._error(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
                else:
                    self._file(repo_id, repo, commit, name, content)
            self._error(404, None, "Sorry, we can't find the page you are looking for.")

        # Who may see what.

        def _token(self) -> str | None:
            return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

        def _repo(self, repo_id: str) -> ServedRepo:
            token = self._token()
            if token in hub.rejected_tokens:
                self._error(401, None, "Invalid credentials in Authorization header")
            repo = hub.repos.get(repo_id)
            if repo is None or (repo.private and token not in repo.accepted_tokens):
                # The Hub does not tell the anonymous whether a name exists.
                self._error(401 if token is None else 404, "RepoNotFound", "Repository not found")
                raise _Answered
            if repo.not_a_hub:
                self._send(200, b"<html>Sign in to this network</html>", {"Content-Type": "text/html"})
            if repo.disabled:
                self._error(403, None, "Access to this resource is disabled.")
            return repo

        def _check_gate(self, repo_id: str, repo: ServedRepo) -> None:
            token = self._token()
            if repo.gated and token not in repo.accepted_tokens:
                text = f"Access to model {repo_id} is restricted."
                self._error(401 if token is None else 403, "GatedRepo", text)

        def _commit(self, repo: ServedRepo, revision: str) -> str:
            commit = repo.revisions.get(revision, revision)
            if commit not in repo.commits:
                self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return commit

        def _fail_with(self, status: int | None) -> None:
            if status is not None:
                # Retry-After keeps the client's retries short.
                self._error(status, None, "switched to fail", {"Retry-After": "0"})

        def _is_plan(self) -> bool:
            """Whether a part is asked for: a download asks for everything, from some byte on."""
            return re.fullmatch(r"bytes=\d+-\d+", self.headers.get("Range") or "") is not None

        # Uploads, after hf_api.create_repo and create_commit, _commit_api.py and lfs.py of huggingface_hub 2.4.

        def _body_sent(self) -> bytes:
            if "chunked" not in (self.headers.get("Transfer-Encoding") or ""):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b""
            while length := int(self.rfile.readline(), 16):
                body += self.rfile.read(length)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _take(self, body: bytes) -> None:
            parts = urlsplit(self.path)
            if parts.path.startswith("/lfs/"):  # a signed address: it takes no token
                self._step("put")
                hub.uploaded[parts.path.removeprefix("/lfs/")] = body
                self._send(200, b"", {})
            if parts.path == "/api/validate-yaml":
                self._step("validate")
                self._json({"errors": [], "warnings": [{"message": "a warning of the Hub"}]})
            if parts.path == "/api/repos/create":
                self._create(json.loads(body))
            batch = re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", parts.path)
            if batch:
                self._may_write(batch[1])
                self._step("batch")
                self._json({"transfer": "basic", "objects": [_batch_object(hub, one) for one in _objects(body)]})
            step = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/([^/]+)", parts.path)
            if step:
                repo_id, kind, revision = step.groups()
                repo = self._repo(repo_id)
                pull_request = "create_pr" in parse_qs(parts.query)
                if not pull_request:
                    self._may_write(repo_id)
                self._step(kind)
                files = repo.commits[self._commit(repo, revision)]
                if kind == "preupload":
                    self._json({"files": [_upload_mode(files, one) for one in json.loads(body)["files"]]})
                self._add_commit(repo_id, repo, dict(files), body, revision="refs/pr/1" if pull_request else revision)

        def _step(self, name: str) -> None:
            if name == hub.hold:
                hub.held.set()
                hub.released.wait(timeout=60)
            self._fail_with(hub.upload_status.get(name))

        def _may_write(self, repo_id: str) -> None:
            token = self._token()
            if token is None or token in hub.rejected_tokens:
                self._error(401, None, "Invalid credentials in Authorization header")
            if repo_id.split("/")[0] not in hub.writers.get(token or "", ()):
                self._error(403, None, "You don't have the rights to do this")

        def _create(self, asked: dict[str, Any]) -> None:
            repo_id = f"{asked['organization']}/{asked['name']}"
            self._may_write(repo_id)
            self._step("create")
            url = {"url": f"{hub.url}/{repo_id}"}
            if repo_id in hub.repos:
                self._send(409, json.dumps({"error": "You already created this model repo", **url}).encode(), {})
            private = asked.get("visibility") == "private" or asked.get("private") is True
            repo = hub.repos[repo_id] = ServedRepo(private=private, accepted_tokens=set(hub.writers))
            hub.add_commit(repo, {".gitattributes": b"*.bin filter=lfs\n"})
            self._json(url)

        def _add_commit(
            self, repo_id: str, repo: ServedRepo, files: dict[str, bytes], body: bytes, *, revision: str
        ) -> None:
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "header":
                    hub.messages.append(value["summary"])
                elif entry["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    files[value["path"]] = hub.uploaded[value["oid"]]
                else:
                    assert entry["key"] == "deletedFile"
                    del files[value["path"]]
            commit = hub.add_commit(repo, files, revision=revision)
            pull_request = f"{hub.url}/{repo_id}/discussions/1" if revision != "main" else None
            url = f"{hub.url}/{repo_id}/commit/{commit}"
            self._json({"commitUrl": url, "commitOid": commit, "pullRequestUrl": pull_request})

        # Answers. Each ends the request.

        def _json(self, value: object) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _error(self, status: int, code: str | None, text: str, extra: dict[str, str] | None = None) -> None:
            headers = {"X-Error-Message": text, **({"X-Error-Code": code} if code else {}), **(extra or {})}
            self._send(status, json.dumps({"error": text}).encode(), headers)

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
            raise _Answered

        def _file(self, repo_id: str, repo: ServedRepo, commit: str, name: str, content: bytes) -> None:
            start = 0
            wanted = "" if repo.no_ranges else self.headers.get("Range") or ""
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)
            stop = len(content)
            if asked:
                start = int(asked[1])
                stop = min(int(asked[2]) + 1, stop) if asked[2] else stop
            if asked and start >= len(content):
                self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            self.send_response(206 if asked else 200)
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{_etag(name, content)}"')
            self.send_header("Accept-Ranges", "bytes")
            if name.endswith(LARGE_SUFFIXES):
                self.send_header("X-Linked-ETag", f'"{_etag(name, content)}"')
                self.send_header("X-Linked-Size", str(len(content)))
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            if self.command == "GET":
                self._body(f"{repo_id}/{name}", repo, memoryview(content)[start:stop])
            raise _Answered

        def _body(self, path: str, repo: ServedRepo, body: memoryview) -> None:
            is_held = path.endswith(LARGE_SUFFIXES) and not self._is_plan()
            if is_held and repo.cut_after is not None and path not in repo.already_cut:
                repo.already_cut.add(path)
                self._write(path, body[: repo.cut_after])
                self.close_connection = True
                raise _Answered
            if is_held and repo.stall_after is not None and path.endswith(repo.stall_at):
                self._write(path, body[: repo.stall_after])
                repo.stalled.set()
                repo.release.wait(timeout=60)
                body = body[repo.stall_after :]
            self._write(path, body)

        def _write(self, path: str, body: memoryview) -> None:
            for begin in range(0, len(body), _CHUNK_BYTES):
                chunk = body[begin : begin + _CHUNK_BYTES]
                self.wfile.write(chunk)
                self.wfile.flush()
                with hub.lock:
                    hub.sent_bytes[path] += len(chunk)

    return Handler


def _objects(body: bytes) -> list[dict[str, Any]]:
    asked: dict[str, Any] = json.loads(body)
    assert asked["operation"] == "upload"
    objects: list[dict[str, Any]] = asked["objects"]
    return objects


def _batch_object(hub: HubServer, one: dict[str, Any]) -> dict[str, Any]:
    if one["oid"] in hub.uploaded:
        return one
    return {**one, "actions": {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}}}


def _upload_mode(files: dict[str, bytes], one: dict[str, Any]) -> dict[str, Any]:
    name = one["path"]
    mode = "lfs" if name.endswith(LARGE_SUFFIXES) else "regular"
    there = _etag(name, files[name]) if name in files else None
    return {"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": there}


def _info(repo_id: str, repo: ServedRepo, commit: str, *, blobs: bool) -> dict[str, Any]:
    siblings: list[dict[str, Any]] = []
    for name, content in repo.commits[commit].items():
        sibling: dict[str, Any] = {"rfilename": name}
        if blobs:
            sibling |= {"size": len(content), "blobId": _blob_id(content)}
            if name.endswith(LARGE_SUFFIXES):
                sha256 = _etag(name, content)
                sibling["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
        siblings.append(sibling)
    return {
        "_id": hashlib.sha1(repo_id.encode()).hexdigest()[:24],
        "id": repo_id,
        "modelId": repo_id,
        "author": repo_id.split("/")[0],
        "sha": commit,
        "lastModified": "2026-01-01T00:00:00.000Z",
        "createdAt": "2026-01-01T00:00:00.000Z",
        "private": repo.private,
        "gated": "manual" if repo.gated else False,
        "disabled": repo.disabled,
        "tags": ["diffusers"],
        "downloads": 0,
        "likes": 0,
        "siblings": siblings,
    }


def _tree(files: dict[str, bytes], folder: str, *, recursive: bool) -> list[dict[str, Any]]:
    prefix = f"{folder}/" if folder else ""
    entries: dict[str, dict[str, Any]] = {}
    for name, content in files.items():
        if not name.startswith(prefix):
            continue
        head, slash, _ = name.removeprefix(prefix).partition("/")
        if slash:
            entries.setdefault(prefix + head, {"type": "directory", "oid": "0" * 40, "size": 0, "path": prefix + head})
        if recursive or not slash:
            entry: dict[str, Any] = {
                "type": "file",
                "oid": _blob_id(content),
                "size": len(content),
                "path": name,
            }
            if name.endswith(LARGE_SUFFIXES):
                entry["lfs"] = {"oid": _etag(name, content), "size": len(content), "pointerSize": 134}
            entries[name] = entry
    return list(entries.values())
