"""How memory changes during a step, one allocation or release after the other; and that of a deeper model, by repeats.

A model with one more period of layers changes memory in the same order, with further changes inserted: those of the
layers' weights and states, of their forward and backward, of their updates. Found between two depths, and inserted as
often as the whole model has more layers, they give its timeline, change by change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

Change = tuple[str, int]
"""A category, and bytes from then on: more than before, or fewer."""
WINDOW = 16
"""Changes after an inserted block that are compared first."""


@dataclass(frozen=True, slots=True)
class Block:
    """Changes that a deeper model has in addition.

    Attributes:
        place: in the shallower timeline, before which they stand.
        changes: of one repetition.
    """

    place: int
    changes: np.ndarray


@dataclass(slots=True)
class Alphabet:
    """Numbers for changes, so that timelines are arrays.

    Attributes:
        changes: by their numbers.
    """

    changes: list[Change] = field(default_factory=list)
    _numbers: dict[Change, int] = field(default_factory=dict)

    def encode(self, changes: Iterable[Change]) -> np.ndarray:
        """The numbers of changes."""
        return np.fromiter(map(self._number, changes), dtype=np.int32)

    def fullest(self, timeline: np.ndarray) -> dict[str, int]:
        """Bytes by category at the first moment at which they are the most together."""
        sizes = np.array([size for _, size in self.changes], np.int64)
        totals = np.cumsum(sizes[timeline])
        if not len(totals) or totals.max() <= 0:
            return {}
        counts = np.bincount(timeline[: int(totals.argmax()) + 1], minlength=len(sizes))
        found: dict[str, int] = {}
        for (category, size), count in zip(self.changes, counts.tolist(), strict=True):
            found[category] = found.get(category, 0) + size * count
        return {category: size for category, size in found.items() if size}

    def _number(self, change: Change) -> int:
        number = self._numbers.setdefault(change, len(self.changes))
        if number == len(self.changes):
            self.changes.append(change)
        return number


def fullest(changes: Iterable[Change]) -> dict[str, int]:
    """Bytes by category at the first moment at which they are the most together."""
    alphabet = Alphabet()
    return alphabet.fullest(alphabet.encode(changes))


def inserted(short: np.ndarray, long: np.ndarray) -> list[Block] | None:
    """What a timeline has more than that of a model with fewer layers, block by block; None: it is otherwise, too.

    Each block is a whole repetition of the changes before it: where the timelines part, the longer one runs on in its
    period, up to the point from which both go on alike.
    """
    found: list[Block] = []
    here = there = 0
    while True:
        alike = _alike(short[here:], long[there:])
        here, there = here + alike, there + alike
        if there == len(long):
            return found if here == len(short) else None
        missing = (len(long) - there) - (len(short) - here)
        size = _block(short[here:], long, there, missing)
        if size is None:
            return None
        found.append(Block(here, long[there : there + size]))
        there += size


def repeated(short: np.ndarray, blocks: Iterable[tuple[Block, int]]) -> np.ndarray:
    """A timeline with blocks inserted, each a number of times."""
    parts: list[np.ndarray] = []
    done = 0
    for block, times in sorted(blocks, key=lambda pair: pair[0].place):
        parts += [short[done : block.place], np.tile(block.changes, times)]
        done = block.place
    return np.concatenate([*parts, short[done:]])


def _alike(first: np.ndarray, second: np.ndarray) -> int:
    """Changes at the beginning that are the same."""
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    return int(differ.argmax()) if differ.any() else length


def _block(rest: np.ndarray, long: np.ndarray, at: int, missing: int) -> int | None:
    """The size of the block of `long` that begins at `at`, after which it goes on like `rest`, for as long as any."""
    best, furthest = None, -1
    for size in _sizes(rest, long, at, missing):
        after = long[at + size :]
        if _alike(rest[:WINDOW], after[:WINDOW]) < min(WINDOW, len(rest), len(after)) and furthest >= WINDOW:
            continue
        if size > at or not np.array_equal(long[at - size : at], long[at : at + size]):
            continue
        alike = _alike(rest, after)
        if alike > furthest:
            best, furthest = size, alike
    return best


def _sizes(rest: np.ndarray, long: np.ndarray, at: int, missing: int) -> Sequence[int]:
    """Sizes of a block after which the next change is that of `rest`."""
    if missing <= 0:
        return []
    if not len(rest):
        return [missing]
    return (np.flatnonzero(long[at + 1 : at + missing + 1] == rest[0]) + 1).tolist()
