"""The line on memory after a run's second step."""

from __future__ import annotations

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
    worker: Any = SimpleNamespace(
        state=SimpleNamespace(sizes=lambda: {None: parameters}),
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
    assert "GB resident at most" in shown.lines[0]
    assert "0.50 GB planned (" in shown.lines[0]
    assert started == [
        ["shardtune", "plan", str(tmp_path / "config.yaml"), "--ranks", "2", "--json", "runner.device=cpu"]
    ]


@pytest.mark.parametrize("case", ["one step", "small"])
def test_short_runs_and_small_models_show_nothing(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "module_command", lambda *_: pytest.fail("a plan was started"))
    found, shown = compared(tmp_path, parameters=LEAST - (case == "small"))
    steps(found, 1 if case == "one step" else 3)
    assert shown.lines == []


def test_what_another_process_cannot_read_is_measured_alone(tmp_path: Path) -> None:
    found, shown = compared(tmp_path, in_files=False)
    steps(found, 2)
    assert len(shown.lines) == 1
    assert "planned" not in shown.lines[0]


def test_the_peak_is_counted_from_a_moment_of_choice() -> None:
    before = resident_memory.resident()
    assert before is not None
    held = torch.ones(2**25)  # 128 MiB
    del held
    if not resident_memory.restart_peak():
        pytest.skip("the system counts no peak anew")
    assert (resident_memory.resident_peak() or 0) < before + 2**26
    assert resident_memory.Earlier.gigabytes >= (before + 2**27) / 1e9 * 0.95
