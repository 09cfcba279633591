"""Named arrays of rows in a cache entry: each field flat in one array, read back as views of the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardtune.errors import DataError

_OFFSET = np.dtype("<i8")
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class FieldKind:
    """What the arrays of a field have in common in all rows; their shapes may differ."""

    dtype: np.dtype
    ndim: int

    @classmethod
    def of(cls, name: str, value: Any) -> FieldKind:
        """Raises `DataError` for what is no array, or one whose elements have no place in a flat file."""
        if not isinstance(value, np.ndarray | np.generic) or isinstance(value, np.ma.MaskedArray):
            raise DataError(
                f"the field {name!r} is {type(value).__name__}, not a numpy array",
                remedy=f"give an array of one type: {name} = np.asarray(value, np.float32)",
            )
        if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
            raise DataError(
                f"the field {name!r} is an array of dtype {value.dtype}; only booleans, integers and floats of at most "
                "64 bits can be kept",
                remedy="give numbers: text as token ids or np.frombuffer(text.encode(), np.uint8), lists of unequal "
                "length padded or as several fields, any other type cast with .astype",
            )
        return cls(value.dtype.newbyteorder("<"), value.ndim)

    def __str__(self) -> str:
        return f"{self.dtype.name} of {self.ndim} dimension{'' if self.ndim == 1 else 's'}"


Kinds = Mapping[str, FieldKind]


def kinds_of(fields: Mapping[str, np.ndarray]) -> Kinds:
    """The kind of each field of one row."""
    return {name: FieldKind.of(name, value) for name, value in fields.items()}


def require_same_kinds(kinds: Kinds, expected: Kinds, other: str, where: str | None = None) -> None:
    """Raises `DataError` unless a row's fields are those of the row `other`, with their types."""
    if kinds == expected:
        return
    for name in sorted(kinds.keys() | expected.keys()):
        if name not in kinds or name not in expected:
            has, not_has = ("has", "has not") if name in kinds else ("lacks", "has")
            raise DataError(
                f"the row {has} the field {name!r}, which {other} {not_has}",
                where=where,
                remedy="let every row have the same fields: zeros or an empty array where there is nothing",
            )
        if kinds[name] != expected[name]:
            raise DataError(
                f"the field {name!r} is {kinds[name]}, in {other} it is {expected[name]}",
                where=where,
                remedy="let it have one type and number of dimensions in all rows: "
                f"np.asarray(value, np.{expected[name].dtype.name}), reshaped; sizes may differ",
            )


@dataclass(frozen=True, slots=True)
class FieldColumn:
    """A field of consecutive rows.

    Attributes:
        data: the elements of all rows end to end, flat.
        shapes: int64 [rows, dimensions].
    """

    data: np.ndarray
    shapes: np.ndarray

    @property
    def kind(self) -> FieldKind:
        return FieldKind(self.data.dtype, self.shapes.shape[1])


def pack_fields(rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, FieldColumn]:
    """The fields of rows, which have the same kinds."""
    if not rows or not rows[0]:
        return {}
    columns = {}
    for name in sorted(rows[0]):
        values = [row[name] for row in rows]
        dtype = FieldKind.of(name, values[0]).dtype
        data = np.concatenate([value.reshape(-1) for value in values]).astype(dtype, copy=False)
        shapes = np.array([value.shape for value in values], _OFFSET).reshape(len(values), values[0].ndim)
        columns[name] = FieldColumn(data, shapes)
    return columns


@dataclass(slots=True)
class _Progress:
    """How far a field is written. `shape` is that of all rows so far, None from the first row that differs."""

    kind: FieldKind
    shape: tuple[int, ...] | None
    rows: int = 0
    end: int = 0


