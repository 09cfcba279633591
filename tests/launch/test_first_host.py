"""An agent of torchrun whose first host is lost."""

from __future__ import annotations

import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from torch.distributed import run as torch_run
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from shardtune.launch import first_host, torchrun
from shardtune.launch.first_host import FirstHostWatch


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.lengthy
def test_an_agent_leaves_once_the_first_host_is_lost_and_its_ranks_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = SimpleNamespace(status=lambda: psutil.STATUS_RUNNING)
    ranks = [rank]
    monkeypatch.setattr(first_host.psutil, "Process", lambda: SimpleNamespace(children=lambda: ranks))
    monkeypatch.setattr(first_host, "WAITING_SECONDS", 0.1)
    left, reported = threading.Event(), list[bool]()
    with socket.create_server(("127.0.0.1", 0)) as store:
        host, port = store.getsockname()
        watch = FirstHostWatch(host, port, left.set, reported.append, seconds=0.3)
        never = FirstHostWatch(host, 1, left.set, reported.append, seconds=0.3)  # not there yet
        wait_for(lambda: watch.met)
        assert not left.wait(0.3)
        assert not reported, "there are ranks"
        ranks.clear()
        assert not left.wait(0.5), "the first host is there"
        ranks.append(rank)
    assert not left.wait(0.5), "a rank saves, or ends by itself"
    rank.status = lambda: psutil.STATUS_ZOMBIE  # the agent's main thread is blocked
    assert left.wait(5)
    assert not never.met
    watch.end()
    never.end()
    waiting = FirstHostWatch(host, 1, left.set, reported.append, seconds=0.3)
    wait_for(lambda: reported)
    waiting.end()
    assert reported == [False]


@pytest.mark.parametrize(("noted", "code"), [(None, 1), (75, 75), (2, 2)])
def test_a_broken_connection_to_the_first_host_is_named_unless_ranks_have_ended_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, noted: int | None, code: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        endpoint = f"127.0.0.1:{store.getsockname()[1]}"

        def run(arguments: Namespace) -> None:
            if noted is not None:
                (tmp_path / "0").write_text(str(noted))
            store.accept()
            time.sleep(0.1)
            raise RendezvousConnectionError("The connection to the C10d store has failed.")

        monkeypatch.setattr(torch_run, "run", run)
        arguments = Namespace(standalone=False, rdzv_backend="c10d", rdzv_endpoint=endpoint, nproc_per_node="1")
        found, message = torchrun._run(arguments, tmp_path)
    assert found == code
    assert ("the first host is lost: no connection to 127.0.0.1:" in message) == (code == 1)
