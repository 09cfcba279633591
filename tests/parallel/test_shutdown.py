"""A process that has used gloo ends well, whatever gloo's threads were doing last."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from shardtune.parallel.shutdown import TASKS, await_rest
from tests.support.doc_blocks import ROOT

LINUX = pytest.mark.skipif(not TASKS.is_dir(), reason="what threads do is known on Linux alone")
SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from shardtune.parallel.ranks import open_group

os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
open_group(torch.device("cpu"))
group = dist.group.WORLD  # as tensors' caches do
sys.setswitchinterval(60)
dist.all_gather([torch.zeros(20_000_000)], torch.zeros(20_000_000), async_op=True)
until = time.monotonic() + 0.5
while time.monotonic() < until:
    pass
dist.destroy_process_group()
print("done", flush=True)
"""
"""Ends while a thread of gloo waits for the interpreter's lock, to let go of tensors.

They are large, so that it comes to that after this thread has the lock again, which then keeps it."""


def test_a_script_ends_well_while_gloo_lets_go_of_its_last_tensor() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


@contextmanager
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def holding_the_lock() -> Iterator[None]:
    """Other threads get the interpreter's lock only where this one waits."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.lengthy
@LINUX
def test_at_rest_no_thread_holds_a_tensor() -> None:
    with group_of_one(), holding_the_lock():
        tensor = torch.zeros(20_000_000)
        held = weakref.ref(tensor)
        dist.all_gather([tensor], torch.zeros(20_000_000), async_op=True)
        del tensor
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            pass
        assert held() is not None
        assert await_rest()
        assert held() is None


@LINUX
@pytest.mark.lengthy
def test_threads_that_work_are_waited_for() -> None:
    with group_of_one():
        given, taken = torch.zeros(10_000_000), torch.zeros(10_000_000)
        works = [dist.all_gather([taken], given, async_op=True) for _ in range(20)]
        assert not all(work is None or work.is_completed() for work in works)
        assert await_rest()
        assert all(work is not None and work.is_completed() for work in works)


def test_without_threads_there_is_nothing_to_wait_for() -> None:
    began = time.monotonic()
    await_rest()
    assert time.monotonic() - began < 1
