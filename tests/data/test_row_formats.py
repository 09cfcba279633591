"""Which rows are recognised as what, what they become, and what is said about the others."""

from __future__ import annotations

import json

import pytest

from shardtune.data.encoder import RowError
from shardtune.data.messages import shown_question
from shardtune.data.row_formats import (
    FORMATS,
    Chat,
    Completion,
    Text,
    as_row,
    format_of,
    read_example,
    read_tools,
    recognise,
    rename_columns,
    unread_keys,
)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


ROWS = {
    "messages": {"messages": [user("Hi"), assistant("Hello")]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    "instruction": {"instruction": "Hi", "input": "", "output": "Hello"},
    "question_answer": {"question": "Hi", "answer": "Hello", "id": 7},
}


@pytest.mark.parametrize("name", ROWS)
def test_chats(name):
    assert recognise(ROWS[name]).name == name
    example = read_example(ROWS[name])
    assert example == Chat((user("Hi"), assistant("Hello")), (None, None))
    assert read_example(ROWS[name], name) == example


def test_texts():
    assert read_example({"prompt": "2+2=", "completion": "4"}) == Completion("2+2=", "4")
    assert read_example({"text": "Once upon a time"}) == Text("Once upon a time")


def test_numbers_are_answers_too():
    example = read_example({"question": "6*7?", "answer": 42})
    assert isinstance(example, Chat)
    assert example.messages[1]["content"] == "42"


def test_instruction_with_input_system_and_history():
    row = {
        "system": "Be brief.",
        "history": [["One?", "1"], ["Two?", "2"]],
        "instruction": "Translate",
        "input": "Haus",
        "output": "house",
    }
    example = read_example(row)
    assert isinstance(example, Chat)
    assert [message["content"] for message in example.messages] == [
        "Be brief.", "One?", "1", "Two?", "2", "Translate\n\nHaus", "house"
    ]  # fmt: skip
    assert example.messages[0]["role"] == "system"


def test_prompt_and_completion_as_messages_train_the_completion_alone():
    prompt = [user("Hi"), assistant("Hello", weight=1), user("2+2?")]
    example = read_example({"prompt": prompt, "completion": [assistant("4")]})
    assert isinstance(example, Chat)
    assert [message["content"] for message in example.messages] == ["Hi", "Hello", "2+2?", "4"]
    assert example.weights == (None, 0.0, None, None)


def test_messages_in_full():
    row = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            user("Weather?"),
            assistant(None, tool_calls=[{"function": {"name": "look", "arguments": '{"at": "sky"}'}}], loss_weight=0.5),
            {"role": "tool", "content": "blue", "name": "look"},
            assistant("Fine.", reasoning_content="blue is fine", loss_weight=None),
        ],
        "tools": json.dumps([{"name": "look", "parameters": {}}]),
    }
    example = read_example(row)
    assert isinstance(example, Chat)
    assert example.messages[0] == {"role": "system", "content": "Be brief."}
    function = {"name": "look", "arguments": {"at": "sky"}}
    call = {"type": "function", "function": function, "id": "call00001"}
    assert example.messages[2] == assistant("", tool_calls=[call])
    assert example.messages[3] == {"role": "tool", "content": "blue", "name": "look", "tool_call_id": "call00001"}
    assert example.messages[4] == assistant("Fine.", reasoning_content="blue is fine")
    assert example.weights == (None, None, 0.5, None, None)
    look = ({"type": "function", "function": {"name": "look", "parameters": {}}},)
    assert example.tools == look
    said = {"function": {"name": "look", "arguments": '{"at": "sky"}'}}
    as_text = read_example({"messages": [user("Weather?"), assistant(None, tool_calls=[json.dumps(said)])]})
    assert isinstance(as_text, Chat)
    assert as_text.messages[1] == assistant("", tool_calls=[call])
    assert read_tools([json.dumps({"name": "look", "parameters": {}})]) == look
    with pytest.raises(RowError, match="a tool definition is text, but not JSON"):
        read_tools(["look"])


