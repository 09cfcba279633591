"""The first step at which two runs hold other rows: computed from their recipes and data, without a model.

The order of rows is a pure function of (seed, epoch, rows consumed), so nothing about rows has to be recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardtune.config.schema import short_key
from shardtune.data.cache.dataset import Part, TokenDataset
from shardtune.data.cache.entry import Entry
from shardtune.data.cache_directory import cache_root
from shardtune.data.loader.order import DataOrder, OrderSource
from shardtune.data.quarantine import without_quarantined
from shardtune.errors import ShardtuneError
from shardtune.run.diff.continued import other_before
from shardtune.run.stored_run import StoredRun
from shardtune.training.worker.run_context import silent

BLOCK_ROWS = 1 << 18
"""Rows that are compared at a time."""
SHOWN_ROWS = 3
OF_ORDER = ("runner.seed", "data.shuffle", "actor.global_batch_size", "actor.global_batch_tokens", "data.eval_split")
"""Keys that the order of rows depends on."""
LEFT_OUT_BY = "data.quarantine"


@dataclass(frozen=True, slots=True)
class RowsDifference:
    """The rows of two runs, step by step.

    Attributes:
        steps: how many of both were compared.
        step: the first step that holds other rows; None: there is none, or it is not known.
        first: rows of that step that only the first run has, at most three; `more` has how many there are.
        second: likewise.
        more: how many rows of that step only the first run has, and only the second.
        by: what rows were told apart by.
        unknown: why rows were not compared, or not to the end; "" if they were.
    """

    steps: int = 0
    step: int | None = None
    first: list[str] = field(default_factory=list)
    second: list[str] = field(default_factory=list)
    more: tuple[int, int] = (0, 0)
    by: str = ""
    unknown: str = ""


class NotKnown(Exception):
    """Why the rows of a run cannot be computed."""


@dataclass(frozen=True, slots=True)
class StepBlock:
    """Consecutive steps: the size of each, and their rows, step after step."""

    sizes: np.ndarray
    rows: np.ndarray

    def cut(self, first: int, last: int) -> StepBlock:
        """The steps [first, last)."""
        ends = np.concatenate([[0], np.cumsum(self.sizes)])
        return StepBlock(self.sizes[first:last], self.rows[ends[first] : ends[last]])


class RunOrder:
    """The order of a run's rows, from its records and the cache.

    Args:
        run: with the spans of its sources in the manifest.
        rows: its encoded rows; None: rows are known by their numbers alone.

    Attributes:
        uncertain: steps that were passed over, where it is not known which ones.
    """

    def __init__(self, run: StoredRun, rows: TokenDataset | None) -> None:
        recipe = run.resolved
        lost = [key for key in OF_ORDER if not run.is_unchanged(key)]
        if recipe is None or lost:
            what = f"{short_key(lost[0])} had another value" if lost else "a variable of its recipe is not set here"
            raise NotKnown(f"{run.path}: {what}, in the environment of that time")
        if recipe.data.cache != "whole":
            raise NotKnown(f"{run.path}: its rows were tokenised file by file (data.cache: {recipe.data.cache})")
        self._tokens = recipe.actor.global_batch_tokens or 0
        self._batch = 0 if self._tokens else (recipe.actor.global_batch_size or 0)
        if rows is None and (self._tokens or recipe.data.quarantine is not None):
            why = "steps are cut by tokens" if self._tokens else "data.quarantine leaves rows out"
            raise NotKnown(
                f"{run.path}: {why}, and its encoded rows are no longer in the cache, or are no longer those of the run"
            )
        self._left_out = np.empty(0, np.int64) if rows is None else rows.left_out
        self._order = DataOrder(
            [OrderSource(**span) for span in run.manifest["data"]["sources"]],
            seed=recipe.runner.seed,
            shuffle=recipe.data.shuffle,
            global_batch_size=self._batch or None,
            global_batch_tokens=self._tokens or None,
            lengths=rows.lengths if self._tokens and rows is not None else None,
            left_out=self._left_out,
        )
        self._size = self._order.rows_per_epoch
        self._run, self._rows = run, rows
        self.uncertain = 0

    def locate(self, row: int) -> str:
        """A row as `file:number`, or by its number alone."""
        return f"row {row:,}" if self._rows is None else self._rows.locate(row)

    def keys(self, rows: np.ndarray) -> np.ndarray:
        """What rows are told apart by: the hash of their content, or their numbers."""
        return rows if self._rows is None else self._rows.hashes[rows]

    def blocks(self) -> Iterator[StepBlock]:
        """The rows of all steps from the first on, without end; steps that were passed over are left out."""
        logged_at, positions = _logged_positions(self._run, self._size)
        step = epoch = start = 0
        while True:
            block, ends = self._block(epoch, start)
            steps = np.arange(step + 1, step + 1 + len(ends))
            known = np.minimum(np.searchsorted(logged_at, steps), len(logged_at) - 1) if len(logged_at) else steps[:0]
            wrong = np.flatnonzero((logged_at[known] == steps) & (positions[known] != ends)) if len(known) else known
            good = int(wrong[0]) if len(wrong) else len(ends)
            if good:
                yield block.cut(0, good)
                step += good
            else:
                good = self._passed_over(ends, int(positions[known[0]]))
                at = int(known[0])
                self.uncertain += bool(at and logged_at[at - 1] != step)
            start = int(ends[good - 1]) - epoch * self._size
            if start >= self._size:
                epoch, start = epoch + 1, 0

    def _passed_over(self, ends: np.ndarray, position: int) -> int:
        """The steps that were passed over before the one that ends at a position."""
        if position > ends[-1]:
            return len(ends)
        found = np.flatnonzero(ends == position)
        if not len(found):
            raise NotKnown(
                f"{self._run.path}: its positions in the data are not those of its recipe's order: data or recipe "
                "changed when it was continued"
            )
        return int(found[0])

    def _block(self, epoch: int, start: int) -> tuple[StepBlock, np.ndarray]:
        """Steps from a place of an epoch on, at least one, and the position after each, as `DataOrder.cut` cuts them.

        Worked example: of places 0 to 5 the rows of 1, 2 and 5 are left out, and a step has two rows: those at 0 and 3,
        then the one at 4. The first step ends at 4, where the next one's first row is, and the second at 6.
        """
        rows = self._order.rows(epoch, start, start + BLOCK_ROWS)
        is_end = start + len(rows) >= self._size
        kept = np.flatnonzero(~np.isin(rows, self._left_out))
        sizes = self._sizes(rows[kept], is_end)
        nexts = np.cumsum(sizes)
        if not is_end:  # where a step ends is known from the row behind it
            sizes, nexts = sizes[nexts < len(kept)], nexts[nexts < len(kept)]
        if not len(sizes):
            rows, end = self._order.cut(epoch, start)
            return StepBlock(np.array([len(rows)]), rows), np.array([epoch * self._size + end])
        ends = start + np.append(kept, len(rows))[nexts]
        return StepBlock(sizes, rows[kept][: nexts[-1]]), epoch * self._size + ends

    def _sizes(self, rows: np.ndarray, is_end: bool) -> np.ndarray:
        """The sizes of the steps that lie within `rows`, of which the first one begins a step."""
        if self._tokens:
            return self._sizes_by_tokens(rows, is_end)
        sizes = np.full(len(rows) // self._batch, self._batch)
        rest = len(rows) % self._batch
        return np.append(sizes, rest) if rest and is_end else sizes

    def _sizes_by_tokens(self, rows: np.ndarray, is_end: bool) -> np.ndarray:
        assert self._rows is not None
        tokens = np.cumsum(self._rows.lengths[rows], dtype=np.int64)
        sizes, at = list[int](), 0
        while at < len(rows):
            before = int(tokens[at - 1]) if at else 0
            stop = max(at + 1, int(np.searchsorted(tokens, before + self._tokens, side="right")))
            if stop >= len(rows) and not is_end:
                break  # it may go on behind these rows
            sizes.append(stop - at)
            at = stop
        return np.array(sizes, np.int64)


def compare_rows(first: StoredRun, second: StoredRun, steps: int) -> RowsDifference:
    """The rows of the first steps of two runs.

    Args:
        first: a run.
        second: another.
        steps: how many both have done.
    """
    try:
        orders, by = _orders(first, second)
    except NotKnown as reason:
        return RowsDifference(unknown=str(reason))
    streams = [order.blocks() for order in orders]
    rest: list[StepBlock | None] = [None, None]
    done = 0
    try:
        while done < steps:
            blocks = [next(stream) if left is None else left for left, stream in zip(rest, streams, strict=True)]
            here = min(steps - done, *(len(block.sizes) for block in blocks))
            parts = [block.cut(0, here) for block in blocks]
            at = _first_difference(*(StepBlock(p.sizes, o.keys(p.rows)) for p, o in zip(parts, orders, strict=True)))
            if at is not None:
                rows = [part.cut(at, at + 1).rows for part in parts]
                return _described(done + at, rows, orders, by)
            rest = [block.cut(here, len(block.sizes)) if len(block.sizes) > here else None for block in blocks]
            done += here
    except NotKnown as reason:
        return RowsDifference(done, by=by, unknown=str(reason))
    unsure = sum(order.uncertain for order in orders)
    why = f"steps were passed over at {unsure} places between logged ones: those before the next one may differ"
    return RowsDifference(done, by=by, unknown=why if unsure else "")


def _first_difference(one: StepBlock, other: StepBlock) -> int | None:
    """The first step with other rows; their order within a step has no meaning."""
    if not np.array_equal(one.sizes, other.sizes):
        size = min(len(one.sizes), len(other.sizes))
        at = int(np.flatnonzero(one.sizes[:size] != other.sizes[:size])[0])
        before = _first_difference(one.cut(0, at), other.cut(0, at)) if at else None
        return at if before is None else before
    ends = np.cumsum(one.sizes)
    for step in np.unique(np.searchsorted(ends, np.flatnonzero(one.rows != other.rows), side="right")).tolist():
        here = slice(int(ends[step] - one.sizes[step]), int(ends[step]))
        if not np.array_equal(np.sort(one.rows[here]), np.sort(other.rows[here])):
            return step
    return None


def _described(done: int, rows: list[np.ndarray], orders: list[RunOrder], by: str) -> RowsDifference:
    """A step's rows that one run alone has."""
    counts = [Counter(order.keys(numbers).tolist()) for order, numbers in zip(orders, rows, strict=True)]
    shown, more = [], []
    for mine, order, numbers in zip((0, 1), orders, rows, strict=True):
        left = counts[mine] - counts[1 - mine]
        named = []
        for number, key in zip(numbers.tolist(), order.keys(numbers).tolist(), strict=True):
            if left[key] > 0:
                left[key] -= 1
                named.append(number)
        shown.append([order.locate(number) for number in named[:SHOWN_ROWS]])
        more.append(len(named))
    return RowsDifference(done, done + 1, shown[0], shown[1], (more[0], more[1]), by)


