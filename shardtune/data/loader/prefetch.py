"""Work that processes do ahead of who needs it, in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing.queues import SimpleQueue
from typing import Any, TypeVar

import torch

from shardtune.data.loader.shared_memory import SharedMemoryMessage, packed
from shardtune.errors import DataError

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 2
"""Pieces of work that each process is ahead by."""
_WATCH_SECONDS = 1.0


def computed_ahead(function: Callable[[T], R], items: Iterable[T], num_processes: int) -> Iterator[R]:
    """`function` of each item, in their order, computed in processes that fork here.

    Args:
        function: what is computed; it sees this process as it is now. A result's tensors come through shared memory, in
            one piece.
        items: read ahead of what is asked for, so they may have no end.
        num_processes: 0: nothing is started, each result is computed when it is asked for.

    Raises:
        DataError: one of the processes was killed. What the function raises comes as it is, in its place.
    """
    if not num_processes:
        yield from map(function, items)
        return
    pending, waiting = enumerate(items), deque[Future[SharedMemoryMessage]]()
    # Forked, so that nothing has to be sent to it that this process knows.
    context = multiprocessing.get_context("fork")
    started = context.SimpleQueue()
    most = num_processes * AHEAD
    pool = ProcessPoolExecutor(
        num_processes, context, initializer=_begin, initargs=(function, os.getpid(), started, most)
    )
    try:
        with quiet_tokenizers():
            for number, item in islice(pending, most):
                waiting.append(pool.submit(_work, number, item))
        while waiting:
            found = _received(waiting.popleft().result())
            for number, item in islice(pending, 1):
                waiting.append(pool.submit(_work, number, item))
            yield found
    except BrokenProcessPool as error:
        kill_started(started)
        raise _died(error) from error
    finally:
        waiting.clear()
        pool.shutdown(wait=True, cancel_futures=True)


def kill_started(processes: SimpleQueue[int]) -> None:
    """Kills what is left of a broken pool, by the numbers that its processes gave when they began.

    The pool asks them to end, and waits; but they may wait for a lock that died with the one that held it.
    """
    while not processes.empty():
        with suppress(ProcessLookupError):
            os.kill(processes.get(), signal.SIGKILL)


def _received(message: SharedMemoryMessage) -> Any:
    try:
        return message.opened()
    except FileNotFoundError as error:  # its process is gone, and so is the memory
        raise BrokenProcessPool(str(error)) from error
    except OSError as error:
        raise _not_shared(error) from error


@dataclass(frozen=True, slots=True)
class _Worker:
    """A process of the pool.

    Attributes:
        function: computes a result.
        most: results that may be under way at once, of all processes.
        kept: numbers and files of results whose memory may not have been opened yet.
    """

    function: Callable[[Any], Any]
    most: int
    kept: deque[tuple[int, int]]

    def work(self, number: int, item: Any) -> SharedMemoryMessage:
        # A piece is given out when the one that is `most` before it has been opened.
        while self.kept and self.kept[0][0] <= number - self.most:
            os.close(self.kept.popleft()[1])
        found = self.function(item)
        try:
            message = packed(found)
        except OSError as error:
            raise _not_shared(error) from error
        if message.file is not None:
            self.kept.append((number, message.file))
        return message


_worker: _Worker | None = None


def _begin(function: Callable[[Any], Any], parent: int, started: SimpleQueue[int], most: int) -> None:
    global _worker
    _worker = _Worker(function, most, deque())
    started.put(os.getpid())
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they reach a whole group; the parent decides when work ends
    threading.Thread(target=_follow, args=(parent,), daemon=True, name="shardtune-ahead-watch").start()


def _follow(parent: int) -> None:
    """Ends this process when its parent is gone: a killed parent cannot end it."""
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


def _work(number: int, item: Any) -> SharedMemoryMessage:
    assert _worker is not None
    return _worker.work(number, item)


@contextmanager
def quiet_tokenizers() -> Iterator[None]:
    """Tells the tokenizers library that forking is meant, so that it does not warn about its threads."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _not_shared(error: OSError) -> DataError:
    return DataError(
        f"a micro-batch cannot be handed over in shared memory: {error}",
        where="data.num_workers",
        remedy="set it to 0, or make room in memory and let processes of one user open each other's files in /proc",
    )


def _died(error: BrokenProcessPool) -> DataError:
    cause = str(error.__cause__ or "").strip(" \n'\"").rpartition("\n")[2]
    return DataError(
        "a process that makes micro-batches died" + (f": {cause}" if cause else ""),
        where="data.num_workers",
        remedy="memory, in which batches are shared, may be full: lower data.num_workers, or the rows of a micro-batch",
    )
