"""Private names of torch stand in one folder, where a new release of torch can be checked against them."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from shardtune.errors import ConfigError
from tests.support.doc_blocks import ROOT

PACKAGE = ROOT / "shardtune"
ALLOWED = PACKAGE / "parallel" / "torch_private"
MODULE_INTERNALS = frozenset(("_parameters", "_buffers", "_modules", "_apply", "_non_persistent_buffers_set"))
OTHERS = frozenset((
    "_exit",  # of os
    "_current_frames", "_getframe",  # of sys, documented
    # Of transformers, which documents several of them for authors of models.
    "_attn_implementation", "_experts_implementation", "_get_dtype_plan", "_get_generation_parameters",
    "_keys_to_ignore_on_load_missing",
    "_has_unfinished_sequences", "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save", "_rescale_layers",
))  # fmt: skip
"""Private attributes of other packages than torch."""
PRIVATE_PATH = re.compile(r"\btorch(?:\.\w+)*\._(?!_)\w+")


@cache
def nodes(source: str) -> list[ast.AST]:
    return [*ast.walk(ast.parse(source))]


def private_names(source: str, own: frozenset[str]) -> Iterator[str]:
    """The private names of torch in a source: imported, in dotted paths, as attributes of objects, in strings.

    Args:
        source: text of a file.
        own: private names that the package itself defines somewhere.
    """
    for node in nodes(source):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (path for path in paths if PRIVATE_PATH.search(path))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if PRIVATE_PATH.search(alias.name))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            path = ast.unparse(node)
            foreign = node.attr not in own | OTHERS or (node.attr in MODULE_INTERNALS and not _is_of_self(node))
            if foreign or PRIVATE_PATH.search(path):
                yield path
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PRIVATE_PATH.search(node.value):
            yield node.value


def _is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_names(source: str) -> Iterator[str]:
    """The private names that a source defines: functions, classes, variables, attributes of `self`."""
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_of_self(node):
            yield node.attr


def sources() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.lengthy
def test_private_names_of_torch_stand_in_one_folder():
    texts = sources()
    own = frozenset(name for text in texts.values() for name in defined_names(text) if _is_private(name))
    found = {
        str(path.relative_to(ROOT)): sorted(names)
        for path, text in texts.items()
        if path.parent != ALLOWED and (names := set(private_names(text, own)))
    }
    assert not found


@pytest.mark.lengthy
@pytest.mark.parametrize("file", sorted(path.stem for path in ALLOWED.glob("*.py") if path.stem != "__init__"))
def test_a_file_of_it_holds_nothing_unused(file: str):
    """What it defines is imported somewhere, so that a reason goes with the name it explains."""
    texts = sources()
    imported = {
        alias.name
        for text in texts.values()
        for node in nodes(text)
        if isinstance(node, ast.ImportFrom) and node.module == f"shardtune.parallel.torch_private.{file}"
        for alias in node.names
    }
    source = texts[ALLOWED / f"{file}.py"]
    aliases = {
        alias.asname
        for node in nodes(source)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    offered = {name for name in defined_names(source) if name.isidentifier()} | aliases
    assert imported
    assert imported <= offered
    functions = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    used_here = {node.id for node in nodes(source) if isinstance(node, ast.Name)}
    assert not (functions | aliases) - imported - {name for name in used_here if name.startswith("_")}


def test_a_release_of_torch_that_lacks_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.autograd.graph._engine_run_backward")
    for name in ("shardtune.parallel.torch_private", "shardtune.parallel.torch_private.graph"):
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"lacks a name .*'_engine_run_backward'") as raised:
        importlib.import_module("shardtune.parallel.torch_private")
    assert (raised.value.remedy or "").startswith("pip install 'torch")


@pytest.mark.parametrize(
    "line",
    [
        "from torch.utils._pytree import tree_map",
        "from torch.nn.modules.batchnorm import _NormBase",
        "import torch.distributed._tensor",
        "torch._foreach_mul_(grads, 2)",
        "wrapped._handle.reshard()",
        "module._parameters['weight'] = weight",
        "logging.getLogger('torch.distributed.tensor._redistribute')",
    ],
)
def test_private_names_are_found(line: str):
    assert list(private_names(line, frozenset({"_parameters"})))


@pytest.mark.parametrize("line", ["torch.__version__", "self._handle", "from torch.nn import Linear", "os._exit(1)"])
def test_other_names_are_not(line: str):
    assert not list(private_names(line, frozenset({"_handle"})))
