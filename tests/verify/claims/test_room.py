"""Shortened runs share cores, or the memory of a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardtune.verify.claims import room
from shardtune.verify.claims.room import PEAK, Room


def counted(made: Room, ranks: int) -> int:
    """The number of runs that begin before one would have to wait."""
    begun = 0
    while not begun or made.has_room(ranks):
        made.take(ranks)
        begun += 1
    return begun


def test_on_processors_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(room, "usable_cores", lambda: 4)
    monkeypatch.setattr(room, "free_bytes", lambda _: int(80e9))
    log, made = tmp_path / "metrics.jsonl", Room("cpu")
    made.weigh_running(log)
    assert counted(made, 2) == 1, "it has logged nothing"
    log.write_text(json.dumps({PEAK: 1.0}))
    made = Room("cpu")
    made.weigh_running(log)
    assert counted(made, 2) == 2
    assert counted(Room("cpu"), 8) == 1


@pytest.mark.parametrize(("peak", "runs"), [(0.5, 16), (3.0, 6), (60.0, 1)])
def test_on_processors_ranks_share_the_memory(
    peak: float, runs: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """4 x 2.5 GB of each, and half a GB of libraries: 7 in 80 GB, of which one is the plain run."""
    monkeypatch.setattr(room, "usable_cores", lambda: 16)
    monkeypatch.setattr(room, "free_bytes", lambda _: int(80e9))
    monkeypatch.setattr(room, "own_bytes", lambda: int(0.5e9))
    log, made = tmp_path / "metrics.jsonl", Room("cpu")
    log.write_text(json.dumps({PEAK: peak}))
    made.weigh(log)
    assert counted(made, 1) == runs


@pytest.mark.parametrize(
    ("lines", "runs"),
    [
        pytest.param([{PEAK: 2.0}, {PEAK: 5.0}], 3, id="80 of 4 x 5 GB, and the plain run"),
        pytest.param([{PEAK: 0.1}], 16, id="as many as cores"),
        pytest.param([{PEAK: 60.0}], 1, id="large"),
        pytest.param([{"loss": 1.0}], 1, id="not logged"),
        pytest.param(["{"], 1, id="killed within a line"),
        pytest.param(None, 1, id="no log"),
    ],
)
def test_on_a_gpu_one_run_shows_how_many_have_room(
    lines: list[object] | None, runs: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(room, "usable_cores", lambda: 16)
    monkeypatch.setattr(room, "choose_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(room, "free_bytes", lambda _: int(80e9))
    assert counted(Room("auto"), 1) == 1
    made = Room("auto")
    log = tmp_path / "metrics.jsonl"
    if lines is not None:
        log.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    made.weigh(log)
    assert counted(made, 2) == runs, "each is on the first GPU, whatever its ranks"