@pytest.mark.parametrize("key", ["text", "value", "content"])
def test_a_part_has_its_text_under_any_of_its_names(key):
    parts = read_example({"messages": [user([{"type": "text", key: "Hi"}]), assistant("Yo")]})
    assert parts == read_example({"messages": [user("Hi"), assistant("Yo")]})


def test_a_part_without_text_is_refused_with_its_form():
    with pytest.raises(RowError, match=r'type text without text \(its keys: type, txt\).*"text": "…"'):
        read_example({"messages": [user([{"type": "text", "txt": "Hi"}]), assistant("Yo")]})


def test_a_question_for_a_reader_is_the_last_one_with_its_calls_and_results():
    call = {"function": {"name": "look", "arguments": {"at": "sky"}}}
    turns = [user("Hi"), assistant("Hello"), user("Weather?"), assistant(None, tool_calls=[call])]
    turns.append({"role": "tool", "content": "blue"})
    example = read_example({"messages": [*turns, assistant("Fine.")]})
    assert isinstance(example, Chat)
    assert shown_question(example.messages[:-1]) == 'Weather?\n→ look({"at": "sky"})\n→ blue'


def test_a_call_under_the_older_name():
    call = {"name": "look", "arguments": '{"at": "sky"}'}
    newer, older = (
        read_example({"messages": [user("Hi"), assistant(None, **{key: value})]})
        for key, value in (("tool_calls", [call]), ("function_call", call))
    )
    assert newer == older


