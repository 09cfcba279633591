"""Values for the chat template, of the recipe and of rows: tokens as `apply_chat_template` gives them."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.chat.template import load_template
from shardtune.data.encoder import RowError
from shardtune.errors import DataError
from tests.data.chat.test_encoder import MULTI, turn

# A thinking switch as Qwen3 has it, an effort, a date, documents.
SWITCHED = """
{%- macro today() %}{{ strftime_now('%d %B %Y') }}{% endmacro %}
{%- if reasoning_effort is defined %}<|system|>Effort: {{ reasoning_effort }}, {{ today() }}<|end|>{% endif %}
{%- for document in documents or [] %}<|system|>{{ document.title }}: {{ document.text }}<|end|>{% endfor %}
{%- for m in messages %}{{ '<|' + m.role + '|>' }}
{%- if m.role == 'assistant' and loop.last and (m.reasoning_content or enable_thinking is defined) %}
{{- '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}
{{- m.content + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"""
# Opens every answer with reasoning, in generation only.
OPENED = """
{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% if enable_thinking is not defined or enable_thinking %}<think>
{% endif %}{% endif %}"""
DOCUMENTS = [{"title": "Oslo", "text": 'It is "cold".\n\\ 🙂'}, {"title": "Rome", "text": "{% raw %}"}]


@pytest.fixture
def tokenizer(make_tokenizer: Any) -> Any:
    return make_tokenizer(eos_token="<|end|>")


def rendered(tokenizer: Any, messages: Any, text: str = SWITCHED, *, prompt: bool = False, **given: Any) -> str:
    return tokenizer.apply_chat_template(
        messages, chat_template=text, tokenize=False, add_generation_prompt=prompt, **given
    )


@pytest.mark.parametrize(
    "given",
    [
        {"enable_thinking": False},
        {"enable_thinking": True},
        {"documents": DOCUMENTS},
        {"documents": DOCUMENTS[:1], "enable_thinking": False},
    ],
)
def test_tokens_are_those_of_transformers(given: dict[str, Any], tokenizer: Any, trained: Any) -> None:
    """Of the recipe, of a row, as JSON text, and in `final/`, whose template needs no values."""
    of_recipe = ChatEncoder(tokenizer, SWITCHED, with_prompts=True, template_kwargs=given)
    of_row = ChatEncoder(tokenizer, SWITCHED, with_prompts=True, template_kwargs={"enable_thinking": None})
    rows = [{}, {"chat_template_kwargs": given}, {"chat_template_kwargs": json.dumps(given)}]
    whole, before = rendered(tokenizer, MULTI, **given), rendered(tokenizer, MULTI[:3], prompt=True, **given)
    for encoder, row in zip((of_recipe, of_row, of_row), rows, strict=True):
        for messages in (MULTI, MULTI):  # at length, then by its outline
            sample = encoder.encode({"messages": messages, **row})
            assert tokenizer.decode(sample.input_ids) == whole
            assert tokenizer.decode(sample.prompt_ids) == before
            switched_off = given.get("enable_thinking") is False
            block = "" if switched_off or "enable_thinking" not in given else "<think></think>"
            assert trained(tokenizer, sample) == ["Hello!<|end|>", f"{block}It is 4.<|end|>"]
    assert of_recipe.template is not None
    of_final = of_recipe.template.with_arguments
    assert rendered(tokenizer, MULTI, of_final) == whole
    assert rendered(tokenizer, MULTI[:3], of_final, prompt=True) == before
    assert ChatEncoder(tokenizer, of_final, template_kwargs=given).template.with_arguments == of_final  # pyright: ignore[reportOptionalMemberAccess]
    assert (
        of_recipe.prompt(MULTI[:3]).tokens.tolist() == of_row.prompt(MULTI[:3], template_kwargs=given).tokens.tolist()
    )
    other: dict[str, Any] = {"enable_thinking": not given.get("enable_thinking", False)}
    assert rendered(tokenizer, MULTI, of_final, **other) == rendered(tokenizer, MULTI, **given | other)


def test_a_row_takes_precedence_and_names_its_own_date(tokenizer: Any) -> None:
    encoder = ChatEncoder(
        tokenizer, SWITCHED, template_kwargs={"reasoning_effort": "low", "strftime_now": "2024-12-31"}
    )
    for given, shown in (
        ({}, "low, 31 December 2024"),
        ({"reasoning_effort": "high"}, "high, 31 December 2024"),
        ({"strftime_now": "2026-02-01"}, "low, 01 February 2026"),
    ):
        sample = encoder.encode({"messages": MULTI, "chat_template_kwargs": given})
        assert f"Effort: {shown}<|end|>" in tokenizer.decode(sample.input_ids)
    assert encoder.template is not None
    assert "low, 31 December 2024" in rendered(tokenizer, MULTI, encoder.template.with_arguments)
    plain = ChatEncoder(tokenizer, SWITCHED, template_kwargs={"reasoning_effort": "low"})
    assert "low, 01 January 2025" in tokenizer.decode(plain.encode({"messages": MULTI}).input_ids)
    assert len({encoder.cache_key(), plain.cache_key(), ChatEncoder(tokenizer, SWITCHED).cache_key()}) == 3


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"enable_thinkin": True}, r"does not read the argument 'enable_thinkin': did you mean 'enable_thinking'\?"),
        ({"color": 1}, "'color': it reads documents, enable_thinking, reasoning_effort, strftime_now"),
        ({"messages": []}, "'messages' is no argument"),
        ({"strftime_now": "tomorrow"}, "'tomorrow', not the date"),
        ({"documents": [{"title": {1, 2}}]}, "no text, number"),
    ],
)
def test_what_a_template_does_not_read_is_refused(given: dict[str, Any], match: str, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=match) as caught:
        ChatEncoder(tokenizer, SWITCHED, template_kwargs=given)
    assert caught.value.where == "data.template_kwargs"
    encoder = ChatEncoder(tokenizer, SWITCHED, ignored_keys=["ignored"])
    with pytest.raises(RowError, match=f"chat_template_kwargs: .*{match}"):
        encoder.encode({"messages": MULTI, "chat_template_kwargs": given})
    encoder.encode({"messages": MULTI, "chat_template_kwargs": {"ignored": 1}})
    for row in ({"text": "a"}, {"prompt": "a", "completion": "b"}):
        with pytest.raises(RowError, match="chat_template_kwargs is for a chat template"):
            encoder.encode({**row, "chat_template_kwargs": {"enable_thinking": True}})
    with pytest.raises(DataError, match="no chat template renders"):
        ChatEncoder(tokenizer, None, template_kwargs={"enable_thinking": True})
    with pytest.raises(RowError, match="not a mapping"):
        encoder.encode({"messages": MULTI, "chat_template_kwargs": [1]})


def test_the_prompt_of_generation_precedes_what_is_trained(tokenizer: Any, trained: Any) -> None:
    """Or it is an error with the first difference; reasoning behind it is trained without what opens it."""
    row = {"messages": [turn("user", "Hi"), turn("assistant", "Ho")]}
    with pytest.raises(DataError) as caught:
        ChatEncoder(tokenizer, OPENED).encode(row)
    assert "message 2, from character 31 on" in caught.value.what
    assert "generation has '<|user|>Hi<|end|><|assistant|><think>\\n'" in caught.value.what
    assert "training has   '<|user|>Hi<|end|><|assistant|>Ho<|end|>'" in caught.value.what
    assert "data.template_kwargs" in str(caught.value.remedy)
    for options in ({"template_kwargs": {"enable_thinking": False}}, {"on_prompt_mismatch": "accept"}):
        sample = ChatEncoder(tokenizer, OPENED, **options).encode(row)  # pyright: ignore[reportArgumentType]
        assert trained(tokenizer, sample) == ["Ho<|end|>"]
        assert sample.prompt_differs == ("on_prompt_mismatch" in options)
    row["messages"][1]["reasoning_content"] = "why"
    kept = ChatEncoder(tokenizer, OPENED, thinking="keep", with_prompts=True).encode(row)
    assert trained(tokenizer, kept) == ["why\n</think>\n\nHo<|end|>"]
    assert tokenizer.decode(kept.prompt_ids) == rendered(tokenizer, row["messages"][:1], OPENED, prompt=True)
    block = "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}{% else %}"
    marked = OPENED.replace(" + m.content + '<|end|>' }}", " }}" + block + "{{ m.content + '<|end|>' }}{% endif %}")
    with pytest.raises(DataError, match="opens an answer otherwise"):
        ChatEncoder(tokenizer, marked).encode({"messages": [turn("user", "Hi"), turn("assistant", "Ho")]})
    ChatEncoder(tokenizer, marked, template_kwargs={"enable_thinking": False}).encode({"messages": MULTI})


def test_reasoning_after_the_last_question(tokenizer: Any, trained: Any) -> None:
    """With `last` that of earlier turns is left out and counted, and that of all turns since is trained."""
    messages = copy.deepcopy(MULTI)
    messages[1]["reasoning_content"] = "greet"
    call = {"function": {"name": "add", "arguments": {}}}
    messages[3:] = [
        turn("assistant", "", tool_calls=[call], reasoning_content="use it"),
        turn("tool", "4"),
        turn("assistant", "It is 4.", reasoning_content="read it"),
    ]
    chatml, text = load_template("chatml", tokenizer), "<think>\n{}\n</think>\n\n{}<|im_end|>"
    last = ChatEncoder(tokenizer, chatml, thinking="last").encode({"messages": messages})
    called = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    turns = ["Hello!<|im_end|>", text.format("use it", called), text.format("read it", "It is 4.")]
    assert trained(tokenizer, last) == turns
    assert last.left_out == len(tokenizer("greet", add_special_tokens=False)["input_ids"])
    stripped = ChatEncoder(tokenizer, chatml, thinking="strip").encode({"messages": messages})
    assert trained(tokenizer, stripped) == ["Hello!<|im_end|>", f"{called}<|im_end|>", "It is 4.<|im_end|>"]


def test_a_template_by_name(tokenizer: Any) -> None:
    named = copy.copy(tokenizer)
    named.chat_template = {"default": OPENED, "tool_use": SWITCHED}
    assert load_template(None, named) == OPENED
    assert load_template("tool_use", named) == SWITCHED
    with pytest.raises(DataError, match="rag cannot be read") as caught:
        load_template("rag", named)
    assert "(default, tool_use)" in str(caught.value.remedy)


def test_rows_with_the_same_switch_share_an_outline(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = ChatEncoder(tokenizer, SWITCHED)
    assert encoder.template is not None
    counts, render = [], encoder.template.render_marked
    monkeypatch.setattr(
        encoder.template, "render_marked", lambda *given, **more: (counts.append(1), render(*given, **more))[1]
    )
    for thinking in (True, True, False, False):
        counts.append(0)
        encoder.encode({"messages": MULTI[:2], "chat_template_kwargs": {"enable_thinking": thinking}})
    per_row = [len(one) for one in "".join(map(str, counts)).split("0")[1:]]
    assert per_row[1] == per_row[3] == 1
    assert min(per_row[0], per_row[2]) > 1
