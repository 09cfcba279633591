"""`final/`: the trained model as a directory that `from_pretrained` loads, evaluated from what is on the disk."""

from __future__ import annotations

import gc
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardtune.checkpoint.atomic import publish, write_json
from shardtune.checkpoint.store import CheckpointStore
from shardtune.checkpoint.training_state import OPTIMIZER, STATE_FILE
from shardtune.config import Recipe
from shardtune.run.directory import FINAL, finish_run
from shardtune.training.saver import on_main
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.run_context import RunContext, silent


@dataclass(frozen=True, slots=True)
class FinalScore:
    """The evaluation of the model in `final/`.

    Attributes:
        metrics: of the evaluation sets; empty without any.
        samples: the generated answers.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    samples: Sequence[Mapping[str, object]] = field(default_factory=list)


def write_final(recipe: Recipe, run_dir: Path, worker: FSDPSftWorker, *, ended: str = "") -> FinalScore:
    """Write the worker's model, reload and evaluate it, then rename it to `final/`; every rank calls it.

    The worker cannot be used afterwards.

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
    score = FinalScore()
    if measured:
        fresh = worker.reopened(temporary)
        fresh.setup_evaluation(context=RunContext(report=silent, weights_directory=temporary))
        score = FinalScore(fresh.run_eval(), fresh.samples)
        fresh.release()
    on_main(ranks, lambda: _publish(run_dir, temporary, step, score.metrics, ended))
    return score


def _publish(run_dir: Path, temporary: Path, step: int, metrics: dict[str, float], ended: str) -> None:
    last = CheckpointStore(run_dir / "checkpoints").latest()
    write_json(temporary / "metrics.json", {"step": step, **metrics})
    if last is not None:
        _keep_training_state(last, temporary / "training_state")
    publish(temporary, run_dir / FINAL)
    if not (run_dir / "FINAL").exists():
        (run_dir / "FINAL").symlink_to(FINAL)
    finish_run(run_dir, {"step": step, "ended": ended, "metrics": metrics})


def _keep_training_state(checkpoint: Path, target: Path) -> None:
    """Optimizer and schedule of the last checkpoint, as hard links where the file system supports them."""
    target.mkdir()
    for file in [*(checkpoint / OPTIMIZER).glob("*"), checkpoint / STATE_FILE]:
        place = target / file.relative_to(checkpoint)
        place.parent.mkdir(exist_ok=True)
        try:
            os.link(file, place)
        except OSError:
            shutil.copy2(file, place)
