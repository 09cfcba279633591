"""Which keys of a row some code reads, in whatever way."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pytest
from pydantic import BaseModel

from shardtune.data.row_reads import RowReads

ROW = {"x": 1, "y": [2], "z": None}


class Model(BaseModel):
    x: int


def named(x: int, **others: object) -> int:
    return x


def matched(row: RowReads) -> Any:
    match row:
        case {"x": value}:
            return value


@pytest.mark.parametrize(
    "read",
    [
        itemgetter("x"),
        lambda row: row.get("x"),
        lambda row: row.pop("x"),
        lambda row: row.setdefault("x", 0),
        lambda row: "x" in row,
        lambda row: "{x}".format_map(row),
        lambda row: "%(x)s" % row,  # noqa: UP031
        Model.model_validate,
        matched,
    ],
)
def test_a_key_that_is_read_alone(read: Callable[[RowReads], Any]) -> None:
    row = RowReads(ROW)
    read(row)
    assert row.unread() == ["y"]


@pytest.mark.parametrize(
    "read",
    [
        dict,
        list,
        str,
        json.dumps,
        copy.copy,
        copy.deepcopy,
        dict.fromkeys,
        reversed,
        lambda row: {**row},
        lambda row: named(**row),
        lambda row: Model(**row),
        lambda row: row | {"a": 1},
        lambda row: {"a": 1} | row,
        lambda row: {}.update(row),
        lambda row: row.copy(),
        lambda row: list(row.values()),
        lambda row: row == ROW,
        lambda row: pickle.loads(pickle.dumps(row)),
        lambda row: [key for key, _ in row.items()],
        lambda row: row.keys() - {"y"},
    ],
)
def test_a_row_that_is_taken_whole(read: Callable[[RowReads], Any]) -> None:
    row = RowReads(ROW)
    read(row)
    assert row.unread() == []


def test_it_is_the_row_and_its_own_keys_are_no_reading() -> None:
    row = RowReads(ROW)
    row["a"] = 5
    assert (len(row), bool(row), row.unread()) == (4, True, [])  # nothing was read
    assert row["a"] == 5
    assert row.unread() == ["x", "y"]
    assert (row["x"], row == {**ROW, "a": 5}) == (1, True)
