"""What the files of a run say about it, finished or not; read without executing or resolving anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardtune.config import Recipe, flatten, load_recipe
from shardtune.config.environment import is_value
from shardtune.config.recipe_file import read_stored
from shardtune.config.schema import FORMER_KEYS
from shardtune.config.tree import get_value
from shardtune.errors import CheckpointError, ShardtuneError
from shardtune.launch.events import BEGINS, EVENTS
from shardtune.run.directory import FROM_ENVIRONMENT
from shardtune.run.identity import CONFIG, FINAL, MANIFEST, read_manifest, record_file
from shardtune.training.loggers import metric_lines


@dataclass(frozen=True)
class StoredRun:
    """The records of a run.

    Attributes:
        path: of its directory.
        tree: `config.yaml`, with references to the environment as written.
        manifest: `manifest.json`.
        events: `events.jsonl`.
        label: what it is called in place of its directory's name.
    """

    path: Path
    tree: dict[str, Any]
    manifest: dict[str, Any]
    events: list[dict[str, Any]]
    label: str = ""

    @classmethod
    def read(cls, path: Path) -> StoredRun:
        """The run in a directory.

        Raises:
            CheckpointError: it holds none.
        """
        config = record_file(path, CONFIG)
        if config is None or record_file(path, MANIFEST) is None:
            lost = [name for name in (CONFIG, MANIFEST) if record_file(path, name) is None]
            below = sorted(str(file.parent) for file in path.glob(f"*/{MANIFEST}"))
            raise CheckpointError(
                f"{path} is not a run directory: {' and '.join(lost)} cannot be read",
                where=str(path),
                remedy=f"there are runs below it: {', '.join(below[:5])}"
                if below
                else "give the directory that shardtune train made (runs/<experiment_name>)",
            )
        return cls(path, read_stored(config.read_text(encoding="utf-8")), read_manifest(path), _events(path))

    @cached_property
    def settings(self) -> dict[str, object]:
        """The recipe by dotted key, in the long form."""
        return {FORMER_KEYS.get(key, key): value for key, value in flatten(self.tree).items()}

    @cached_property
    def resolved(self) -> Recipe | None:
        """The recipe with today's values of environment variables; None where one of them is not set."""
        config = record_file(self.path, CONFIG)
        assert config is not None  # `read` has found it
        try:
            return load_recipe(config, in_memory=self.manifest.get("in_memory", []), files_must_exist=False)
        except ShardtuneError:
            return None

    def is_unchanged(self, key: str) -> bool:
        """Whether `resolved` has a key's value as the run had it; for one from the environment by its hash."""
        digest = self.manifest.get(FROM_ENVIRONMENT, {}).get(key)
        if digest is None:
            return True
        return self.resolved is not None and is_value(digest, get_value(self.resolved.to_dict(), key))

    @property
    def name(self) -> str:
        """Its label, or the name of its directory."""
        return self.label or self.path.resolve().name

    @property
    def final(self) -> Path:
        """The directory of the trained model, written or not."""
        return self.path / FINAL

    @property
    def finished(self) -> dict[str, Any] | None:
        """Step, reason of the end, and metrics of `final/`; None for a run that has not ended."""
        return self.manifest.get("finished")

    def lines(self) -> Iterator[dict[str, float | None]]:
        """The lines of `metrics.jsonl`."""
        return metric_lines(self.path)

    def starts(self) -> list[tuple[int, int | None]]:
        """The step after which the run was started or continued, and the ranks, each time."""
        begun = [event for event in self.events if event.get("event") in BEGINS]
        return [(int(event.get("step") or 0), event.get("ranks")) for event in begun]


def _events(path: Path) -> list[dict[str, Any]]:
    """The events of a run; torn lines are left out."""
    try:
        lines = (path / EVENTS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:  # torn
            continue
    return [event for event in found if isinstance(event, dict)]
