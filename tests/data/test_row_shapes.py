"""A row of a shape that no format has is refused with the recipe's lines that would read this very row."""

from __future__ import annotations

import re

import pytest

from shardtune.data.encoder import RowError
from shardtune.data.row_formats import read_example, rename_columns

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
ROWS = [
    ({"problem": "1+1", "solution": "2", "level": 3}, "{question: problem, answer: solution}"),
    ({"id": "7", "solution": "2", "problem": "1+1"}, "{question: problem, answer: solution}"),
    ({"question": "1+1", "solution": "2"}, "{answer: solution}"),
    ({"prompt": "z", "chosen": "x", "rejected": "y"}, "{completion: chosen}"),
    ({"first thing": "a", "second": "b"}, '{question: "first thing", answer: second}'),
    ({"id": "7", "dialog": TURNS}, "{messages: dialog}"),
    ({"talk": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "{conversations: talk}"),
    ({"code": "print(1)", "lang": "en"}, "{text: code}"),
]


@pytest.mark.parametrize(("row", "columns"), ROWS)
def test_both_lines_that_the_message_names_read_the_row(row: dict[str, object], columns: str) -> None:
    with pytest.raises(RowError) as caught:
        read_example(row)
    reason = caught.value.reason
    assert f"data.columns: {columns},\n    or as a flag, --data.columns '{columns}'," in reason
    assert max(map(len, reason.splitlines())) <= 120
    assert ("fine-tuning on the chosen answers: the rejected ones are not read" in reason) == ("rejected" in row)
    names = dict(part.replace('"', "").split(": ") for part in columns[1:-1].split(", "))
    mapped = read_example(rename_columns(row, names))
    line = re.search(r"in prepare\.py:\n    (def prepare\(row\): return .*)", reason)
    assert line is not None
    made: dict = {}
    exec(line[1], made)
    assert read_example(made["prepare"](row)) == mapped


def test_keys_that_would_not_be_seen_are_in_quotes() -> None:
    with pytest.raises(RowError, match=r"has no answer \(its keys: question, ' answer', ''\)"):
        read_example({"question": "a", " answer": "b", "": "1"})


def test_a_format_that_the_recipe_names_too() -> None:
    with pytest.raises(RowError, match=r"(?s)has no answer, which.*data\.columns: \{answer: reply\}.*data\.transform"):
        read_example({"question": "a", "reply": "b"}, "question_answer")
