"""Replays a step of a run: goes to the nearest checkpoint, trains the steps up to it, and measures it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from shardtune.batch import Sample
from shardtune.data.loader.protocol import MicroBatch, Step
from shardtune.data.loader.step_loader import StepLoader
from shardtune.data.user_loader.batch import UserBatch, describe_batch
from shardtune.models.source_losses import RowTargets
from shardtune.parallel.ranks import leave_ranks
from shardtune.run.api import Run, load_run
from shardtune.run.choose_worker import NOTHING, Objects
from shardtune.run.display import Display
from shardtune.run.replay.measure import CLOSE, Measured, measure
from shardtune.run.replay.place import Place, RowLine, lines_of, place_of
from shardtune.run.replay.record import LOSS, Record, Start, check_step
from shardtune.run.replay.session import at, check_data, made_worker, stand_for
from shardtune.run.replay.settings import settings_of
from shardtune.run.train_rank import deterministic
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.cached_rows import CachedRowsTask
from shardtune.training.worker.reported import overrides_training, training_method

OWN = "shardtune."
MOST_TOKENS, TOKENS_BEFORE = 6, 8
"""Of the worst tokens of a row, how many are named, and how many tokens before each."""


@dataclass(frozen=True, slots=True)
class TokenLine:
    """A trained token of a row: its place, its text, the tokens before it, and its loss."""

    place: int
    text: str
    before: str
    loss: float


@dataclass(frozen=True, slots=True)
class WorstRow:
    """A row with a high loss, whole.

    Attributes:
        line: of it in the list.
        sample: of it.
        tokens: its worst tokens, the worst first; none where the loss is not one of tokens.
    """

    line: RowLine
    sample: Sample
    tokens: Sequence[TokenLine] = ()


@dataclass(frozen=True, slots=True)
class Replay:
    """A step of a run, listed or computed again.

    Attributes:
        run_dir: of the run.
        step: as in metrics.jsonl.
        start: where it began; None where nothing was computed.
        ranks: on which the step was trained, or would be.
        rows: of the step, in its order; empty where a user's loader does not number them.
        recorded: its line of metrics.jsonl; empty if it has none.
        measured: None where nothing was computed.
        worst: rows by loss, the worst first.
        batches: a description of each micro-batch of a user's loader.
        passed: the rows of each step that was passed over between the step before and this one.
        tokenizer: for showing rows.
        notes: what a reader should know.
        trained: whether the run has done it; False for the one after its last.
    """

    run_dir: Path
    step: int
    start: Start | None
    ranks: int
    rows: Sequence[RowLine]
    recorded: Mapping[str, float]
    measured: Measured | None = None
    worst: Sequence[WorstRow] = ()
    batches: Sequence[str] = ()
    passed: Sequence[Sequence[RowLine]] = ()
    tokenizer: PreTrainedTokenizerBase | None = None
    notes: Sequence[str] = field(default_factory=list)
    trained: bool = True


def replay(
    run: str | Path | Run,
    step: int,
    *,
    only_rows: bool = False,
    checkpoint: str | None = None,
    worst: int = 3,
    trust: Sequence[str] = (),
    objects: Objects = NOTHING,
    display: Display | None = None,
) -> Replay:
    """One step of a run again, in one process; nothing of the run changes.

    Args:
        run: a run, or its directory.
        step: its number in metrics.jsonl: the step that is computed after `step - 1` steps.
        only_rows: list the rows; no model is loaded and nothing is computed.
        checkpoint: where to begin: a step, a path, latest, best, or initial; None: the nearest before the step.
        worst: how many rows with the highest losses are looked at token by token.
        trust: as for `load_run`.
        objects: in memory, if the run was trained with any.
        display: receives progress; None: standard error.

    Raises:
        ShardtuneError: there is no such step or checkpoint, or the data is not what it was.
    """
    found = run if isinstance(run, Run) else load_run(run, trust=trust)
    recipe, record, screen = found.executable_recipe(), Record(found.dir), display or Display()
    with recipe.spelling.in_errors():
        check_step(record, step)
        recipe = found.consented(settings_of(recipe, record, step))
        start, ranks = record.start(step, checkpoint), record.ranks(step)
        worker = made_worker(recipe, record, objects, screen.report)
        try:
            check_data(worker, record, start, step)
            notes = stand_for(worker, recipe, ranks)
            listed, place = _listed(worker, record, start, step, ranks)
            if only_rows:
                return listed
            listed = replace(listed, start=start, notes=[*notes, *listed.notes])
            with deterministic(recipe.runner.deterministic):
                return _computed(worker, record, listed, place, start, worst, screen)
        finally:
            leave_ranks(worker.ranks)


def _listed(worker: FSDPSftWorker, record: Record, start: Start, step: int, ranks: int) -> tuple[Replay, Place | None]:
    """The rows of a step, which the order of rows gives, and its place; None with a loader of the user's."""
    task, recorded = worker.task, record.steps.get(step, {})
    plain = Replay(record.run_dir, step, None, ranks, (), recorded, trained=step <= record.last_step)
    if not isinstance(task, CachedRowsTask) or not type(worker).build_dataloader.__module__.startswith(OWN):
        note = f"{type(worker).__name__} makes its batches itself: their rows have no numbers"
        return replace(plain, notes=[note]), None
    place = place_of(task.training_loader(worker.ranks), record, start, step)
    rows, passed = (lines_of(task, place.rows, worker.tokenizer), place.passed)
    return replace(
        plain,
        rows=rows,
        passed=[lines_of(task, numbers, worker.tokenizer) for numbers in passed],
        tokenizer=worker.tokenizer,
        notes=[place.note] if place.note else [],
    ), place


