"""Runs a function on several gloo ranks, each in a process of its own.

The processes are kept for the next call: starting one (importing torch and transformers) takes longer than most tests.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardtune.parallel.gloo_threads import batch_threads

MOST_THREADS = 80
"""Of a process that is kept."""


@dataclass(frozen=True)
class _Rank:
    """A process that waits for something to do."""

    process: BaseProcess
    pipe: Connection

    @property
    def worn(self) -> bool:
        """Whether many threads of closed groups are left in it, which torch's caches keep."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        return tasks.is_dir() and len(list(tasks.iterdir())) > MOST_THREADS

    def rest(self) -> None:
        """Stop the process until `wake`: the threads of its closed groups wake 100 times a second each."""
        os.kill(self._pid, signal.SIGSTOP)

    def wake(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    @property
    def _pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


_waiting: dict[int, _Rank] = {}
"""By rank: torch's caches hold what is only true of one rank of a mesh, so a process never becomes another rank."""


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, fresh: bool = False
) -> list[Any]:
    """Calls `fn(*args)` on every rank inside an initialised gloo process group.

    Args:
        fn: a function of a module's top level (the processes are spawned); its result must be picklable.
        timeout: seconds after which all ranks are killed.
        fresh: take new processes, and keep none of them: for what is measured of a process, or may spoil it.

    Returns:
        What each rank returned, in rank order.

    Raises:
        AssertionError: a rank failed (with its traceback), ended, or ran out of time; all of them have been killed.
    """
    deadline = time.monotonic() + timeout
    ranks = [None if fresh else _waiting.pop(number, None) for number in range(world_size)]
    for kept in filter(None, ranks):
        kept.wake()
    ranks = [kept or _start() for kept in ranks]
    port = _free_port()
    results: list[Any] = [None] * world_size
    problems: dict[int, str] = {}
    try:
        for number, rank in enumerate(ranks):
            rank.pipe.send((number, world_size, port, pickle.dumps((fn, args))))
        problems = _collect(ranks, results, deadline)
    finally:
        if problems or fresh or sys.exc_info()[0] is not None or any(rank.worn for rank in ranks):
            for rank in ranks:
                rank.end()
        else:
            for rank in ranks:
                rank.rest()
            _waiting.update(enumerate(ranks))
    told = "\n".join(f"rank {number}: {text}" for number, text in sorted(problems.items()))
    assert not problems, f"{len(problems)} of {world_size} ranks failed\n{told}"
    return results


def _collect(ranks: list[_Rank], results: list[Any], deadline: float) -> dict[int, str]:
    """Wait for what all ranks return; once one fails, the others get a moment to fail too. Returns the failures."""
    problems: dict[int, str] = {}
    open_ranks = {rank.pipe: number for number, rank in enumerate(ranks)}
    while open_ranks and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(open_ranks), timeout=left):
            assert isinstance(pipe, Connection)
            number = open_ranks.pop(pipe)
            try:
                done, value = pipe.recv()
            except EOFError:
                done, value = False, "the process ended"
            if done:
                results[number] = pickle.loads(value)
            else:
                problems[number] = value
                deadline = min(deadline, time.monotonic() + 2)
    return problems | dict.fromkeys(open_ranks.values(), "did not return in time")


def _start() -> _Rank:
    # The new processes import the test module by its name, from wherever pytest was started.
    root = str(Path(__file__).resolve().parents[3])
    if root not in sys.path:
        sys.path.append(root)
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_rank_main, args=(there,), daemon=True)
    process.start()
    there.close()
    return _Rank(process, here)


@atexit.register
def _end_all() -> None:
    """End the processes that wait."""
    while _waiting:
        _waiting.popitem()[1].end()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank_main(pipe: Connection) -> None:
    """Do what comes through the pipe until it is closed."""
    torch.set_num_threads(1)
    while True:
        try:
            rank, world_size, port, work = pipe.recv()
        except EOFError:
            return
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(world_size),
            OMP_NUM_THREADS="1",
        )
        try:
            with batch_threads():
                dist.init_process_group("gloo", timeout=timedelta(seconds=60))
            fn, args = pickle.loads(work)
            result = pickle.dumps(fn(*args))
            if dist.is_initialized():
                dist.barrier()  # no rank takes its connections away while another still talks
                dist.destroy_process_group()
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
            return
