"""Preview of training rows as the model receives them, and a dry run of one step that writes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import numpy as np
from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from shardtune.batch import Sample
from shardtune.config import Recipe, load_recipe
from shardtune.config.rank_layout import Layout
from shardtune.config.user_code import import_plugins
from shardtune.data.cache.by_file import RowsByFile, TrainingRows, rows_to_show
from shardtune.data.cache.dataset import TokenDataset
from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.loader.step_loader import DataState, StepLoader
from shardtune.data.prepare import PreparedData, prepare_data
from shardtune.data.user_loader.batch import describe_batch
from shardtune.data.user_loader.loader import BatchLoader
from shardtune.errors import ConfigError, ModelError, counted
from shardtune.models.causal_lm import TOKENS
from shardtune.models.find_adapter import find_adapter
from shardtune.parallel.gradient_hooks import refuse_gradient_hooks
from shardtune.parallel.ranks import check_launcher, leave_ranks, num_ranks
from shardtune.run.augmented_images import save_augmented
from shardtune.run.choose_worker import make_worker, unused_workers, worker_class
from shardtune.run.directory import plan_run
from shardtune.run.display import Display, count
from shardtune.run.push import check_push
from shardtune.run.status import decimal
from shardtune.training.callbacks import load_callbacks
from shardtune.training.loggers import check_logger
from shardtune.training.run_summary import RunSummary
from shardtune.training.step import TRAIN_METRICS
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.cached_rows import EvaluationSet
from shardtune.training.worker.reported import check_worker_monitors, training_method
from shardtune.training.worker.run_context import RunContext, set_up
from shardtune.training.worker.task import Evaluation
from shardtune.training.worker.user_evaluation import require_all_samples
from shardtune.training.worker.user_task import UserTask

SHOWN_ROWS = 2


def dry_run(recipe: str | Path | Mapping[str, object] | DictConfig | None, *overrides: str) -> dict[str, float]:
    """Do everything of a training run up to and including its first step, on one rank, without writing a run.

    Returns:
        The metrics of the step.
    """
    check_launcher()
    loaded = load_recipe(recipe, overrides)
    with loaded.spelling.in_errors():
        return _dry_run(loaded)


def _dry_run(loaded: Recipe) -> dict[str, float]:
    import_plugins(loaded.plugins)
    load_callbacks(loaded.runner.callbacks)
    display = Display()
    plan = plan_run(loaded)
    check_logger(loaded.runner.logger)
    check_push(loaded.runner.push_to_hub)
    worker = make_worker(loaded, report=display.report)
    try:
        if num_ranks(loaded.runner) > 1 and isinstance(worker, SFTWorker):
            # with a worker of its own, as where ranks are started: the layout is checked that they would have
            make_worker(loaded, report=lambda _: None).task.check()
        notes = [*loaded.notes, *unused_workers(loaded, worker)]
        set_up(worker, RunContext(report=display.report, notes=notes, tries_loss=True))
        _report_files(worker.task.rows, loaded.data.max_length, display)
        worker.loader.check_ranks(num_ranks(loaded.runner))
        if isinstance(worker.task, UserTask):
            worker.task.check_layout(worker.state.inner, Layout.of(loaded.actor, num_ranks(loaded.runner)))
        check_worker_monitors(worker)
        refuse_gradient_hooks(worker.weights.parameters.items(), worker.ranks, own=worker.weights.hooked)
        display.first_screen(worker.summary(), *_first_row(worker), plan.run_dir)
        _show_further_rows(display, worker)
        found = training_method(worker)()
        metrics = {**dict.fromkeys(TRAIN_METRICS, math.nan), **found}  # an override may return fewer
        display.report("before training:")
        for line in checklist(worker, metrics):
            display.report(line)
        display.report(
            f"one step: loss {decimal(metrics['train/loss'], 4)}, "
            f"gradient norm {decimal(metrics['train/grad_norm'], 3)}, {_size(metrics)}; "
            f"to come: {counted(worker.position.horizon, 'step')}, {_size_to_come(worker, metrics)}"
        )
        for note in plan.notes:
            display.report(note)
        if worker.task.rows is not None and not worker.task.can_generate:
            display.report(
                "shardtune verify adapter RECIPE proves that the adapter's sums, weights and masks are right"
            )
        display.report("dry run: nothing was written but the cache of encoded rows")
        _require_a_step(worker, metrics)
        return found
    finally:
        leave_ranks(worker.ranks)


def _size(metrics: Mapping[str, float]) -> str:
    """The input tokens of a step, or the samples of rows without tokens."""
    samples = metrics.get("train/samples")
    return f"{metrics['train/tokens']:,.0f} tokens" if samples is None else f"{samples:,.0f} samples"


def _size_to_come(worker: FSDPSftWorker, metrics: Mapping[str, float]) -> str:
    """The input tokens or samples of all steps; only the first step may be known yet."""
    steps = worker.position.horizon
    unit = "samples" if "train/samples" in metrics else "tokens"
    tokens = worker.loader.num_tokens(steps) if isinstance(worker.loader, StepLoader) else None
    if tokens is not None:
        return f"{tokens:,} {unit}"
    return f"about {count(metrics[f'train/{unit}'] * steps)} {unit} if all have as many as the first"


def _require_a_step(worker: FSDPSftWorker, metrics: Mapping[str, float]) -> None:
    if worker.step:
        return
    raise ModelError(
        f"the first step would be passed over: {worker.position.problem}",
        where=f"the rows {worker.position.passed_over}",
        remedy="look at what the loss of these rows is, and whether they have targets and finite values",
    )


def checklist(worker: FSDPSftWorker, metrics: Mapping[str, float]) -> list[str]:
    """The checklist of what training needs, with what was found for each item.

    Args:
        worker: set up, one step done; the first batch of each evaluation set goes through it here.
        metrics: of the step.
    """
    summary = worker.summary()
    lines = [
        f"✓ model weights: {summary.model} of {count(summary.parameters)} parameters, {_origin(worker)}",
        f"✓ training data: {_epoch(summary)}",
        f"✓ format: {_format(worker)}",
        f"✓ supervision target: a loss of {decimal(metrics['train/loss'], 4)} over {_targets(worker, metrics)} of the "
        f"first step, with a gradient of norm {decimal(metrics['train/grad_norm'], 3)}",
    ]
    if not math.isfinite(metrics["train/loss"]) or not metrics["train/grad_norm"]:
        lines[-1] = f"✗ supervision target: {worker.position.problem or 'the gradient of the first step is zero'}"
    lines += [f"✓ evaluation data: {_evaluated(worker, name)}" for name in worker.eval_loaders]
    config = worker.recipe.eval
    if config.environment is not None:
        lines.append(f"✓ closed-loop evaluation: {config.episodes:,} episodes of {config.environment}, which was begun")
    if config.harness:
        lines.append(f"✓ lm-evaluation-harness: {', '.join(config.harness)}, whose data was read")
    if not worker.evaluates:
        lines.append("– evaluation data: none, so only the training loss is watched (data.eval_data_paths is null)")
    return lines


def _origin(worker: FSDPSftWorker) -> str:
    """The origin of the weights that training starts from."""
    source = worker.task.initial_weights()
    if isinstance(source, str | Path):
        return str(source)
    given = {} if source is None else {name: value for name, value in source.items() if value is not None}
    if not given:
        return "drawn from the seed"
    paths = [f"{name or 'the rest'} from {value}" for name, value in given.items() if isinstance(value, str | Path)]
    entries = "1 entry" if len(given) == 1 else f"{len(given):,} entries"
    return ", ".join(paths) if paths else f"{entries} of initial_weights()"


def _epoch(summary: RunSummary) -> str:
    """The rows and steps of an epoch, or its files where they are not counted."""
    if summary.rows is None or summary.steps_per_epoch is None:
        return summary.files
    return f"{counted(summary.rows, 'row')} in {counted(summary.steps_per_epoch, 'step')}"


def _targets(worker: FSDPSftWorker, metrics: Mapping[str, float]) -> str:
    """The denominator of the first step's loss."""
    weights = worker.loader.step(DataState()).denominators if isinstance(worker.loader, StepLoader) else {}
    if not weights or TOKENS in weights:
        return f"{metrics['train/supervised_tokens']:,.0f} targets"
    if len(weights) == 1:
        return f"a weight of {next(iter(weights.values())):,.0f}"
    return f"the weights {', '.join(f'{weight:,.0f} in {term}' for term, weight in weights.items())}"


