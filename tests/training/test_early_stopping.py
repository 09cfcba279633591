"""Early stopping and the best checkpoint."""

from __future__ import annotations

import math

import pytest

from shardtune.config import RunnerConfig
from shardtune.training.early_stopping import Watch, Watches


def watches(**early: object) -> Watches:
    values = {"early_stop": {"enabled": True, **early}, "best": {"monitor": "eval/eval_accuracy"}}
    return Watches(RunnerConfig.model_validate(values))


@pytest.mark.parametrize(
    ("mode", "values", "best"), [("min", [3, 2, 2.5, 2], [1, 1, 0, 0]), ("max", [3, 2, 4, 4], [1, 0, 1, 0])]
)
def test_the_best_is_strictly_better(mode: str, values: list[float], best: list[int]) -> None:
    watch = Watch("x", mode)
    assert [watch.update(value, step) for step, value in enumerate(values)] == [bool(is_best) for is_best in best]


def test_less_than_min_delta_is_no_improvement_and_nan_never_is() -> None:
    watch = Watch("x", "min", min_delta=0.1)
    assert [watch.update(value, 0) for value in (1.0, 0.95, math.nan, 0.89)] == [True, False, False, True]
    never = Watch("x", "max")
    assert never.without_best() == ""
    assert never.update(math.nan, 0) is False
    assert never.without_best() == "there is no best checkpoint: x was NaN in each evaluation (runner.best)"
    assert never.describe() == "x has not improved in 1 evaluations, in which it was NaN (runner.early_stop)"
    assert never.update(0.0, 1)
    assert never.without_best() == ""


def test_patience_counts_measurements_without_improvement() -> None:
    watched = watches(patience=2)
    for loss, accuracy, best, stop in [(1.0, 0.1, True, False), (2.0, 0.3, True, False), (1.5, 0.2, False, True)]:
        assert watched.update({"eval/loss": loss, "eval/eval_accuracy": accuracy}, 1) is best
        assert watched.stop is stop


def test_counts_go_into_a_checkpoint_and_come_back() -> None:
    watched = watches(patience=2)
    watched.update({"eval/loss": 1.0, "eval/eval_accuracy": 0.1}, 4)
    watched.update({"eval/loss": 2.0, "eval/eval_accuracy": 0.0}, 5)
    again = watches(patience=2)
    again.restore(watched.state())
    assert again.state() == watched.state()
    assert not again.stop
    again.update({"eval/loss": 2.0, "eval/eval_accuracy": 0.0}, 6)
    assert again.stop
    other = watches(monitor="eval/perplexity")
    other.restore(watched.state())
    assert other.early is not None
    assert other.early.best is None, "what another metric reached says nothing of this one"


def test_values_that_were_measured_otherwise_are_not_compared() -> None:
    values = {"early_stop": {"enabled": True, "patience": 1}, "best": {"monitor": "train/loss", "mode": "min"}}
    config = RunnerConfig.model_validate(values)
    watched = Watches(config, {"data.eval_data_paths": "one", "eval.match": "a"})
    for loss in (1.0, 2.0):
        watched.update({"eval/loss": loss, "train/loss": loss}, 4)
    assert watched.stop
    same, other = (Watches(config, {"data.eval_data_paths": rows, "eval.match": "a"}) for rows in ("one", "two"))
    assert same.restore(watched.state()) == []
    assert same.stop
    assert other.restore(watched.state()) == [
        "runner.early_stop begins anew: eval/loss was measured otherwise so far (data.eval_data_paths)"
    ]
    assert not other.stop
    assert other.early is not None
    assert other.best is not None
    assert (other.early.best, other.best.best) == (None, 1.0), "training's own loss has nothing to do with it"
