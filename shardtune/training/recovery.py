"""Loading checkpoints into a worker: at the start, and after an anomaly that a run is rolled back for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict

from shardtune.checkpoint.state_file import read_state, saved_step
from shardtune.checkpoint.store import CheckpointStore
from shardtune.errors import CheckpointError, ModelError
from shardtune.training.anomalies import Anomaly
from shardtune.training.worker.base import FSDPSftWorker


class Moved(TypedDict):
    """The position in the data that belongs to a checkpoint since an anomaly, in the run's state in the checkpoint.

    Attributes:
        step: of the checkpoint.
        position: in the data, after the anomaly.
        rolled_back: whether the checkpoint was loaded for it; otherwise the run was stopped.
    """

    step: int
    position: dict[str, object]
    rolled_back: bool


def load_first(actor: FSDPSftWorker, candidates: Sequence[Path], report: Callable[[str], None]) -> Path:
    """Load the first checkpoint that can be loaded, on all ranks the same one; raises the first error otherwise."""
    first: Exception | None = None
    for checkpoint in candidates:
        failed: Exception | None = None
        try:
            actor.load_checkpoint(checkpoint)
            _require_loaded(actor, checkpoint)
            read_state(checkpoint)
        except Exception as error:  # whatever the reason is, an older checkpoint may not have it
            failed = error
        told = None if failed is None else f"{type(failed).__name__}: {failed}"
        problems = [problem for problem in actor.ranks.gather(told) if problem is not None]
        if not problems:
            return checkpoint
        first = first or failed or CheckpointError(problems[0], where=str(checkpoint))
        if checkpoint != candidates[-1]:
            report(f"passed over the checkpoint {checkpoint.name}: {problems[0]}")
    assert first is not None
    raise first


def _require_loaded(actor: FSDPSftWorker, checkpoint: Path) -> None:
    """Refuse a `load_checkpoint` after which training would begin again at another step."""
    saved, step = saved_step(checkpoint), actor.step
    if step != saved:
        raise CheckpointError(
            f"after {type(actor).__name__}.load_checkpoint the worker is at step {step}, the checkpoint is "
            f"of step {saved}",
            where=str(checkpoint),
            remedy="call super().load_checkpoint(path) and super().save_checkpoint(path, step) in the overrides: "
            "they keep weights, optimizer, step and position in the data; files of your own may lie beside theirs",
        )


def to_go_back_to(store: CheckpointStore, step: int, moved: Moved | None) -> list[Path]:
    """The checkpoints of a rollback, the one to load first.

    That is the newest one; or the one before, if the newest was gone back to and no step since has changed weights.

    Args:
        store: of the run, with a checkpoint.
        step: optimizer steps done.
        moved: by the last anomaly.
    """
    newest = store.newest_first()
    in_vain = moved is not None and moved["rolled_back"] and moved["step"] == step == saved_step(newest[0])
    return newest[1:] if in_vain and len(newest) > 1 else newest


def ended_by(anomaly: Anomaly, step: int, run_dir: Path, *, newest: Path | None, saved: bool) -> ModelError:
    """The error that ends a run after an anomaly.

    Args:
        anomaly: of the last step.
        step: optimizer steps done.
        run_dir: of the run.
        newest: checkpoint.
        saved: whether it was written after the anomaly.
    """
    key, what = f"runner.on_{anomaly.kind}: {anomaly.action}", anomaly.problem
    if anomaly.over_budget:
        key, what = "runner.max_anomalies", f"too many steps had wrong numbers; of the last one {what}"
    if newest is None:
        goes_on = "there is no checkpoint yet, so the same command begins anew"
    elif saved:
        goes_on = f"the same command goes on after these rows, from {newest}"
    else:
        goes_on = f"the same command continues from {newest}"
    if anomaly.over_budget:
        goes_on += (
            "; lower actor.optim.lr or set actor.optim.clip_grad, or raise the limit, with "
            "runner.allow_changes=[actor.optim,runner.max_anomalies]"
        )
    return ModelError(
        f"{what} ({key})",
        where=f"after step {step:,}, the rows {anomaly.rows}",
        remedy=f"{replay_command(run_dir, step)} computes the step again; {goes_on}",
    )


def replay_command(run_dir: Path, step: int) -> str:
    """The command that computes the step after `step` steps again."""
    return f"shardtune replay {run_dir} --step {step + 1}"