def _format(worker: FSDPSftWorker) -> str:
    """The format of rows or batches."""
    if isinstance(worker.loader, BatchLoader):
        return f"a batch holds {describe_batch(worker.loader.last_batch)}"
    return "" if worker.task.rows is None else describe_training(worker.task.rows)


def _evaluated(worker: FSDPSftWorker, name: str) -> str:
    """One evaluation set: its rows, and the metrics of the first batches if a user method measures them."""
    loader, info = worker.eval_loaders[name]
    size = info.get("num_samples")
    found = (name or "eval") + (f", {counted(size, 'row')}" if isinstance(size, int) else "")
    if isinstance(loader, EvaluationSet):
        return found
    require_all_samples(loader, name or "eval")
    worker.model.eval()
    first = list(islice(iter(loader), worker.ranks.num_data_ranks))
    evaluation = Evaluation(worker.model, worker.ranks, worker.step, worker.context.poll, worker.report)
    metrics = worker.task.evaluate_set(name, first, {**info, "num_samples": None}, evaluation).metrics
    worker.model.train()
    return f"{found}; its first batch gives {', '.join(f'{key} {decimal(value, 4)}' for key, value in metrics.items())}"


def _first_row(worker: FSDPSftWorker) -> tuple[Sample | None, PreTrainedTokenizerBase | None]:
    """A row to show, if rows come from the recipe and not from a user's loader."""
    rows = worker.task.rows
    return (rows.row(rows.first_trained) if rows is not None else None), worker.tokenizer


