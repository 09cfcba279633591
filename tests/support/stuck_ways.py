"""A plugin for runs that get stuck: one rank stops making progress in the way that `TEST_STUCK` names.

`TEST_STUCK_RANK` is that rank, 1 by default; it stops in the third step, `loading_sleeps` before the first.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.base import FSDPSftWorker

DONE = 2
"""Steps before the one that gets stuck."""


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleeps() -> None:
    time.sleep(10**6)


def computes() -> None:
    while True:
        pass


def holds_the_interpreter() -> None:
    re.match(r"(a|a)*b", "a" * 60)


def waits_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def reads_a_pipe() -> None:
    os.read(os.pipe()[0], 1)


def waits_for_a_child() -> None:
    subprocess.run(["sleep", "1000000"])


def calls_a_collective_alone() -> None:
    alone = torch.zeros(3)
    dist.all_reduce(alone)


def receives_what_nobody_sends() -> None:
    dist.recv(torch.zeros(1), src=1 - dist.get_rank())


def leaves() -> None:
    sys.exit(3)


def leaves_at_once() -> None:
    os._exit(0)


IN_LOSS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        stopped,
        sleeps,
        computes,
        holds_the_interpreter,
        waits_for_a_lock,
        reads_a_pipe,
        waits_for_a_child,
        calls_a_collective_alone,
        receives_what_nobody_sends,
        leaves,
        leaves_at_once,
    )
}
ELSEWHERE = ("loading_sleeps", "skips_a_step", "loader_sleeps", "evaluation_sleeps", "save_sleeps", "all_sleep")
WAYS = (*IN_LOSS, *ELSEWHERE)

way = os.environ.get("TEST_STUCK", "")
guilty = way == "all_sleep" or os.environ.get("RANK", "0") == os.environ.get("TEST_STUCK_RANK", "1")


class Endless(Iterator[Any]):
    """Steps of a loader that never gives the third."""

    def __init__(self, steps: Iterator[Any]) -> None:
        self._steps, self._given = steps, 0

    def __next__(self) -> Any:
        self._given += 1
        while self._given > DONE:
            time.sleep(1)
        return next(self._steps)


def _instead(owner: type, name: str, action: Callable[[], None], *, skip: bool = False) -> None:
    original = getattr(owner, name)

    def changed(self: Any, *given: Any, **known: Any) -> Any:
        if self.step == DONE:
            action()
            if skip:
                return {}
        return original(self, *given, **known)

    setattr(owner, name, changed)


def _endless_loader() -> None:
    original = FSDPSftWorker.run_training

    def run_training(self: Any) -> dict[str, float]:
        if not isinstance(self.position.steps, Endless):
            self.position.steps = Endless(self.position.steps)
        return original(self)

    FSDPSftWorker.run_training = run_training


if guilty and way in IN_LOSS:
    _instead(SFTWorker, "get_train_model_output", IN_LOSS[way])
elif guilty and way == "all_sleep":
    _instead(SFTWorker, "get_train_model_output", sleeps)
elif guilty and way == "skips_a_step":
    _instead(FSDPSftWorker, "run_training", lambda: None, skip=True)
elif guilty and way == "evaluation_sleeps":
    _instead(SFTWorker, "get_eval_model_output", sleeps)
elif guilty and way == "save_sleeps":
    _instead(FSDPSftWorker, "save_checkpoint", sleeps)
elif guilty and way == "loading_sleeps":
    FSDPSftWorker._build = lambda *_, **__: sleeps()
elif guilty and way == "loader_sleeps":
    _endless_loader()