def test_sharegpt_calls_and_observations():
    calls = [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": 1}}]
    row = {
        "conversations": [
            {"from": "human", "value": "Do it"},
            {"from": "function_call", "value": json.dumps(calls)},
            {"from": "observation", "value": "1"},
            {"from": "tool", "value": "2"},
            {"from": "gpt", "value": "Done"},
        ],
        "system": "Be brief.",
        "tools": "",
    }
    example = read_example(row)
    assert isinstance(example, Chat)
    assert [message["role"] for message in example.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert [call["function"] for call in example.messages[2]["tool_calls"]] == calls
    ids = [call["id"] for call in example.messages[2]["tool_calls"]]
    assert [message["tool_call_id"] for message in example.messages[3:5]] == ids
    assert example.tools is None


@pytest.mark.parametrize(
    ("turns", "calls", "results"),
    [
        # a call that is never answered does not wait for the result of a later one
        ([["a"], "?", ["b"], None], ["a", "b"], ["b"]),
        ([[None], "?", [None], None], ["call00001", "call00002"], ["call00002"]),
        ([["a", "b"], None, ["c"], None], ["a", "b", "c"], ["a", "c"]),
        # results in another order: the one without an id answers the other call
        ([["a", "b"], ("b",), None], ["a", "b"], ["b", "a"]),
        # a call without an id has that of its result
        ([[None], ("x",)], ["x"], ["x"]),
        ([[None, "b"], ("b",), None], ["call00001", "b"], ["b", "call00001"]),
        # calls in two turns after each other
        ([["a"], ["b"], None, None], ["a", "b"], ["a", "b"]),
    ],
)
def test_calls_and_results_without_ids_are_paired(turns, calls, results):
    """Of each turn: a list is the calls of the assistant by their ids, text a question, the others are results."""
    made = [user("Hi")]
    for turn in turns:
        if isinstance(turn, list):
            made.append(assistant("", tool_calls=[{"name": "f", **({"id": own} if own else {})} for own in turn]))
        elif isinstance(turn, str):
            made.append(user(turn))
        else:
            made.append({"role": "tool", "content": "1", **({"tool_call_id": turn[0]} if turn else {})})
    example = read_example({"messages": [*made, assistant("Done")]})
    assert isinstance(example, Chat)
    assert [call["id"] for message in example.messages for call in message.get("tool_calls", ())] == calls
    assert [message["tool_call_id"] for message in example.messages if message["role"] == "tool"] == results


def test_messages_as_json_text():
    assert read_example({"messages": json.dumps(ROWS["messages"]["messages"])}) == read_example(ROWS["messages"])


@pytest.mark.parametrize("row", [*ROWS.values(), {"text": "a"}, {"prompt": "a", "completion": "b"}])
def test_as_row_is_read_back_unchanged(row):
    example = read_example(row)
    assert read_example(as_row(example)) == example


def test_as_row_keeps_weights_and_tools():
    row = {"messages": [user("Hi"), assistant("Hello", loss_weight=0.5)], "tools": [{"name": "look"}]}
    example = read_example(row)
    assert read_example(as_row(example)) == example


def test_rename_columns():
    row = {"problem": "2+2?", "solution": "4", "question": "an id", "other": 1}
    renamed = rename_columns(row, {"question": "problem", "answer": "solution"})
    assert renamed == {"question": "2+2?", "answer": "4", "other": 1}
    with pytest.raises(
        RowError, match=r"'problme', which the row does not have \(its keys: problem.*did you mean problem\?"
    ):
        rename_columns(row, {"question": "problme"})


CHAT_FAULTS = [
    ([user("Hi")], "no assistant turn"),
    ([], "messages is empty"),
    ([user("Hi"), assistant("  ")], "message 2: the assistant's answer is empty"),
    ([user("Hi"), assistant(None)], "message 2: the assistant's answer is empty"),
    ([{"role": "critic", "content": "no"}, assistant("a")], "message 1: the role 'critic' is not known"),
    ([{"content": "no"}, assistant("a")], "message 1: no role"),
    (["Hi", "Hello"], "message 1 of messages is str"),
    ([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, assistant("a")], "type 'image'"),
    ([{"role": "user", "content": [{"type": "text"}]}, assistant("a")], "without text"),
    ([{"role": "user", "content": 7}, assistant("a")], "message 1: the content is int"),
    ([user("Hi"), assistant("a", loss_weight=-1)], "message 2: loss_weight is -1"),
    ([user("Hi"), assistant("a", loss_weight="much")], "loss_weight is 'much'"),
    ([user("Hi"), assistant("a", loss_weight=float("nan"))], "loss_weight is nan"),
    ([user("Hi"), assistant("a", loss_weight=1e39)], "32-bit arithmetic needs"),
    ([user("Hi"), assistant("a", loss_weight=1, weight=1)], "both loss_weight and weight"),
    ([{**user("Hi"), "tool_calls": [{"name": "a"}]}, assistant("a")], "tool_calls in a user turn"),
    ([user("Hi"), assistant("", tool_calls=[{"arguments": {}}])], "a tool call without a name"),
    ([user("Hi"), assistant("", tool_calls=["look()"])], "a tool call is text, but not JSON"),
    (
        [user("Hi"), assistant("", tool_calls=[{"name": "a", "arguments": "{x"}])],
        "arguments of a is text, but not JSON",
    ),
    (
        [user("Hi"), assistant("", tool_calls=[{"name": "a", "arguments": '{"x": 1, "x": 2}'}])],
        "arguments of a is text, but not usable as JSON: the key 'x' is there twice, with different values",
    ),
    ([user("Hi"), assistant("", tool_calls=[{"name": "a", "arguments": [1]}])], "arguments of a are not an object"),
    ([{"role": "user", "text": "Hi"}, assistant("a")], r"message 1: no content \(its keys: role, text\)"),
    ([{"role": "system", "content": None}, assistant("a")], "message 1: no content"),
    ([{"from": "user", "role": "assistant", "content": "a"}], "the role is 'assistant', and from is 'user'"),
    ([{**user("Hi"), "value": "Ho"}, assistant("a")], "both content and value are given, and they differ"),
    ([{**user("Hi"), "thinking": "hm"}, assistant("a")], "message 1: reasoning in a user turn"),
    ([user("Hi"), assistant("a", thinking="b", reasoning="c")], "both thinking and reasoning are given"),
    ([user("Hi"), assistant("a", tool_calls=[{"name": "a"}], function_call={"name": "a"})], "they mean the same"),
    ([user("Hi"), assistant([{"type": "refusal", "refusal": "No"}])], "content part of type 'refusal'"),
    ([user("Hi"), assistant([{"type": "text", "text": "a", "weight": 0}])], "the key 'weight' has no meaning"),
    ([user("Hi"), assistant([{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "b"}])], "behind others"),
    ([user("Hi"), assistant([{"type": "thinking"}, {"type": "text", "text": "a"}])], "'thinking' without text"),
    (
        [user("Hi"), assistant("", tool_calls=[{"name": "a", "parameters": {"x": 1}}])],
        "a call of a: the key 'parameters' has no meaning here: a call has its arguments under arguments",
    ),
    (
        [user("Hi"), assistant("", tool_calls=[{"function": {"name": "a"}, "arguments": {"x": 1}}])],
        "a call of a: arguments stands beside the key function, which has None",
    ),
    (
        [user("Hi"), assistant("", tool_calls=[{"name": "b", "function": {"name": "a", "arguments": {}}}])],
        "a call of a: name stands beside the key function, which has 'a'",
    ),
    ([user("Hi"), assistant("", tool_calls=3)], "message 2: the calls of tools are 3, not a list"),
    ([user("Hi"), {"from": "function_call", "value": None}], "message 2: the calls of tools are None, not a list"),
]


@pytest.mark.parametrize(("messages", "message"), CHAT_FAULTS)
def test_faulty_chats(messages, message):
    with pytest.raises(RowError, match=message):
        read_example({"messages": messages})


ROW_FAULTS = [
    ({"messages": [user("a"), assistant("b")], "loss_weight": 0.5}, r"loss_weight \(0.5\) is a key of a message"),
    ({"messages": [user("a"), assistant("b")], "weight": 0}, r"weight \(0\) is a key of a message.*data.transform"),
    ({"question": "Hi", "answer": "Hello", "weight": 0.5}, r"weight \(0.5\) is a key of a message, not of a row"),
    ({"prompt": "a", "completion": "b", "loss_weight": 0}, r"loss_weight \(0\) is .*: text has none; give messages"),
    ({"text": "a", "weight": 2.5}, r"weight \(2.5\) is .*: text has none"),
    ({"input_ids": [1, 2], "loss_weight": 0.5}, r"loss_weight \(0.5\) is .*: loss_weights has one for each token"),
    (
        {"prompt": [user("a"), assistant("b", weight=2), user("c")], "completion": [assistant("d")]},
        "message 2 of the prompt has the loss_weight 2, and only the completion is trained",
    ),
    (
        {"system": "Be brief.", "messages": [{"role": "system", "content": "Be long."}, user("a"), assistant("b")]},
        "the column system is 'Be brief.', and the conversation begins with the system turn 'Be long.'",
    ),
    ({"instruction": "a", "output": "b", "history": [["q", None]]}, "the answer in history is empty"),
    ({"instruction": "a", "output": "b", "history": [["q", ["x"]]]}, "history is list, not text"),
    ({"question": "Hi", "answer": ""}, "message 2: the assistant's answer is empty"),
    ({"question": " ", "answer": "a"}, "the question is empty"),
    ({"question": "Hi", "answer": None}, "looks like question/answer, but its answer is null$"),
    ({"messages": None, "text": None, "question": "Hi", "answer": None}, "question/answer, but its answer is null$"),
    ({"messages": None, "id": 7}, "looks like chat messages, but its messages is null$"),
    ({"question": "Hi", "answer": ["a"]}, "answer is list, not text"),
    ({"question": "Hi", "answer": True}, "answer is bool, not text"),
    ({"question": "Hi", "answer": float("inf")}, "answer is the number inf, not text"),
    ({"instruction": "", "input": "", "output": "a"}, "the instruction is empty"),
    ({"instruction": "a", "output": "b", "history": ["x"]}, "history is not a list of"),
    ({"prompt": "a", "completion": ""}, "the completion is empty"),
    ({"prompt": "a", "completion": [assistant("b")]}, "both be text, or both lists"),
    ({"text": "\n"}, "the text is empty"),
    ({"messages": "[{"}, "messages is text, but not JSON"),
    ({"messages": {"role": "user"}}, "messages is not a list"),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "look()"}]}, "not JSON"),
    ({"messages": [user("a"), assistant("b")], "images": ["a.png"]}, "the row has images, but this model takes text"),
    ({"messages": [user("a"), assistant("b")], "tools": {"name": "a"}}, "tools is dict"),
    ({"messages": [user("a"), assistant("b")], "tools": [{"description": "a"}]}, "tool definition without a name"),
]


