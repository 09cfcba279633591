"""The two lines of a run's state: on narrow and wide terminals, in bounded memory, with what the run waits for."""

from __future__ import annotations

import math
from itertools import count

import pytest

from shardtune.launch.progress import EVALUATION, FIRST_STEP, GENERATION, SAVING, STEP, Progress
from shardtune.launch.watchdog.stacks import Place
from shardtune.run import status as module
from shardtune.run.status import Curve, Status, decimal

METRICS = {
    "train/loss": 2.5,
    "train/grad_norm": 0.5,
    "train/learning_rate": 1e-4,
    "perf/tokens_per_second": 26869.0,
    "perf/peak_memory_gb": 1.26,
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def texts(status: Status, width: int) -> list[str]:
    return [line.plain for line in status.lines(width)]


@pytest.mark.parametrize("width", [20, 39, 79, 109, 159])
def test_no_line_is_longer_than_the_terminal_is_wide(width: int, clock: list[float]) -> None:
    status = Status("training", 1_000_000, progress=Progress())
    for step in range(1, 70):
        clock[0] += 100
        status.stepped(step, METRICS | {"train/loss": 100.0 / step})
    lines = texts(status, width)
    assert len(lines) == 2
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("training ")
    assert lines[1].startswith("loss 1.4493")
    assert not any(line.endswith("…") for line in lines) or width == 20
    if width >= 79:
        assert lines[0].endswith(" 69/1,000,000  27775 h 51 min left")
        assert "26,869 tokens/s  1.3 GB  grad 0.500" in lines[1]
        assert "█" in lines[1]


def test_time_left_leaves_out_the_first_step_and_what_was_before(clock: list[float]) -> None:
    status = Status("training", 10, progress=Progress())
    clock[0] += 60
    status.stepped(1, METRICS)
    assert status.seconds_left is None
    for step in (2, 3):
        clock[0] += 2
        status.stepped(step, METRICS)
    assert status.seconds_left == pytest.approx(14)


def test_what_the_run_waits_for(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress()
    status = Status("training", 10, ranks=2, progress=progress)
    monkeypatch.setattr(module, "place_of_main_thread", lambda: Place("there", collective="all_reduce"))
    for phase, label in (
        (STEP, "training"),
        (FIRST_STEP, "compiling"),
        (EVALUATION, "evaluating"),
        (GENERATION, "answering"),
        (SAVING, "saving"),
    ):
        progress.phase = phase
        progress.beats += 1
        assert texts(status, 79)[0].split()[0] == label
    for _ in range(3):
        clock[0] += 2
        progress.beats += 1
        lines = texts(status, 79)
        assert len(lines) == 1
    assert texts(status, 79)[0].startswith("saving 6 s ")
    clock[0] += 4
    assert texts(status, 79)[0].startswith("waiting for other ranks ")
    progress.phase, progress.beats = STEP, progress.beats + 1
    assert texts(status, 79)[0].startswith("training   ")
    assert texts(Status("loading the model", progress=Progress()), 79) == ["loading the model"]


def test_a_curve_of_any_length_takes_bounded_memory() -> None:
    curve = Curve(8)
    assert curve.sparkline(4) == ""
    for number in count():
        if number == 10_000:
            break
        curve.add(10_000 - number)
        curve.add(math.nan)
        assert len(curve._sums) <= 8
    assert sum(curve._counts) == 10_000
    assert sum(curve._sums) == sum(range(1, 10_001))
    assert curve.sparkline(4)[0] == "█"
    assert curve.sparkline(4)[-1] == "▁"
    steep = Curve()
    for number in (1000, 100, 10, 1):
        steep.add(number)
    assert steep.sparkline(4) == "█▆▃▁", "by their logarithms"
    flat = Curve()
    flat.add(3)
    flat.add(3)
    assert flat.sparkline(9) == "▁▁"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.30259, "2.3026"), (0.0, "0.0000"), (-12345.6, "-12,345.6000"), (0.000321, "3.2100e-04"),
        (2.5e29, "2.5000e+29"), (float("nan"), "nan"), (float("-inf"), "-inf"),
    ],
)  # fmt: skip
def test_a_number_is_shown_in_places_or_in_digits(value: float, text: str) -> None:
    assert decimal(value, 4) == text
