"""The notebook's code fits the package; run from top to bottom, what it claims to teach is learned."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import shardtune
from shardtune.config import load_recipe
from shardtune.run.run import Run

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "finetune.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook with its outputs, run in an empty directory."""
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        patch.setenv("JUPYTER_PLATFORM_DIRS", "1")
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        return NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()


def output(notebook: Any, containing: str) -> str:
    """What the cell prints or returns whose source contains a text."""
    cell = next(cell for cell in notebook.cells if cell.cell_type == "code" and containing in cell.source)
    parts = [part.get("text") or part.get("data", {}).get("text/plain", "") for part in cell.outputs]
    return "".join(parts)


def test_it_is_stored_without_outputs():
    """So that a change of the notebook shows as one."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


def test_its_recipe_and_calls_are_those_of_the_package():
    """The short form of what follows: the recipe is read, and `train` and the methods of a run take what is given."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = ast.parse("\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code"))
    assigned = [node for node in code.body if isinstance(node, ast.Assign)]
    (recipe,) = (node.value for node in assigned if ast.unparse(node.targets[0]) == "recipe")
    made = eval(compile(ast.Expression(recipe), str(NOTEBOOK), "eval"), {"work": Path("work"), "str": str})
    load_recipe(made, in_memory=("actor.model.model_path", "data.train_data_paths", "data.eval_data_paths"))
    called = {"shardtune.train": shardtune.train}
    called |= {f"run.{name}": vars(Run)[name] for name in ("evaluate", "generate", "export")}
    calls = [node for node in ast.walk(code) if isinstance(node, ast.Call)]
    assert called.keys() <= {ast.unparse(call.func) for call in calls}
    for call in calls:
        name = ast.unparse(call.func)
        if name.startswith(("shardtune.", "run.")):
            given = [None] * (len(call.args) + name.startswith("run."))
            inspect.signature(called[name]).bind(*given, **{str(key.arg): None for key in call.keywords})


@pytest.mark.slow
def test_the_model_learns(executed: Any):
    scores = re.findall(r"right answers (\d+)%", output(executed, "right answers"))
    assert len(scores) >= 4
    assert int(scores[0]) == 0
    assert int(scores[-1]) >= 80
    assert len(re.findall(r"-> [a-z]$", output(executed, "questions ="), re.MULTILINE)) == 4


@pytest.mark.slow
def test_the_export_loads_and_the_run_goes_on(executed: Any):
    assert "LlamaForCausalLM from my-model" in output(executed, "run.export")
    assert re.search(r"step \d+, loss 0\.\d+", output(executed, "max_epochs=6"))
    assert re.search(r"continuing (from|after) step \d+", output(executed, "max_epochs=6"))
