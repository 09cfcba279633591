"""Answers are judged, counted and kept; an answer pattern that hardly ever matches is told of."""

from __future__ import annotations

import json
from pathlib import Path

from shardtune.config import EvalConfig
from shardtune.evaluate.answers import Answer, Answers, make_matcher


def answers(*verdicts: bool | None) -> Answers:
    return Answers([Answer(f"r:{n}", "q", "<q>", "1", f"so it is {n}", verdict) for n, verdict in enumerate(verdicts)])


def test_an_answer_without_the_pattern_is_wrong_and_counted() -> None:
    assert answers(True, False, None, None).metrics() == {"eval_accuracy": 0.25, "unparsed": 2.0}


def test_many_answers_without_the_pattern_are_told_of_with_examples() -> None:
    told = answers(None, True, None, None, None).warning("#### (.*)")
    assert told.startswith("4 of 5 answers count as wrong because eval.answer_pattern, #### (.*), is not in them")
    assert '"so it is 0"; "so it is 2"; "so it is 3". The model may not' in told
    assert answers(*[True] * 9, None).warning("#### (.*)") == ""


def test_the_pattern_of_a_recipe_is_the_one_that_is_asked() -> None:
    matcher = make_matcher(EvalConfig(answer_pattern=r"#### (\d+)"))
    assert matcher.correct("it is #### 7", "#### 7") is True
    assert matcher.correct("it is 7", "#### 7") is None


def test_answers_are_kept_by_step_and_set(tmp_path: Path) -> None:
    answers(True, None).keep(tmp_path / "samples", 12, "math")
    lines = (tmp_path / "samples" / "step_12_math.jsonl").read_text().splitlines()
    assert [json.loads(line)["correct"] for line in lines] == [True, None]
