"""The rows of a step: read from the recipe's data, or assumed from sizes that are typed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardtune.batch import TOKENS, Batch, PackedBatch, Sample
from shardtune.config import Recipe
from shardtune.config.rank_layout import Layout
from shardtune.data.cache.by_file import RowsByFile, rows_to_show
from shardtune.data.loader.packing import pack
from shardtune.data.loader.protocol import DataState
from shardtune.data.prepare import PreparedData, prepare_data
from shardtune.errors import ConfigError, counted
from shardtune.models.adapter import Adapter
from shardtune.models.language_model import LanguageModel
from shardtune.models.recipe_hooks import Hooks
from shardtune.parallel.ranks import Ranks
from shardtune.run.plan.ledger import CPU
from shardtune.run.plan.simulation import tensors_of
from shardtune.training.build.model import build_empty
from shardtune.training.worker.adapter_task import AdapterTask
from shardtune.training.worker.data_position import DataPosition
from shardtune.training.worker.task import UserMethods

STEPS_LOOKED_AT = 8
ALIKE = 2
"""Micro-batches of a step that are computed: the first and those after it differ, others are alike."""


@dataclass(frozen=True, slots=True)
class Given:
    """Sizes that are typed in place of data.

    Attributes:
        tokens: of all rows together; None: unknown.
        length: tokens of a row; None: `data.max_length`.
    """

    tokens: int | None = None
    length: int | None = None

    def __bool__(self) -> bool:
        return self.tokens is not None or self.length is not None


@dataclass(frozen=True, slots=True)
class Work:
    """What the ranks compute.

    Attributes:
        source: where the numbers come from, in words.
        batches: the fullest micro-batch of the first rank, once per micro-batch of a step up to two.
        micro_batch_tokens: of it; None: its rows are no tokens.
        micro_batches: of a rank in a step.
        step_tokens: mean of all ranks' tokens in a step.
        mean_length: tokens of a row.
        steps: optimizer steps of the run; None: unknown.
        tokens: of the run; None: unknown.
        longest: tokens of the longest row.
        notes: on the rows.
    """

    source: str
    batches: Sequence[Batch]
    micro_batch_tokens: int | None
    micro_batches: int
    step_tokens: float
    mean_length: float
    steps: int | None
    tokens: float | None
    longest: int
    notes: Sequence[str] = ()


Rows = Callable[[Recipe, Adapter, Layout], Work]


def rows_of(recipe: Recipe, adapter: Adapter, given: Given, report: Callable[[str], None]) -> Rows:
    """Computes the work of a recipe, and of others with the same rows.

    Args:
        recipe: its data is encoded here, or found in the cache, unless sizes are given.
        adapter: of its model.
        given: sizes in place of data.
        report: receives lines on the data.
    """
    if given or not recipe.data.train_data_paths:
        if not isinstance(adapter, LanguageModel):
            raise ConfigError(
                f"{type(adapter).__name__} takes more than tokens, so a row of it has to be read",
                where="--tokens, --length",
                remedy="leave them out, and name rows in data.train_data_paths",
            )
        return lambda changed, _, layout: assumed(changed, layout, given)
    prepared = prepare_data(recipe, lambda prompts: adapter.encoder(with_prompts=prompts), report=report)
    return lambda changed, model, layout: read(changed, model, layout, prepared)


def read(recipe: Recipe, adapter: Adapter, layout: Layout, prepared: PreparedData) -> Work:
    """The work of a recipe on its encoded rows."""
    build_empty(adapter.build, recipe.runner.seed)  # only then an adapter knows whether rows share a forward
    ranks = Ranks(0, layout.num_ranks, CPU, layout=layout)
    task = AdapterTask(
        recipe, adapter, prepared, _NO_METHODS, hooks=Hooks.of(recipe, adapter, training=True), ranks=ranks
    )
    loader = task.training_loader(ranks)
    loader.check_ranks(layout.num_ranks)
    horizon = DataPosition(loader, recipe.runner, lambda *_: "").horizon
    steps = loader.steps(DataState())
    looked_at = [next(steps) for _ in range(min(horizon, STEPS_LOOKED_AT))]
    fullest = max((batch for step in looked_at for batch in step.micro_batches), key=_size)
    number = max(len(step.micro_batches) for step in looked_at)
    rows, tokens = task.training_rows(), loader.num_tokens(horizon)
    lengths = rows_to_show(rows).lengths
    if tokens is None:
        tokens = round(sum(step.num_tokens for step in looked_at) / len(looked_at) * horizon)
    of = f" of the first of {counted(len(rows.data_files), 'file')}" if isinstance(rows, RowsByFile) else ""
    return Work(
        source=f"{counted(len(lengths), 'row')}{of}, as encoded",
        batches=[fullest] * min(number, ALIKE),
        micro_batch_tokens=len(fullest.input_ids) if isinstance(fullest, PackedBatch) else None,
        micro_batches=number,
        step_tokens=tokens / max(1, horizon),
        mean_length=float(lengths.mean()),
        steps=horizon,
        tokens=tokens,
        longest=int(lengths.max()),
    )


def _size(batch: Batch) -> int:
    """Tokens of a packed micro-batch, otherwise its numbers."""
    if isinstance(batch, PackedBatch):
        return len(batch.input_ids)
    return sum(tensor.numel() for tensor in tensors_of(batch))


def _unused(*_: object) -> object:
    raise RuntimeError("a plan computes no loss of a worker")


_NO_METHODS = UserMethods(_unused, _unused, _unused)  # pyright: ignore[reportArgumentType]


def assumed(recipe: Recipe, layout: Layout, given: Given) -> Work:
    """The work where every row has the same length, and all of its tokens are targets: the most that it can be."""
    actor, runner = recipe.actor, recipe.runner
    length = given.length or recipe.data.max_length
    most = max(1, actor.max_tokens_per_micro_batch // length) if actor.max_tokens_per_micro_batch else None
    if actor.global_batch_tokens is not None:
        step_rows = max(layout.num_data_ranks, actor.global_batch_tokens // length)
    else:
        step_rows = actor.global_batch_size or layout.num_data_ranks
    each = -(-step_rows // layout.num_data_ranks)
    rows = min(size for size in (each, actor.micro_batch_size, most) if size)
    number = -(-each // rows)
    rows = -(-each // number)
    sample = Sample(np.zeros(length, np.int32), np.ones(length, np.float32))
    packed = pack([sample] * rows, range(rows), {})
    batch = replace(packed, weights={TOKENS: packed.target_weight})
    steps = runner.max_steps if runner.max_steps > 0 else None
    tokens = None if steps is None else steps * step_rows * length
    if given.tokens is not None:
        of_epoch = max(1, -(-given.tokens // (step_rows * length)))
        if runner.max_epochs > 0:
            steps = min(steps or of_epoch * runner.max_epochs, of_epoch * runner.max_epochs)
        if steps is not None:
            epochs, more = divmod(steps, of_epoch)  # the last step of an epoch has the rows that are left
            tokens = epochs * given.tokens + more * step_rows * length
    return Work(
        source=f"rows of {length:,} tokens, all of them targets ({'as typed' if given else 'data.max_length'})",
        batches=[batch] * min(number, ALIKE),
        micro_batch_tokens=rows * length,
        micro_batches=number,
        step_tokens=step_rows * length,
        mean_length=length,
        steps=steps,
        tokens=tokens,
        longest=length,
        notes=_beyond(recipe, length),
    )


def _beyond(recipe: Recipe, length: int) -> list[str]:
    """A note if training has no rows of this length."""
    data = recipe.data
    if length <= data.max_length:
        return []
    return [
        f"--length {length} is above data.max_length ({data.max_length}), so that training has no such rows "
        f"(data.on_too_long: {data.on_too_long}): add data.max_length={length}"
    ]
