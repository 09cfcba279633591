"""Whether a metric is better if larger or if smaller, by its name."""

from __future__ import annotations

import pytest

from shardtune.config import RunnerConfig
from shardtune.errors import ConfigError
from shardtune.evaluate.loss import check_monitors
from shardtune.evaluate.metric_direction import direction, named_direction


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
    for name in ("arc/acc_norm", "acc,none", "explained_variance", "gsm8k/exact_match/strict-match", "bleu", "top3"):
        assert direction("auto", f"eval/{name}") == "max"
    for name in ("word_perplexity", "action_l1/0", "wer", "loss/accuracy", "map/rmse", "value_loss"):
        assert direction("auto", f"eval/{name}") == "min"


def test_names_that_show_neither_are_refused_without_a_mode() -> None:
    for name in ("eval/dev/quality", "eval/accuracy_error", "eval/map/quality"):
        assert named_direction(name) is None
    for name in ("accuracy_gap", "inaccuracy", "time_to_success", "acc_stderr", "unsuccessful", "not_exact"):
        assert named_direction(f"eval/{name}") is None
    config = RunnerConfig.model_validate({"best": {"monitor": "eval/quality"}})
    for known in (["eval/quality"], None):
        with pytest.raises(ConfigError, match=r"'eval/quality' does not say(?s:.*)runner.best.mode: max, or min"):
            check_monitors(config, known)
    check_monitors(RunnerConfig.model_validate({"best": {"monitor": "eval/quality", "mode": "max"}}), None)
