"""Work done ahead in processes: in order, with its errors, and with nothing left behind however it ends."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import pytest
import torch

from shardtune.data.loader.prefetch import computed_ahead
from shardtune.errors import DataError, ModelError

pytestmark = pytest.mark.lengthy

SCRIPT = """\
import os, sys, time
import torch
from shardtune.data.loader.prefetch import computed_ahead
def work(number):
    os.write(2, f"{os.getpid()}\\n".encode())
    return torch.full((1000,), number)
results = computed_ahead(work, iter(int, 1), 2)
for _ in range(6):
    next(results)
print("ready", flush=True)
"""


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(gone: set[int], seconds: float) -> None:
    end = time.monotonic() + seconds
    while any(map(is_alive, gone)):
        assert time.monotonic() < end, "processes are left"
        time.sleep(0.05)


def slow_at_first(number: int) -> tuple[int, int, torch.Tensor]:
    if number == 0:
        time.sleep(0.3)
    return number, os.getpid(), torch.arange(number)


def test_more_processes_than_cores_are_started_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    assert list(computed_ahead(abs, range(2), (os.cpu_count() or 1) + 1)) == [0, 1]
    assert not recwarn.list


def test_results_keep_their_order() -> None:
    found = list(computed_ahead(slow_at_first, range(9), 2))
    assert [number for number, _, _ in found] == list(range(9))
    assert all(torch.equal(tensor, torch.arange(number)) for number, _, tensor in found)
    processes = {process for _, process, _ in found}
    assert len(processes - {os.getpid()}) == 2
    wait_for(processes, 5)


def test_items_without_end_are_read_as_they_are_needed() -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for number in count():
            read.append(number)
            yield number

    results = computed_ahead(slow_at_first, items(), 2)
    assert [next(results)[0] for _ in range(5)] == list(range(5))
    assert len(read) <= 5 + 2 * 2 + 1
    assert isinstance(results, Iterator)


def test_no_process_computes_when_asked() -> None:
    done: list[int] = []
    results = computed_ahead(lambda number: (done.append(number), os.getpid())[1], count(), 0)
    assert (next(results), next(results)) == (os.getpid(), os.getpid())
    assert done == [0, 1]


def failing(number: int) -> int:
    if number == 3:
        raise ModelError("no pixels", where="row 3", remedy="draw some")
    if number == 5:
        raise KeyError("pixels")
    return number


def test_errors_come_as_they_were_raised_at_their_place() -> None:
    results = computed_ahead(failing, range(5), 2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ModelError) as told:
        next(results)
    assert (told.value.what, told.value.where, told.value.remedy) == ("no pixels", "row 3", "draw some")
    with pytest.raises(KeyError, match=r"^'pixels'$"):
        list(computed_ahead(failing, range(4, 7), 2))


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_process_is_one_error_where_its_result_is_asked_for(number: int) -> None:
    """Idle ones: one of them waits for work, and holds the lock that the other waits for."""
    results = computed_ahead(slow_at_first, count(), 2)
    processes = sorted({next(results)[1] for _ in range(6)})
    time.sleep(0.3)
    process = processes[number]
    os.kill(process, signal.SIGKILL)
    time.sleep(0.2)  # nothing is raised here, in the middle of a step
    with pytest.raises(DataError, match="a process that makes micro-batches died") as told:
        list(islice(results, 20))
    wait_for(set(processes), 5)
    assert told.value.where == "data.num_workers"
    assert "lower data.num_workers" in str(told.value.remedy)


def test_processes_end_with_who_stops_early() -> None:
    results = computed_ahead(slow_at_first, count(), 2)
    processes = {next(results)[1] for _ in range(6)}
    assert [is_alive(process) for process in processes] == [True, True]
    results.close()  # type: ignore[attr-defined]
    wait_for(processes, 5)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_group_are_for_the_parent(sent: signal.Signals) -> None:
    results = computed_ahead(slow_at_first, count(), 2)
    processes = {next(results)[1] for _ in range(4)}
    for process in processes:
        os.kill(process, sent)
    assert [next(results)[0] for _ in range(8)] == list(range(4, 12))


def run(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script], stdout=-1, stderr=-1, text=True)


def test_nothing_is_left_and_nothing_is_said_at_exit() -> None:
    out, err = run(SCRIPT).communicate(timeout=60)
    assert out == "ready\n"
    assert all(line.isdigit() for line in err.splitlines()), err
    wait_for({int(line) for line in err.splitlines()}, 5)


def leave_results(file: Path) -> None:
    """Ends with an error while results are asked for."""
    results = computed_ahead(slow_at_first, count(), 2)
    file.write_text(" ".join({str(next(results)[1]) for _ in range(6)}))
    raise SystemExit(3 if results else 0)  # named here, so that this frame holds them


def test_processes_end_with_one_that_multiprocessing_has_started(tmp_path: Path) -> None:
    """It waits for its own processes before it ends, and calls nothing that is registered with `atexit`."""
    process = multiprocessing.get_context("spawn").Process(target=leave_results, args=(tmp_path / "ids",))
    process.start()
    process.join(30)
    code = process.exitcode
    process.kill()
    assert code == 3
    wait_for({int(number) for number in (tmp_path / "ids").read_text().split()}, 5)


def test_processes_end_when_their_parent_is_killed() -> None:
    parent = run(SCRIPT + "time.sleep(60)")
    assert parent.stdout is not None
    assert parent.stderr is not None
    assert parent.stdout.readline() == "ready\n"
    processes = {int(parent.stderr.readline()) for _ in range(6)}
    parent.kill()
    parent.wait()
    wait_for(processes, 15)
    parent.stdout.close()
    parent.stderr.close()


def test_what_cannot_be_shared_goes_through_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", full, raising=False)
    found = list(computed_ahead(pixels, range(3), 2))
    assert [tensor.shape for tensor in found] == [pixels(number).shape for number in range(3)]
    assert all(torch.equal(tensor, pixels(number)) for number, tensor in enumerate(found))


def pixels(number: int) -> torch.Tensor:
    return torch.full((1000, 100), number).t()[number:]


def test_a_result_that_cannot_be_pickled_is_an_error_in_its_place() -> None:
    before = set(multiprocessing.active_children())
    results = computed_ahead(lambda number: number if number < 2 else threading.Lock(), range(4), 2)
    assert (next(results), next(results)) == (0, 1)
    with pytest.raises(TypeError, match="cannot pickle") as kept:
        next(results)
    left = set(multiprocessing.active_children()) - before
    assert not left, f"{kept.value} keeps processes, for which the end would wait forever"


def test_random_draws_of_this_process_are_left_alone() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    list(computed_ahead(slow_at_first, range(1, 4), 2))
    assert torch.equal(torch.rand(2), wanted)


def test_memory_of_results_is_given_back() -> None:
    def work(number: int) -> tuple[torch.Tensor, int]:
        return torch.full((100_000,), number), len(os.listdir("/proc/self/fd"))

    def maps() -> int:
        return Path("/proc/self/maps").read_text().count("/dev/shm/torch_")

    gc.collect()  # what earlier tests' errors keep
    files = []
    for number, (tensor, open_files) in enumerate(computed_ahead(work, range(60), 2)):
        assert torch.equal(tensor, torch.full((100_000,), number))
        files.append(open_files)
        assert maps() <= 2  # this one, and the one before it
    assert max(files[30:]) <= max(files[:30]) + 2  # however many results there have been
    del tensor
    assert maps() == 0
