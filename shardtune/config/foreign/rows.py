"""Entries of `data.train_data_paths` from other trainers' data sets, and what can be seen of local rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardtune.config.foreign.conversion import Conversion
from shardtune.config.foreign.values import listed

BUILDERS = ("json", "csv", "parquet", "arrow", "text")
"""Readers of `datasets`, which stand in place of a path."""
MOST_BYTES = 1 << 20
TRAIN, EVAL = "data.train_data_paths", "data.eval_data_paths"


def as_entries(entries: Sequence[Mapping[str, object]]) -> object:
    """Entries in their shortest form: a path alone where there is nothing else, no list around one."""
    brief = [entry["path"] if len(entry) == 1 else dict(entry) for entry in entries]
    return brief[0] if len(brief) == 1 else brief


def entry(path: object, **options: object) -> dict[str, object]:
    """An entry with the options that are set."""
    return {"path": path, **{name: value for name, value in options.items() if value not in (None, {}, [])}}


def files_of(c: Conversion, path: object, data_files: object) -> list[str]:
    """The paths of a data set as `datasets.load_dataset` takes it: a builder with files, a folder, or a Hub name."""
    if isinstance(data_files, Mapping):
        data_files = [name for split in data_files.values() for name in listed(split)]
    names = listed(data_files)
    if not names:
        return [c.path(path)]
    if str(path) in BUILDERS or path is None:
        return [c.path(name) for name in names]
    return [c.path(f"{path}/{name}") for name in names]


def first_row(c: Conversion, path: str) -> Mapping[str, object]:
    """The first row of a local JSON file, from its beginning; empty where there is none to be seen."""
    file = c.target / path
    if not file.is_file() or not file.name.endswith((".jsonl", ".ndjson", ".json")):
        return {}
    try:
        text = _beginning(file).lstrip().removeprefix("[")
        row, _ = json.JSONDecoder().raw_decode(text.lstrip())
    except (OSError, ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _beginning(file: Path) -> str:
    with file.open(encoding="utf-8-sig", errors="replace") as opened:
        return opened.read(MOST_BYTES)
