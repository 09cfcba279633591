"""The cores that a process may use are those of its affinity and of its container's limit."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path

import pytest
import torch

import shardtune.cli.commands as commands
import shardtune.launch.cores as cores
from shardtune.launch.cores import cpu_limits, idle_cores, limit_threads, threads_of_rank, usable_cores, waiting


@pytest.mark.parametrize(
    ("own", "files", "limits"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, [1.5]),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, [3.0]),
        ("0::/elsewhere", {"cpu.max": "max 100000"}, []),
        ("4:cpu,cpuacct:/x\n3:memory:/x", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, [0.5]),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, []),
    ],
)
def test_limits_of_control_groups(tmp_path: Path, own: str, files: dict[str, str], limits: list[float]) -> None:
    (tmp_path / "own").write_text(f"{own}\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert list(cpu_limits(tmp_path, tmp_path / "own")) == limits
    assert list(cpu_limits(tmp_path, tmp_path / "gone")) == []


def test_threads_are_those_of_the_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "cpu_limits", lambda: iter(()))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert (usable_cores(), threads_of_rank(4), threads_of_rank(7)) == (6, 1, 1)
    monkeypatch.setattr(cores, "cpu_limits", lambda: iter((2.5, 4.0)))
    assert usable_cores() == 3
    asked: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    limit_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    limit_threads()
    assert asked == [3]


def test_threads_wait_briefly_beside_other_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat, after = tmp_path / "stat", []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})

    def write(*idle: int) -> None:
        lines = [f"cpu{number} 5 0 5 {ticks} 3 0 0 0 0 0" for number, ticks in enumerate(idle)]
        stat.write_text("\n".join(["cpu  9 0 9 9 9 0 0 0 0 0", *lines, "intr 1 2", "btime 3"]))

    now = 3.0

    def pause(_: float) -> None:
        nonlocal now
        now += 0.2  # longer than was asked for, as on a busy machine
        write(*after)

    monkeypatch.setattr(time, "sleep", pause)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    ticks = os.sysconf("SC_CLK_TCK")
    for busy, idle in ((0.0, (ticks // 5, 0, ticks // 5)), (1.0, (ticks // 5, 0, 0)), (2.0, (0, ticks, 0))):
        write(0, 0, 0)
        after[:] = idle
        assert idle_cores(stat) == pytest.approx(2 - busy)
    assert idle_cores(tmp_path / "gone") == math.inf


def test_they_wait_as_they_do_by_themselves_alone_and_where_a_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 4)
    monkeypatch.setattr(cores, "idle_cores", lambda: 3.4)
    assert waiting({}) == waiting({"OMP_NUM_THREADS": "2"}) == {"GOMP_SPINCOUNT": "1000"}
    for chosen in ({"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}, {"RANK": "0"}, {"OMP_NUM_THREADS": "1"}):
        assert waiting(chosen) == {}
    seen: list[str | None] = []
    for name in ("GOMP_SPINCOUNT", "RANK", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # so that it is afterwards what it was
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["shardtune", "train"])
    monkeypatch.setattr(commands, "app", lambda **_: seen.append(os.environ.get("GOMP_SPINCOUNT")))
    monkeypatch.setattr(commands, "leave", lambda _: None)
    commands.main()
    assert seen == ["1000"]
    monkeypatch.setattr(cores, "idle_cores", lambda: 3.9)
    assert waiting({}) == {}
    monkeypatch.setattr(cores, "idle_cores", lambda: math.inf)
    assert waiting({}) == {}
