"""Predictions of a trained model for rows without targets: those of a task by name, or of a user's adapter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardtune.batch import Sample
from shardtune.batch.seeds import derive_seed, generators_kept, seed_generators, seeded
from shardtune.config.user_code import named_errors
from shardtune.data.encoder import Row, RowError, caused_by
from shardtune.data.sources.inference_rows import InferenceRows, dropped_note
from shardtune.data.sources.resolve import resolve_sources
from shardtune.errors import ConfigError, DataError, ModelError, counted
from shardtune.models.adapter import Adapter
from shardtune.models.adapter_encoder import FieldEncoder
from shardtune.models.tasks.task import TextTask
from shardtune.parallel.precision import COMPUTE_DTYPE
from shardtune.training.step import ROW_DRAWS
from shardtune.training.worker.adapter_task import root_of
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.run_context import silent

Encoded = tuple[Row, Sample, bool]
"""A row, as the model reads it, and whether it was cut."""
WRITTEN = ("prediction", "truncated")
"""Keys of each line; a row's own columns of these names are written with `given_` before them."""
ADAPTER = "actor.model.adapter"
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
    the model's positions. The row's own columns of these names are `given_prediction` and `given_truncated`. What a
    model, `encode_input` and `data.transform` draw is the same in each call.

    Args:
        worker: ready to evaluate.
        rows: a file, or rows in memory; they need no targets. A row that `data.transform` drops has no prediction.
        prepared: the rows are as `data.transform` returns them, with the names known here.
        report: receives a line about the rows that are dropped, and one about columns that have no part in predictions.

    Raises:
        ConfigError: the model is of no task by name, and its adapter has no `predict_rows`.
        ModelError: `predict_rows` returned something else than a value for each row.
        DataError: a row cannot be used; names file and row.
    """
    if not isinstance(worker, SFTWorker) or not worker.adapter.predicts_rows:
        raise _predicts_nothing(worker)
    worker.model.eval()
    actor = worker.recipe.actor
    size = actor.eval_micro_batch_size or actor.micro_batch_size or ROWS_AT_ONCE
    size = size if worker.adapter.rows_share_forwards or worker.adapter.rows_of_one_length else 1
    waiting, done = list[Encoded](), 0
    for one in _encoded(worker, rows, InferenceRows.of(worker.recipe.data, prepared=prepared), report):
        if not done and not waiting and isinstance(worker.adapter, TextTask):  # without data nothing was probed before
            dtype = COMPUTE_DTYPE[actor.model.precision]
            for note in worker.adapter.probe_assumptions(root_of(worker.model), [one[1]], worker.device, dtype):
                report(note)
        waiting.append(one)
        if len(waiting) == size:
            yield from _predicted(worker, waiting, done)
            waiting, done = [], done + size
    if waiting:
        yield from _predicted(worker, waiting, done)


def _alike(adapter: Adapter, samples: Sequence[Sample]) -> Iterator[list[int]]:
    """The places of the samples that share a forward: all, or those of each length."""
    if adapter.rows_share_forwards:
        yield [*range(len(samples))]
        return
    for length in dict.fromkeys(sample.length for sample in samples):
        yield [place for place, sample in enumerate(samples) if sample.length == length]


def _predicts_nothing(worker: FSDPSftWorker) -> ConfigError:
    kind = type(worker.adapter) if isinstance(worker, SFTWorker) else type(worker)
    remedy = "shardtune generate RUN answers prompts, shardtune act RUN gives actions"
    if not kind.__module__.startswith("shardtune."):
        remedy = (
            f"write {kind.__name__}.predict_rows(model, batch), which returns a value for each row"
            if isinstance(worker, SFTWorker)
            else "load final/ in code of your own, as a worker of your own reads its rows itself"
        )
    return ConfigError(
        f"{kind.__name__} is of no task that predicts: those are listed by shardtune models",
        where="actor.model.model_type",
        remedy=remedy,
    )


def _encoded(
    worker: SFTWorker,
    rows: str | Path | Sequence[Mapping[str, Any]],
    reading: InferenceRows,
    report: Callable[[str], None],
) -> Iterator[Encoded]:
    adapter = worker.adapter
    sample = _of_task(adapter) if isinstance(adapter, TextTask) else _of_fields(adapter)
    spec = str(rows) if isinstance(rows, str | Path) else [dict(row) for row in rows]
    data = worker.recipe.data.model_copy(update={"transform": None, "columns": {}})
    dropped, unread, remedy = 0, dict[str, None](), "mend the row, or take it out"
    if type(adapter).encode_input is Adapter.encode_input:
        kind = type(adapter).__name__
        remedy = f"mend the row; if it lacks its target alone, write {kind}.encode_input(row), which leaves that out"
    for source in resolve_sources(spec, data, purpose="eval", name_format=lambda row: "rows", report=silent):
        for file in source.files:
            for number, row in source.rows(file):
                where = f"{file.label}: row {number:,}"
                try:
                    if isinstance(row, RowError):
                        raise row
                    with seeded(derive_seed(worker.recipe.runner.seed, number, "encode")):
                        prepared = reading.read(row, where)
                        made = None if prepared is None else sample(prepared)
                    if prepared is not None and made is not None:
                        yield prepared, *made
                        unread |= dict.fromkeys(adapter.without_part(prepared) if isinstance(adapter, TextTask) else ())
                except Exception as error:  # a tokenizer may raise anything for what it does not expect
                    reason = caused_by(error, row).reason
                    raise DataError(reason, where=where, remedy=remedy) from error
                dropped += prepared is None
    if dropped:
        report(dropped_note(dropped))
    if unread:
        report(f"columns that are not read for predictions: {', '.join(map(str, unread))}")


def _of_task(adapter: TextTask) -> Callable[[Row], tuple[Sample, bool]]:
    """Makes a row one for the model, and whether it was cut."""
    encoder = adapter.encoder(with_prompts=False)

    def sample(row: Row) -> tuple[Sample, bool]:
        whole = adapter.encode_input(row)
        fitting = encoder.within(whole)
        return fitting, fitting.size < whole.size

    return sample


def _of_fields(adapter: Adapter) -> Callable[[Row], tuple[Sample, bool]]:
    """As `_of_task`, of a user's adapter."""
    encoder = adapter.encoder(with_prompts=False)
    if not isinstance(encoder, FieldEncoder):
        raise ConfigError(
            f"the rows of {type(adapter).__name__} are not read by its encode alone",
            where=f"{type(adapter).__name__}.predict_rows",
            remedy="shardtune act RUN gives the actions of a model of robot data",
        )

    def sample(row: Row) -> tuple[Sample, bool]:
        whole = encoder.encode_input(row)
        fitting = encoder.fit(whole)
        if isinstance(fitting, list):
            raise RowError(f"it is longer than data.max_length ({whole.size:,} positions), and split in training")
        return fitting, fitting.size < whole.size

    return sample


