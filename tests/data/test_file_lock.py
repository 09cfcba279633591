"""The lock: one holder at a time, freed by its death on this machine and by silence on another."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from shardtune.data.file_lock import FileLock

ELSEWHERE = '{"host": "elsewhere", "pid": 1, "token": "x"}'
Until = Callable[[str, float], bool]


def never(holder: str, seconds: float) -> bool:
    return False


@contextmanager
def hold(path, until: Until = never, **options) -> Iterator[bool]:
    lock = FileLock(path, **options)
    try:
        yield lock.acquire(until)
    finally:
        lock.release()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock"


def test_is_free_again_behind_its_holder(path):
    for _ in range(2):
        with hold(path) as held:
            assert held
            assert json.loads(path.read_text())["pid"] == os.getpid()
        assert not path.exists()


def test_is_free_again_behind_an_error(path):
    with pytest.raises(RuntimeError), hold(path):
        raise RuntimeError
    assert not path.exists()


@pytest.mark.lengthy
def test_waits_for_a_living_holder_however_long_it_takes(path):
    order = []

    def other() -> None:
        with hold(path, stale_after=0.4):
            order.append("second")

    with hold(path, beat_every=0.05):
        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(1.0)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_gives_up_when_the_work_is_done(path):
    finished = threading.Event()
    with hold(path):
        threading.Timer(0.2, finished.set).start()
        with hold(path, lambda *_: finished.is_set()) as held:
            assert not held
        assert path.exists()


@pytest.mark.parametrize("content", [ELSEWHERE, "{}", "torn {"])
@pytest.mark.lengthy
def test_silent_holder_is_replaced(path, content):
    path.write_text(content)
    holders = []
    began = time.monotonic()
    with hold(path, lambda holder, seconds: holders.append(holder) or False, stale_after=1.3) as held:
        assert held
        assert 1.2 < time.monotonic() - began < 10
    assert not path.exists()
    assert set(holders) == {"process 1 on elsewhere" if content == ELSEWHERE else "another process"}


@pytest.mark.lengthy
def test_a_holder_elsewhere_that_gives_signs_of_life_is_waited_for(path):
    path.write_text(ELSEWHERE)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.1):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    lock = FileLock(path, stale_after=1.0)
    assert not lock.acquire(lambda holder, seconds: seconds > 2)
    assert lock.holder_alive
    assert not lock.held
    stop.set()
    thread.join()
    assert lock.acquire(lambda holder, seconds: seconds > 5)
    lock.release()


@pytest.mark.parametrize("content", ["", json.dumps({"host": socket.gethostname(), "pid": 1, "token": "x"})])
def test_dead_holder_on_this_machine_is_replaced_at_once(path, content):
    """Whatever process has its number now; likewise one that died before it wrote its name."""
    path.write_text(content)
    began = time.monotonic()
    with hold(path, stale_after=60) as held:
        assert held
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert time.monotonic() - began < 5


HOLDER = """
import os, sys, time
from pathlib import Path
from shardtune.data.file_lock import FileLock
assert FileLock(Path(sys.argv[1]), beat_every=1000).acquire(lambda *_: True)
print("held", flush=True)
time.sleep(600)
"""


def test_a_living_holder_on_this_machine_may_be_silent_and_a_killed_one_frees_it(path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    lock = FileLock(path, stale_after=0.1)
    assert not lock.acquire(lambda name, seconds: seconds > 1)
    assert lock.holder() == f"process {holder.pid} on {socket.gethostname()}"
    holder.kill()
    holder.communicate()
    began = time.monotonic()
    assert lock.acquire(lambda name, seconds: seconds > 20)
    assert time.monotonic() - began < 5
    lock.release()


def test_whether_it_is_in_use_is_seen_without_taking_it(path):
    assert not FileLock(path).in_use()
    with hold(path):
        assert FileLock(path).in_use()
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": 1, "token": "x"}))
    assert not FileLock(path).in_use()
    path.write_text(ELSEWHERE)
    assert not FileLock(path, beat_every=0.05).in_use()
    beat = threading.Timer(0.1, os.utime, [path])
    beat.start()
    assert FileLock(path, beat_every=0.3).in_use()
    assert path.read_text() == ELSEWHERE


def test_a_lock_is_free_though_forked_processes_live_on(path):
    with hold(path):
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
    with hold(path, lambda holder, seconds: seconds > 2) as held:
        assert held
    os.kill(child, 9)
    os.waitpid(child, 0)


def failing(number: int) -> Callable[[int, int], None]:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    return flock


@pytest.mark.parametrize("kind", ["fails", "is invalid", "always refuses", "is granted to all"])
@pytest.mark.lengthy
def test_where_flock_excludes_nobody_the_heartbeat_decides(path, monkeypatch, kind):
    broken = {
        "fails": failing(errno.ENOTSUP),
        "is invalid": failing(errno.EINVAL),
        "always refuses": failing(errno.EAGAIN),
        "is granted to all": lambda descriptor, operation: None,
    }
    monkeypatch.setattr(fcntl, "flock", broken[kind])
    options = {"stale_after": 0.4, "beat_every": 0.1}
    with hold(path, **options), hold(path, lambda _, seconds: seconds > 0.8, **options) as second:
        assert not second
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "token": "x"}))
    with hold(path, **options) as held:
        assert held
    assert list(path.parent.iterdir()) == [], "no probe is left"


def test_a_held_lock_notices_that_its_folder_is_gone(tmp_path):
    (tmp_path / "run").mkdir()
    lock = FileLock(tmp_path / "run/lock", beat_every=0.02)
    assert lock.acquire(never)
    assert not lock.is_gone
    (tmp_path / "run").rename(tmp_path / "moved")
    until = time.monotonic() + 5
    while not lock.is_gone and time.monotonic() < until:
        time.sleep(0.01)
    assert lock.is_gone
    lock.release()


def test_a_lock_whose_directory_has_moved_leaves_the_next_one_alone(tmp_path):
    (tmp_path / "run").mkdir()
    first, second = (FileLock(tmp_path / "run/lock") for _ in range(2))
    assert first.acquire(never)
    (tmp_path / "run").rename(tmp_path / "aside")
    (tmp_path / "run").mkdir()
    assert second.acquire(never)
    first.release()
    assert (tmp_path / "run/lock").exists()
    second.release()
    assert not (tmp_path / "run/lock").exists()


@pytest.mark.lengthy
def test_one_of_many_replaces_a_silent_holder(path):
    path.write_text("{}")
    inside, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal inside, most
        with hold(path, stale_after=0.5, beat_every=0.05):
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
