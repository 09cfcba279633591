"""A run is continued on the rows that it was trained on, whatever the cache holds by then."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardtune
from shardtune import Sample
from shardtune.config import Recipe, load_recipe
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


def test_what_is_allowed_already_stays_in_the_key_to_paste(tmp_path: Path) -> None:
    given = recipe(tmp_path, "Regressor", allow_changes=["optim.lr"])
    changed = {**given, "actor": {**given["actor"], "optim": {"lr": 1.0, "weight_decay": 0.5}}}
    with pytest.raises(CheckpointError, match=r"weight_decay: 0\.01 -> 0\.5\n(?s:.*)") as told:
        check_changes(load_recipe(given), load_recipe(changed), tmp_path)
    assert "runner.allow_changes=[actor.optim.lr,actor.optim.weight_decay]" in str(told.value)


@pytest.mark.parametrize(
    ("section", "before", "now"),
    [
        ("model", {}, {"freeze": ["linear"]}),
        ("model", {"is_lora": True, "lora": {"r": 4}}, {"is_lora": True, "lora": {"r": 8}}),
        ("optim", {}, {"state_dtype": "bf16"}),
    ],
)
def test_what_no_checkpoint_could_go_on_with_is_not_proposed(
    tmp_path: Path, section: str, before: dict[str, Any], now: dict[str, Any]
) -> None:
    def loaded(values: dict[str, Any]) -> Recipe:
        given = recipe(tmp_path, "Regressor")
        actor = given["actor"]
        return load_recipe({**given, "actor": {**actor, section: {**actor.get(section, {}), **values}}})

    with pytest.raises(CheckpointError, match="is not the one this run was made with") as told:
        check_changes(loaded(before), loaded(now), tmp_path)
    assert "as the checkpoints hold what was trained with it" in str(told.value)
    assert "allow_changes" not in str(told.value)


def test_of_two_changes_only_the_one_that_checkpoints_can_follow_is_proposed(tmp_path: Path) -> None:
    given = recipe(tmp_path, "Regressor")
    model = {**given["actor"]["model"], "freeze": ["linear"]}
    changed = {**given, "actor": {**given["actor"], "model": model, "optim": {"weight_decay": 0.5}}}
    with pytest.raises(CheckpointError, match="is not the one this run was made with") as told:
        check_changes(load_recipe(given), load_recipe(changed), tmp_path)
    remedy = told.value.remedy or ""
    assert remedy.startswith("put actor.model.freeze back")
    assert "and allow the rest with runner.allow_changes=[actor.optim.weight_decay];" in remedy


def test_what_moves_the_order_of_rows_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = "in an epoch that has begun some rows come twice and others not at all"
    given = recipe(tmp_path, "Regressor")
    seeded = recipe(tmp_path, "Regressor", seed=7, allow_changes=["runner.seed"])
    assert check_changes(load_recipe(given), load_recipe(seeded), tmp_path) == (
        f"runner.seed: 42 -> 7 (allowed by runner.allow_changes; {told})",
    )
    shardtune.train(given)
    rows = Path(given["data"]["train_data_paths"])
    lines = rows.read_text().splitlines(keepends=True)
    longer = recipe(tmp_path, "Regressor", max_steps=3, allow_changes=["data.train_data_paths"])
    rows.write_text("".join(lines[:4]))
    capsys.readouterr()
    shardtune.train(longer)
    assert f"allowed by runner.allow_changes; {told}" in " ".join(capsys.readouterr().err.split())


def test_records_without_checksums_of_rows_are_the_same() -> None:
    one, other = ({**RECORD, "encoded": value} for value in "ab")
    assert len(data_changes([one], [other])) == 1
    assert not data_changes([RECORD], [other])
    assert not data_changes([one], [RECORD])
    (found,) = files_read([one], [other])
    assert (found.name, found.effects) == ("encoded rows of a.jsonl", ("rows", "tokens"))
    assert not [*files_read([one], [one]), *files_read([RECORD], [other])]
