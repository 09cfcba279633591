"""What the ranks of a shortened run recorded, step by step, and the first step in which two runs differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardtune.errors import counted
from shardtune.verify.result import Failed, Skipped

Place = tuple[int, int]
"""A position in the data: epoch and rows consumed."""
LOSS, NORM = "train/loss", "train/grad_norm"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One rank's micro-batch.

    Attributes:
        rows: of the data set; None where the user's loader does not number them.
        digest: of all its numbers.
    """

    rows: tuple[int, ...] | None
    digest: str


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as all ranks recorded it.

    Attributes:
        number: optimizer steps done after it.
        start: the position in the data before it.
        end: and after it.
        rows: of the data set, in order; empty where the user's loader does not number them.
        micro_batches: of each rank.
        metrics: of the step, without times and sizes, as `float.hex`.
        loader_steps: the steps of the loader that it took; None where a worker's own `run_training` took a part of one.
        changed: the frozen weights, which no checkpoint holds, that it changed on some rank.
    """

    number: int
    start: Place
    end: Place
    rows: tuple[int, ...]
    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    metrics: Mapping[str, str]
    loader_steps: int | None = 1
    changed: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks that computed it."""
        return len(self.micro_batches)

    def value(self, metric: str) -> float:
        """A metric as a number.

        Raises:
            Skipped: the worker's own `run_training` does not return it.
        """
        if metric not in self.metrics:
            raise Skipped(
                f"the worker's run_training returns no {metric}, which is compared: let it return 'loss' and "
                "'grad_norm'"
            )
        return float.fromhex(self.metrics[metric])

    def dealt_wrongly(self) -> str | None:
        """How its rows went to ranks other than once each; None where that is right or rows have no numbers."""
        if not self.rows:
            return None
        # -1 is no row: a blank one that keeps ranks in step, as beside rows without images.
        dealt = [row for rank in self.micro_batches for batch in rank for row in batch.rows or () if row >= 0]
        twice = sorted({row for row in dealt if dealt.count(row) > self.rows.count(row)})
        never = sorted(set(self.rows) - set(dealt))
        found = [f"row {twice[0]} was computed more than once"] if twice else []
        return " and ".join([*found, *([f"row {never[0]} by no rank"] if never else [])]) or None


