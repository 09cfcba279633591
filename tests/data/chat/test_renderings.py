"""How often the chat template is rendered for a row, and that rows come out as by many renderings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardtune.data.chat import printed_template, rendering
from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.chat.rendering import ChatTemplate
from shardtune.data.chat.template import load_template
from shardtune.data.encoder import RowError
from shardtune.data.row_formats import Chat
from tests.data.chat.test_encoder import STYLES, TAGS, TEMPLATES, TestUnstableTemplates, turn

CALL = {"function": {"name": "look", "arguments": {"at": "Oslo"}}}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}


@pytest.fixture
def renderings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one whenever a template is rendered."""
    found: list[object] = []
    render: Callable[..., Any] = printed_template.render_jinja_template

    def counted(**options: Any) -> Any:
        found.append(options)
        return render(**options)

    monkeypatch.setattr(printed_template, "render_jinja_template", counted)
    return found


def chat(first: str, *words: str) -> dict[str, Any]:
    """A system turn, two questions with answers, a call and its result; all but the answers are short or blank."""
    call = copy.deepcopy(CALL)
    call["function"]["arguments"]["at"] = first
    turns = [
        turn("system", first),
        turn("user", words[0]),
        turn("assistant", words[1]),
        turn("user", words[2]),
        turn("assistant", None, tool_calls=[call]),
        turn("tool", f'{{"sun": "{first}"}}'),
        turn("assistant", words[3]),
    ]
    return {"messages": turns, "tools": [TOOL]}


ROWS = [
    chat("Be brief.", "Hi", "Hello!", "And Oslo?", "Sun."),
    chat("Be kind.", "4", "It is 4.", "5", "Several\n\nparagraphs"),
    chat("é 日本", "x\ny", "<think>2 + 2</think>4", "Hi", "Sun and rain."),
    chat("Go on.", "Hello", "é 🙂", "?", "Rain."),
]


