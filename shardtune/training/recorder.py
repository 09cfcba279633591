"""Records what each step of a run did, exactly: rows and numbers; `shardtune verify` compares them.

Each rank appends lines of JSON to a file of its own. Numbers are written by `float.hex`, so that equal text is equal
bits. What a step left behind (weights, optimizer states) is in the run's checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from shardtune.batch import Batch
from shardtune.checkpoint.base_weights import own_bits
from shardtune.data.loader.protocol import MicroBatch, Step
from shardtune.data.user_loader.batch import UserBatch, fingerprint
from shardtune.launch.signals import StopSignal
from shardtune.training.worker.base import FSDPSftWorker

MEASURED = "perf/"
"""The prefix of metrics that are times and sizes, which no two runs have in common."""

DERIVED = ("rows", "key", "weights", "numbered")
"""Fields of a batch that are no content: they follow from seed, step and rows."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What is recorded of a run.

    Attributes:
        folder: of the lines of each rank, appended to `rank0.jsonl` and so on; None: nothing is recorded.
        stop_after: after this step the run stops as on a signal: it saves and ends with exit code 75; None: at its end.
    """

    folder: Path | None = None
    stop_after: int | None = None

    @property
    def words(self) -> list[str]:
        """As options of `shardtune train`."""
        folder = [] if self.folder is None else ["--record", str(self.folder)]
        return folder if self.stop_after is None else [*folder, "--stop-after", str(self.stop_after)]


class Recorder:
    """Records the steps of one rank.

    Args:
        recording: what is recorded.
        worker: ready for its next step.
        stop: requested once `stop_after` is reached.
    """

    def __init__(self, recording: Recording, worker: FSDPSftWorker, stop: StopSignal) -> None:
        self._worker, self._stop, self._stop_after = worker, stop, recording.stop_after
        self._file: Path | None = None
        if recording.folder is not None:
            recording.folder.mkdir(parents=True, exist_ok=True)
            self._file = recording.folder / f"rank{worker.ranks.rank}.jsonl"
        self._steps: list[Step[MicroBatch]] = []
        self._contents: list[dict[str, object]] = []
        self._skipped = 0
        self._frozen = self._frozen_bits()
        if self._file is not None:
            worker.position.observe(self._noted)

    def stepped(self, metrics: Mapping[str, float]) -> None:
        """Write the line of a step that has just been computed.

        Args:
            metrics: of it; those of times and sizes are left out.
        """
        step = self._worker.step
        if self._file is not None:
            exact = {name: float(value).hex() for name, value in metrics.items() if not name.startswith(MEASURED)}
            line: dict[str, object] = {
                "step": step,
                "ranks": self._worker.ranks.world_size,
                **self._taken(),
                "metrics": exact,
            }
            changed = self._changed()
            if changed:
                line["changed"] = changed
            with self._file.open("a") as lines:
                lines.write(json.dumps(line) + "\n")
        if self._stop_after is not None and step >= self._stop_after:
            self._stop.request()

    def _noted(self, steps: Iterator[Step[MicroBatch]]) -> Iterator[Step[MicroBatch]]:
        """Steps as they are, from a position that training has gone to; what was taken before it is written."""
        self._steps, self._contents, self._skipped = [], [], self._worker.position.taken
        for step in steps:
            self._steps.append(step)
            self._contents += [_content(batch) for batch in step.micro_batches]
            yield step

    def _taken(self) -> dict[str, object]:
        """What was computed since the last line: one step of the loader, or what a worker's own method took from it."""
        if not self._steps:
            return {}
        steps, left = self._steps, self._worker.position.taken
        begun, last = self._skipped, steps[-1]
        end = len(self._contents) - (len(last.micro_batches) - left if left else 0)
        whole = not begun and not left
        first, after = steps[0].state, last.state if left else last.after
        line = {
            "from": [first.epoch, first.rows_consumed],
            "to": [after.epoch, after.rows_consumed],
            "rows": [row for step in steps for row in step.rows.tolist()] if whole else None,
            "micro_batches": self._contents[begun:end],
            "loader_steps": len(steps) if whole else None,
        }
        self._steps, self._skipped = ([last], left) if left else ([], 0)
        self._contents = self._contents[end - left :] if left else []
        return line

    def _frozen_bits(self) -> dict[str, int]:
        """A sum of each frozen weight that no checkpoint holds; nothing where nothing is recorded."""
        parts = self._worker.weights.left_out_parts() if self._file is not None else {}
        return {name: own_bits(part) for name, part in parts.items()}

    def _changed(self) -> list[str]:
        """The frozen weights that the step has changed, though none may."""
        before, self._frozen = self._frozen, self._frozen_bits()
        return sorted(name for name, bits in self._frozen.items() if bits != before.get(name, bits))


def _content(batch: MicroBatch) -> dict[str, object]:
    """The rows of a micro-batch and a digest of its content; of one that only keeps ranks in step neither."""
    if not batch.counts:
        return {"rows": [], "digest": ""}
    if isinstance(batch, UserBatch):
        return {"rows": None, "digest": fingerprint(batch.fields)}
    if isinstance(batch, Batch):
        content = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name not in DERIVED}
        return {"rows": list(batch.rows), "digest": fingerprint(content)}
    return {"rows": None, "digest": fingerprint(batch)}
