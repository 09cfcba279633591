"""What is printed as JSON can be read by any parser, and controls no terminal."""

from __future__ import annotations

import json
from datetime import date

from shardtune.cli.json_text import json_text


def test_numbers_that_are_not_finite_are_null() -> None:
    text = json_text({"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -float("inf")}, "e": date(2026, 1, 2)})
    assert json.loads(text, parse_constant=lambda name: name) == {
        "a": None, "b": [None, 1.5], "c": {"d": None}, "e": "2026-01-02"
    }  # fmt: skip


def test_characters_that_control_a_terminal_are_escaped() -> None:
    row = {"text": "\x9b31m \u202e \x7f é \ud800"}
    text = json_text(row)
    assert text == r'{"text": "\u009b31m \u202e \u007f é \ud800"}'
    assert json.loads(text) == row
    assert json_text({"a": 1}, indent=2) == json.dumps({"a": 1}, indent=2)
