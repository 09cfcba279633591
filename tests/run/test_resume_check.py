"""A run is continued on the rows that it was trained on, whatever the cache holds by then."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardtune
from shardtune import Sample
from shardtune.config import load_recipe
from shardtune.errors import CheckpointError
from shardtune.run.diff.circumstances import files_read
from shardtune.run.resume_check import check_changes, data_changes
from tests.support.healthy_adapters import Regressor
from tests.support.tiny_run import write_rows

RECORD = {"source": "train", "file": "a.jsonl", "rows": 3, "key": "k"}


class Noisy(Regressor):
    """Draws from the system while it encodes."""

    def encode(self, row: Any) -> Sample:
        sample = super().encode(row)
        return Sample(fields={**sample.fields, "x": sample.fields["x"] + np.random.default_rng().random(4)})


def recipe(folder: Path, kind: str, **runner: object) -> dict[str, Any]:
    rows = [{"x": [1.0] * 4, "y": [float(number)] * 2, "seen": [1.0] * 2} for number in range(6)]
    return {
        "runner": {"max_steps": 2, "save_interval": 1, "logger": {"log_path": str(folder / "runs")}, **runner},
        "actor": {"global_batch_size": 2, "micro_batch_size": 2, "model": {"adapter": f"{__file__}:{kind}"}},
        "data": {
            "train_data_paths": str(write_rows(folder / "rows.jsonl", rows)),
            "cache_dir": str(folder / "cache"),
            "num_workers": 0,
        },
    }


@pytest.mark.parametrize("kind", ["Noisy", "Regressor"])
def test_rows_that_encode_makes_otherwise_are_refused(tmp_path: Path, kind: str) -> None:
    shardtune.train(recipe(tmp_path, kind))
    shardtune.train(recipe(tmp_path, kind, max_steps=3))  # from the cache
    shutil.rmtree(tmp_path / "cache")
    if kind == "Regressor":
        shardtune.train(recipe(tmp_path, kind, max_steps=4))
        return
    with pytest.raises(CheckpointError, match="of which encode of the adapter makes other numbers than then"):
        shardtune.train(recipe(tmp_path, kind, max_steps=4))
    allowed = ["data.train_data_paths"]
    assert shardtune.train(recipe(tmp_path, kind, max_steps=4, allow_changes=allowed)).metrics


def test_keys_in_a_mapping_that_was_empty_are_the_change(tmp_path: Path) -> None:
    given = recipe(tmp_path, "Regressor")
    old = load_recipe(given)
    now = load_recipe({**given, "data": {**given["data"], "columns": {"x": "input"}}})
    with pytest.raises(CheckpointError) as told:
        check_changes(old, now, tmp_path)
    assert "made with:\n    data.columns.x: null -> input\n" in str(told.value)
    assert "runner.allow_changes=[data.columns.x]" in str(told.value)
    with pytest.raises(CheckpointError, match=r"made with:\n    data\.columns\.x: input -> null\n"):
        check_changes(now, old, tmp_path)


def test_records_without_checksums_of_rows_are_the_same() -> None:
    one, other = ({**RECORD, "encoded": value} for value in "ab")
    assert len(data_changes([one], [other])) == 1
    assert not data_changes([RECORD], [other])
    assert not data_changes([one], [RECORD])
    (found,) = files_read([one], [other])
    assert (found.name, found.effects) == ("encoded rows of a.jsonl", ("rows", "tokens"))
    assert not [*files_read([one], [one]), *files_read([RECORD], [other])]