def _orders(first: StoredRun, second: StoredRun) -> tuple[list[RunOrder], str]:
    """The orders of both runs, and what their rows are told apart by."""
    for run in (first, second):
        data = run.manifest.get("data", {})
        if not data.get("sources"):
            why = "it was made by an earlier version" if data.get("train") else "they come from a loader of its own"
            raise NotKnown(f"{run.path}: the order of its rows is not recorded, as {why}")
        if any(file["key"] is None for file in data["train"]):
            raise NotKnown(f"{run.path}: its rows were tokenised file by file (data.cache: by_file)")
        other = other_before(run, (*OF_ORDER, LEFT_OUT_BY))
        if other:
            raise NotKnown(f"{run.path}: {other}, so one order does not hold for all of its steps")
    data = [run.manifest["data"] for run in (first, second)]
    if data[0]["train_fingerprint"] == data[1]["train_fingerprint"]:
        # The same rows in the same order: their numbers are enough, but steps that are cut by tokens need lengths, and
        # rows that are left out are known by their content.
        needed = ("actor.global_batch_tokens", LEFT_OUT_BY)
        rows = [_encoded_rows(run) if any(map(run.settings.get, needed)) else None for run in (first, second)]
        if all(one is None for one in rows):
            return [RunOrder(run, None) for run in (first, second)], "their numbers in the same data"
    rows = [_encoded_rows(run) for run in (first, second)]
    for run, encoded in zip((first, second), rows, strict=True):
        if encoded is None:
            raise NotKnown(
                f"{run.path}: its encoded rows are no longer in the cache, or are no longer those of the run, so "
                "rows cannot be compared"
            )
    return [RunOrder(run, encoded) for run, encoded in zip((first, second), rows, strict=True)], "their content"


