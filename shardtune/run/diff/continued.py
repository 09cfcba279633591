"""Settings that a run was continued with and had not begun with, by the recipes in its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from shardtune.checkpoint.records import intact_copy
from shardtune.checkpoint.store import CheckpointStore
from shardtune.config import flatten
from shardtune.config.recipe_file import read_stored
from shardtune.config.schema import FORMER_KEYS, short_key
from shardtune.config.shown import as_written
from shardtune.run.diff.settings import PLACE, Difference, effects_of
from shardtune.run.identity import CONFIG
from shardtune.run.resume_check import has_moved
from shardtune.run.stored_run import StoredRun

History = dict[str, list[tuple[int, object]]]
"""By key the values that a run had before the last one, each with the last step that is known to have it."""


def changed_on_the_way(first: StoredRun, second: StoredRun) -> Iterator[Difference]:
    """The keys that one of two runs was continued with another value of, where the other was not, or otherwise."""
    one, other = _earlier(first), _earlier(second)
    for key in dict.fromkeys([*one, *other]):
        was, now = _shown(first, one, key), _shown(second, other, key)
        if was != now and one.get(key) != other.get(key):  # where the last value alone differs, the recipes show it
            yield Difference("history", short_key(key), was, now, effects_of(key))


def other_before(run: StoredRun, keys: Sequence[str]) -> str:
    """Why steps of a run may have had another value of one of these keys than the last; "" where none had."""
    values = _earlier(run)
    for key in keys:
        if key in values:
            return f"it was continued after step {values[key][-1][0]:,} with another {short_key(key)}"
    recipe = run.resolved
    if recipe is None or len(run.starts()) < 2 or _copies(run):
        return ""
    allowed = [short_key(key) for key in keys if recipe.runner.allows(key)]
    if not allowed:
        return ""
    return f"it was continued with {', '.join(allowed)} in runner.allow_changes, and the value before is not known"


def _copies(run: StoredRun) -> list[tuple[int, Path]]:
    """The recipes in the checkpoints that are left of before the run was continued last, with their steps."""
    store, last_start = CheckpointStore(run.path / "checkpoints"), run.starts()[-1][0]
    found = [(step, intact_copy(store.path(step), CONFIG)) for step in store.steps() if step <= last_start]
    return [(step, file) for step, file in found if file is not None]


def _earlier(run: StoredRun) -> History:
    """What the checkpoints of a run that are left have recorded."""
    found: History = {}
    if len(run.starts()) < 2:
        return found
    for step, file in _copies(run):
        stored = flatten(read_stored(file.read_text(encoding="utf-8")))
        then = {FORMER_KEYS.get(key, key): value for key, value in stored.items()}
        for key in then.keys() & run.settings.keys():
            values = found.setdefault(key, [])
            if values and values[-1][1] == then[key]:
                values.pop()
            values.append((step, then[key]))
    return {key: values for key, values in found.items() if _has_changed(key, values, run.settings[key])}


def _has_changed(key: str, values: list[tuple[int, object]], last: object) -> bool:
    """Whether a key that numbers depend on had another value, beside another place on the disk."""
    if key in PLACE or not effects_of(key):
        return False
    return any(value != last and not has_moved(value, last) for _, value in values)


def _shown(run: StoredRun, earlier: History, key: str) -> str:
    """The values of a key in their order."""
    last, values = run.settings.get(key), earlier.get(key, [])
    if values and values[-1][1] == last:
        values = values[:-1]
    return ", then ".join([*(f"{as_written(value)} up to step {step:,}" for step, value in values), as_written(last)])
