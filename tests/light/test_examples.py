"""The examples that are no Python: they parse, they say what aoquant understands, and `hf` takes the job."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml  # type: ignore[import-untyped]

from aoquant.cli import app

EXAMPLES = Path(__file__).parents[2] / "examples"
WORKFLOW: dict[Any, Any] = yaml.safe_load((EXAMPLES / "github-actions.yml").read_text())
STEPS = WORKFLOW["jobs"]["quantize"]["steps"]
RUNS = {step.get("name", step["run"]): step["run"] for step in STEPS if "run" in step}
SCRIPTS = {path.name: path.read_text() for path in sorted(EXAMPLES.glob("*.sh"))}

# What the shell makes of its arrays.
ARRAYS = {'"${components[@]}"': "--component unet=int8wo", '"${parts[@]}"': "unet vae"}


def lines_of(text: str) -> list[str]:
    """Every `aoquant ...` of a shell script, without what follows it in its line."""
    text = re.sub(r"\\\n\s*", "", text)
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for array, words in ARRAYS.items():
        text = text.replace(array, words)
    return [line.strip() for line in re.findall(r"(?<![\w$/-])(aoquant [a-z][^|)>\n]*)", text)]


LINES = [(name, line) for name, text in (RUNS | SCRIPTS).items() for line in lines_of(text)]


def test_the_lines_are_found() -> None:
    commands = [line.split()[1] for _, line in LINES]
    assert sorted(commands) == sorted(
        ["plan", "quantize", "verify", "load", "push", "plan", "quantize", "join", "verify", "quantize"]
    )


@pytest.mark.parametrize(("where", "line"), LINES, ids=lambda value: re.sub(r"\W+", "-", value))
def test_a_line_names_only_what_there_is(where: str, line: str) -> None:
    root: Any = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    with root.make_context("aoquant", list(words)) as context:
        name, command, rest = root.resolve_command(context, words)
        command.make_context(name, list(rest), parent=context)


def test_the_workflow_runs_by_hand_and_keeps_no_token_in_its_cache() -> None:
    assert "workflow_dispatch" in WORKFLOW[True]  # YAML 1.1 reads `on` as a truth
    assert all(("run" in step) != ("uses" in step) for step in STEPS)
    (cache,) = (step["with"] for step in STEPS if step.get("uses", "").startswith("actions/cache@"))
    assert Path(cache["path"]).name == "hub"  # the token lies beside it
    outputs = set(re.findall(r"steps\.plan\.outputs\.(\w+)", str(STEPS)))
    written = set(re.findall(r'echo "(\w+)=.*>> "\$GITHUB_OUTPUT"', RUNS["Plan"]))
    assert outputs == written == {"revision"}


@pytest.mark.parametrize("variable", sorted(set(re.findall(r"\$([A-Z_]+)", "\n".join(RUNS.values())))))
def test_every_variable_of_the_workflow_is_set(variable: str) -> None:
    of_steps = {name for step in STEPS for name in step.get("env", {})}
    assert variable in {*WORKFLOW["env"], *of_steps, "GITHUB_OUTPUT"}


@pytest.mark.parametrize("text", [*RUNS.values(), *SCRIPTS.values()], ids=[*RUNS, *SCRIPTS])
def test_the_shell_understands_it(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_run_and_says_how(name: str, tmp_path: Path) -> None:
    assert os.access(EXAMPLES / name, os.X_OK)
    done = subprocess.run([EXAMPLES / name], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: ") and done.stderr.count("\n") == 1


def test_hf_takes_the_job() -> None:
    """The real `hf` reads the whole command line, and does not submit it."""
    environment = {
        **os.environ, "AOQUANT": "git+https://example.org/aoquant", "HF_TOKEN": "hf_SecretSecret",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    command = [str(EXAMPLES / "hf-jobs.sh"), "FLUX.1-dev", "int8wo", "acme/FLUX.1-dev-int8wo", "--dry-run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for words in ("MODEL=FLUX.1-dev", "CONFIG=int8wo", "REPO_ID=acme/FLUX.1-dev-int8wo", "python:3.12", "HF_TOKEN"):
        assert words in done.stdout
    assert "hf_SecretSecret" not in done.stdout + done.stderr


def test_a_job_without_something_to_install_is_not_sent(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "AOQUANT"}
    command = [str(EXAMPLES / "hf-jobs.sh"), "FLUX.1-dev", "int8wo", "acme/x", "--dry-run"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "AOQUANT" in done.stderr
