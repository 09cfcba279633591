"""The lock: one holder at a time, kept by a heartbeat, freed by silence."""

from __future__ import annotations

import json
import os
import socket
import threading
import time

import pytest

from shardtune.data.cache.lock import HeartbeatLock


def never() -> bool:
    return False


def ignore(holder: str, seconds: float) -> None:
    return None


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock"


def test_is_free_again_behind_its_holder(path):
    for _ in range(2):
        with HeartbeatLock(path).hold(never, ignore) as held:
            assert held
            assert json.loads(path.read_text())["pid"] == os.getpid()
        assert not path.exists()


def test_is_free_again_behind_an_error(path):
    with pytest.raises(RuntimeError), HeartbeatLock(path).hold(never, ignore):
        raise RuntimeError
    assert not path.exists()


def test_waits_for_a_living_holder_however_long_it_takes(path):
    order = []

    def other() -> None:
        with HeartbeatLock(path, stale_after=0.4).hold(never, ignore):
            order.append("second")

    with HeartbeatLock(path, beat_every=0.05).hold(never, ignore):
        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(1.0)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_gives_up_when_the_work_is_done(path):
    finished = threading.Event()
    with HeartbeatLock(path).hold(never, ignore):
        threading.Timer(0.2, finished.set).start()
        with HeartbeatLock(path).hold(finished.is_set, ignore) as held:
            assert not held


@pytest.mark.parametrize("content", ['{"host": "elsewhere", "pid": 1, "token": "x"}', "", "torn {"])
def test_silent_holder_is_replaced(path, content):
    path.write_text(content)
    told = []
    began = time.monotonic()
    lock = HeartbeatLock(path, stale_after=1.3)
    with lock.hold(never, lambda holder, seconds: told.append((holder, seconds))) as held:
        assert held
        assert 1.2 < time.monotonic() - began < 10
    assert not path.exists()
    assert told
    assert ("elsewhere" in told[0][0]) == ("elsewhere" in content)


def test_dead_holder_on_this_machine_is_replaced_at_once(path):
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": child, "token": "x"}))
    began = time.monotonic()
    with HeartbeatLock(path, stale_after=60).hold(never, ignore) as held:
        assert held
    assert time.monotonic() - began < 5


def test_one_of_many_replaces_a_silent_holder(path):
    path.write_text("{}")
    inside, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal inside, most
        with HeartbeatLock(path, stale_after=0.5, beat_every=0.05).hold(never, ignore):
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.1)
            with lock:
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
