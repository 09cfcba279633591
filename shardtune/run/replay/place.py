"""Which rows a step of a run holds: the order of rows is a function of the seed, so nothing has to be computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from shardtune.batch import Sample
from shardtune.data.loader.protocol import DataState
from shardtune.data.loader.step_loader import StepLoader
from shardtune.errors import legible
from shardtune.run.display import field_text
from shardtune.run.replay.record import Record, Start
from shardtune.training.worker.cached_rows import CachedRowsTask

SHOWN_TOKENS, SHOWN_LETTERS = 60, 70
"""How much of a row's beginning stands in a list."""
MOST_PASSED = 1000
"""Steps that are looked through for the one that ended at a recorded position."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a step in the data.

    Attributes:
        state: the position before it.
        rows: int64 [rows], the data set's.
        passed: the rows of each step that was passed over between the last optimizer step and this one.
        note: why the place is not certain; "" where it is.
    """

    state: DataState
    rows: np.ndarray
    passed: Sequence[np.ndarray] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class RowLine:
    """One row of a step, for a list.

    Attributes:
        number: of the row in the data set.
        file: its file.
        row: its line, or row number, in the file.
        digest: the hash of its content, by which `data.quarantine` names it.
        length: tokens; of a row of fields its size.
        trained: tokens that are trained; 0 in a row of fields.
        weights: in each loss term.
        text: its beginning.
        losses: its sum in each loss term; empty where nothing was computed, or where rows have no loss of their own.
        loss: the mean loss over its weight, terms added up; None without losses.
    """

    number: int
    file: str
    row: int
    digest: str
    length: int
    trained: int
    weights: dict[str, float]
    text: str
    losses: dict[str, float] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"{self.file}:{self.row}"

    @property
    def loss(self) -> float | None:
        if not self.losses:
            return None
        return sum(total / self.weights[name] for name, total in self.losses.items() if self.weights.get(name))

    def as_json(self) -> dict[str, Any]:
        known = {"file": self.file, "row": self.row, "hash": self.digest, "length": self.length}
        known |= {"trained_tokens": self.trained, "weights": self.weights, "text": self.text}
        return known if self.loss is None else {**known, "loss": self.loss, "losses": self.losses}


def place_of(loader: StepLoader, record: Record, start: Start, step: int) -> Place:
    """The place of a step.

    The position after each logged step is in its metrics, so that steps that were passed over (as their loss was not
    finite) are known. Where the last positions before and after are not, steps are counted from the last that is.
    """
    stopped = record.stopped_before(step)
    if stopped is not None:
        return Place(stopped, loader.rows_at(stopped)[2])
    done, state = record.nearest_before(step, loader, start)
    for _ in range(done, step - 1):
        state = loader.rows_at(state)[1]
    end = record.after(step, loader)
    place, passed = state, list[np.ndarray]()
    for _ in range(MOST_PASSED):
        place, after, rows = loader.rows_at(place)
        if end is None or after == end:
            return Place(place, rows, passed, _uncertain(record, done, step) if end is None else "")
        passed.append(rows)
        place = after
    place, _, rows = loader.rows_at(state)
    return Place(place, rows, (), f"metrics.jsonl has another position after step {step}: {end}")


def _uncertain(record: Record, done: int, step: int) -> str:
    """Whether steps may have been passed over that nothing of is known."""
    skipped = "train/skipped_steps"
    later = min((number for number in record.steps if number > step), default=None)
    if later is None:
        return ""
    before = record.steps.get(done, {}).get(skipped, 0.0)
    if record.steps[later].get(skipped, 0.0) == before:
        return ""
    return f"between the logged steps {done} and {later} steps were passed over: these rows may be those of a later one"


def lines_of(task: CachedRowsTask, numbers: np.ndarray, tokenizer: PreTrainedTokenizerBase | None) -> list[RowLine]:
    """The rows of a step for a list, in their order."""
    rows, found = task.training_rows(), []
    terms = task.weighed(rows).term_weights
    for number in numbers.tolist():
        file, row = rows.origin(number)
        sample = rows.row(number)
        weights = {name: float(values[number]) for name, values in terms.items()}
        trained = int(np.count_nonzero(sample.loss_weights[1:]))
        digest, length = f"{int(rows.hashes[number]):016x}", int(rows.lengths[number])
        found.append(RowLine(number, file, row, digest, length, trained, weights, beginning(sample, tokenizer)))
    return found


def beginning(sample: Sample, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """The start of a row on one line, without control characters."""
    if tokenizer is not None and len(sample.input_ids):
        return legible(str(tokenizer.decode(sample.input_ids[:SHOWN_TOKENS].tolist())), SHOWN_LETTERS)
    return legible("; ".join(field_text(name, values) for name, values in sample.fields.items()), SHOWN_LETTERS)
