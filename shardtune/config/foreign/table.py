"""What a key of another trainer is here: the entries of the tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias


class NoCounterpart(Exception):
    """A value that no key of ours can express; the message is what to do instead."""


class _Ours:
    """The other trainer's default is ours, or follows from the model."""


OURS = _Ours()


def as_given(value: object) -> object:
    """The value as it stands."""
    return value


@dataclass(frozen=True, slots=True)
class To:
    """A key of ours with the same meaning.

    Attributes:
        key: ours, dotted.
        read: from their value to ours; raises NoCounterpart. None means that nothing is written.
        default: theirs where it is not ours; it is then written into the recipe.
        note: a difference that remains, for the comment.
    """

    key: str
    read: Callable[[object], object] = as_given
    default: object = OURS
    note: str = ""


@dataclass(frozen=True, slots=True)
class By:
    """A key that is read together with others, by a rule of its trainer.

    Attributes:
        line: the line to write in a recipe instead, for messages.
        read: our keys for a value, where that decides them by itself; raises `NoCounterpart`.
    """

    line: str
    read: Callable[[object], Mapping[str, object]] | None = None


@dataclass(frozen=True, slots=True)
class NotNeeded:
    """A key without a counterpart, because what it sets does not arise here, whatever its value.

    Attributes:
        why: completes "not needed: …".
    """

    why: str


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that there is not here.

    Attributes:
        remedy: what to do instead.
        off: the values that describe what happens here anyway.
    """

    remedy: str
    off: tuple[object, ...] = (None, False)


Entry: TypeAlias = To | By | NotNeeded | Missing
Table: TypeAlias = Mapping[str, Entry]


def each(names: str, entry: Entry) -> dict[str, Entry]:
    """One entry for several names, separated by spaces."""
    return dict.fromkeys(names.split(), entry)


def entry_of(table: Table, name: str) -> tuple[str, Entry | None]:
    """The entry of a dotted name, or of the section or list around it, and the name that has it."""
    outer = name.partition("[")[0]
    while outer:
        if outer in table:
            return outer, table[outer]
        outer = outer.rpartition(".")[0]
    return name, None
