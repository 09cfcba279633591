"""Ranks of one machine listen on its loopback interface alone."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from shardtune.parallel.rendezvous import GLOO_INTERFACE, meet
from tests.support.dist.ranks import run_ranks


def _listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections(kind="inet")
    return {(one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN}


def _found() -> tuple[set[str], float, int]:
    """The addresses on which this rank listens for a group of its own, and a sum over its ranks."""
    rank = int(os.environ["RANK"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = [probe.getsockname()[1]]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    before = _listening()
    timeout = timedelta(seconds=30)
    store = meet("127.0.0.1", port[0], rank, 2, timeout)
    again = meet("127.0.0.1", port[0], rank, 2, timeout)  # as after the comparison of ranks
    dist.init_process_group("gloo", store=dist.PrefixStore("own", store), rank=rank, world_size=2, timeout=timeout)
    total = torch.ones(1)
    dist.all_reduce(total)
    again.set(f"seen {rank}", "x")
    again.wait(["seen 0", "seen 1"], timeout)
    opened = {address for address, _ in _listening() - before}
    dist.barrier()
    del os.environ[GLOO_INTERFACE]
    return opened, float(total), rank


def test_a_store_and_its_group_listen_on_loopback_alone() -> None:
    (first, total, _), (second, _, _) = run_ranks(_found, 2)
    assert first == second == {"127.0.0.1"}
    assert total == 2
