"""`timings.jsonl`: when each logged step was done, where, and what its time went into."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path

from shardtune.data.durable import Lines, naming
from shardtune.launch.events import now

TIMINGS_FILE = "timings.jsonl"


class Timings:
    """A line per logged step, flushed at once.

    It records what happened, so it is never cut back: a step that is repeated after a restart has a second line, with a
    larger `restart`.

    Args:
        run_dir: of the run.
        restart: how often the run was started again.
        ranks: of the run.
    """

    def __init__(self, run_dir: Path, *, restart: int, ranks: int) -> None:
        self._file = run_dir / TIMINGS_FILE
        self._lines = Lines(self._file)
        self._facts = {"host": socket.gethostname(), "restart": restart, "ranks": ranks}

    def log(self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        line = {
            "time": now(),
            "step": step,
            **self._facts,
            "seconds": {part: round(value, 6) for part, value in seconds.items()},
            **_speed(metrics),
            "mfu": metrics.get("perf/mfu"),
        }
        with naming(self._file):
            self._lines.add(json.dumps(line))

    def close(self) -> None:
        self._lines.close()


def _speed(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Tokens per second; of rows without tokens samples per second."""
    samples = metrics.get("perf/samples_per_second")
    if samples is not None:
        return {"samples_per_second": samples}
    return {"tokens_per_second": metrics.get("perf/tokens_per_second")}