@pytest.mark.parametrize(("row", "message"), ROW_FAULTS)
def test_faulty_rows(row, message):
    with pytest.raises(RowError, match=message):
        read_example(row)


def test_what_is_given_twice_alike_is_no_fault():
    system = {"role": "system", "content": "Be brief."}
    messages = [system, *ROWS["messages"]["messages"]]
    assert read_example({"messages": messages, "system": "Be brief."}) == read_example({"messages": messages})
    call = {"name": "a", "arguments": {"x": 1}}
    both, one = ([user("Hi"), assistant("", tool_calls=[form])] for form in ({**call, "function": call}, call))
    assert read_example({"messages": both}) == read_example({"messages": one})
    prompt = [user("a"), assistant("b", loss_weight=0), user("c")]
    plain = [user("a"), assistant("b"), user("c")]
    completion = [assistant("d")]
    assert read_example({"prompt": prompt, "completion": completion}) == read_example(
        {"prompt": plain, "completion": completion}
    )


def test_history_as_json_text():
    row = {"instruction": "a", "output": "b", "history": [["q", "r"], ["s", 7]]}
    assert read_example({**row, "history": json.dumps(row["history"])}) == read_example(row)


def test_a_column_of_text_named_weight():
    for value in ("heavy", None, float("nan"), True):
        assert read_example({**ROWS["messages"], "weight": value}) == read_example(ROWS["messages"])


