"""The recipe of a run is read again without its files and objects, whichever way its evaluation rows were chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardtune.config import load_recipe
from shardtune.config.stored_recipe import stored_recipe
from shardtune.models.tasks.task import TASK_FILE
from shardtune.run.replay.session import one_process
from shardtune.training.worker.exported_recipe import with_found

ROWS: dict[str, dict[str, Any]] = {
    "a split": {"train_data_paths": "gone.jsonl", "eval_split": 0.25},
    "files": {"train_data_paths": "gone.jsonl", "eval_data_paths": "too.jsonl"},
    "objects": {"train_data_paths": "gone.jsonl"},
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_all_ways_of_reading_a_run_again_take_its_evaluation_rows_as_they_are(
    rows: dict[str, Any], tmp_path: Path
) -> None:
    model = {"model_type": "sequence_classifier", "model_path": "gone", "options": {"labels": ["a", "b"]}}
    given = {"actor": {"model": model}, "data": rows, "runner": {"eval_interval": 2, "max_steps": 4}}
    recipe = load_recipe(given, in_memory=["data.eval_data_paths"] * (len(rows) == 1), files_must_exist=False)
    (tmp_path / TASK_FILE).write_text('{"options": {"labels": ["a", "b"]}}')
    split = rows.get("eval_split", 0.0)
    assert stored_recipe(recipe.to_dict()) == recipe
    assert stored_recipe(recipe.to_dict(), [f"data.eval_split={split}"], splits=split) == recipe
    assert with_found(recipe, tmp_path, 1) == recipe
    assert one_process(recipe).data.eval_split == split