def _computed(
    worker: FSDPSftWorker,
    record: Record,
    listed: Replay,
    place: Place | None,
    start: Start,
    worst: int,
    screen: Display,
) -> Replay:
    """The step with its losses and norms."""
    at(worker, start, screen.report)
    notes = [*listed.notes, *_train_up_to(worker, record, listed.step, start, screen)]
    with screen.during(f"computing step {listed.step}"):
        if overrides_training(worker):
            notes.append(f"{type(worker).__name__} has a run_training of its own: the step is not taken apart")
            return replace(listed, measured=Measured(training_method(worker)(), "", {}), notes=notes)
        loader = worker.loader
        if place is not None and isinstance(loader, StepLoader):
            step = loader.step(place.state)
        else:
            worker.position.move_to(record.stopped_before(listed.step) or worker.position.state)
            step = next(worker.position.steps)
        measured = measure(worker, step)
    if measured.problem:
        notes.append(f"training passes this step over: {measured.problem}")
    rows = [_with_losses(line, measured) for line in listed.rows]
    logged = listed.recorded.get(LOSS)
    if logged is not None and not _apart(logged, measured.metrics[LOSS]) <= CLOSE:
        notes.extend(record.uncertain_settings(listed.step, start))
    return replace(
        listed,
        rows=rows,
        measured=measured,
        worst=_worst(worker, rows, measured, worst),
        batches=_described(step),
        notes=[*notes, *measured.notes],
    )


def _train_up_to(worker: FSDPSftWorker, record: Record, step: int, start: Start, screen: Display) -> list[str]:
    """Train the steps between a checkpoint and the one before `step`; returns a note on how they agree with the run."""
    number, largest = step - 1 - start.step, 0.0
    if not number:
        return []
    screen.report(f"training {number:,} step{'' if number == 1 else 's'} after {start}")
    train = training_method(worker)
    screen.started(worker.step, step - 1)
    placed = -1
    while worker.step < step - 1:
        if worker.step != placed and isinstance(worker.loader, StepLoader):
            # Where the run has gone on after a spike or a rollback, the position is not that behind the last step.
            placed = worker.step
            worker.position.move_to(place_of(worker.loader, record, start, placed + 1).state)
        metrics = train()
        screen.stepped(worker.step, metrics)
        before = record.steps.get(worker.step, {}).get(LOSS)
        if before is not None and LOSS in metrics:
            largest = max(largest, _apart(before, metrics[LOSS]))
    screen.finished()
    steps = f"the {number:,} step{'' if number == 1 else 's'} before it"
    return [f"{steps} had to be trained again; their losses differ from the recorded ones by {largest:.1g} at most"]


def _apart(one: float, other: float) -> float:
    """The relative difference of two numbers; infinite where one alone is not finite."""
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other) / max(abs(one), abs(other), 1e-12)
    return 0.0 if math.isfinite(one) == math.isfinite(other) else math.inf


def _with_losses(line: RowLine, measured: Measured) -> RowLine:
    return replace(line, losses=dict(measured.row_losses.get(line.number, {})))


def _worst(worker: FSDPSftWorker, rows: Sequence[RowLine], measured: Measured, most: int) -> list[WorstRow]:
    """The rows with the highest mean losses; those that are not finite first."""
    task = worker.task
    if not isinstance(task, CachedRowsTask):
        return []
    known = [(line.loss, line) for line in rows if line.loss is not None]
    known.sort(key=lambda pair: pair[0] if math.isfinite(pair[0]) else math.inf, reverse=True)
    found = []
    for _, line in known[:most]:
        sample = task.training_rows().row(line.number)
        targets = measured.targets.get(line.number)
        tokens = [] if targets is None or worker.tokenizer is None else _tokens(sample, targets, worker.tokenizer)
        found.append(WorstRow(line, sample, tokens))
    return found


def _tokens(sample: Sample, targets: RowTargets, tokenizer: PreTrainedTokenizerBase) -> list[TokenLine]:
    order = np.argsort(-np.nan_to_num(targets.losses, nan=np.inf), kind="stable")[:MOST_TOKENS]
    ids, found = sample.input_ids, []
    for place, loss in zip(targets.places[order].tolist(), targets.losses[order].tolist(), strict=True):
        before = ids[max(0, place - TOKENS_BEFORE) : place].tolist()
        found.append(TokenLine(place, str(tokenizer.decode([int(ids[place])])), str(tokenizer.decode(before)), loss))
    return found


def _described(step: Step[MicroBatch]) -> list[str]:
    """The fields of each micro-batch of a user's loader."""
    return [describe_batch(batch.fields) for batch in step.micro_batches if isinstance(batch, UserBatch)]
