"""Threads of gloo interrupt no others, and runs and engines in one process group share them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardtune.config.rank_layout import Layout
from shardtune.parallel.gloo_threads import batch_threads
from shardtune.parallel.ranks import lay_out
from tests.support.dist.ranks import run_ranks

TASKS = Path("/proc/self/task")
LOOP = "gloo_tcp_loop"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="policies of threads are Linux's")


def loops() -> dict[str, int]:
    """The policies of the threads that wait for gloo's messages, by number."""
    return {
        task.name: os.sched_getscheduler(int(task.name))
        for task in TASKS.iterdir()
        if (task / "comm").read_text().strip() == LOOP
    }


def laid_out_twice() -> tuple[set[int], int, int, bool]:
    """Policies of gloo's threads and of this one, threads more after a second run, and whether the mesh is the same."""
    layout = Layout(shard=2)
    first = lay_out(layout, dist.get_rank(), torch.device("cpu"))
    group = first.new_group()
    for one in (group, first.mesh.get_group("shard") if first.mesh is not None else None):
        dist.all_reduce(torch.ones(1), group=one)  # a thread that has carried a message has its name
    before = loops()
    second = lay_out(layout, dist.get_rank(), torch.device("cpu"))
    dist.barrier(group)
    return {*before.values()}, os.sched_getscheduler(0), len(loops()) - len(before), second.mesh is first.mesh


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="threads of gloo have no names in earlier releases")
def test_they_are_of_the_batch_class_and_no_second_run_starts_more() -> None:
    for of_gloo, own, more, shared in run_ranks(laid_out_twice, 2, fresh=True):
        assert of_gloo == {os.SCHED_BATCH}
        assert own == os.SCHED_OTHER
        assert more == 0
        assert shared


def total() -> float:
    """Over the ranks of a mesh's axis."""
    mesh = lay_out(Layout(shard=2), dist.get_rank(), torch.device("cpu")).mesh
    assert mesh is not None
    ones = torch.ones(1)
    dist.all_reduce(ones, group=mesh.get_group("shard"))
    return float(ones)


def test_a_new_process_group_has_meshes_of_its_own() -> None:
    for _ in range(2):
        assert run_ranks(total, 2) == [2.0, 2.0]


def test_a_process_of_another_policy_keeps_it() -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        with batch_threads():
            assert os.sched_getscheduler(0) == os.SCHED_BATCH
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def test_where_it_is_not_allowed_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refused)
    with batch_threads():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
