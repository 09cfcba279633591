"""Turns that a chat template prints in part, or otherwise than the row has them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.encoder import RowError
from tests.data.chat.test_encoder import STYLES, TAGS, TEMPLATES, TestUnstableTemplates, turn
from tests.data.chat.test_renderings import ROWS, answers, at_length

TEXT = ' What is the "height" of <b>this</b> tower?\n### And of that one? It is on the left & smaller.\n'
LOSSES = {
    "[:20]": """leaves out part of the {}'s turn, from '" of <b>this""",
    ".split('###')[0]": "leaves out part of the {}'s turn, from '### And of that one?",
    ".split('###')[-1]": "leaves out part of the {}'s turn",
    " | upper": "changes the {}'s turn: it prints 'HAT IS THE",
    " | replace('\\n', ' ')": "changes the {}'s turn: it prints ' ### And of",
    " | escape": "changes the {}'s turn: it prints '&#34;height",
}
EDITS = ["", " | trim", " | tojson", ".strip() | tojson", ".split('</think>')[-1].lstrip('\\n')"]


def template(question: str = "", answer: str = "", *, marked: bool = False) -> str:
    """ChatML with filters on the text of the turns."""
    answer = f"{{{{ m.content{answer} }}}}<|im_end|>"
    answer = f"{{% generation %}}{answer}{{% endgeneration %}}" if marked else answer
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        f"{{% if m.role == 'assistant' %}}{answer}{{% else %}}{{{{ m.content{question} }}}}<|im_end|>{{% endif %}}\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("edit", LOSSES)
def test_an_answer_that_is_changed_is_an_error(edit: str, marked: bool, make_tokenizer: Any) -> None:
    """Also in rows of a known shape, and behind an answer that the template leaves as it is."""
    encoder = ChatEncoder(make_tokenizer(eos_token="<|im_end|>"), template(answer=edit, marked=marked))
    assert encoder.encode(answers("Hi", "4")).changed_turns == ()
    with pytest.raises(RowError) as raised:
        encoder.encode(answers("Hi", "4", "Hi", TEXT))
    assert raised.value.reason.startswith(f"message 4: the chat template {LOSSES[edit].format('assistant')}")


@pytest.mark.parametrize("answer", ["4", TEXT])
@pytest.mark.parametrize("role", ["system", "user", "tool"])
@pytest.mark.parametrize("edit", LOSSES)
def test_another_turn_that_is_changed_is_named(edit: str, role: str, answer: str, make_tokenizer: Any) -> None:
    """Also where the answer has the same text, and after a row that is not changed."""
    encoder = ChatEncoder(make_tokenizer(eos_token="<|im_end|>"), template(edit))
    row = {"messages": [turn("user", "7"), turn(role, TEXT), turn("assistant", answer)]}
    assert encoder.encode({"messages": [turn("user", "7"), turn("assistant", TEXT)]}).changed_turns == ()
    assert encoder.encode(copy.deepcopy(row)).changed_turns == (role,)


