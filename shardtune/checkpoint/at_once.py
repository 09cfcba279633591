"""Many small requests of the file system, which wait for it together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

THREADS = 16
FEW = 64
"""Requests that are made one after another, in less time than threads start."""


def at_once(request: Callable[[T], R], of: Sequence[T]) -> list[R]:
    """The answers to a request for each item, in order. A shared file system answers many in the time of one.

    Raises:
        Exception: what a request raises, of the first item for which one does.
    """
    if len(of) <= FEW:
        return [request(item) for item in of]
    size = -(-len(of) // (4 * THREADS))
    parts = [of[start : start + size] for start in range(0, len(of), size)]
    with ThreadPoolExecutor(THREADS, "requests") as pool:
        return list(chain.from_iterable(pool.map(lambda part: [request(item) for item in part], parts)))