def at_length(encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert encoder.template is not None
    monkeypatch.setattr(encoder.template, "_outline", lambda _: None)


@pytest.mark.parametrize("kind", ["marked", "prefix"])
@pytest.mark.parametrize("style", STYLES)
def test_one_rendering_for_a_row_of_a_known_shape(
    style: str, kind: str, make_tokenizer: Any, renderings: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each template style, with its marks and without; and each token and weight is that of many renderings."""
    text = (TEMPLATES / f"{style}.jinja").read_text(encoding="utf-8")
    text = text if kind == "marked" else TAGS.sub("", text)
    tokenizer = make_tokenizer(**STYLES[style][0])
    encoder, slow = ChatEncoder(tokenizer, text), ChatEncoder(tokenizer, text)
    at_length(slow, monkeypatch)
    encoder.encode(copy.deepcopy(ROWS[0]))
    for row in (ROWS[0], ROWS[1], ROWS[3]):
        renderings.clear()
        sample = encoder.encode(copy.deepcopy(row))
        assert len(renderings) == 1
        wanted = slow.encode(copy.deepcopy(row))
        assert len(renderings) > 3 + 5 * (kind == "prefix")
        assert np.array_equal(sample.input_ids, wanted.input_ids)
        assert np.array_equal(sample.loss_weights, wanted.loss_weights)


@pytest.mark.parametrize("style", ["chatml", "llama3", "gemma", "phi", "deepseek"])
def test_a_prompt_needs_no_rendering_of_its_own(style: str, make_tokenizer: Any, renderings: list[object]) -> None:
    """Where the rendering begins with it; Mistral's moves the system prompt, so that it is rendered apart."""
    text = TAGS.sub("", (TEMPLATES / f"{style}.jinja").read_text(encoding="utf-8"))
    encoder = ChatEncoder(make_tokenizer(**STYLES[style][0]), text, with_prompts=True)
    rows = [{"messages": row["messages"][:3]} for row in ROWS]
    encoder.encode(copy.deepcopy(rows[0]))
    renderings.clear()
    sample = encoder.encode(copy.deepcopy(rows[1]))
    assert len(renderings) == 1
    assert encoder.template is not None
    assert sample.prompt_ids is not None
    prompt = encoder.template.render(rows[1]["messages"][:2], None, prompt=True)
    assert encoder.tokenizer.decode(sample.prompt_ids) == prompt


def answers(*contents: str) -> dict[str, Any]:
    return {"messages": [turn("user" if n % 2 == 0 else "assistant", text) for n, text in enumerate(contents)]}


@pytest.mark.parametrize(
    "row",
    [
        answers(" blanks ", "Hello!", "around\n", " answers \n"),
        answers("Hi", "A<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nB", "Hi", "Hello!"),
        answers("Yes.", "A", "Yes.", "B", "Yes.", "C"),
        answers("Hi", "<|im_end|>", "</s><|im_end|>", "Hello!<|im_end|>"),
        answers("Hi", "<think>they greet</think>Hello!", "2+2?", "<think>add</think>4"),
        answers("Hi", "<think>\nthey greet", "2+2?", "add</think>4"),
        {
            "messages": [
                turn("assistant", "Hi"),
                turn("assistant", "again"),
                turn("user", "Yes."),
                turn("assistant", "B"),
            ]
        },
    ],
)
def test_unusual_rows_come_out_as_by_many_renderings(
    row: dict[str, Any], make_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blanks that templates trim, answers that spell the template's own tokens, repeated turns, reasoning."""
    opened = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    texts = [
        (TEMPLATES / "gemma.jinja").read_text(encoding="utf-8"),
        *(TAGS.sub("", (TEMPLATES / f"{style}.jinja").read_text(encoding="utf-8")) for style in STYLES),
        TestUnstableTemplates.THINKING,
        opened + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    ]
    plain = [answers(*(["x", "y"] * (len(row["messages"]) // 2))), answers("x", "<think>r</think>y", "z", "w")]
    for text in texts:
        tokenizer = make_tokenizer(bos_token="<s>", eos_token="<|im_end|>")
        accepting: Any = {"thinking": "template", "on_prompt_mismatch": "accept"}
        encoder, slow = (ChatEncoder(tokenizer, text, **accepting) for _ in range(2))
        at_length(slow, monkeypatch)
        for other in (*plain, row, row):
            results = []
            for one in (encoder, slow):
                try:
                    sample = one.encode(copy.deepcopy(other))
                    results.append((sample.input_ids.tolist(), sample.loss_weights.tolist(), sample.prompt_differs))
                except RowError as error:
                    results.append(error.reason)
            assert results[0] == results[1]


def test_a_shape_is_learned_once(make_tokenizer: Any, renderings: list[object]) -> None:
    """A row of another length is another shape; what one row's words are does not matter."""
    tokenizer = make_tokenizer(eos_token="<|im_end|>")
    encoder = ChatEncoder(tokenizer, load_template("chatml", tokenizer))
    counts = []
    for row in (answers("a", "b"), answers("c", "d"), answers("a", "b", "c", "d"), answers("e", "f", "g", "h")):
        renderings.clear()
        encoder.encode(row)
        counts.append(len(renderings))
    assert counts[1] == counts[3] == 1
    assert counts[0] > 1
    assert counts[2] > 1


def test_templates_are_forgotten_when_there_are_too_many_shapes(
    make_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "_MOST_OUTLINES", 2)
    tokenizer = make_tokenizer(eos_token="<|im_end|>")
    text = load_template("chatml", tokenizer)
    assert text is not None
    known = ChatTemplate(text, tokenizer)
    for turns in range(1, 6):
        ChatEncoder(tokenizer, text).encode(answers(*(["a", "b"] * turns)))
        known.render_turns(Chat(tuple(answers(*(["a", "b"] * turns))["messages"]), (None,) * 2 * turns))
        assert len(known._outlines) <= 2
