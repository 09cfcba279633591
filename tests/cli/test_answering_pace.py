"""The lines about how far answers have come."""

from __future__ import annotations

from shardtune.cli.answering_pace import AnsweringPace


def test_a_line_now_and_then_with_the_time_that_is_left() -> None:
    """The model is loaded in the first 50 seconds; then a prompt takes 3, and two of three lines are too close."""
    now, lines = 0.0, list[str]()
    pace = AnsweringPace(100, lines.append, lambda: now)
    now = 50.0
    pace.update(4)
    for _ in range(32):
        now += 9.0
        pace.update(4 + int(now - 50) // 3)
    assert lines[:2] == ["4 of 100 prompts are answered", "10 of 100 prompts are answered, about 4 min 30 s left"]
    assert lines[-1] == "94 of 100 prompts are answered, about 18 s left"
    assert len(lines) == 16, "none of the last prompt, after which the answers are there"
