"""Early stopping and the best checkpoint."""

from __future__ import annotations

import math

import pytest

from shardtune.config import RunnerConfig
from shardtune.errors import ConfigError
from shardtune.evaluate.loss import check_monitors
from shardtune.training.early_stopping import Watch, Watches, direction, told_direction


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
    assert Watch("x", "max").update(math.nan, 0) is False


def test_accuracies_and_successes_grow_and_losses_fall() -> None:
    assert direction("auto", "eval/eval_accuracy") == "max"
    assert direction("auto", "eval/math/token_accuracy") == "max"
    assert direction("auto", "eval/success") == direction("auto", "eval/success_low") == "max"
    for name in ("f1", "f1_macro", "recall_at_10/size_64", "mrr", "spearman", "rougeL", "exact_match"):
        assert direction("auto", f"eval/{name}") == direction("auto", f"eval/dev/{name}") == "max"
    assert direction("auto", "eval/rmse") == direction("auto", "eval/accuracy_set/loss") == "min"
    assert direction("auto", "eval/episode_length") == "min"
    assert direction("auto", "eval/loss") == direction("auto", "eval/perplexity") == "min"
    assert direction("max", "eval/loss") == "max"
    for name in ("arc/acc_norm", "acc,none", "explained_variance", "gsm8k/exact_match,strict-match", "bleu", "top3"):
        assert direction("auto", f"eval/{name}") == "max"
    for name in ("word_perplexity", "action_l1/0", "wer", "loss/accuracy", "map/rmse", "value_loss"):
        assert direction("auto", f"eval/{name}") == "min"


def test_names_that_do_not_tell_are_refused_without_a_mode() -> None:
    for name in ("eval/dev/quality", "eval/accuracy_error", "eval/map/quality"):
        assert told_direction(name) is None
    config = RunnerConfig.model_validate({"best": {"monitor": "eval/quality"}})
    for known in (["eval/quality"], None):
        with pytest.raises(ConfigError, match=r"'eval/quality' does not say(?s:.*)runner.best.mode: max, or min"):
            check_monitors(config, known)
    check_monitors(RunnerConfig.model_validate({"best": {"monitor": "eval/quality", "mode": "max"}}), None)


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
