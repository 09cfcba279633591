"""Imports point one way, from a room to those below it, and public names are what they should be."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import Path

import pytest

import shardtune
from tests.support import fork_server
from tests.support.doc_blocks import ROOT

PACKAGE = ROOT / "shardtune"
HEAVY = ("torch", "transformers", "datasets", "pandas")

ROOMS = (
    ("cli",),
    ("run", "verify", "engine"),
    ("training",),
    ("checkpoint", "evaluate"),
    ("models", "optim"),
    ("data",),
    ("parallel", "launch"),
    ("config",),
    ("batch",),
    ("errors",),
)
"""Folders and files of the package from top to bottom; those of one row do not import each other."""
FRONT = ("__init__", "__main__", "halos", "nn", "former_paths")
"""Files and a folder through which the package is entered; nothing inside imports them."""
MOST_ENTRIES = 18


def module_of(file: Path) -> str:
    """A source file as a dotted name without the package's: `data/cache/entry.py` is data.cache.entry."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported(file: Path) -> frozenset[str]:
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
    return frozenset(name.removeprefix("shardtune.") for name in names if name.startswith("shardtune."))


@cache
def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return name.startswith("shardtune") and (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file())


def sources() -> list[Path]:
    """The files in the rooms."""
    return sorted(
        path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0].removesuffix(".py") not in FRONT
    )


def graph() -> dict[str, frozenset[str]]:
    """Which module imports which; a package's front door (`__init__`) stands for itself."""
    known = {module_of(file) for file in sources()}
    return {module_of(file): imported(file) & known - {module_of(file)} for file in sources()}


def test_every_entry_is_a_room():
    entries = {path.stem for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "py.typed")}
    rooms = {name for row in ROOMS for name in row}
    assert entries == rooms | set(FRONT)
    assert len(entries - {"__init__", "__main__"}) <= MOST_ENTRIES


def test_every_folder_says_what_it_is_for():
    folders = {path.parent for path in sources()} - {PACKAGE}
    silent = [folder for folder in folders if not ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))]
    assert len(folders) > 20
    assert not silent


def test_imports_point_to_rooms_below():
    row_of = {name: number for number, row in enumerate(ROOMS) for name in row}
    wrong = [
        f"{module} imports {name}"
        for module, names in graph().items()
        for name in names
        if module.partition(".")[0] != name.partition(".")[0]
        and row_of[name.partition(".")[0]] <= row_of[module.partition(".")[0]]
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_inside_enters_by_the_front():
    assert not [str(file) for file in sources() if {name.partition(".")[0] for name in imported(file)} & set(FRONT)]


def circles(arrows: Mapping[str, Set[str]]) -> Iterator[str]:
    """A circle of a graph, if there is one, as text."""
    done: set[str] = set()

    def visit(node: str, path: tuple[str, ...]) -> Iterator[str]:
        if node in path:
            yield " -> ".join((*path[path.index(node) :], node))
        elif node not in done:
            for target in sorted(arrows.get(node, ())):
                yield from visit(target, (*path, node))
            done.add(node)

    for node in arrows:
        yield from visit(node, ())


def test_no_modules_go_in_circles():
    # A front door names what lies behind it, and modules behind it may import their neighbours' submodules.
    doors = {module_of(file) for file in sources() if file.name == "__init__.py"}
    arrows = {module: names - doors for module, names in graph().items() if module not in doors}
    assert not list(circles(arrows))


def test_no_folders_go_in_circles():
    """Folders side by side in one room: none imports another that imports it, however far around."""
    arrows: dict[str, set[str]] = {}
    for module, names in graph().items():
        for name in names:
            here, there = module.split("."), name.split(".")
            shared = next((i for i, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), None)
            if shared:  # the folders that part below a common one
                one, other = (".".join(parts[: shared + 1]) for parts in (here, there))
                if all((PACKAGE / path.replace(".", "/")).is_dir() for path in (one, other)):
                    arrows.setdefault(one, set()).add(other)
    assert arrows
    assert not list(circles(arrows))


def test_circles_are_found():
    assert list(circles({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == ["b -> c -> b"]
    assert not list(circles({"a": {"b", "c"}, "b": {"c"}}))


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
    "module", ["shardtune", "shardtune.cli", "shardtune.config", "shardtune.errors", "shardtune.launch.local"]
)
def test_modules_that_must_be_quick_import_nothing_heavy(module: str):
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert outcome.stdout.strip() == "[]"


OWN = """
import sys
import numpy as np
import shardtune
from torch import nn


class Doubles(shardtune.Adapter):
    def build(self):
        return nn.Linear(1, 1)

    def encode(self, row):
        return shardtune.Sample(fields={"x": np.array([row["x"]], np.float32)})

    def loss(self, model, batch):
        return shardtune.LossSum(model(batch["x"]).square().sum(), len(batch["x"]))


if __name__ == "__main__":
    shardtune.train(
        {"micro_batch_size": 1, "global_batch_size": 2, "model": {"adapter": "own.py:Doubles"}},
        "data.train_data_paths=rows.jsonl", "data.num_workers=0", "runner.device=cpu", "runner.max_steps=1",
    )
    print([name for name in ("pyarrow", "pandas", "datasets", "peft") if name in sys.modules])
"""


def test_a_run_without_tables_and_adapters_loads_no_library_for_them(tmp_path: Path):
    """pyarrow takes 30 MB of each process, PEFT 10 to 24 MB and a fifth of a second."""
    (tmp_path / "rows.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    (tmp_path / "own.py").write_text(OWN)
    command = [sys.executable, "own.py"]
    with fork_server.own_starts():
        outcome = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert outcome.stdout.splitlines()[-1] == "[]"
