"""What an evaluation says of overrides that it does not use, and of rows that the run was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.config import load_recipe
from shardtune.config.schema import Recipe
from shardtune.run.evaluation_notes import idle_overrides, trained_rows


def recipe(*overrides: str) -> Recipe:
    values = {"model": {"model_path": "m"}, "data": {"train_data_paths": "t.jsonl"}}
    return load_recipe(values, overrides, files_must_exist=False)


@pytest.mark.parametrize(
    ("overrides", "notes"),
    [
        (
            ["optim.lr=5", "seed=3", "model.batch_size=3", "data.audit.max_dropped=0.1"],
            ["optim.lr, global_batch_size and data.audit.max_dropped have no effect in an evaluation"],
        ),
        (["actor.optim={lr: 1, ema_use: true, ema_decay: 0.9}"], ["optim.lr has no effect in an evaluation"]),
        (["runner.allow_changes=[model.model_path]"], []),
        (["runner.allow_changes=[optim]"], ["runner.allow_changes has no effect in an evaluation"]),
        (["eval.generate=false", "eval.max_new_tokens=7"], ["eval.max_new_tokens has no effect without eval.generate"]),
        (["eval.environment=null", "eval.episodes=7"], ["eval.episodes has no effect without eval.environment"]),
        (["data.train_data_paths=u.jsonl"], ["data.train_data_paths has no effect in an evaluation"]),
        (["data.train_data_paths=u.jsonl", "data.eval_split=0.5"], []),
        (["model.model_type=embedding", "data.train_data_paths=u.jsonl"], []),
        (["eval.generate=true", "eval.max_new_tokens=7", "data.eval_data_paths=e.jsonl", "data.max_length=9"], []),
        (["worker=mine.py:Mine", "optim.lr=5"], []),
    ],
)
def test_overrides_without_effect(overrides: list[str], notes: list[str]) -> None:
    found = [*idle_overrides(recipe(*overrides), overrides)]
    assert len(found) == len(notes), found
    assert all(text.startswith(start) for text, start in zip(found, notes, strict=True)), found


@pytest.mark.parametrize(
    ("before", "now", "held_out"),
    [("0", "0.2", "none of its rows"), ("0.1", "0.2", "only 0.1 of its rows"), ("0.2", "0.2", ""), ("0.2", "0.1", "")],
)
def test_rows_that_the_run_was_trained_on(before: str, now: str, held_out: str) -> None:
    run, with_split = recipe(f"data.eval_split={before}"), recipe(f"data.eval_split={now}")
    notes = [*trained_rows(run, with_split, Path("runs/a"))]
    assert [f"runs/a held out {held_out}" in note for note in notes] == [True] * bool(held_out)
    others = recipe(f"data.eval_split={now}", "data.train_data_paths=u.jsonl")
    assert not [*trained_rows(run, others, Path("runs/a"))]
