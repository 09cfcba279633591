"""The entries of `data.train_data_paths` and `data.eval_data_paths`, as a recipe or a program gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from shardtune.data.row_formats import FORMATS_BY_NAME
from shardtune.data.sources import hub
from shardtune.data.sources.memory_rows import is_table
from shardtune.errors import DataError

ENTRY_KEYS = ("path", "name", "weight", "max_samples", "columns", "format", "split")


def named_sets(spec: object) -> dict[str, object]:
    """`data.eval_data_paths` by name: what the recipe names, or everything under the name ""; nothing for null."""
    hub.refuse_container(spec)
    if isinstance(spec, Mapping) and "path" not in spec:
        return dict(spec)
    return {} if spec is None else {"": spec}


def items_of(spec: object, where: str) -> list[object]:
    """What a data key names or holds, as a list; rows in memory are one item. Raises `DataError` for other objects."""
    hub.refuse_container(spec)
    if isinstance(spec, Sized) and not isinstance(spec, (str, Mapping)) and not len(spec):
        raise DataError(f"the {_kind_of(spec)} of rows is empty", where=where, remedy="give it rows")
    if isinstance(spec, (str, Path, Mapping, BaseModel)) or is_table(spec):
        return [spec]
    if not isinstance(spec, Sequence):
        raise DataError(
            f"data cannot be read from {_kind_of(spec)}",
            where=where,
            remedy="name a file, directory, glob or Hub name, or give a list of dictionaries, a datasets.Dataset or a "
            "pandas.DataFrame",
        )
    rows = [item for item in spec if isinstance(item, Mapping) and not _is_entry(item)]
    if rows and len(rows) < len(spec):
        for number, item in enumerate(spec, 1):
            if not isinstance(item, (str, Path, Mapping, BaseModel)):
                raise DataError(
                    f"the row is {_kind_of(item)}, not a dictionary",
                    where=f"rows in memory: row {number:,}",
                    remedy="leave it out, or make it a dictionary",
                )
        raise DataError("the list mixes rows and paths", where="data", remedy="give either rows or paths")
    return [spec] if rows else list(spec)


def _kind_of(spec: object) -> str:
    return type(spec).__name__


def _is_entry(item: Mapping[str, object]) -> bool:
    return "path" in item and set(item) <= set(ENTRY_KEYS)


def entry_of(item: object) -> dict[str, Any]:
    """An item with the keys of an entry, of which `path` is there. Raises `DataError` for unknown keys and values."""
    if isinstance(item, BaseModel):
        item = item.model_dump()
    if not isinstance(item, Mapping):
        return {"path": item}
    unknown = [key for key in item if key not in ENTRY_KEYS]
    if unknown or item.get("path") is None:
        what = f"a data entry has the unknown key {unknown[0]!r}" if unknown else "a data entry names no path"
        raise DataError(what, where=f"data: {dict(item)}", remedy=f"its keys are {', '.join(ENTRY_KEYS)}")
    entry = dict(item)
    where = f"data: {entry['path']}"
    form, most = entry.get("format"), entry.get("max_samples")
    if form is not None and form not in FORMATS_BY_NAME:
        raise DataError(f"the format {form!r} is not known", where=where, remedy=f"one of {', '.join(FORMATS_BY_NAME)}")
    if most is not None and (not isinstance(most, int) or most < 1):
        raise DataError(f"max_samples is {most!r}", where=where, remedy="a whole number of at least 1, or null")
    weight = entry.get("weight")
    if weight is not None and (not isinstance(weight, (int, float)) or not 0 < weight < float("inf")):
        raise DataError(f"weight is {weight!r}", where=where, remedy="a number above 0")
    return entry


def unique_name(name: str, taken: list[str]) -> str:
    """The name, with a number behind it where it is taken."""
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}-{count}"
    return candidate
