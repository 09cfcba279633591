"""Loading checkpoints into a worker: at the start, and after an anomaly that a run is rolled back for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict

from shardtune.checkpoint.state_file import read_state, saved_step
from shardtune.checkpoint.store import CheckpointStore
from shardtune.errors import CheckpointError, ModelError
from shardtune.training.anomalies import Anomaly
from shardtune.training.observer import Observer
from shardtune.training.run_files import RunFiles
from shardtune.training.saver import Saver, on_main
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


class Recovery:
    """What follows an anomaly: the run is stopped, or rolled back to a checkpoint and goes on with the rows after it.

    Args:
        actor: the worker.
        files: of the run.
        saver: of its checkpoints.
        observer: receives what is done.
    """

    def __init__(self, actor: FSDPSftWorker, files: RunFiles, saver: Saver, observer: Observer) -> None:
        self._actor, self._files, self._saver, self._observer = actor, files, saver, observer
        self._moved: Moved | None = None
        self._place: dict[str, object] = {}  # in the data, behind the anomaly

    def resume(self, checkpoint: Path) -> None:
        """Move the position in the data of a checkpoint that was loaded to where an anomaly has moved it."""
        self._moved = read_state(checkpoint).get("moved")
        if self._moved is not None:
            self._actor.position.restore(self._moved["position"])

    def moved_at(self, step: int) -> Moved | None:
        """What belongs to a checkpoint of this step."""
        return self._moved if self._moved is not None and self._moved["step"] == step else None

    def begin(self, anomaly: Anomaly) -> None:
        """Record an anomaly."""
        self._files.write_event("anomaly", anomaly.problem, **anomaly.facts())

    def ended(self, anomaly: Anomaly, step: int, state: Callable[[], dict[str, object]]) -> ModelError:
        """Save, unless the weights are those of the anomaly; returns the error that ends the run.

        Args:
            anomaly: of the last step.
            step: optimizer steps done before it.
            state: of the run, for the checkpoint.
        """
        position = self._actor.position
        saves = anomaly.action != "rollback" and not position.none_finite
        if saves:
            self._moved = Moved(step=step, position=position.place(), rolled_back=False)
            self._observer.log("stopping: saving a checkpoint first")
            self._saver.save(state())
        self._saver.finish()
        newest = on_main(self._actor.ranks, self._files.store.latest)
        return ended_by(anomaly, step, self._files.run_dir, newest=newest, saved=saves)

    def go_back(self) -> tuple[Path, int]:
        """Load the newest checkpoint that can be; returns it, and the number of steps that are undone by that."""
        actor = self._actor
        self._saver.finish()
        before, self._place = actor.step, actor.position.place()
        candidates = on_main(actor.ranks, lambda: to_go_back_to(self._files.store, before, self._moved))
        return load_first(actor, candidates, self._observer.log), before - actor.step

    def go_on_behind(self, undone: int, state: Callable[[], dict[str, object]]) -> None:
        """Go on with the rows after the anomaly; that is recorded in the checkpoint that was gone back to.

        Args:
            undone: steps.
            state: of the run, for the checkpoint.
        """
        position = self._actor.position
        position.restore(self._place)
        position.none_finite = False
        self._moved = Moved(step=self._actor.step, position=self._place, rolled_back=True)
        kept = state()  # on every rank
        on_main(self._actor.ranks, lambda: self._files.go_back(undone, kept))


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
