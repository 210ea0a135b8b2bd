"""`push`: the real client against a Hub on loopback, in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aoquant.checkpoint.manifest import card_on_hub, parse_manifest
from tests.light import processes, schemas
from tests.light.checkpoints import LARGE, MADE, WEIGHTS, checkpoint, write_texts
from tests.light.hub_server import HubServer, ServedRepo

REPO = "acme/tiny-int8"
TOKEN = "hf_SecretSecretSecretSecret"


@pytest.fixture
def hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """A Hub on which the token of the environment may write for acme."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.writers[TOKEN] = {"acme"}
    return hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Weights that are uploaded by themselves, and small ones."""
    checkpoint(tmp_path / "out", "transformer", rows=8 * LARGE)
    checkpoint(tmp_path / "vae", "vae")
    shutil.move(tmp_path / "vae" / "vae", tmp_path / "out" / "vae")
    return write_texts(tmp_path / "out", "transformer", "vae")


def aoquant(*argv: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """One command, of which no output and no file may hold the token."""
    done = processes.run(["-m", "aoquant", *argv], cwd=cwd, env=environment)
    assert TOKEN not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    for path in (*cwd.rglob("*"), *Path(os.environ["HF_HOME"]).rglob("*")):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()
    return done


def pushed(folder: Path, *options: str) -> dict[str, Any]:
    """The document of a push that goes well."""
    done = aoquant("push", folder.name, REPO, "--json", "-q", *options, cwd=folder.parent)
    assert (done.returncode, done.stderr) == (0, "")
    document: dict[str, Any] = schemas.validated(done.stdout, "push")
    return document


def refused(folder: Path, *argv: str, code: int = 3, **environment: str) -> str:
    """What stderr says of a push that fails."""
    done = aoquant(*(argv or ("push", folder.name, REPO)), "-q", cwd=folder.parent, **environment)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"], done.stderr
    return done.stderr


def served(hub: HubServer, revision: str = "main") -> dict[str, bytes]:
    repo = hub.repos[REPO]
    return repo.commits[repo.revisions[revision]]


def local(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_repository_holds_the_folder(hub: HubServer, folder: Path) -> None:
    before = local(folder)
    document = pushed(folder)
    there = dict(served(hub))
    assert there.pop(".gitattributes")
    assert there.keys() == before.keys()
    assert {name for name in there if there[name] != before[name]} == {"README.md"}
    assert local(folder) == before
    assert document["url"] == f"{hub.url}/{REPO}"
    assert document["commit"] == hub.repos[REPO].revisions["main"]
    assert (document["pull_request"], document["private"]) == (None, False)
    assert (document["num_files"], document["num_bytes"]) == (len(there), sum(map(len, there.values())))
    assert hub.messages == ["acme/tiny-flux: transformer int8wo, vae int8wo by aoquant 0.1.0"]


def test_the_card_there_loads_from_there(hub: HubServer, folder: Path) -> None:
    pushed(folder)
    card = served(hub)["README.md"].decode()
    assert f'from_pretrained("{REPO}", subfolder="transformer"' in card
    assert '("out"' not in card and "\n# tiny-int8\n" in card
    assert 'DiffusionPipeline.from_pretrained("acme/tiny-flux", revision=' in card
    for line in ("base_model: acme/tiny-flux", "base_model_relation: quantized", "library_name: diffusers",
                 'license: "other"', 'license_name: "tiny"'):  # fmt: skip
        assert f"\n{line}\n" in card.partition("\n---\n")[0] + "\n"


def test_what_is_downloaded_again_verifies(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    """Its card differs from the manifest's, which is none of damage."""
    pushed(folder)
    copy = tmp_path / "copy"
    for name, content in served(hub).items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(content)
    done = aoquant("verify", "copy", "--json", cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["notes"]


def test_the_address_is_all_of_stdout(hub: HubServer, folder: Path) -> None:
    done = aoquant("push", "out", REPO, cwd=folder.parent)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{hub.url}/{REPO}\n", "")


def test_a_second_push_takes_away_what_the_first_one_brought(hub: HubServer, folder: Path) -> None:
    """And nothing else: a file of someone's own stays."""
    pushed(folder)
    repo = hub.repos[REPO]
    hub.add_commit(repo, {**served(hub), "samples/one.png": b"png"})
    shutil.rmtree(folder / "vae")
    write_texts(folder, "transformer")
    pushed(folder)
    assert served(hub).keys() == {*local(folder), ".gitattributes", "samples/one.png"}


def test_the_same_push_twice_is_no_error(hub: HubServer, folder: Path) -> None:
    first = pushed(folder)
    hub.forget()
    assert pushed(folder) == first
    assert not [path for method, path in hub.requests if method == "PUT" or "/commit/" in path]


def test_an_upload_that_broke_off_is_taken_up_again(hub: HubServer, folder: Path) -> None:
    """No commit before all files are there."""
    hub.upload_status["commit"] = 500
    assert "HTTP 500" in refused(folder)
    assert served(hub).keys() == {".gitattributes"}
    hub.upload_status.clear()
    hub.forget()
    pushed(folder)
    assert not [path for method, path in hub.requests if method == "PUT"]


def test_a_private_one(hub: HubServer, folder: Path) -> None:
    assert pushed(folder, "--private")["private"] is True
    assert hub.repos[REPO].private
    assert pushed(folder, "--private")["private"] is True


def test_private_does_not_publish_in_a_public_repository(hub: HubServer, folder: Path) -> None:
    hub.repos[REPO] = ServedRepo()
    hub.add_commit(hub.repos[REPO], {})
    stderr = refused(folder, "push", "out", REPO, "--private", code=2)
    assert "is public" in stderr and f"{hub.url}/{REPO}/settings" in stderr
    assert served(hub) == {}


def test_a_pull_request_to_someone_else(hub: HubServer, folder: Path) -> None:
    hub.repos[REPO] = ServedRepo()
    hub.add_commit(hub.repos[REPO], {"theirs.txt": b"x"})
    hub.writers[TOKEN] = {"me"}
    assert "--create-pr" in refused(folder)
    hub.writers[TOKEN] = {"acme"}
    document = pushed(folder, "--create-pr")
    assert document["pull_request"] == f"{hub.url}/{REPO}/discussions/1"
    assert served(hub) == {"theirs.txt": b"x"}
    assert served(hub, "refs/pr/1").keys() == {*local(folder), "theirs.txt"}


def nobody(hub: HubServer) -> None:
    hub.writers.clear()


def rejected(hub: HubServer) -> None:
    hub.rejected_tokens.add(TOKEN)


def failing(step: str, status: int) -> Callable[[HubServer], Any]:
    return lambda hub: hub.upload_status.update({step: status})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (nobody, ["may not write to acme/tiny-int8 (HTTP 403)", "/settings/tokens"]),
        (rejected, ["does not accept your Hub token (HTTP 401)", "HF_TOKEN"]),
        (failing("create", 429), ["limits the rate", "429"]),
        (failing("commit", 429), ["limits the rate", "429"]),
        (failing("batch", 403), ["may not write", "403"]),
        (failing("put", 403), ["may not write", "403"]),
        (failing("put", 507), ["failed to answer", "507"]),
        (failing("commit", 409), ["changed by someone else", "push it again"]),
        (failing("commit", 413), ["refuses the upload", "413"]),
        (failing("preupload", 404), ["knows no acme/tiny-int8", "404"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_the_hub_objects_to(
    spoil: Callable[[HubServer], Any], words: list[str], hub: HubServer, folder: Path
) -> None:
    spoil(hub)
    stderr = refused(folder)
    assert [word for word in words if word not in stderr] == [], stderr


def test_what_fails_before_the_hub_is_asked(hub: HubServer, folder: Path) -> None:
    assert "there is none here" in refused(folder, HF_TOKEN="")
    for name in ("a b/c", "tiny", "a/b/c", "https://huggingface.co/acme/x", "../x/y", ""):
        assert "repository" in refused(folder, "push", "out", name)
    assert "HF_HUB_OFFLINE" in refused(folder, HF_HUB_OFFLINE="1")
    (folder / "vae" / "config.json").write_text("{}")
    assert "'vae/config.json' has 2 bytes" in refused(folder, code=4)
    assert hub.requests == []


def test_a_hub_that_is_not_there(folder: Path) -> None:
    stderr = refused(folder, HF_TOKEN=TOKEN, HF_ENDPOINT="http://user:password@127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached" in stderr and "password" not in stderr


def test_progress_is_lines_that_name_the_files(hub: HubServer, folder: Path) -> None:
    code = (
        "import sys; from aoquant import console, push; console._LINE_EVERY_S = 0.0\n"
        "with console.Console().progress() as report: push('out', sys.argv[1], on_progress=report)\n"
    )
    done = processes.run(["-c", code, REPO], cwd=folder.parent)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    lines = done.stderr.splitlines()
    assert lines[0].startswith("verifying ") and "\r" not in done.stderr
    assert any(line.startswith(f"uploading transformer/{WEIGHTS}: 0 % (0 B of 22") for line in lines)
    assert lines[-1].startswith(f"uploading to {REPO}: 100 % (")


# The card.


def card_of(folder: Path) -> str:
    manifest = parse_manifest(json.loads((folder / "aoquant.json").read_text()))
    return card_on_hub((folder / "README.md").read_text(), manifest, repo_id=REPO)


def test_int4_is_loaded_from_a_download(tmp_path: Path) -> None:
    """aoquant.load takes folders."""
    card = card_of(checkpoint(tmp_path / "out", "transformer", needs="aoquant"))
    assert "from huggingface_hub import snapshot_download\n" in card
    assert f'aoquant.load(snapshot_download("{REPO}"), component="transformer")' in card


def test_a_whole_pipeline_is_loaded_from_there_too(tmp_path: Path) -> None:
    card = card_of(checkpoint(tmp_path / "out", "transformer", others={"model_index.json": b"{}"}))
    assert f'DiffusionPipeline.from_pretrained("{REPO}", transformer=transformer' in card
    assert '"out"' not in card


def test_the_folder_may_be_called_as_its_source(tmp_path: Path) -> None:
    """Only the checkpoint's own name changes."""
    origin = replace(MADE.origin, model="flux", repo_id=None, revision=None)
    card = card_of(checkpoint(tmp_path / "flux", "transformer", made=replace(MADE, origin=origin)))
    assert f'FluxTransformer2DModel.from_pretrained("{REPO}", subfolder' in card
    assert 'DiffusionPipeline.from_pretrained("flux", transformer' in card


def test_what_someone_wrote_in_the_card_stays(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "out", "transformer")
    path = folder / "README.md"
    path.write_text(
        path.read_text().replace("## Loading", "Samples by me.\n\n## Loading").replace("import torch\n", "")
    )
    card = card_of(folder)
    assert "Samples by me." in card and f'from_pretrained("{REPO}", subfolder' in card
    path.write_text("# My own\n\nNothing of the old one.\n")
    assert card_of(folder) == path.read_text()


def test_a_card_that_was_pushed_is_pushed_on_to_another_place(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "out", "transformer", needs="aoquant")
    first = card_of(folder)
    (folder / "README.md").write_text(first)
    manifest = parse_manifest(json.loads((folder / "aoquant.json").read_text()))
    second = card_on_hub(first, manifest, repo_id="other/place")
    assert second == first.replace(REPO, "other/place").replace("# tiny-int8", "# place")
