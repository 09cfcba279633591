"""A row that notes which of its keys are read, so that those which the code of an adapter passes over are named."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any


class RowReads(dict[str, Any]):
    """A copy of a row. Whatever takes it as a whole (`dict(row)`, `**row`, a loop, JSON, a copy) has read all of it."""

    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__(row)
        self._given = list(row)
        self._read = set[str]()

    def unread(self) -> list[str]:
        """The keys with a value that were not read.

        None are named where none was read: compiled code may take values out of a row without its methods.
        """
        if not self._read:
            return []
        return [key for key in self._given if key not in self._read and super(RowReads, self).get(key) is not None]

    def _whole(self) -> None:
        self._read.update(self._given)

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._read.add(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().setdefault(key, default)

    def __delitem__(self, key: str) -> None:
        self._read.add(key)
        super().__delitem__(key)

    def __iter__(self) -> Iterator[str]:
        self._whole()
        return super().__iter__()

    def keys(self) -> KeysView[str]:  # pyright: ignore[reportIncompatibleMethodOverride] (a dict_keys, without a name)
        self._whole()
        return super().keys()

    def items(self) -> ItemsView[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._whole()
        return super().items()

    def values(self) -> ValuesView[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._whole()
        return super().values()

    def copy(self) -> dict[str, Any]:
        self._whole()
        return super().copy()

    def popitem(self) -> tuple[str, Any]:
        self._whole()
        return super().popitem()

    def __or__(self, other: Any) -> Any:
        self._whole()
        return super().__or__(other)

    def __ror__(self, other: Any) -> Any:
        self._whole()
        return super().__ror__(other)

    def __reversed__(self) -> Iterator[str]:
        self._whole()
        return super().__reversed__()

    def __eq__(self, other: object) -> bool:
        self._whole()
        return super().__eq__(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType] (as dict has it)

    def __repr__(self) -> str:
        self._whole()
        return super().__repr__()