def _show_further_rows(display: Display, worker: FSDPSftWorker) -> None:
    rows = None if worker.task.rows is None else rows_to_show(worker.task.rows)
    if rows is not None:
        for index in range(rows.first_trained + 1, min(rows.first_trained + SHOWN_ROWS, len(rows))):
            display.show_row(rows.row(index), worker.tokenizer, titled(rows, index))
    for name, (loader, _) in worker.eval_loaders.items():
        if isinstance(loader, EvaluationSet):
            _show_rows(display, loader.rows, worker.tokenizer, name, range(1))


def _show_rows(
    display: Display, rows: TokenDataset, tokenizer: PreTrainedTokenizerBase | None, name: str, indices: range
) -> None:
    """Rows of an evaluation set."""
    for index in indices:
        display.show_row(rows.row(index), tokenizer, f"evaluation set {name or 'eval'}, {rows.locate(index)}")


def titled(rows: TokenDataset, index: int) -> str:
    """Where a training row comes from, and whether it is left out."""
    return rows.locate(index) + (", left out by data.quarantine" if index in rows.left_out else "")


def describe_training(rows: TrainingRows) -> str:
    """As `describe`; of rows that are tokenised file by file, for those of the first file."""
    if not isinstance(rows, RowsByFile):
        return describe(rows)
    file = rows.data_files[rows.first_file].file.label
    return f"{file}, the first of {counted(len(rows.data_files), 'file')}: {describe(rows.first)}"


def _report_files(rows: TrainingRows | None, max_length: int, display: Display) -> None:
    """Say what becomes of the rows of each file that is read, where files are tokenised one by one."""

    def report(file: TokenDataset) -> None:
        for line in file.report.lines(max_length=max_length):
            display.report(f"data: {line}")

    if isinstance(rows, RowsByFile):
        rows.follow(report)


def describe(rows: TokenDataset) -> str:
    """Numbers of rows, tokens and targets, and row lengths; for rows of fields, their weights."""
    lengths, weights = rows.lengths, rows.term_weights
    if TOKENS in weights:
        held = f"{int(lengths.sum(dtype='int64')):,} tokens, {weights[TOKENS].sum():,.0f} trained"
    else:
        held = f"weight {', '.join(f'{values.sum():,.0f} in {term}' for term, values in weights.items())}"
    gone = f", {len(rows.left_out):,} of them left out by data.quarantine" if len(rows.left_out) else ""
    return (
        f"{counted(len(rows), 'row')}, {held}; longest {int(lengths.max()):,}, median {int(np.median(lengths)):,}{gone}"
    )


def preview(
    recipe: str | Path | Mapping[str, object] | DictConfig | None,
    *overrides: str,
    rows: int = 3,
    start: int = 0,
    images: Path | None = None,
) -> None:
    """Show rows as the model receives them, with the trained tokens marked, and the dropped rows.

    Args:
        recipe: as for training.
        overrides: as for training.
        rows: how many training rows to show, and how many of each evaluation set, from its first.
        start: the index of the first one, from 0, in the order of the files.
        images: a file for a picture of their images as `data.augmentation` changes them; None: none is made.
    """
    loaded = load_recipe(recipe, overrides)
    with loaded.spelling.in_errors():
        _preview(loaded, rows, start, images)


def _preview(loaded: Recipe, rows: int, start: int, images: Path | None) -> None:
    import_plugins(loaded.plugins)
    kind = worker_class(loaded)
    if not issubclass(kind, SFTWorker):
        raise ConfigError(
            f"the recipe is driven by {kind.__name__}, which makes its own batches: there are no rows to show",
            where="actor.worker" if loaded.actor.worker else "actor.model.model_type",
            remedy="shardtune train RECIPE --dry-run describes the first batch",
        )
    display = Display()
    adapter = find_adapter(loaded)
    prepared: PreparedData = prepare_data(
        loaded, lambda with_prompts: adapter.encoder(with_prompts=with_prompts), report=display.report
    )
    assert prepared.train is not None
    _report_files(prepared.train, loaded.data.max_length, display)
    display.report(f"training rows: {describe_training(prepared.train)}")
    data = rows_to_show(prepared.train)
    for name, evaluation in prepared.evals.items():
        display.report(f"evaluation set {name or 'eval'}: {describe(evaluation)}")
    if start >= len(data):
        raise ConfigError(
            f"there is no row {start}: the data has {counted(len(data), 'row')}",
            where=f"--start {start}",
            remedy=f"give a number below {len(data):,}",
        )
    tokenizer = prepared.encoder.tokenizer if isinstance(prepared.encoder, ChatEncoder) else None
    shown = range(start, min(start + rows, len(data)))
    for index in shown:
        display.show_row(data.row(index), tokenizer, titled(data, index))
    if images is not None:
        number, epochs = save_augmented(loaded, adapter, data, shown, images)
        display.report(f"{images}: {number} image{'s' if number > 1 else ''}, each as it is and as in {epochs} epochs")
    for name, evaluation in prepared.evals.items():
        _show_rows(display, evaluation, tokenizer, name, range(min(rows, len(evaluation))))
