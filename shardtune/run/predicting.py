"""Predictions of a trained task: labels, numbers, vectors, scores or texts for rows without targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardtune.batch import Sample
from shardtune.data.encoder import Row, RowError, caused_by
from shardtune.data.sources.inference_rows import InferenceRows, dropped_note
from shardtune.data.sources.resolve import resolve_sources
from shardtune.errors import ConfigError, DataError
from shardtune.models.tasks.task import TaskRoot, TextTask
from shardtune.training.worker.adapter_task import root_of
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.run_context import silent

Encoded = tuple[Row, Sample, bool]
"""A row, as the model reads it, and whether it was cut."""
WRITTEN = ("prediction", "truncated")
"""Keys of each line; a row's own columns of these names are written with `given_` before them."""
ROWS_AT_ONCE = 32
"""Rows of a forward, unless the recipe has `eval_micro_batch_size` or `micro_batch_size`."""


def predict(
    worker: FSDPSftWorker,
    rows: str | Path | Sequence[Mapping[str, Any]],
    *,
    prepared: bool = False,
    report: Callable[[str], None] = silent,
) -> Iterator[dict[str, Any]]:
    """For each row its columns and `prediction`, in order; and `truncated` where it was cut at `data.max_length` or at
    the model's positions. The row's own columns of these names are `given_prediction` and `given_truncated`.

    Args:
        worker: ready to evaluate.
        rows: a file, or rows in memory; they need no targets. A row that `data.transform` drops has no prediction.
        prepared: the rows are as `data.transform` returns them, with the names known here.
        report: receives a line about the rows that are dropped, and one about columns that have no part in predictions.

    Raises:
        ConfigError: the model is of no task by name.
        DataError: a row cannot be used; names file and row.
    """
    if not isinstance(worker, SFTWorker) or not isinstance(worker.adapter, TextTask):
        kind = type(worker.adapter).__name__ if isinstance(worker, SFTWorker) else type(worker).__name__
        raise ConfigError(
            f"{kind} is of no task that predicts: those are listed by shardtune models",
            where="actor.model.model_type",
            remedy="shardtune generate RUN answers prompts, shardtune act RUN gives actions",
        )
    worker.model.eval()
    actor = worker.recipe.actor
    size = actor.eval_micro_batch_size or actor.micro_batch_size or ROWS_AT_ONCE
    waiting: list[Encoded] = []
    for one in _encoded(worker, rows, InferenceRows.of(worker.recipe.data, prepared=prepared), report):
        waiting.append(one)
        if len(waiting) == size:
            yield from _predicted(worker, waiting)
            waiting = []
    if waiting:
        yield from _predicted(worker, waiting)


def _encoded(
    worker: SFTWorker,
    rows: str | Path | Sequence[Mapping[str, Any]],
    reading: InferenceRows,
    report: Callable[[str], None],
) -> Iterator[Encoded]:
    assert isinstance(worker.adapter, TextTask)
    spec = str(rows) if isinstance(rows, str | Path) else [dict(row) for row in rows]
    data = worker.recipe.data.model_copy(update={"transform": None, "columns": {}})
    dropped, unread = 0, dict[str, None]()
    for source in resolve_sources(spec, data, purpose="eval", name_format=lambda row: "rows", report=silent):
        for file in source.files:
            for number, row in source.rows(file):
                where = f"{file.label}: row {number:,}"
                try:
                    if isinstance(row, RowError):
                        raise row
                    prepared = reading.read(row, where)
                    if prepared is not None:
                        yield prepared, *_sample(worker.adapter, prepared)
                        unread |= dict.fromkeys(worker.adapter.without_part(prepared))
                except Exception as error:  # a tokenizer may raise anything for what it does not expect
                    reason = caused_by(error, row).reason
                    raise DataError(reason, where=where, remedy="mend the row, or take it out") from error
                dropped += prepared is None
    if dropped:
        report(dropped_note(dropped))
    if unread:
        report(f"columns that are not read for predictions: {', '.join(map(str, unread))}")


def _sample(adapter: TextTask, row: Row) -> tuple[Sample, bool]:
    """A row for the model, and whether it was cut."""
    whole = adapter.encode_input(row)
    sample = adapter.encoder(with_prompts=False).within(whole)
    return sample, sample.size < whole.size


@torch.no_grad()
def _predicted(worker: SFTWorker, rows: Sequence[Encoded]) -> Iterator[dict[str, Any]]:
    task, root = worker.adapter, root_of(worker.model)
    assert isinstance(task, TextTask)
    assert isinstance(root, TaskRoot)
    batch = task.collate([sample for _, sample, _ in rows], range(len(rows)), {}).to(worker.device)
    for (row, _, is_cut), record in zip(rows, root.predict(batch), strict=True):
        kept = {f"given_{name}" if name in WRITTEN else name: value for name, value in row.items()}
        yield {**kept, "prediction": task.prediction(record), **({"truncated": True} if is_cut else {})}
