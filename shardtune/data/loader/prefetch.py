"""Results that processes compute ahead of their use, in order, by torch's `DataLoader`."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from shardtune.errors import DataError
from shardtune.parallel.torch_private.processes import end_processes

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 2
"""Results that each process may be ahead by."""
_WATCH_SECONDS = 1.0


class ProcessDied(DataError):
    """A prefetching process was killed, for example because memory ran out."""


def computed_ahead(function: Callable[[T], R], items: Iterable[T], num_processes: int) -> Generator[R, None, None]:
    """`function` of each item, in their order, computed in processes that fork here.

    Args:
        function: sees this process as it is when the first result is requested. The tensors of a result come through
            shared memory.
        items: read only a few ahead of the results, so they may have no end.
        num_processes: 0: nothing is started, each result is computed when it is requested.

    Raises:
        ProcessDied: one of the processes was killed. An error of the function is raised as it is, in its place.
    """
    if not num_processes:
        yield from map(function, items)
        return
    with quiet_tokenizers(), _signal_handler_kept(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # more processes than cores
        messages = iter(_loader(function, items, num_processes))
    # At exit, of a process that multiprocessing has started too, that has to come before it waits for the processes,
    # which ignore SIGTERM, and before its queues are closed (10), by which they are ended.
    end = Finalize(None, end_processes, (messages,), exitpriority=20)
    try:
        while True:
            try:
                message = next(messages, None)
                if message is None:
                    return
                result, error = pickle.loads(message)
            except (RuntimeError, EOFError, OSError) as problem:  # of torch, whose process is gone, not of the function
                cause = str(problem)
                break
            if error is not None:
                raise error
            yield result
    finally:
        end()
    raise ProcessDied(
        f"a process that makes micro-batches died: {cause}",
        where="data.num_workers",
        remedy="memory may be full: lower data.num_workers, or the rows of a micro-batch",
    )


def _loader(function: Callable[[T], R], items: Iterable[T], num_processes: int) -> DataLoader[bytes]:
    return DataLoader(
        _Messages(function),
        batch_size=None,
        sampler=items,
        collate_fn=_unchanged,
        num_workers=num_processes,
        prefetch_factor=AHEAD,
        multiprocessing_context="fork",  # so that nothing has to be pickled that this process already holds
        worker_init_fn=partial(_begin, os.getpid()),
        generator=torch.Generator(),  # by default the seed of the processes is drawn from the global one
    )


class _Messages(Dataset[bytes], Generic[T, R]):
    """`[item]` is the pickled pair (result, None), or (None, error); torch would raise another error with its text."""

    def __init__(self, function: Callable[[T], R]) -> None:
        self._function = function

    def __getitem__(self, item: T) -> bytes:
        try:
            answer = self._function(item), None
        except Exception as error:
            answer = None, error
        # Pickled here, and not by the queue's thread, where a failure would be printed and leave the reader waiting.
        try:
            return bytes(ForkingPickler.dumps(answer))
        except RuntimeError:  # no room in shared memory, in containers often 64 MB: the content goes through the pipe
            return pickle.dumps(answer)


def _unchanged(message: T) -> T:
    return message


def _begin(parent: int, _: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they reach a whole group; the parent decides when work ends
    threading.Thread(target=_follow, args=(parent,), daemon=True, name="shardtune-ahead-watch").start()


def _follow(parent: int) -> None:
    """Ends this process when its parent is gone: a killed parent cannot end it."""
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


@contextmanager
def _signal_handler_kept() -> Iterator[None]:
    """Keep torch's handler of SIGCHLD out: it raises wherever the main thread is, as in the middle of a step."""
    if threading.current_thread() is not threading.main_thread():  # where torch sets none
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


@contextmanager
def quiet_tokenizers() -> Iterator[None]:
    """Keep the tokenizers library from warning that a process with its threads forks."""
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
