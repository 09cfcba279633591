"""What a logger is started with, and what it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """The run that a logger is started for.

    Attributes:
        project: `runner.logger.project_name`.
        name: `runner.logger.experiment_name`.
        run_dir: the run directory.
        recipe: all keys, nested; values from environment variables as `${oc.env:NAME}`.
        done: the last step whose metrics are kept; -1: the run starts. Later steps are logged again.
    """

    project: str
    name: str
    run_dir: Path
    recipe: Mapping[str, object]
    done: int

    @property
    def resumed(self) -> bool:
        """Whether the run continues."""
        return self.done >= 0

    def known_id(self, service: str) -> str | None:
        """The id that a service gave a run that is now continued, from the run directory."""
        file = self.run_dir / f"{service}_id"
        return file.read_text().strip() if self.resumed and file.exists() else None

    def keep_id(self, service: str, given: str) -> None:
        """Write a service's id of the run into the run directory."""
        (self.run_dir / f"{service}_id").write_text(given)


class Experiment(Protocol):
    """A run at a service; made on rank 0 only."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def samples(self, step: int, name: str, answers: Sequence[Mapping[str, object]]) -> None: ...
    def close(self) -> None: ...
