"""Imports point one way, as the table in docs/architecture.md says, and public names are what they should be."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardtune
from tests.support.doc_blocks import ROOT

PACKAGE = ROOT / "shardtune"
_TABLE = re.compile(r"<!-- layers -->\n(.*?)<!-- /layers -->", re.DOTALL)
HEAVY = ("torch", "transformers", "datasets", "pandas")


def layers() -> dict[str, int]:
    """Module or package, relative to shardtune -> its layer, from the table in the documentation."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = _TABLE.search(page)
    assert table is not None
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", table[1], re.MULTILINE)
    return {name: int(number) for number, names in rows for name in re.findall(r"`([\w.]+)`", names)}


def layer_of(module: str, known: dict[str, int]) -> int:
    """The layer of the longest entry that names the module or a package around it."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in known:
            return known[".".join(parts[:length])]
    raise AssertionError(f"{module} is in no row of the table in docs/architecture.md")


def module_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(file: Path) -> set[str]:
    """The package's own modules that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide where they point"
            base = node.module or ""
            submodules = {f"{base}.{alias.name}" for alias in node.names if _is_module(f"{base}.{alias.name}")}
            names |= submodules or {base}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.removeprefix("shardtune.") for name in names if name.startswith("shardtune.")}


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return name.startswith("shardtune") and (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file())


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def test_imports_point_one_way():
    known = layers()
    wrong = []
    for file in sources():
        module = module_of(file)
        here = layer_of(module, known)
        above = {name: layer_of(name, known) for name in imported(file)}
        wrong += [f"{module} ({here}) imports {name} ({layer})" for name, layer in above.items() if layer > here]
    assert not wrong, "\n".join(wrong)


def test_no_imports_go_in_circles():
    graph = {module_of(file): imported(file) & {module_of(other) for other in sources()} for file in sources()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a circle: {' -> '.join((*path[path.index(module) :], module))}"
        if module not in done:
            for target in sorted(graph[module] - {module}):
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_the_table_is_up_to_date():
    """Every module is in it (else `layer_of` fails), and it names nothing that is gone."""
    known = layers()
    assert len(known) > 20
    gone = [name for name in known if not _is_module(f"shardtune.{name}")]
    assert not gone
    for file in sources():
        assert layer_of(module_of(file), known)


def test_the_loop_is_the_projects_own():
    """Trainer, Accelerator and TRL are for bench/ alone."""
    foreign = re.compile(r"^\s*(?:from|import) (?:trl|accelerate)\b|\bimport .*\bTrainer\b", re.MULTILINE)
    assert not [str(file) for file in sources() if foreign.search(file.read_text(encoding="utf-8"))]


# -- Public names ------------------------------------------------------------------------------------------------------


def test_public_names_are_sorted_as_a_reader_would():
    assert len(set(shardtune.__all__)) == len(shardtune.__all__) >= 12


@pytest.mark.parametrize("name", shardtune.__all__)
def test_public_names_import_and_are_documented(name: str):
    public = getattr(shardtune, name)
    if inspect.ismodule(public):
        assert public.__name__ == f"shardtune.{name}"
    else:
        assert public.__name__ == name
        assert public.__module__.startswith("shardtune."), f"{name} comes from {public.__module__}"
    documentation = inspect.getdoc(public) or ""
    first = documentation.partition("\n")[0]
    assert len(first) > 15
    assert first.endswith((".", ";", ":", "…")), f"{name}: the first line of its docstring is no sentence: {first}"


def test_unknown_public_names_are_refused():
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(shardtune, "no_such_name")  # noqa: B009 (the point is that it is asked for by name)


@pytest.mark.parametrize(
    "module", ["shardtune", "shardtune.cli.commands", "shardtune.config", "shardtune.errors", "shardtune.launch.local"]
)
def test_modules_that_must_be_quick_import_nothing_heavy(module: str):
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert outcome.stdout.strip() == "[]"