@pytest.mark.parametrize("text", ["Hi", "end"])
def test_short_texts_that_stand_elsewhere_by_chance(text: str, make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(eos_token="<|im_end|>")
    assert ChatEncoder(tokenizer, template(" | upper")).encode(answers(text, text)).changed_turns == ("user",)
    assert ChatEncoder(tokenizer, template("[-20:]")).encode(answers(text, text)).changed_turns == ()
    with pytest.raises(RowError, match="message 2: the chat template changes the assistant's turn"):
        ChatEncoder(tokenizer, template(answer=" | upper")).encode(answers(text, text))


def test_answers_that_are_not_trained_are_named(make_tokenizer: Any) -> None:
    row = answers("Hi", TEXT, "Hi", "4")
    tokenizer = make_tokenizer(eos_token="<|im_end|>")
    encoder = ChatEncoder(tokenizer, template(answer="[:20]"), train_on="last_assistant")
    assert encoder.encode(copy.deepcopy(row)).changed_turns == ("assistant",)
    row["messages"][1]["loss_weight"] = 0
    assert ChatEncoder(tokenizer, template(answer="[:20]")).encode(row).changed_turns == ("assistant",)


@pytest.mark.parametrize("slow", [False, True])
def test_what_templates_may_do_is_no_change(slow: bool, make_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blanks that are stripped, JSON, reasoning that is split off, turns that move."""
    thought = answers("x", f"<think>\nhm\n</think>\n\n{TEXT}", "e", "<think>b</think>c")
    rows = [*ROWS, answers("e", "e", TEXT, TEXT), answers(TEXT, "</s> it is", "end", "<|im_end|>"), thought]
    rows.append({"messages": [turn("system", TEXT), turn("user", TEXT), turn("assistant", "d")]})
    texts = [(TEMPLATES / f"{style}.jinja").read_text(encoding="utf-8") for style in STYLES]
    texts += [TAGS.sub("", text) for text in texts]
    texts += [template(edit, edit) for edit in EDITS] + [TestUnstableTemplates.THINKING]
    for text in texts:
        tokenizer = make_tokenizer(bos_token="<s>", eos_token="</s>")
        encoder = ChatEncoder(tokenizer, text, thinking="template", on_prompt_mismatch="accept")
        if slow:
            at_length(encoder, monkeypatch)
        for row in rows:
            if "tools" in row and text not in texts[: 2 * len(STYLES)]:
                continue  # these render no calls
            assert encoder.encode(copy.deepcopy(row)).changed_turns == ()


def test_an_answer_that_spells_the_end_of_a_turn_behind_its_marks_is_whole(make_tokenizer: Any, trained: Any) -> None:
    """The template writes the token behind the block; the one in the text is not the end."""
    text = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}</s>"
        "{% else %}<|user|>{{ m.content }}<|assistant|>{% endif %}{% endfor %}"
    )
    tokenizer = make_tokenizer(eos_token="</s>")
    sample = ChatEncoder(tokenizer, text).encode(answers("What ends it?", "It is </s> in HTML."))
    assert trained(tokenizer, sample) == ["It is </s> in HTML.</s>"]


ARGUMENTS = {
    "query": 'say "hi" to <b>Åsa & Øl</b>\n\tand 日本, c:\\dir',
    "nested": {"list": ["it's", {"deep": "end"}], "json": '{"a": "b\\nc"}'},
    "numbers": [3, 1e-5, -2.50, True, None, ""],
    "blank": " padded ",
}
WAYS = {
    "json": "{{ call.function.arguments | tojson }}",
    "spaced": "{{ call.function.arguments | tojson(indent=2) }}",
    "ascii": "{{ call.function.arguments | tojson(ensure_ascii=true) }}",
    "python": "{{ call.function.arguments }}",
    "twice": "{{ call.function.arguments | tojson | tojson }}",
    "one by one": "{% for name, value in call.function.arguments.items() %}<{{ name }}>\n"
    "{{ value if value is string else value | tojson }}\n</{{ name }}>{% endfor %}",
    "escaped": "{% for value in call.function.arguments.values() %}{{ value | string | e }}{% endfor %}",
    "upper": "{% for value in call.function.arguments.values() %}{{ value | string | upper }}{% endfor %}",
}
CALLING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }} CALL{% endfor %}</s>{% endfor %}"
)


def called(make_tokenizer, way: str) -> None:
    call = {"type": "function", "function": {"name": "search", "arguments": ARGUMENTS}}
    messages = [turn("user", "?"), turn("assistant", None, tool_calls=[call, call])]
    encoder = ChatEncoder(make_tokenizer(eos_token="</s>"), CALLING.replace("CALL", way))
    encoder.encode({"messages": messages})


@pytest.mark.parametrize("way", WAYS)
def test_arguments_of_calls_may_be_written_in_any_way(make_tokenizer, way):
    called(make_tokenizer, WAYS[way])


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("()", "query"),
        ("{{ call.function.arguments.query }}", "nested"),
        ("{{ (call.function.arguments | tojson)[:12] }}", "query"),
        ("{{ (call.function.arguments | tojson)[:60] }}", "nested"),
        ("{{ call.function.arguments.query }}{{ call.function.arguments.nested }}", "numbers"),
    ],
)
def test_arguments_of_calls_that_are_left_out_are_refused(make_tokenizer, way, name):
    """A template without them trained the name alone, without a word."""
    with pytest.raises(RowError, match=f"message 2: the chat template leaves out the argument '{name}' of the call of"):
        called(make_tokenizer, way)