@torch.no_grad()
def _predicted(worker: SFTWorker, rows: Sequence[Encoded], done: int) -> Iterator[dict[str, Any]]:
    """The lines of some rows; `done` is the number of those before them."""
    adapter, root, seed = worker.adapter, root_of(worker.model), worker.recipe.runner.seed
    module = type(adapter).__module__  # that of a notebook has no file
    file = vars(sys.modules[module]).get("__file__") if module in sys.modules else None
    code = f"{file or module}:{type(adapter).__name__}"
    where, values = f"{type(adapter).__name__}.predict_rows", dict[int, object]()
    for places in _alike(adapter, [sample for _, sample, _ in rows]):
        with generators_kept():
            seed_generators(derive_seed(seed, done, "predict"))
            with named_errors(code, ADAPTER, "collate"):  # no weights: rows without targets have none
                batch = adapter.collate([rows[place][1] for place in places], [done + place for place in places], {})
            with named_errors(code, ADAPTER, "predict_rows"):
                found = root.predict(replace(batch.to(worker.device), key=derive_seed(seed, ROW_DRAWS)))
        values |= zip(places, _a_value_each(found, len(places), where), strict=True)
    for place, (row, _, is_cut) in enumerate(rows):
        kept = {f"given_{name}" if name in WRITTEN else name: own for name, own in row.items()}
        yield {**kept, "prediction": _as_json(values[place], where), **({"truncated": True} if is_cut else {})}


def _a_value_each(found: object, rows: int, where: str) -> list[object]:
    """What `predict_rows` returned for some rows, as a list.

    Raises:
        ModelError: it is not a value for each.
    """
    values: list[object] | None = [*found] if isinstance(found, torch.Tensor | np.ndarray | Sequence) else None
    if values is None or isinstance(found, str) or len(values) != rows:
        made = f"a {type(found).__name__}" if values is None else counted(len(values), "value")
        raise ModelError(
            f"for {counted(rows, 'row')} it returned {made}",
            where=where,
            remedy="return a value for each row, in order",
        )
    return values


def _as_json(value: object, where: str) -> object:
    """A prediction in types of JSON, tensors and arrays as lists.

    Raises:
        ModelError: it has no form in JSON.
    """
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _as_json(each, where) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each, where) for each in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise ModelError(
        f"it returned a {type(value).__name__} for a row, which JSON has no form for",
        where=where,
        remedy="return numbers, texts, tensors, or lists and dicts of them",
    )
