"""Work that processes do ahead of who needs it, in order."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, Dataset

from shardtune.errors import ShardtuneError

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 2
"""Pieces of work that each process is ahead by."""


def computed_ahead(function: Callable[[T], R], items: Iterable[T], num_processes: int) -> Iterator[R]:
    """`function` of each item, in their order, computed in processes that fork here.

    Args:
        function: what is computed; it sees this process as it is now. Its tensors come through shared memory.
        items: read ahead of what is asked for, so they may have no end.
        num_processes: 0: nothing is started, each result is computed when it is asked for.

    Raises:
        ShardtuneError: that of the function, as it was raised there.
    """
    if not num_processes:
        yield from map(function, items)
        return
    loader: Any = DataLoader(
        _Work(function),
        batch_size=None,
        sampler=items,  # pyright: ignore[reportArgumentType]
        num_workers=num_processes,
        prefetch_factor=AHEAD,
        collate_fn=_as_it_is,
        worker_init_fn=_begin,
        multiprocessing_context="fork",
    )
    for found in loader:
        if isinstance(found, ShardtuneError):
            raise found
        yield found


class _Work(Dataset[Any], Generic[T, R]):
    """A function as a data set whose indices are its arguments. A user's error is handed back instead of raised: torch
    would make another of it."""

    def __init__(self, function: Callable[[T], R]) -> None:
        self._function = function

    def __getitem__(self, item: T) -> R | ShardtuneError:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            return self._function(item)
        except ShardtuneError as error:
            return error.with_traceback(None)


def _as_it_is(found: R) -> R:
    return found


def _begin(number: int) -> None:
    """The parent decides when work ends, and ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
