"""What evaluations are measured by: keys and contents, whatever the place of the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.config import load_recipe
from shardtune.run.inputs import Inputs
from shardtune.run.measured_by import measured_by

EVAL = "data.eval_data_paths"


def measured(folder: Path, *overrides: str, content: str = "rows") -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    for name in ("train.jsonl", "eval.jsonl"):
        (folder / name).touch()
    rows = (f"data.train_data_paths={folder}/train.jsonl", f"{EVAL}={folder}/eval.jsonl")
    recipe = load_recipe(None, ["model.model_path=owner/name", *rows, *overrides])
    return measured_by(recipe, Inputs({EVAL: [(f"{folder}/eval.jsonl", content)]}))


@pytest.mark.parametrize(
    ("overrides", "content", "changed"),
    [
        ((), "other rows", {EVAL}),
        (("eval.generate=true",), "rows", {"eval.generate"}),
        (("data.max_length=7",), "rows", {"data.max_length"}),
        (("optim.lr=1", "global_batch_size=3", "runner.max_steps=4", "data.num_workers=1"), "rows", set()),
        (("eval_micro_batch_size=1", "data.shuffle=false"), "rows", set()),
    ],
)
def test_what_changes_the_measure(tmp_path: Path, overrides: tuple[str, ...], content: str, changed: set[str]) -> None:
    before = measured(tmp_path / "here")
    now = measured(tmp_path / "there", *overrides, content=content)
    assert {key for key in before if before[key] != now[key]} == changed


def test_training_rows_count_where_a_part_of_them_is_held_out(tmp_path: Path) -> None:
    key = "data.train_data_paths"
    assert key not in measured(tmp_path)
    assert key in measured(tmp_path, "data.eval_split=0.5", f"{EVAL}=null")
