"""Ranks of one machine listen on its loopback interface alone; the store of several is served to the end."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from shardtune.parallel import rendezvous
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


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"], ids=["one machine", "several"])
def test_rank_0_serves_the_store_after_those_who_met_have_forgotten_it(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """Ranks compare before there is a group; the watch over the other hosts connects in between."""
    monkeypatch.setattr(rendezvous, "_served", {})
    monkeypatch.setenv(GLOO_INTERFACE, "lo")
    # Of several machines the store is served on all interfaces, on each of which its port has to be free.
    with socket.create_server((address if address == "127.0.0.1" else "", 0)) as free:
        port = free.getsockname()[1]
    timeout = timedelta(seconds=2)
    meet(address, port, 0, 1, timeout).set("compared", "yes")
    watch = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    assert watch.get("compared") == b"yes"
    assert meet(address, port, 0, 1, timeout).get("compared") == b"yes"
    assert watch.check(["compared"])


def test_ranks_that_torchrun_starts_again_see_nothing_of_the_start_before(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv(rendezvous.AGENT_STORE, "True")
    monkeypatch.setenv(GLOO_INTERFACE, "lo")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # torch 2.15 compares them
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    for start in ("0", "1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        first, second = (meet("127.0.0.1", agent.port, rank, 2, timedelta(seconds=30)) for rank in range(2))
        assert not first.check(["address"])
        second.set("address", start)
        assert first.get("address") == start.encode()
