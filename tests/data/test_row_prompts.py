"""The prompt of a row is what training shows before its answer, whether the row has one or not."""

from __future__ import annotations

from typing import Any

import pytest

from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.encoder import RowError
from shardtune.data.row_prompts import read_row_prompt
from tests.support.workspace import CHATML, make_tokenizer

ASKED, ANSWERED = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
SYSTEM = {"role": "system", "content": "S"}
HUMAN, GPT = {"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}
FETCHED = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}, {"role": "tool", "content": "7"}
ROWS: list[dict[str, Any]] = [
    {"messages": [ASKED, ANSWERED]},
    {"system": "S", "messages": [ASKED, ANSWERED, ASKED, ANSWERED]},
    {"system": "S", "messages": [SYSTEM, ASKED, ANSWERED]},
    {"messages": [ASKED, *FETCHED, ANSWERED]},
    {"conversations": [HUMAN, GPT]},
    {"system": "S", "conversations": [HUMAN, GPT, HUMAN, GPT]},
    {"instruction": "Q", "input": "R", "output": "A"},
    {"system": "S", "instruction": "Q", "input": "R", "history": [["q", "a"]], "output": "A"},
    {"system": "S", "question": "Q", "answer": "A"},
    {"question": "Q", "answer": "A", "messages": [{**ASKED, "content": "M"}, ANSWERED]},
    {"prompt": [ASKED, ANSWERED], "completion": [ASKED, ANSWERED], "system": "S"},
    {"prompt": "Q", "completion": "A"},
]


@pytest.fixture(scope="module")
def encoder() -> ChatEncoder:
    """Its template writes calls, with the ids that training gives them."""
    shown = "message['content'] + ((message.tool_calls or '') | string) + (message.tool_call_id or '')"
    return ChatEncoder(make_tokenizer(), CHATML.replace("message['content']", shown), with_prompts=True)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_it_is_that_of_training_and_evaluation(row: dict[str, Any], encoder: ChatEncoder) -> None:
    wanted = encoder.encode(row)
    found = read_row_prompt(row)
    turns = [{"role": "user", "content": found.prompt}] if isinstance(found.prompt, str) else found.prompt
    given = encoder.text_prompt(str(found.prompt)) if found.plain else encoder.prompt(turns)
    assert given.tokens.tolist() == wanted.prompt_ids.tolist()
    assert found.answer == wanted.reference == "A"
    assert set(row) - {"question", "answer"} <= set(found.keys)


@pytest.mark.parametrize("key", ["messages", "conversations", "prompt"])
def test_the_reasoning_of_earlier_answers_is_that_of_training(key: str) -> None:
    """That of a prompt beside a completion is not trained, and so not written."""
    encoder = ChatEncoder(make_tokenizer(), CHATML, with_prompts=True, thinking="keep")
    thought = {**(GPT if key == "conversations" else ANSWERED), "reasoning": "thought", "weight": 1}
    asked = HUMAN if key == "conversations" else ASKED
    turns = [asked, thought, asked]
    rest = (
        {key: turns, "completion": [ANSWERED]} if key == "prompt" else {key: [*turns, {**thought, "reasoning": None}]}
    )
    wanted, found = encoder.encode(rest), read_row_prompt(rest)
    assert isinstance(found.prompt, list)
    given = encoder.prompt(found.prompt).tokens
    assert given.tolist() == wanted.prompt_ids.tolist()
    assert ("thought" in encoder.tokenizer.decode(given)) is (key != "prompt")


@pytest.mark.parametrize("row", [row for row in ROWS if "completion" not in row], ids=str)
def test_it_is_the_same_without_the_answer(row: dict[str, Any]) -> None:
    bare = {key: value for key, value in row.items() if key not in ("output", "answer")}
    for key in ("messages", "conversations"):
        if key in row:
            bare[key] = row[key][:-1]
    found = read_row_prompt(bare)
    assert (found.prompt, found.answer) == (read_row_prompt(row).prompt, None)


def test_rows_that_training_does_not_know() -> None:
    for row, prompt in (
        ({"prompt": "Q"}, "Q"),
        ({"prompt": "Q", "system": "S"}, [SYSTEM, ASKED]),
        ({"prompt": [ASKED, ANSWERED]}, [ASKED, ANSWERED]),
        ({"prompt": "Q", "question": "no", "instruction": "no"}, "Q"),
        ({"messages": None, "question": "Q", "answer": ""}, "Q"),
        ({"messages": [ASKED, {"role": "assistant", "content": ""}]}, [ASKED]),
    ):
        found = read_row_prompt(row)
        assert (found.prompt, found.answer, found.plain) == (prompt, None, False)


def test_an_answer_that_is_more_than_a_text_stays_turns() -> None:
    assert read_row_prompt({"messages": [ASKED, FETCHED[0]]}).answer == [FETCHED[0]]
    assert read_row_prompt({"messages": [ASKED, ANSWERED, ANSWERED]}).answer == [ANSWERED, ANSWERED]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "T"}, "no prompt"),
        ({"prompt": 7}, "prompt is neither text nor a list of messages"),
        ({"prompt": "Q", "completion": [ANSWERED]}, "must both be text"),
        ({"messages": [ANSWERED]}, "nothing to answer"),
        ({"messages": [{"role": "user"}]}, "message 1 of messages has no content"),
        ({"conversations": [{"from": "nobody", "value": "x"}]}, "message 1 of conversations: the role 'nobody'"),
    ],
)
def test_what_cannot_be_asked_is_refused(row: dict[str, Any], says: str) -> None:
    with pytest.raises(RowError, match=says):
        read_row_prompt(row)


def test_two_system_prompts_that_differ() -> None:
    with pytest.raises(
        RowError, match="the column system is 'T', and the conversation begins with the system turn 'S'"
    ):
        read_row_prompt({"system": "T", "messages": [SYSTEM, ASKED]})
