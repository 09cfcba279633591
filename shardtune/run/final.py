"""`final/`: the trained model as a directory that `from_pretrained` loads, evaluated from what is on the disk."""

from __future__ import annotations

import gc
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from shardtune.checkpoint.atomic import publish, write_json
from shardtune.checkpoint.checksums import add_checksums, complete_checksums, sum_of_checksums, was_changed
from shardtune.checkpoint.state_file import StateFile
from shardtune.checkpoint.store import CheckpointStore
from shardtune.checkpoint.training_state import OPTIMIZER, STATE_FILE
from shardtune.config import Recipe
from shardtune.data.checksum import Parts, file_parts
from shardtune.errors import ShardtuneError
from shardtune.run.directory import finish_run
from shardtune.run.identity import CHECKPOINTS, FINAL
from shardtune.training.loggers import as_json_numbers, read_metrics
from shardtune.training.saver import on_main
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.reported import evaluation_method
from shardtune.training.worker.run_context import RunContext, silent

METRICS = "metrics.json"
ROUNDED = 0.02
"""Of a loss: more than weights rounded to bf16 change it."""
TRAINING_STATE = "training_state"


@dataclass(frozen=True, slots=True)
class FinalScore:
    """The evaluation of the model in `final/`.

    Attributes:
        metrics: of the evaluation sets; empty without any.
        samples: the generated answers.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    samples: Sequence[Mapping[str, object]] = field(default_factory=list)


def check_final(recipe: Recipe, worker: FSDPSftWorker) -> None:
    """Try, before training, to save what belongs to `final/` besides the weights; every rank calls it."""
    on_main(worker.ranks, lambda: worker.check_export(recipe.runner.final_dtype))


def write_final(recipe: Recipe, run_dir: Path, worker: FSDPSftWorker, *, ended: str = "") -> FinalScore:
    """Write the worker's model as `final/`, then load it again and evaluate it; every rank calls it.

    The worker cannot be used afterwards. If the directory cannot be loaded or evaluated, it stays, and the run counts
    as unfinished: the same command tries it again.

    Args:
        recipe: of the run.
        run_dir: of the run.
        worker: at the end of its training.
        ended: why training ended, for the manifest.
    """
    ranks = worker.ranks
    temporary = ranks.broadcast(run_dir / f".{FINAL}.tmp-{uuid.uuid4().hex[:8]}")
    worker.export(temporary, recipe.runner.final_dtype)
    ranks.barrier()
    step, measured = worker.step, worker.evaluates
    worker.release()
    gc.collect()
    metrics = on_main(ranks, lambda: _publish(run_dir, temporary, step, worker.report, measured=measured))
    score = _evaluate(worker, run_dir / FINAL) if measured else FinalScore()
    on_main(ranks, lambda: _compare(run_dir, step, score.metrics, worker.report))
    on_main(ranks, lambda: _finish(run_dir, metrics, score.metrics, ended))
    return score


def _evaluate(worker: FSDPSftWorker, directory: Path) -> FinalScore:
    """The evaluation of a model that is loaded from its directory."""
    try:
        fresh = worker.reopened(directory)
        fresh.setup_evaluation(context=RunContext(report=silent, weights_directory=directory))
        score = FinalScore(evaluation_method(fresh)(), fresh.samples)
        fresh.release()
    except ShardtuneError as error:
        raise type(error)(
            f"{directory} is written, but it cannot be loaded again and evaluated: {error.what}",
            where=error.where,
            remedy=f"{f'{error.remedy}; ' if error.remedy else ''}then the same command evaluates it",
        ) from error
    except Exception as error:
        error.add_note(f"{directory} is written; what failed is loading it again and evaluating it")
        raise
    return score


def _compare(run_dir: Path, step: int, found: Mapping[str, float], report: Callable[[str], None]) -> None:
    """Report losses of `final/` that are not those of the same step in training, by more than an export rounds."""
    lines = read_metrics(run_dir)
    trained = lines[-1] if lines and lines[-1].get("step") == step else {}
    for name, value in found.items():
        before = trained.get(name)
        if not name.endswith("/loss") or not isinstance(before, float):
            continue
        if abs(value - before) > ROUNDED * max(abs(before), abs(value), 1.0):  # rounding is more of a small loss
            report(
                f"{name} of {FINAL}/ is {value:.4g}, and {before:.4g} in training after the same step: what the model "
                "computes is not in its parameters and persistent buffers alone (an attribute or a buffer that forward "
                "changes, say), so whoever loads the directory gets other results"
            )


def _publish(
    run_dir: Path, temporary: Path, step: int, report: Callable[[str], None], *, measured: bool
) -> dict[str, float]:
    """Rename the directory to `final/`; returns the metrics in it: those of the last step.

    Where it is evaluated next, which adds to its metrics, their file has no checksum before that: the two cannot change
    at once, and what a full disk or a kill left in between would count as damaged.
    """
    store, lines = CheckpointStore(run_dir / CHECKPOINTS), read_metrics(run_dir)
    last = store.latest()
    trained = {key: value for key, value in (lines[-1] if lines else {}).items() if not key.startswith("eval/")}
    metrics = {**trained, "step": step}
    if not measured:
        write_json(temporary / METRICS, as_json_numbers(metrics))
    known: dict[str, Parts] = {}
    if last is not None:
        _keep_training_state(last, temporary / TRAINING_STATE)
        known = {f"{TRAINING_STATE}/{name}": parts for name, parts in _checksums_of(last).items()}
    complete_checksums(temporary, known)
    if measured:
        write_json(temporary / METRICS, as_json_numbers(metrics))
    if was_changed(run_dir / FINAL, without=[METRICS]):  # by somebody else, or on the disk: it is not ours to remove
        kept = run_dir / f"{FINAL}.kept-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
        (run_dir / FINAL).rename(kept)
        report(f"what was in {run_dir / FINAL} is not what was written there: it is kept as {kept.name}")
    publish(temporary, run_dir / FINAL)
    if not (run_dir / "FINAL").exists():
        with suppress(OSError):  # a file system without links; everything is found without it
            (run_dir / "FINAL").symlink_to(FINAL)
    return metrics


def _checksums_of(checkpoint: Path) -> dict[str, Parts]:
    known = StateFile.read(checkpoint)
    return known.files if known.has_checksums else {}


def _finish(run_dir: Path, trained: Mapping[str, float | None], measured: Mapping[str, float], ended: str) -> None:
    """Add the evaluation to the metrics of `final/`, and record that the run is complete."""
    if measured:
        write_json(run_dir / FINAL / METRICS, as_json_numbers({**trained, **measured}))
        add_checksums(run_dir / FINAL, {METRICS: file_parts(run_dir / FINAL / METRICS)})
    final = sum_of_checksums(run_dir / FINAL)
    finish_run(run_dir, {"step": trained["step"], "ended": ended, "metrics": as_json_numbers(measured), FINAL: final})


def _keep_training_state(checkpoint: Path, target: Path) -> None:
    """Optimizer and schedule of the last checkpoint, as hard links where the file system supports them."""
    target.mkdir()
    state = [checkpoint / STATE_FILE] if (checkpoint / STATE_FILE).exists() else []  # a user's own save may lack it
    for file in [*(checkpoint / OPTIMIZER).glob("*"), *state]:
        place = target / file.relative_to(checkpoint)
        place.parent.mkdir(exist_ok=True)
        try:
            os.link(file, place)
        except OSError:
            shutil.copy2(file, place)
