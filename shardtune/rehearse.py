"""Looking before leaping: rows as the model will see them, and a dry run that trains one step and keeps nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from shardtune.config import load_recipe
from shardtune.data.dataset import TokenDataset
from shardtune.data.prepare import PreparedData, prepare_data
from shardtune.display import Display, count
from shardtune.errors import ConfigError
from shardtune.functions import import_plugins
from shardtune.models.registry import load_tokenizer, no_model_path
from shardtune.parallel.mesh import leave_ranks
from shardtune.run_directory import plan_run
from shardtune.sft_worker import SFTWorker
from shardtune.training import facts

SHOWN_ROWS = 2


def dry_run(recipe: str | Path | Mapping[str, Any] | DictConfig | None, *overrides: str) -> dict[str, float]:
    """Do everything of a training run up to and including its first step, on one rank, and write no run.

    Returns:
        The metrics of the step.
    """
    loaded = load_recipe(recipe, overrides)
    import_plugins(loaded.plugins)
    display = Display()
    plan = plan_run(loaded)
    worker = SFTWorker(loaded, say=display.say)
    try:
        worker.setup()
        assert worker.prepared.train is not None
        assert worker.tokenizer is not None
        display.first_screen(facts(worker), worker.prepared.train.row(0), worker.tokenizer, plan.run_dir)
        for index in range(1, min(SHOWN_ROWS, len(worker.prepared.train))):
            row = worker.prepared.train.row(index)
            display.show_row(row, worker.tokenizer, worker.prepared.train.locate(index))
        metrics = worker.run_training()
        tokens = count(metrics["train/tokens"] * worker.total_steps())
        display.say(
            f"one step: loss {metrics['train/loss']:.4f}, gradient norm {metrics['train/grad_norm']:.3f}, "
            f"{metrics['train/tokens']:,.0f} tokens; to come: {worker.total_steps():,} steps, about {tokens} tokens"
        )
        for note in plan.notes:
            display.say(note)
        display.say("dry run: nothing was written but the cache of tokenised rows")
        return metrics
    finally:
        leave_ranks(worker.ranks)


def describe(rows: TokenDataset) -> str:
    """How many rows, tokens and targets there are, and how long the rows are."""
    lengths, targets = rows.lengths, rows.term_weights["ce"].sum()
    return (
        f"{len(rows):,} rows, {int(lengths.sum(dtype='int64')):,} tokens, {targets:,.0f} trained; "
        f"longest {int(lengths.max()):,}, median {int(np.median(lengths)):,}"
    )


def preview(
    recipe: str | Path | Mapping[str, Any] | DictConfig | None, *overrides: str, rows: int = 3, start: int = 0
) -> None:
    """Show training rows as the model will see them, the trained tokens marked, and what became of the others.

    Args:
        recipe: as for training.
        overrides: as for training.
        rows: how many are shown.
        start: the number of the first of them, from 0, in the order of the files.
    """
    loaded = load_recipe(recipe, overrides)
    import_plugins(loaded.plugins)
    display = Display()
    source = loaded.actor.tokenizer.tokenizer_model or loaded.actor.model.model_path
    if source is None:
        raise no_model_path()
    tokenizer = load_tokenizer(source, trust_remote_code=loaded.actor.model.trust_remote_code)
    prepared: PreparedData = prepare_data(loaded, tokenizer, say=display.say)
    data = prepared.train
    assert data is not None
    display.say(f"training rows: {describe(data)}")
    for name, evaluation in prepared.evals.items():
        display.say(f"evaluation set {name or 'eval'}: {describe(evaluation)}")
    if start >= len(data):
        raise ConfigError(
            f"there is no row {start}: the data has {len(data):,} rows",
            where=f"--start {start}",
            remedy=f"give a number below {len(data):,}",
        )
    for index in range(start, min(start + rows, len(data))):
        display.show_row(data.row(index), tokenizer, data.locate(index))