@dataclass(frozen=True, slots=True)
class Evidence:
    """The steps of a run.

    Attributes:
        steps: in order; of a step that was computed again after an interruption the last time.
        again: those that were computed more than once.
    """

    steps: Sequence[StepRecord]
    again: Sequence[int]

    def epoch_ends(self) -> list[int]:
        """The steps with which an epoch ends."""
        return [step.number for step in self.steps if step.end[0] != step.start[0]]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of two runs.

    Attributes:
        step: in which it is.
        what: differs: rows, content, or the name of a metric.
        text: both sides, in a sentence.
    """

    step: int
    what: str
    text: str


def require_frozen(evidence: Evidence, what: str) -> None:
    """Refuse a run that changed a frozen weight.

    Args:
        evidence: of the run.
        what: is this run, for the message.

    Raises:
        Failed: with the first such step and weight.
    """
    for step in evidence.steps:
        if step.changed:
            first, *others = step.changed
            more = f" and {len(others)} more" if others else ""
            raise Failed(
                f"{what} changes a weight that is frozen, in step {step.number}: {first}{more}; no checkpoint holds "
                "it, so a resumed run has it as it was",
                where=f"step {step.number}: {first}",
                remedy="look for code of yours that writes to weights; what is to be trained is left out of "
                "actor.model.freeze, or named in actor.model.lora.modules_to_save; let what a step changes otherwise, "
                "as a running mean of weights, be a persistent buffer, which checkpoints hold",
            )


def read_evidence(folder: Path) -> Evidence:
    """The recorded lines of all ranks."""
    files = sorted(folder.glob("rank*.jsonl"), key=lambda file: int(file.stem.removeprefix("rank")))
    ranks = [[json.loads(line) for line in _whole_lines(file)] for file in files]
    by_place: dict[tuple[Place, int], StepRecord] = {}
    again: list[int] = []
    for parts in _steps(ranks):
        step = _joined(parts)
        place = (step.start, step.number)  # an update may take a part of a step, which another begins with too
        if place in by_place:
            again.append(step.number)
            # What followed was computed again too, or not reached.
            by_place = {other: known for other, known in by_place.items() if other < place}
        by_place[place] = step
    return Evidence(list(by_place.values()), again)


def _whole_lines(file: Path) -> list[str]:
    """The lines of a file; without the last one while it is being written."""
    return file.read_text().split("\n")[:-1]


def _steps(ranks: Sequence[Sequence[Mapping[str, object]]]) -> Iterator[list[Mapping[str, object]]]:
    """The lines of each step, of all ranks that computed it; the number of ranks may change at a resume."""
    places = [0] * len(ranks)
    while ranks and places[0] < len(ranks[0]):
        count = ranks[0][places[0]]["ranks"]
        assert isinstance(count, int)
        if any(places[rank] >= len(ranks[rank]) for rank in range(count)):
            return  # a rank ended in the middle of the step
        yield [ranks[rank][places[rank]] for rank in range(count)]
        for rank in range(count):
            places[rank] += 1


def _joined(parts: Sequence[Mapping[str, object]]) -> StepRecord:
    first: dict[str, object] = dict(parts[0])
    if "from" not in first:
        raise Skipped(
            "the worker's run_training takes no batch from self.data_iter, so no step has rows that could be compared"
        )
    start, end, rows, metrics = first["from"], first["to"], first["rows"], first["metrics"]
    number = first["step"]
    assert isinstance(start, list)
    assert isinstance(end, list)
    assert isinstance(metrics, dict)
    assert isinstance(number, int)
    micro_batches = tuple(tuple(_micro_batches(part)) for part in parts)
    if rows is None:  # of a part of a step
        rows = [row for rank in micro_batches for batch in rank for row in batch.rows or () if row >= 0]
    assert isinstance(rows, list)
    taken = first.get("loader_steps", 1)
    assert taken is None or isinstance(taken, int)
    return StepRecord(
        number,
        (start[0], start[1]),
        (end[0], end[1]),
        tuple(rows),
        micro_batches,
        metrics,
        taken,
        tuple(sorted({name for part in parts for name in _names(part.get("changed"))})),
    )


def _names(found: object) -> list[str]:
    return found if isinstance(found, list) else []


def _micro_batches(part: Mapping[str, object]) -> Iterator[MicroBatch]:
    found = part["micro_batches"]
    assert isinstance(found, list)
    for batch in found:
        rows = batch["rows"]
        yield MicroBatch(None if rows is None else tuple(rows), batch["digest"])


def first_difference(one: Evidence, other: Evidence, *, close: float = 0.0) -> Difference | None:
    """The first step in which two runs differ; None where there is none.

    On the same number of ranks the micro-batches are compared too; on different ones the rows and how they were dealt.

    Args:
        one: the run that is right.
        other: is compared with it.
        close: the relative difference allowed between numbers; 0: they are equal bit by bit.
    """
    for left, right in zip(one.steps, other.steps, strict=False):
        found = _difference(left, right, close)
        if found is not None:
            return found
    if len(one.steps) != len(other.steps):
        number = min(len(one.steps), len(other.steps)) + 1
        return Difference(number, "length", f"{counted(len(one.steps), 'step')} and {len(other.steps)}")
    return None


def _difference(left: StepRecord, right: StepRecord, close: float) -> Difference | None:
    number = left.number

    def differ(what: str, one: object, other: object) -> Difference:
        return Difference(number, what, f"{what} {one} and {other}")

    for side in (left, right):
        wrong = side.dealt_wrongly()
        if wrong is not None:
            return Difference(number, "rows", f"on {side.ranks} ranks {wrong}")
    if (left.start, left.end) != (right.start, right.end):
        return differ("the position in the data", (left.start, left.end), (right.start, right.end))
    if left.rows != right.rows:
        first = next(i for i, pair in enumerate(_pairs(left.rows, right.rows)) if pair[0] != pair[1])
        return Difference(
            number, "rows", f"place {first} of the step has row {_at(left, first)} and {_at(right, first)}"
        )
    same_layout = left.ranks == right.ranks
    if same_layout and left.micro_batches != right.micro_batches:
        rows = [batch.rows for rank in left.micro_batches for batch in rank]
        others = [batch.rows for rank in right.micro_batches for batch in rank]
        what = "micro-batches" if rows != others else "content of the micro-batches"
        return Difference(number, what, f"the {what} differ")
    if not same_layout and not left.rows and _contents(left) != _contents(right):
        return Difference(number, "content", "the batches of all ranks together differ")
    for name in sorted({*left.metrics, *right.metrics}, key=lambda name: (name != LOSS, name != NORM, name)):
        if name not in left.metrics or name not in right.metrics:
            return differ(name, left.metrics.get(name, "(none)"), right.metrics.get(name, "(none)"))
        if left.metrics[name] != right.metrics[name] and apart(left.value(name), right.value(name)) > close:
            gap = apart(left.value(name), right.value(name))
            return Difference(
                number, name, f"{name} {left.value(name):.17g} and {right.value(name):.17g} (relative {gap:.2g})"
            )
    return None


def largest_gap(one: Evidence, other: Evidence) -> float:
    """The largest relative difference between losses and norms of two runs of the same steps."""
    pairs = zip(one.steps, other.steps, strict=True)
    return max((apart(a.value(name), b.value(name)) for a, b in pairs for name in (LOSS, NORM)), default=0.0)


def apart(one: float, other: float) -> float:
    """The relative difference of two numbers; infinite where one is not finite and they differ."""
    if one == other or (one != one and other != other):
        return 0.0
    gap = abs(one - other) / max(abs(one), abs(other))
    return gap if gap == gap else float("inf")


def _contents(step: StepRecord) -> list[str]:
    return sorted(batch.digest for rank in step.micro_batches for batch in rank if batch.digest)


def _pairs(one: Sequence[int], other: Sequence[int]) -> Iterator[tuple[int | None, int | None]]:
    for place in range(max(len(one), len(other))):
        yield (one[place] if place < len(one) else None), (other[place] if place < len(other) else None)


def _at(step: StepRecord, place: int) -> str:
    return str(step.rows[place]) if place < len(step.rows) else "none"
