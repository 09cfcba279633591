"""The line on memory after a run's second step."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardtune.run.plan import comparison
from shardtune.run.plan.comparison import LEAST, PeakComparison
from shardtune.training import resident_memory
from shardtune.training.observer import Silent
from shardtune.training.worker.adapter_task import AdapterTask


class Lines(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, text: str) -> None:
        self.lines.append(text)


def compared(tmp_path: Path, *, parameters: int = LEAST, in_files: bool = True) -> tuple[PeakComparison, Lines]:
    weight = torch.nn.Parameter(torch.ones(1000))
    worker: Any = SimpleNamespace(
        state=SimpleNamespace(
            sizes=lambda: {None: parameters},
            inner=torch.nn.ParameterList([weight]),
            weights=SimpleNamespace(parameters={"w": weight}, trainable=lambda: {"w": weight}),
            optimizer=SimpleNamespace(state={weight: {"step": torch.ones(()), "mean": torch.ones(1000)}}),
        ),
        device=torch.device("cpu"),
        ranks=SimpleNamespace(world_size=2),
        task=object.__new__(AdapterTask),
    )
    shown = Lines()
    recipe: Any = None
    return PeakComparison(shown, recipe, tmp_path, worker, in_files=in_files), shown


def steps(found: PeakComparison, number: int) -> None:
    found.started(0, number)
    held = torch.ones(2**24)
    for step in range(1, number + 1):
        found.stepped(step, {})
    found.finished()
    found.close()
    del held


def test_after_the_second_step_measured_and_planned_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def answers(command: list[str], *arguments: str) -> list[str]:
        started.append([command, *arguments])  # pyright: ignore[reportArgumentType]
        return [sys.executable, "-S", "-c", "print('{\"peak\": 5e8}')"]

    monkeypatch.setattr(comparison, "module_command", answers)
    found, shown = compared(tmp_path)
    steps(found, 3)
    assert len(shown.lines) == 1
    assert "memory of rank 0 after 2 steps" in shown.lines[0]
    assert " resident at most, beyond " in shown.lines[0]
    assert "0.50 GB planned (" in shown.lines[0]
    assert started == [
        ["shardtune", "plan", str(tmp_path / "config.yaml"), "--ranks", "2", "--json", "runner.device=cpu"]
    ]


def test_a_step_that_changes_nothing_does_not_count(tmp_path: Path) -> None:
    """Nor one of a run that goes on: there are no states of the optimizer yet, or one step has had them."""
    for numbers, lines in (([7, 7, 8], [0, 0, 0]), ([7, 8, 8, 9], [0, 0, 0, 1]), ([8, 7, 8], [0, 1, 1])):
        found, shown = compared(tmp_path, parameters=LEAST - 1)
        found.started(7, 20)
        seen = []
        for number in numbers:
            found.stepped(number, {})
            seen.append(len(shown.lines))
        found.close()
        assert seen == lines


def test_a_run_of_one_step_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "module_command", lambda *_: pytest.fail("a plan was started"))
    found, shown = compared(tmp_path)
    steps(found, 1)
    assert shown.lines == []


@pytest.mark.parametrize("case", ["small", "in memory", "own worker"])
def test_where_no_plan_is_compared_what_lasts_is_shown_and_why(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "module_command", lambda *_: pytest.fail("a plan was started"))
    found, shown = compared(tmp_path, parameters=LEAST - (case == "small"), in_files=case != "in memory")
    if case == "own worker":
        found._worker.task = object()  # pyright: ignore[reportAttributeAccessIssue]
    steps(found, 2)
    (line,) = shown.lines
    assert (
        "before the model and mapped files; 12.0 kB planned for weights, gradients and optimizer states alone: " in line
    )
    why = {"small": "from 17M parameters on", "in memory": "that names its files", "own worker": "this worker makes"}
    assert why[case] in line


def test_where_no_peak_is_counted_the_plan_is_shown_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "restart_peak", lambda: False)
    command = [sys.executable, "-S", "-c", "print('{\"peak\": 5e8}')"]
    monkeypatch.setattr(comparison, "module_command", lambda *_: command)
    found, shown = compared(tmp_path)
    steps(found, 2)
    (line,) = shown.lines
    assert line.endswith("not measured, as this system counts no peak from a given moment on; 0.50 GB planned")


FREED = """
import os, runpy, sys
memory = runpy.run_path(sys.argv[1])
def returned():
    held = [b"x" * 2**23 for _ in range(20)]
    before = memory["resident"]()
    del held[::2]
    return (before - memory["resident"]()) / (10 * 2**23)
memory["keep_freed_memory"]()
print(returned())
memory["return_freed_memory"]()
print(returned())
os.environ["MALLOC_MMAP_THRESHOLD_"] = "131072"
memory["keep_freed_memory"]()
print(returned())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other rules")
def test_freed_memory_is_returned() -> None:
    """Every other one of twenty times 8 MB, behind which others lie; what a user has set by a variable stays.

    In a process of its own: what is free already is taken before anything new.
    """
    command = [sys.executable, "-S", "-c", FREED, resident_memory.__file__]
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_MMAP_THRESHOLD_"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    kept, returned, chosen = map(float, printed.split())
    assert kept < 0.2
    assert returned > 0.9
    assert chosen > 0.9


def test_the_peak_is_counted_from_a_moment_of_choice() -> None:
    before = resident_memory.resident()
    assert before is not None
    held = torch.ones(2**25)  # 128 MiB
    del held
    if not resident_memory.restart_peak():
        pytest.skip("the system counts no peak anew")
    assert (resident_memory.resident_peak() or 0) < before + 2**26
    assert resident_memory.Earlier.gigabytes >= (before + 2**27) / 1e9 * 0.95
