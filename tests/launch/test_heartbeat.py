"""The watch of ranks over the other hosts, in one process with a store."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from shardtune.errors import Interrupted
from shardtune.launch import heartbeat
from shardtune.launch.heartbeat import PeerWatch
from shardtune.launch.outcome import recorded_end
from shardtune.launch.signals import listening

LIMIT = 0.6
HOSTS = {"host-a/0": [0], "host-b/1": [1]}


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(number))
    return number


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a watch would end the process."""
    event = threading.Event()
    environ = heartbeat.os.environ
    monkeypatch.setattr(heartbeat, "os", SimpleNamespace(environ=environ, _exit=lambda code: event.set()))
    return event


def serve(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


def begun(store: dist.TCPStore, host: int) -> None:
    """Wait for the first heartbeat of a host, which may have been."""
    until = time.monotonic() + 30
    while not store.add(f"shardtune/peers/{host}", 0):
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def _end_watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End what a failed test leaves: its thread would stop this process by the next test's signal."""
    made: list[PeerWatch] = []
    begin = PeerWatch.__init__

    def init(self: PeerWatch, *args: Any, **settings: Any) -> None:
        made.append(self)
        begin(self, *args, **settings)

    monkeypatch.setattr(PeerWatch, "__init__", init)
    yield
    for watch in made:
        watch.end()


def beaten(store: dist.TCPStore, host: int) -> None:
    """Wait for a heartbeat of a host."""
    before, until = store.add(f"shardtune/peers/{host}", 0), time.monotonic() + 20
    while store.add(f"shardtune/peers/{host}", 0) == before:
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.lengthy
def test_a_broken_connection_to_the_store_is_made_anew(
    port: int, left: threading.Event, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = serve(port)
    watch = PeerWatch(HOSTS, 1, LIMIT, tmp_path)
    beaten(store, 1)
    del store
    store = serve(port)
    beaten(store, 1)
    assert not left.wait(1.5 * LIMIT)
    del store
    assert left.wait(6 * LIMIT)
    watch.end()
    assert "host-a (rank 0), where the ranks meet, is lost: no answer for 0.6 s" in capfd.readouterr().err


@pytest.mark.lengthy
@pytest.mark.parametrize("rank", [0, 1])
def test_time_in_which_the_process_was_suspended_does_not_count(
    port: int, left: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    store, ahead = serve(port), [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0], time=time.time)
    monkeypatch.setattr(heartbeat, "time", clock)
    watch = PeerWatch(HOSTS, rank, LIMIT, tmp_path)
    for _ in range(3):
        store.add(f"shardtune/peers/{1 - rank}", 1)
        beaten(store, rank)
        ahead[0] += 100.0
    assert not left.wait(LIMIT / 3)
    if rank == 0:
        assert left.wait(6 * LIMIT), "host-b is silent"
    watch.end()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_of_one_host_alone_stops_the_others_of_the_same_run(
    port: int, left: threading.Event, tmp_path: Path, rank: int
) -> None:
    store = serve(port)
    earlier = PeerWatch(HOSTS, 1, LIMIT, tmp_path)
    other, own = (PeerWatch(HOSTS, one, LIMIT, tmp_path, number=2) for one in (1 - rank, rank))
    with listening() as stop:
        stop.message = "own message"
        with stop.deferred():
            with pytest.raises(Interrupted, match="its message"), other.announcing():
                raise Interrupted("its message")
            until = time.monotonic() + 20
            while not stop.requested and time.monotonic() < until:
                time.sleep(0.02)
        with pytest.raises(Interrupted, match="own message"):
            stop.check()
    assert not left.is_set()
    assert not store.check(["shardtune/peers/stopped/1"])
    for watch in (earlier, other, own):
        watch.end()


def test_a_stop_of_all_ranks_together_is_not_announced(port: int, left: threading.Event, tmp_path: Path) -> None:
    store = serve(port)
    watch = PeerWatch(HOSTS, 1, LIMIT, tmp_path)
    with pytest.raises(Interrupted), watch.announcing():
        raise Interrupted("after step 3", together=True)
    watch.end()
    assert not store.check(["shardtune/peers/stopped/1"])
    assert not left.is_set()


@pytest.mark.parametrize("stopped", [True, False])
def test_a_collective_that_fails_as_another_rank_was_stopped_is_a_stop_too(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, stopped: bool
) -> None:
    """Also where the error comes before the next heartbeat, which would have brought the stop."""
    monkeypatch.setattr(heartbeat, "_watches", 0)
    monkeypatch.setattr(heartbeat, "_current", None)
    store = serve(port)
    own = PeerWatch.over(HOSTS, 0, 60.0, tmp_path, rank_0_serves=False)
    assert own is not None
    begun(store, 0)
    with listening() as stop:
        stop.message = "own message"
        if stopped:
            store.set("shardtune/peers/stopped/1", "")
        with (
            pytest.raises(Interrupted if stopped else RuntimeError, match="own message" if stopped else "by peer"),
            own.announcing(),
            recorded_end(tmp_path, lambda: 5, ranks=2, is_main=True),
        ):
            raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:44937")
    own.end()
    event = json.loads((tmp_path / "events.jsonl").read_text())
    assert (event["event"], event["step"]) == ("stop" if stopped else "failed", 5)


def test_an_error_of_its_own_is_no_stop(port: int, tmp_path: Path) -> None:
    store = serve(port)
    watch = PeerWatch(HOSTS, 1, 60.0, tmp_path)
    store.set("shardtune/peers/stopped/1", "")
    with pytest.raises(ValueError, match="on purpose"), watch.announcing():
        raise ValueError("on purpose")
    watch.end()


def test_a_rank_that_serves_the_store_ends_once_the_others_have_read_of_its_stop(port: int, tmp_path: Path) -> None:
    store = serve(port)
    watch = PeerWatch(HOSTS, 0, 60.0, tmp_path, rank_0_serves=True)
    threading.Timer(0.5, store.set, ("shardtune/peers/stopped/1/1", "")).start()
    began = time.monotonic()
    with pytest.raises(Interrupted), watch.announcing():
        raise Interrupted("before the first step")
    assert 0.4 < time.monotonic() - began < 5
    assert store.check(["shardtune/peers/stopped/1"])
    watch.end()