class Seen(dict):
    """A row that notes which of its keys are looked at."""

    def __init__(self, row):
        super().__init__(row)
        self.keys_read = set()

    def get(self, key, default=None):
        self.keys_read.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.keys_read.add(key)
        return super().__getitem__(key)


@pytest.mark.parametrize("known", FORMATS, ids=lambda known: known.name)
def test_the_keys_that_a_format_declares_are_those_it_reads(known):
    messages = {"prompt": [user("Hi")], "completion": [assistant("Hello")]}
    given = {**ROWS["messages"], **ROWS["sharegpt"], **messages, "input_ids": [1, 2], "text": "a", "thinking": "b"}
    row = Seen({key: given.get(key, "Hi") for key in known.keys} | {"reasoning_content": "c", "thinking": "c"})
    known.read(row)
    refused = {"loss_weight", "weight", *(("chat_template_kwargs",) if known.name == "text" else ())}
    assert row.keys_read - refused == {*known.keys, *known.reads}


def test_keys_that_are_not_read():
    more = {"context": "c", "history": [], "system": "s", "image": None}

    def unread(row, name=None):
        return unread_keys(row, format_of(row, name))

    assert unread({"question": "a", "answer": "b", **more}) == ["context", "history"]
    assert unread({"instruction": "a", "output": "b", **more}) == ["context"]
    assert unread({"prompt": "a", "completion": "b", **more}) == ["context", "history", "system"]
    assert unread({"prompt": [], "completion": [], **more}) == ["context", "history"]
    assert unread({"text": "a", "question": "b", "answer": "c"}, "text") == ["question", "answer"]


def test_unknown_format_lists_keys_and_formats():
    with pytest.raises(RowError) as caught:
        read_example({"problem": "2+2?", "solution": "4"})
    reason = caught.value.reason
    assert "Its keys: problem, solution" in reason
    assert "prompt/completion, question/answer, text" in reason
    assert "data.columns" in reason


def test_named_format_that_does_not_fit():
    with pytest.raises(RowError, match="no instruction and no output, which instruction/input/output needs"):
        read_example(ROWS["question_answer"], "instruction")


def test_an_excluded_answer_may_be_empty():
    example = read_example({"messages": [user("Hi"), assistant("", loss_weight=0), user("Hm?"), assistant("Yes")]})
    assert isinstance(example, Chat)
    assert example.weights[1] == 0
