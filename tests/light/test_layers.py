"""Who may import whom, read from the source; and that the public surface is exactly what it says."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import aoquant

PACKAGE = Path(aoquant.__file__).parent
HEAVY = {"torch", "torchao", "diffusers", "transformers", "accelerate", "safetensors", "numpy"}
MAY_BE_HEAVY = {
    "lowbit", "int4", "engine", "unpickling", "versions", "carrying", "loading", "upgrading", "pipelines",
    "environment", "benchmarking",
}  # fmt: skip

# From the bottom up. What stands in one line may not import each other, but for the modules of one package.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("",),  # the package itself: its version
    ("errors",),
    ("configs", "models", "checkpoint"),
    ("hub", "report"),
    ("source", "inspection"),
    ("request", "output", "lowbit", "verification"),
    ("joining", "upload"),
    ("int4",),
    ("engine",),
    ("unpickling",),
    ("versions", "carrying"),
    ("loading", "upgrading"),
    ("pipelines", "environment"),
    ("benchmarking",),
    ("api",),
    ("console",),
    ("tables",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported module. at_import: the statement runs when its module is imported. typing: for the checker only."""

    importer: str
    module: str
    line: int
    at_import: bool
    typing: bool


def module_name(path: Path) -> str:
    parts = ("aoquant", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(module: str) -> list[Import]:
    tree = ast.parse(MODULES[module].read_text())
    return list(_walk(module, tree, at_import=True, typing=False))


def _walk(module: str, node: ast.AST, *, at_import: bool, typing: bool) -> Iterator[Import]:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        for name in _names(module, node):
            yield Import(importer=module, module=name, line=node.lineno, at_import=at_import, typing=typing)
        return
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        for statement in node.body:
            yield from _walk(module, statement, at_import=False, typing=True)
        return
    inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for child in ast.iter_child_nodes(node):
        yield from _walk(module, child, at_import=at_import and not inside, typing=typing)


def _names(module: str, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    assert node.level == 0 and node.module, f"{module}:{node.lineno} imports relatively"
    for alias in node.names:
        full = f"{node.module}.{alias.name}"
        yield full if full in MODULES else node.module


EVERY = [found for module in MODULES for found in imports_of(module)]


def part(module: str) -> str:
    """`aoquant.engine.plan` → `engine`."""
    return module.partition(".")[2].partition(".")[0]


def where(found: Import) -> str:
    return f"{found.importer}:{found.line} imports {found.module}"


def inner(found: Import) -> bool:
    return found.module.partition(".")[0] == "aoquant"


def test_every_module_has_its_layer() -> None:
    assert {part(module) for module in MODULES} == RANK.keys()


def test_imports_go_strictly_downward() -> None:
    upward = [
        where(found)
        for found in EVERY
        if inner(found)
        and not found.typing
        and part(found.importer) != part(found.module)
        and RANK[part(found.importer)] <= RANK[part(found.module)]
    ]
    assert upward == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: {found.module for found in imports_of(module) if inner(found)} - {module} for module in MODULES}
    graph["aoquant"] = set()  # it names what it resolves lazily, for type checkers
    assert list(TopologicalSorter(graph).static_order())


def test_only_the_engine_and_loading_import_heavy_libraries() -> None:
    wrong = [
        where(found)
        for found in EVERY
        if found.module.partition(".")[0] in HEAVY and not found.typing and part(found.importer) not in MAY_BE_HEAVY
    ]
    assert wrong == []


def test_the_heavy_half_is_imported_inside_functions_of_api_and_cli_alone() -> None:
    wrong = [
        where(found)
        for found in EVERY
        if inner(found)
        and part(found.module) in MAY_BE_HEAVY
        and part(found.importer) not in MAY_BE_HEAVY
        and not found.typing
        and (found.at_import or part(found.importer) not in ("api", "cli"))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "importers"),
    [
        ("huggingface_hub", {"hub"}),
        ("typer", {"cli"}),
        ("rich", {"console", "tables"}),
        ("aoquant.console", {"cli", "tables"}),
        ("aoquant.tables", {"cli"}),
        ("aoquant.cli", {"__main__"}),
        ("aoquant.hub", {"source", "upload"}),
        ("click", set()),
        ("requests", set()),
        ("httpx", set()),
    ],
)
def test_who_else_may_import(module: str, importers: set[str]) -> None:
    found = {part(one.importer) for one in EVERY if f"{one.module}.".startswith(f"{module}.")}
    assert found == importers


def test_only_the_console_prints() -> None:
    printing = [
        f"{module}:{node.lineno}"
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Name) and node.func.id in ("print", "input", "exit", "quit"))
            or ast.unparse(node.func) in ("sys.stdout.write", "sys.stderr.write")
        )
    ]
    # __main__ speaks where an interrupt came before the console could be imported.
    assert [place for place in printing if not place.startswith(("aoquant.console:", "aoquant.__main__:"))] == []


# --- the public surface -----------------------------------------------------------------------------------------------


def test_the_public_surface_is_exactly_all() -> None:
    assert dir(aoquant) == sorted(aoquant.__all__) == aoquant.__all__
    assert {name for name in aoquant.__all__ if inspect.isfunction(getattr(aoquant, name))} == {
        "inspect", "join", "load", "load_pipeline", "plan", "push", "quantize", "upgrade", "verify",
    }  # fmt: skip
    namespace: dict[str, object] = {}
    exec("from aoquant import *", namespace)
    assert namespace.keys() - {"__builtins__"} == set(aoquant.__all__)


def test_every_error_of_the_tree_is_public() -> None:
    from aoquant import errors

    tree = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert tree == {name for name in aoquant.__all__ if name.endswith("Error")}
    codes = [getattr(errors, name).exit_code for name in sorted(tree)]
    assert sorted(codes) == [1, 2, 3, 4, 5, 6, 7]


def test_what_is_not_public_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        aoquant.quantise  # noqa: B018


def test_importing_the_package_imports_nothing_to_speak_of() -> None:
    """Not even its own modules, and resolving every public name imports nothing heavy."""
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import aoquant\n"
        "new = {name for name in sys.modules if name.startswith('aoquant')}\n"
        "assert new == {'aoquant'}, new\n"
        "for name in aoquant.__all__: getattr(aoquant, name)\n"
        f"heavy = {sorted(HEAVY | {'huggingface_hub', 'typer', 'rich'})!r}\n"
        "assert not set(heavy) & set(sys.modules) - before\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)