@dataclass(slots=True)
class FieldsWriter:
    """Writes fields chunk by chunk, in bounded memory; shapes and offsets only of fields whose rows differ in shape.

    Args:
        append: adds elements at the end of the array of a name.
    """

    append: Callable[[str, np.ndarray], None]
    _progress: dict[str, _Progress] = field(default_factory=dict)

    def add(self, columns: Mapping[str, FieldColumn]) -> None:
        """Rows of the same kinds as before."""
        for place, (name, column) in enumerate(columns.items()):
            if name not in self._progress:
                self._progress[name] = _Progress(column.kind, tuple(column.shapes[0].tolist()))
            self._add(f"field{place}", self._progress[name], column)

    def about(self) -> list[dict[str, Any]]:
        """The metadata that `FieldsReader` needs besides the arrays."""
        return [
            {"name": name, "dtype": state.kind.dtype.str, "ndim": state.kind.ndim, "shape": state.shape}
            for name, state in self._progress.items()
        ]

    def _add(self, array: str, state: _Progress, column: FieldColumn) -> None:
        self.append(array, column.data)
        if state.shape is not None and (column.shapes != np.array(state.shape, _OFFSET)).any():
            self._repeat_shape(array, state.rows, state.shape)
            state.shape = None
        if state.shape is None:
            self._append_shapes(array, column.shapes, state.end)
        state.rows += len(column.shapes)
        state.end += len(column.data)

    def _repeat_shape(self, array: str, rows: int, shape: tuple[int, ...]) -> None:
        """The shapes and offsets of the rows so far, which all had this shape."""
        self.append(f"{array}_offsets", np.zeros(1, _OFFSET))
        size = int(np.prod(shape, dtype=np.int64))
        for first in range(0, rows, _BLOCK):
            shapes = np.tile(np.array(shape, _OFFSET), (min(_BLOCK, rows - first), 1))
            self._append_shapes(array, shapes, first * size)

    def _append_shapes(self, array: str, shapes: np.ndarray, start: int) -> None:
        self.append(f"{array}_shapes", shapes)
        self.append(f"{array}_offsets", start + np.cumsum(shapes.prod(axis=1), dtype=_OFFSET))


class FieldsReader:
    """The fields of an entry.

    Args:
        about: what `FieldsWriter.about` gave.
        array: the flat array of a name, viewed as a type.
        rows: how many rows the entry has.
    """

    def __init__(
        self, about: Sequence[Mapping[str, Any]], array: Callable[[str, np.dtype], np.ndarray], rows: int
    ) -> None:
        self.kinds: Kinds = {one["name"]: FieldKind(np.dtype(one["dtype"]), one["ndim"]) for one in about}
        self._even: dict[str, np.ndarray] = {}
        self._uneven: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for place, (name, one) in enumerate(zip(self.kinds, about, strict=True)):
            kind, data = self.kinds[name], array(f"field{place}", self.kinds[name].dtype)
            if one["shape"] is not None:
                self._even[name] = data.reshape(rows, *one["shape"])
            else:
                shapes = array(f"field{place}_shapes", _OFFSET).reshape(rows, kind.ndim)
                self._uneven[name] = (data, array(f"field{place}_offsets", _OFFSET), shapes)

    def counts(self, name: str) -> np.ndarray:
        """int64 [rows]: the first dimension of a field in each row."""
        if name in self._even:
            rows, *shape = self._even[name].shape
            return np.broadcast_to(np.int64(shape[0]), rows)
        return self._uneven[name][2][:, 0]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape that a field has in all rows, if that is one."""
        return self._even[name].shape[1:] if name in self._even else None

    def shapes(self, name: str) -> np.ndarray:
        """int64 [rows, dimensions]: the shape of a field in each row."""
        if name in self._even:
            rows, *shape = self._even[name].shape
            return np.broadcast_to(np.array(shape, _OFFSET), (rows, len(shape)))
        return self._uneven[name][2]

    def row(self, index: int) -> dict[str, np.ndarray]:
        """The fields of one row, as read-only views of the file."""
        fields = {name: data[index, ...] for name, data in self._even.items()}
        for name, (data, offsets, shapes) in self._uneven.items():
            fields[name] = data[offsets[index] : offsets[index + 1]].reshape(shapes[index])
        return fields
