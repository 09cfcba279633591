"""Values in messages, as they are typed in a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.config.shown import as_written


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (r"#### (-?\d+)", r"#### (-?\d+)"),
        (Path("a b/c.jsonl"), "a b/c.jsonl"),
        (["a.jsonl", Path("b.jsonl")], "[a.jsonl, b.jsonl]"),
        ({"path": "a.jsonl", "weight": 2.0, "name": None}, "{path: a.jsonl, weight: 2.0, name: null}"),
        ((True, False, None, 3, 1e-5), "[true, false, null, 3, 1e-05]"),
        (" a", "' a'"),
        ("", "''"),
        (b"x", "b'x'"),
    ],
)
def test_as_written(value: object, text: str) -> None:
    assert as_written(value) == text
