"""Whether a directory holds a run, and which: by its recipe and manifest, or by their copies in its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardtune.checkpoint.atomic import read_json
from shardtune.checkpoint.records import intact_copy, is_readable
from shardtune.checkpoint.store import CheckpointStore
from shardtune.errors import CheckpointError
from shardtune.training.loggers import METRICS_FILE

MANIFEST = "manifest.json"
CONFIG = "config.yaml"
FINAL = "final"
CHECKPOINTS = "checkpoints"


def holds_run(run_dir: Path) -> bool:
    """Whether a directory holds a run, finished or not, whose recipe and manifest can be read."""
    return all(record_file(run_dir, name) is not None for name in (MANIFEST, CONFIG))


def holds_results(run_dir: Path) -> bool:
    """Whether a directory holds checkpoints or a trained model."""
    checkpoints = run_dir / CHECKPOINTS
    return any(checkpoints.glob("global_step_*")) or any((run_dir / FINAL).glob("*"))


def record_file(run_dir: Path, name: str) -> Path | None:
    """The recipe or the manifest of a run: the file itself, or, if it is gone or damaged, a copy in a checkpoint.

    Args:
        run_dir: the run directory.
        name: `MANIFEST` or `CONFIG`.
    """
    if is_readable(run_dir / name):
        return run_dir / name
    copies = (intact_copy(path, name) for path in CheckpointStore(run_dir / CHECKPOINTS).newest_first())
    return next((copy for copy in copies if copy is not None), None)


def read_manifest(run_dir: Path) -> dict[str, Any]:
    """The manifest of a run; empty for a directory that has none."""
    file = record_file(run_dir, MANIFEST)
    return {} if file is None else read_json(file)


def replaced_records(run_dir: Path) -> list[str]:
    """A sentence for each file of a run that is gone or damaged and is read from a checkpoint's copy."""
    found = {name: record_file(run_dir, name) for name in (CONFIG, MANIFEST)}
    return [
        f"{run_dir / name} is {'damaged' if (run_dir / name).exists() else 'gone'}: its copy in "
        f"{file.parents[1].name} is used"
        for name, file in found.items()
        if file is not None and file.parent != run_dir
    ]


def lost_run(run_dir: Path) -> list[str]:
    """A sentence if a directory, which holds no run, has the metrics of one."""
    lost = [str(run_dir / name) for name in (CONFIG, MANIFEST) if record_file(run_dir, name) is None]
    metrics = run_dir / METRICS_FILE
    if not lost or not metrics.is_file() or not metrics.stat().st_size:
        return []
    return [
        f"a run has trained in this directory, but {' and '.join(lost)} cannot be read, and it has no checkpoint: "
        f"it begins again, with a new {METRICS_FILE}"
    ]


def require_identity(run_dir: Path) -> None:
    """Refuse a directory with checkpoints or a trained model of which it cannot be known what run made them."""
    if not holds_results(run_dir) or holds_run(run_dir):
        return
    store = CheckpointStore(run_dir / CHECKPOINTS)
    steps = sorted(int(path.name.rpartition("_")[2]) for path in store.folder.glob("global_step_*") if path.is_dir())
    what = f"the checkpoints of steps {', '.join(map(str, steps))}" if steps else f"a trained model in {FINAL}/"
    lost = [name for name in (CONFIG, MANIFEST) if record_file(run_dir, name) is None]
    raise CheckpointError(
        f"{run_dir} holds {what}, but {' and '.join(lost)} of the run that made them cannot be read, nor a copy in a "
        "checkpoint: it is not continued, and nothing in it is removed",
        where=str(run_dir / lost[0]),
        remedy="put the file back; or choose another runner.logger.experiment_name, if need be with runner.resume_dir="
        "the path of a checkpoint; or move the directory aside with runner.overwrite=true",
    )
