"""Generative evaluation on two ranks gives the answers, and the score, of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardtune.config import load_recipe
from shardtune.training.worker import adapter_worker, task_answers
from tests.support.dist.ranks import run_ranks
from tests.support.workspace import make_workspace

pytestmark = pytest.mark.lengthy

KEYS = ("eval.generate=true", "eval.max_new_tokens=6", "eval.answer_pattern='#### (\\d+)'")


def evaluate(recipe: str, *keys: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics and samples of the untrained model; each rank's samples hold all answers."""
    task_answers.GENERATION_ROWS = 2  # 5 rows are 3 batches: two ranks have one without a batch in the last round
    worker = adapter_worker.SFTWorker(load_recipe(recipe, keys), training=False, report=lambda text: None)
    worker.setup_evaluation()
    return worker.run_eval(), worker.samples


def both(recipe: str) -> list[tuple[dict[str, float], list[dict[str, Any]]]]:
    """The likeliest answers, and drawn ones."""
    return [evaluate(recipe, *KEYS), evaluate(recipe, *KEYS, "eval.temperature=0.7")]


def test_two_ranks_answer_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_answers, "GENERATION_ROWS", 2)
    recipe = str(make_workspace(tmp_path / "work") / "recipe.yaml")
    metrics, samples = evaluate(recipe, *KEYS)
    assert len(samples) == 5
    assert len({sample["prompt"] for sample in samples}) == 5
    assert metrics["eval/unparsed"] == 5
    _, drawn = evaluate(recipe, *KEYS, "eval.temperature=0.7")
    assert drawn != samples
    for (ranked, answered), (_, drawn_there) in run_ranks(both, 2, recipe):
        assert answered == samples
        assert drawn_there == drawn
        assert ranked.keys() == metrics.keys()
        assert all(abs(ranked[name] - metrics[name]) < 1e-5 * abs(metrics[name]) + 1e-12 for name in metrics)