def _encoded_rows(run: StoredRun) -> TokenDataset | None:
    """The training rows of a run from the cache; None where they are gone, or are no longer the same."""
    recipe, data = run.resolved, run.manifest["data"]
    if recipe is None:
        return None
    entries = cache_root(recipe.data.cache_dir) / "entries"
    try:
        parts = [
            Part(Entry(entries / file["key"][:2] / file["key"]), file["source"], file["file"]) for file in data["train"]
        ]
        rows = TokenDataset(parts, {span["name"]: span["weight"] for span in data["sources"]})
        held_out = None
        if recipe.data.eval_split and recipe.data.eval_data_paths is None:
            rows, held_out = rows.split_by_hash(recipe.data.eval_split)
        if recipe.data.quarantine is not None:
            rows = without_quarantined(rows, Path(recipe.data.quarantine), held_out=held_out, report=silent)
    except (OSError, ValueError, ShardtuneError):  # gone, or of another layout
        return None
    return rows if rows.fingerprint == data["train_fingerprint"] else None


def _logged_positions(run: StoredRun, rows_per_epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The logged steps, and the rows consumed after each, over all epochs."""
    steps, positions = list[int](), list[int]()
    for line in run.lines():
        epoch, step = line.get("epoch"), line["step"]
        if epoch is not None and step:
            steps.append(int(step))
            positions.append(round(epoch * rows_per_epoch))
    return np.array(steps, np.int64), np.array(positions, np.int64)
