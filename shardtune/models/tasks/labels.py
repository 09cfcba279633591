"""The labels of a data set: all that its training rows have, in order; read once and kept in the cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from shardtune.config import Recipe
from shardtune.data.cache_directory import cache_error, cache_root, writable, write_atomically
from shardtune.data.checksum import is_sealed, sealed
from shardtune.data.encoder import Row, RowError, bad_row
from shardtune.data.robot.content import content_digest
from shardtune.data.sources.resolve import resolve_sources
from shardtune.data.sources.source import Source, prepare_row
from shardtune.errors import ConfigError
from shardtune.models.options import KEY

LABELS_VERSION = 3
"""Part of every key: raise it when the same rows would have other labels."""
LABELS = f"{KEY}.labels"
NO_LABEL = -100
"""What other trainers write in the place of a label where nothing is to be learned."""
NUMBERS = (int, float, np.number)
Labels = Callable[[Row], Iterable[object]]
"""The labels of a row. Raises `RowError` for one that has none."""


def training_rows(recipe: Recipe, train_data: object) -> Iterator[tuple[Source, Iterator[Row]]]:
    """The sources of the training rows, and their rows as an encoder sees them; those that cannot be used are left out.

    Args:
        recipe: its `data` section is read.
        train_data: rows in memory instead of the recipe's.
    """
    for source in _sources(recipe, train_data):
        yield source, _rows(source)


def first_row(recipe: Recipe, train_data: object) -> Row:
    """The first training row; empty where there is none."""
    return next((row for _, rows in training_rows(recipe, train_data) for row in rows), {})


def _sources(recipe: Recipe, train_data: object) -> list[Source]:
    spec = recipe.data.train_data_paths if train_data is None else train_data
    if spec is None:
        return []
    return resolve_sources(spec, recipe.data, name_format=lambda row: "rows", report=lambda text: None)


def _rows(source: Source) -> Iterator[Row]:
    for file in source.files:
        for _, row in source.rows(file):
            with suppress(RowError):  # it is reported when it is encoded
                prepared = None if isinstance(row, RowError) else prepare_row(row, source)
                if prepared is not None:
                    yield prepared


def labels_of_rows(recipe: Recipe, train_data: object, read: Labels, kind: str) -> list[int | str]:
    """All labels of the training rows: numbers in their order, before texts in theirs; a text "1" is the number 1.

    Args:
        recipe, train_data: as for `training_rows`.
        read: the labels of a row.
        kind: of the task, and what else `read` depends on: part of the name in the cache.

    Raises:
        ConfigError: there are no rows, or fewer than two labels.
        DataError: no row has one; names the first.
    """
    root = cache_root(recipe.data.cache_dir)
    found: set[int | str] = set()
    for source, rows in training_rows(recipe, train_data):
        found |= _of_source(source, rows, read, kind, root)
    found -= {str(label) for label in found if isinstance(label, int)}
    if not found:
        _require_first_label(recipe, train_data, read)
    if len(found) < 2:
        raise ConfigError(
            f"the training rows have {'one label' if found else 'no labels'}"
            + (f": {next(iter(found))}" if found else ""),
            where=LABELS,
            remedy="a classifier needs two or more: name them, options: {labels: [bad, good]}, or rows that have them",
        )
    return sorted(found, key=lambda one: (isinstance(one, str), one))


def _require_first_label(recipe: Recipe, train_data: object, read: Labels) -> None:
    """Refuse the first row, of rows none of which has a label that can be used."""
    for source in _sources(recipe, train_data):
        for file in source.files:
            for number, row in source.rows(file):
                try:
                    prepared = None if isinstance(row, RowError) else prepare_row(row, source)
                    for label in [] if prepared is None else read(prepared):
                        plain_label(label)
                except RowError as error:
                    raise bad_row(file.label, number, error.reason) from error


def plain_label(value: object) -> int | str:
    """A label as a row has it: a text, or a whole number (also as numpy or a bool has it).

    Raises:
        RowError: anything else.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool | np.bool_ | int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return int(value)
    raise RowError(f"the label is {value!r:.60}, not a text or a whole number")


def is_no_label(value: object) -> bool:
    """Whether a row marks by this value, a number or as CSV has it, that there is nothing to be learned."""
    return value == str(NO_LABEL) if isinstance(value, str) else isinstance(value, NUMBERS) and value == NO_LABEL


def distinct(labels: Sequence[object]) -> Sequence[object]:
    """The labels of a row that may have several.

    Raises:
        RowError: one is there twice, as in a list of 0 and 1 for each label.
    """
    plain = [plain_label(label) for label in labels]
    twice = next((label for place, label in enumerate(plain) if label in plain[:place]), None)
    if twice is None:
        return labels
    hint = ", and not 0 or 1 for each of all: data.transform turns [0, 1, 1] into [1, 2], or into their names"
    raise RowError(f"the label {twice!r} is twice in {plain!r:.60}; the list has the labels of the row{hint}")


def place_of(label: int | str, labels: Sequence[str]) -> int | None:
    """The number of a label among labels; None where it is none of them.

    Where labels are names, a whole number is the place of one, as in data sets that keep the names apart.
    """
    if str(label) in labels:
        return labels.index(str(label))
    named = not any(one.removeprefix("-").isdigit() for one in labels)
    return label if isinstance(label, int) and named and 0 <= label < len(labels) else None


def index_of(value: object, labels: Sequence[str]) -> int:
    """The number of a row's label.

    Raises:
        RowError: it is not among the labels.
    """
    label = plain_label(value)
    found = place_of(label, labels)
    if found is not None:
        return found
    raise RowError(
        f"the label {str(label)!r} is not among those of the training rows (or of {LABELS.removeprefix('actor.')}): "
        f"{', '.join(labels[:20])}{', …' if len(labels) > 20 else ''}"
    )


def _of_source(source: Source, rows: Iterator[Row], read: Labels, kind: str, root: Any) -> set[int | str]:
    path = root / "labels" / f"{_key(source, kind, root)}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):  # none there, or damaged
        document = json.loads(path.read_text(encoding="utf-8"))
        if is_sealed(document):
            return set(document["labels"])
    found: set[int | str] = set()
    for row in rows:
        with suppress(RowError):
            found.update(plain_label(one) for one in read(row))
    try:
        writable(path.parent)
        write_atomically(path, json.dumps(sealed({"labels": sorted(found, key=str)})).encode())
    except OSError as error:
        raise cache_error(error, root) from error
    return found


def _key(source: Source, kind: str, root: Any) -> str:
    depends: Mapping[str, object] = {
        "version": LABELS_VERSION,
        "kind": kind,
        "files": [[content_digest(file.path, root), file.kind, file.part] for file in source.files],
        "columns": dict(source.columns),
        "transform": None if source.transform is None else [source.transform.digest, source.transform.spec],
    }
    return hashlib.blake2b(json.dumps(depends, sort_keys=True).encode(), digest_size=20).hexdigest()
