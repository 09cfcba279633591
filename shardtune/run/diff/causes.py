"""Which of the differences between two runs can explain that their numbers part, in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardtune.run.diff.numbers import MetricDifference, Numbers
from shardtune.run.diff.rows import RowsDifference
from shardtune.run.diff.settings import Difference, Effect
from shardtune.run.diff.weights import WeightsDifference

RATE, LOSS, NORM = "train/learning_rate", "train/loss", "train/grad_norm"
TOKENS = ("train/tokens", "train/samples", "train/supervised_tokens")
POSITION = "epoch"
CONTINUED = "a run that was continued with another recipe"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why two runs have other numbers, as far as their records show it.

    Attributes:
        finding: what parts first, in a sentence.
        causes: the differences that can do this.
        effects: what a cause must be able to change.
        advice: what to look at where no recorded difference can be the cause, and other remarks.
    """

    finding: str
    causes: Sequence[Difference] = ()
    effects: tuple[Effect, ...] = ()
    advice: str = ""


def explain(
    differences: Sequence[Difference], rows: RowsDifference, numbers: Numbers, weights: WeightsDifference
) -> list[Explanation]:
    """An explanation of each thing that parts by itself: rows, rate, numbers of training, evaluations, weights."""
    found = []
    if numbers.first_common is None:
        return [Explanation("no step was logged by both runs, so no number could be compared")]
    first, rows_step = numbers.parting, rows.step or _step_of_rows(numbers)
    measured = next((one for one in numbers.parted() if one.name != RATE), None)
    rate = next((one for one in numbers.parted() if one.name == RATE), None)
    if rows_step is not None and first is not None:
        finding = f"from step {rows_step:,} on the runs hold other rows, so that their losses part is no surprise"
        found.append(_caused(differences, finding, ("rows",), "data or a recipe that changed when a run was continued"))
    if rate is not None and rate.step is not None:
        finding = f"the learning rate parts {_at(rate, numbers)}, and with it what each step changes"
        found.append(_caused(differences, finding, ("update", "length"), CONTINUED))
    if measured is not None and measured.step is not None and (rows_step is None or measured.step < rows_step):
        found += _of_measured(differences, measured, rate, numbers)
    if first is None:
        found += _of_equal(differences, numbers, weights)
    evaluations = numbers.parted(evaluation=True)
    if first is None and evaluations:
        finding = f"training is the same, but {evaluations[0].name} is not, {_at(evaluations[0], numbers)}"
        found.append(_caused(differences, finding, ("evaluation",), "evaluation rows or code that no record names"))
    return found


def _of_measured(
    differences: Sequence[Difference], first: MetricDifference, rate: MetricDifference | None, numbers: Numbers
) -> list[Explanation]:
    """Why loss, norm or a count of tokens parts although the rows are the same."""
    assert first.step is not None
    if rate is not None and rate.step is not None and (rate.step < first.step or 1 < rate.step == first.step):
        return []  # explained by the rate
    at = _at(first, numbers)
    if first.name in TOKENS:
        finding = f"the same rows are other tokens, {at}"
        return [_caused(differences, finding, ("tokens",), "the code of the model's adapter")]
    if first.size == "rounding":
        most = f"rounding in {numbers.dtype} can ({numbers.threshold:g} of its value)"
        finding = f"{first.name} parts {at}, by no more than {most}"
        advice = "another number of threads, another processor, or kernels that do not repeat (runner.deterministic)"
        grown: list[Explanation] = []
        small: tuple[Effect, ...] = ("loss", "tokens")
        if first.step <= 1:
            grown = _of_growth(differences, first, rate)
        else:
            small = (*small, "update")
        if first.beyond is not None and not grown:
            other = first.step > 1 and any(one.can("update") for one in differences)
            finding += f"; it grows beyond that at step {first.beyond:,}" + ("" if other else ", as rounding does")
        # A small change of the recipe can look the same: it is named too, behind what only rounds.
        return [_caused(differences, finding, ("rounding", *small), advice), *grown]
    if first.step == numbers.first_common and first.step <= 1:
        what = "the first norm" if first.name == NORM else "the loss of the first step"
        finding = f"{what} parts already, {at}, on the same rows: nothing was updated before"
        missing = "weights, code or draws that no record names"
        return [_or_dropout(_caused(differences, finding, ("loss", "tokens"), missing), differences)]
    before = f"; both logged the same until step {first.step - 1:,}" if first.differing < first.compared else ""
    finding = f"{first.name} parts {at}, on the same rows and by more than rounding{before}"
    missing = "a changed environment in between (a run that was continued), or code that no record names"
    return [_or_dropout(_caused(differences, finding, ("update", "loss"), missing), differences)]


def _of_growth(
    differences: Sequence[Difference], first: MetricDifference, rate: MetricDifference | None
) -> list[Explanation]:
    """Why a metric that parts by rounding parts by more later, where what a step changes differs too."""
    if first.beyond is None:
        return []
    by_rate = rate is not None and rate.step is not None and rate.step < first.beyond
    effects: tuple[Effect, ...] = ("update", "length") if by_rate else ("update",)
    if not by_rate and not any(one.can(*effects) for one in differences):
        return []
    finding = f"{first.name} parts by more than rounding at step {first.beyond:,}: what a step changes differs too"
    return [_caused(differences, finding, effects, CONTINUED)]


def _or_dropout(found: Explanation, differences: Sequence[Difference]) -> Explanation:
    """With another layout as the cause where there is no better one."""
    layout = [one for one in differences if one.can("rounding")]
    if found.causes or not layout:
        return found
    advice = (
        "only if the model has dropout, whose draws follow micro-batches and ranks; otherwise these change the last "
        f"digits alone, and {found.advice}"
    )
    return Explanation(found.finding, layout, found.effects, advice)


def _of_equal(differences: Sequence[Difference], numbers: Numbers, weights: WeightsDifference) -> list[Explanation]:
    """What can be said where no logged number of training differs."""
    if weights.equal or weights.unknown or numbers.last[0] == numbers.last[1]:
        if weights.differing or weights.alone:
            finding = "every logged number of training is the same, but final/ is not"
            effects: tuple[Effect, ...] = ("result", "update", "rounding")
            return [_caused(differences, finding, effects, "steps that were not logged (runner.logger.log_interval)")]
        return [Explanation(f"all {numbers.steps:,} logged steps of both runs are bitwise the same")]
    ends = " and ".join(f"{step:,}" for step in numbers.last)
    finding = f"all logged steps that both did are bitwise the same; they end after other numbers of steps, {ends}"
    return [_caused(differences, finding, ("length",), "one was stopped, or is still running")]


def _step_of_rows(numbers: Numbers) -> int | None:
    """The first step at which the position in the data differs, where rows could not be computed."""
    position = numbers.metrics.get(POSITION)
    return None if position is None else position.step


def _caused(
    differences: Sequence[Difference], finding: str, effects: tuple[Effect, ...], otherwise: str
) -> Explanation:
    causes = list(dict.fromkeys(one for effect in effects for one in differences if one.can(effect)))
    advice = "" if causes else f"no recorded difference can do this; left are {otherwise}"
    return Explanation(finding, causes, effects, advice)


def _at(metric: MetricDifference, numbers: Numbers) -> str:
    """Where a metric parts: at a logged step, before which others may lie that were not logged."""
    step = metric.step or 0
    is_first = step == numbers.first_common
    return f"at step {step:,}" + (", the first that was logged" if is_first and step > 1 else "")
