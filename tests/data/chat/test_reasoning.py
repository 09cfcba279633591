"""The reasoning of an answer is trained, or the recipe chooses that it is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from shardtune.batch import Sample
from shardtune.cli.chat import Streamer
from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.chat.template import load_template
from shardtune.data.encoder import RowError
from shardtune.errors import DataError
from shardtune.evaluate.generate import Generator
from tests.data.chat.test_encoder import TEMPLATES, TestUnstableTemplates, turn

# Like gpt-oss: reasoning under another name, in a block of its own, and in the last turn only.
CHANNELS = """
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.thinking and loop.last %}{{- '<|assistant|>analysis: ' + m.thinking + '<|end|>' }}{% endif %}
{{- '<|assistant|>final: ' + m.content + '<|end|>' }}
{%- else %}{{- '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""
MARKED = """
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{- m.content + '<|im_end|>' }}{% endif %}{{- '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
CALL = {"function": {"name": "look", "arguments": {"at": "Oslo"}}}


def conversation(key: str = "reasoning_content") -> list[dict[str, Any]]:
    """Two questions; the reasoning of the second answer occurs in it, too."""
    return [
        turn("user", "Hi"),
        turn("assistant", "Hello!", **{key: "they greet"}),
        turn("user", "2+2?"),
        turn("assistant", "It is 4.", **{key: "4"}),
    ]


def inline() -> list[dict[str, Any]]:
    return [
        turn("user", "Hi"),
        turn("assistant", "<think>they greet</think>Hello!"),
        turn("user", "2+2?"),
        turn("assistant", "<think>4</think>It is 4."),
    ]


def in_parts() -> list[dict[str, Any]]:
    def part(text: str, thought: str) -> list[dict[str, str]]:
        return [{"type": "thinking", "thinking": thought}, {"type": "text", "text": text}]

    return [
        turn("user", "Hi"),
        turn("assistant", part("Hello!", "they greet")),
        turn("user", "2+2?"),
        turn("assistant", part("It is 4.", "4")),
    ]


def encode(encoder: ChatEncoder, messages: list[dict[str, Any]], **row: Any) -> Sample:
    return encoder.encode({"messages": copy.deepcopy(messages), **row})


@pytest.mark.parametrize("messages", [conversation(), conversation("thinking"), conversation("reasoning"), in_parts()])
def test_the_builtin_template_prints_it(messages: list[dict[str, Any]], make_tokenizer: Any, trained: Any) -> None:
    tokenizer = make_tokenizer(eos_token="<|im_end|>")
    sample = encode(ChatEncoder(tokenizer, load_template("chatml", tokenizer)), messages)
    assert trained(tokenizer, sample) == [
        "<think>\nthey greet\n</think>\n\nHello!<|im_end|>",
        "<think>\n4\n</think>\n\nIt is 4.<|im_end|>",
    ]


def test_a_row_of_question_and_answer_has_it_in_a_column(make_tokenizer: Any, trained: Any) -> None:
    tokenizer = make_tokenizer(eos_token="<|im_end|>")
    encoder = ChatEncoder(tokenizer, load_template("chatml", tokenizer))
    for row in (
        {"question": "2+2?", "answer": "4", "thinking": "add"},
        {"instruction": "2+2?", "output": "4", "reasoning_content": "add"},
    ):
        assert trained(tokenizer, encoder.encode(row)) == ["<think>\nadd\n</think>\n\n4<|im_end|>"]


LOSING = {
    "llama3": (TEMPLATES / "llama3.jinja").read_text(encoding="utf-8"),
    "chatml": (TEMPLATES / "chatml.jinja").read_text(encoding="utf-8"),
    "marked": MARKED,
}


@pytest.mark.parametrize("name", LOSING)
def test_templates_that_do_not_print_it(name: str, make_tokenizer: Any, trained: Any) -> None:
    tokenizer = make_tokenizer(bos_token="<|begin_of_text|>", eos_token="<|im_end|>")
    text = LOSING[name]
    end = "<|eot_id|>" if name == "llama3" else "<|im_end|>"
    with pytest.raises(DataError) as caught:
        encode(ChatEncoder(tokenizer, text), conversation())
    tokens = [len(tokenizer(thought, add_special_tokens=False)["input_ids"]) for thought in ("they greet", "4")]
    assert f"leaves out reasoning of the assistant: {sum(tokens)} of the row's" in caught.value.what
    assert "(message 2, 4)" in caught.value.what
    assert "data.thinking: keep" in str(caught.value.remedy)
    plain = [turn(one["role"], one["content"]) for one in conversation()]
    for thinking in ("template", "strip"):
        sample = encode(ChatEncoder(tokenizer, text, thinking=thinking), conversation())
        assert trained(tokenizer, sample) == [f"Hello!{end}", f"It is 4.{end}"]
        assert sample.left_out == sum(tokens)
        assert sample.input_ids.tolist() == encode(ChatEncoder(tokenizer, text), plain).input_ids.tolist()
    kept = encode(ChatEncoder(tokenizer, text, thinking="keep"), conversation())
    assert trained(tokenizer, kept) == [
        f"<think>\nthey greet\n</think>\n\nHello!{end}",
        f"<think>\n4\n</think>\n\nIt is 4.{end}",
    ]
    assert kept.left_out == 0


@pytest.mark.parametrize("messages", [conversation(), inline()])
def test_a_template_that_prints_it_in_the_last_turn_only(
    messages: list[dict[str, Any]], make_tokenizer: Any, trained: Any
) -> None:
    """As Qwen3's: its own tags are written around what it leaves out."""
    text = TestUnstableTemplates.THINKING.replace(
        "{%- if loop.last %}", "{%- set thought = message.reasoning_content or thought %}{%- if loop.last %}"
    )
    tokenizer = make_tokenizer(eos_token="<|im_end|>")
    with pytest.raises(DataError, match=r"\(message 2\)"):
        encode(ChatEncoder(tokenizer, text), messages)
    last = "<think>4</think>It is 4.<|im_end|>"
    kept = encode(ChatEncoder(tokenizer, text, thinking="keep"), messages)
    assert trained(tokenizer, kept) == ["<think>they greet</think>Hello!<|im_end|>", last]
    left = encode(ChatEncoder(tokenizer, text, thinking="template"), messages)
    assert trained(tokenizer, left) == ["Hello!<|im_end|>", last]
    dropped = encode(ChatEncoder(tokenizer, text, thinking="strip"), messages)
    assert trained(tokenizer, dropped) == ["Hello!<|im_end|>", "<think></think>It is 4.<|im_end|>"]
    assert dropped.left_out > left.left_out > 0


def test_what_is_not_trained_is_not_missed(make_tokenizer: Any, trained: Any) -> None:
    """Reasoning of turns that are only read: earlier ones with train_on last_assistant, and those of weight 0."""
    tokenizer = make_tokenizer(eos_token="<|im_end|>")
    sample = encode(ChatEncoder(tokenizer, TestUnstableTemplates.THINKING, train_on="last_assistant"), inline())
    assert trained(tokenizer, sample) == ["<think>4</think>It is 4.<|im_end|>"]
    assert sample.left_out == 0
    messages = conversation()
    messages[1]["loss_weight"] = messages[3]["loss_weight"] = 0
    assert encode(ChatEncoder(tokenizer, LOSING["chatml"]), messages).left_out == 0


@pytest.mark.parametrize("options", [{}, {"train_on": "last_assistant"}, {"on_prompt_mismatch": "accept"}])
@pytest.mark.parametrize("thinking", ["keep", "last", "template", "strip"])
@pytest.mark.parametrize("name", [*LOSING, "thinking", "channels"])
def test_a_prompt_has_the_reasoning_that_training_shows_before_the_answer(
    name: str, thinking: Any, options: dict[str, Any], make_tokenizer: Any
) -> None:
    tokenizer = make_tokenizer(
        bos_token="<|begin_of_text|>", eos_token="<|im_end|>", additional_special_tokens=["<|end|>"]
    )
    text = {**LOSING, "thinking": TestUnstableTemplates.THINKING, "channels": CHANNELS}[name]
    encoder = ChatEncoder(tokenizer, text, thinking=thinking, with_prompts=True, **options)
    searched = turn("assistant", "One moment.", reasoning_content="search it")
    seen = set[str]()
    for weight in (1, 0):
        earlier = [{**one, "loss_weight": weight} if one["role"] == "assistant" else one for one in conversation()]
        for asked in (
            [*earlier, turn("user", "And 3?")],
            [*earlier, turn("user", "And 3?"), searched, turn("user", "?")],
        ):
            trained = encode(encoder, [*asked, turn("assistant", "It is 9.")])
            prompt = encoder.prompt(copy.deepcopy(asked)).tokens
            assert trained.prompt_ids is not None
            assert prompt.tolist() == trained.prompt_ids.tolist()
            assert tokenizer.decode(trained.input_ids).startswith(tokenizer.decode(prompt))
            seen.add(tokenizer.decode(prompt))
    written = thinking == "keep" and options.get("train_on") is None
    assert any("they greet" in one for one in seen) is written
    assert len(seen) == (4 if written else 2)


def test_a_prompt_ends_as_the_template_opens_answers(make_tokenizer: Any) -> None:
    """And is the template's own where it renders what cannot be trained: here without the answer."""
    tokenizer = make_tokenizer(eos_token="<|end|>")
    opened = """
{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|><think>
{% endif %}"""
    asked = [turn("user", "Hi"), turn("assistant", "Hello!", reasoning_content="greet"), turn("user", "2+2?")]
    for text, earlier in (
        (opened, "<think>greet</think>Hello!"),
        (opened.replace("m.content", "('said' if m.role == 'assistant' else m.content)"), "said"),
    ):
        prompt = ChatEncoder(tokenizer, text, thinking="keep").prompt(copy.deepcopy(asked)).tokens
        shown = tokenizer.decode(prompt).replace("<think>\n", "<think>").replace("\n</think>\n\n", "</think>")
        assert shown == f"<|user|>Hi<|end|><|assistant|>{earlier}<|end|><|user|>2+2?<|end|><|assistant|><think>"


def test_another_name_and_another_format(make_tokenizer: Any, trained: Any) -> None:
    """As gpt-oss: the template reads `thinking`, and writes it as a block of its own."""
    tokenizer = make_tokenizer(eos_token="<|end|>")
    with pytest.raises(DataError, match=r"\(message 2\)"):
        encode(ChatEncoder(tokenizer, CHANNELS), conversation())
    kept = encode(ChatEncoder(tokenizer, CHANNELS, thinking="keep", with_prompts=True), conversation())
    assert trained(tokenizer, kept) == [
        "analysis: they greet<|end|><|assistant|>final: Hello!<|end|>",
        "analysis: 4<|end|><|assistant|>final: It is 4.<|end|>",
    ]
    assert kept.prompt_ids is not None
    assert tokenizer.decode(kept.prompt_ids) == tokenizer.decode(kept.input_ids[: len(kept.prompt_ids)])
    assert kept.reference == "It is 4."


def test_what_names_the_kind_of_an_answer_is_no_part_of_it(
    make_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """As gpt-oss has it: without special tokens the text of an answer would begin with `final`."""
    tokenizer = make_tokenizer(eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel|>", "<|message|>"]})
    template = CHANNELS.replace("final: ", "<|channel|>final<|message|>").replace(
        "analysis: ", "<|channel|>a<|message|>"
    )
    encoder = ChatEncoder(tokenizer, template)
    assert tokenizer.decode(encoder.answer_opening) == "<|channel|>final<|message|>"
    streamer = Streamer(tokenizer, encoder.answer_opening)

    def streamed(tokens: list[int]) -> str:
        streamer.put(torch.tensor([[1, 2]]))  # the prompt
        for token in tokens:
            streamer.put(torch.tensor([token]))
        streamer.end()
        return capsys.readouterr().out

    made = Generator(Any, tokenizer, encoder.stop_token_ids, Any, opening=encoder.answer_opening)  # pyright: ignore
    for before in ("", "<|channel|>a<|message|>2 and 2<|end|><|assistant|>"):
        tokens = tokenizer(f"{before}<|channel|>final<|message|>It is 4.<|end|>", add_special_tokens=False)["input_ids"]
        assert made.text(tokens) == "It is 4."
        assert streamed(tokens) == "It is 4.\n"
    tokens = tokenizer("It is 4.<|end|>", add_special_tokens=False)["input_ids"]
    assert made.text(tokens) == "It is 4."
    assert streamed(tokens) == "It is 4.\n"
    tokens = tokenizer("<|channel|>a<|message|>2 and 2<|end|>", add_special_tokens=False)["input_ids"]
    assert f"{made.text(tokens)}\n" == streamed(tokens), "an answer without the opening is printed in the end"
    for other in (CHANNELS, MARKED, load_template("chatml", tokenizer)):
        assert ChatEncoder(tokenizer, other).answer_opening == ()


def test_it_is_kept_before_a_call(make_tokenizer: Any, trained: Any) -> None:
    """Llama 3 prints nothing of a turn but its call."""
    tokenizer = make_tokenizer(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")
    called = [turn("user", "Sun?"), turn("assistant", None, tool_calls=[CALL], reasoning_content="look at Oslo")]
    with pytest.raises(DataError, match="'look at Oslo'"):
        encode(ChatEncoder(tokenizer, LOSING["llama3"]), called)
    sample = encode(ChatEncoder(tokenizer, LOSING["llama3"], thinking="keep"), called)
    assert trained(tokenizer, sample) == [
        '<think>\nlook at Oslo\n</think>\n\n<|python_tag|>{"name": "look", "parameters": {"at": "Oslo"}}<|eom_id|>'
    ]


def test_nothing_but_reasoning_cannot_be_dropped(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(eos_token="<|im_end|>")
    messages = [turn("user", "Hi"), turn("assistant", "", reasoning_content="hm")]
    with pytest.raises(RowError, match="message 2: nothing but reasoning"):
        encode(ChatEncoder(tokenizer, LOSING["chatml"], thinking="strip"), messages)


class TestKeys:
    """Keys of messages: known to rows, read by the template, named as ignored, or refused."""

    @pytest.mark.parametrize(
        ("more", "match"),
        [
            ({"train": False}, "message 2: the key 'train' has no meaning here: loss_weight: 0 leaves a turn out"),
            ({"wieght": 0.5}, r"'wieght' has no meaning here: did you mean weight\?"),
            ({"language": "en"}, r"'language' has no meaning here: known are .*data\.ignored_keys"),
            ({"refusal": "No."}, "'refusal' has no meaning here"),
        ],
    )
    def test_refused(self, more: dict[str, Any], match: str, make_tokenizer: Any) -> None:
        tokenizer = make_tokenizer(eos_token="<|im_end|>")
        encoder = ChatEncoder(tokenizer, load_template("chatml", tokenizer))
        with pytest.raises(RowError, match=match):
            encode(encoder, [turn("user", "Hi"), turn("assistant", "Hello!", **more)])

    def test_read_of_calls_alone(self, make_tokenizer: Any) -> None:
        tokenizer = make_tokenizer(eos_token="<|im_end|>")
        text = load_template("chatml", tokenizer)
        encoder = ChatEncoder(tokenizer, text)  # which has call.function, and call.function.arguments
        for key in ("function", "arguments"):
            messages = [turn("user", "Hi"), turn("assistant", "Hello!", **{key: "lost"})]
            with pytest.raises(
                RowError, match=rf"message 2: the key '{key}' changes nothing .*ignored_keys: \[{key}\]"
            ):
                encode(encoder, messages)
        assert text is not None
        planning = text.replace(
            "{{- message.content }}", "{{- message.content }}{% if message.tool_calls %}{{ message.plan }}{% endif %}"
        )
        encoder = ChatEncoder(tokenizer, planning)
        with pytest.raises(RowError, match="the key 'plan' changes nothing"):
            encode(encoder, [turn("user", "Hi"), turn("assistant", "Hello!", plan="lost")])
        called = turn("assistant", "", plan="First.", tool_calls=[{"name": "f", "arguments": {}}])
        sample = encode(encoder, [turn("user", "Hi"), called])
        assert "First." in tokenizer.decode(sample.input_ids)

    def test_ignored_or_read(self, make_tokenizer: Any) -> None:
        tokenizer = make_tokenizer(eos_token="<|im_end|>")
        text = load_template("chatml", tokenizer)
        messages = [turn("user", "Hi"), turn("assistant", "Hello!")]
        marked = [turn("user", "Hi", language="en", id=3, weight=None), turn("assistant", "Hello!", language="en")]
        plain = encode(ChatEncoder(tokenizer, text), messages)
        ignored = encode(ChatEncoder(tokenizer, text, ignored_keys=["language", "id"]), marked)
        assert ignored.input_ids.tolist() == plain.input_ids.tolist()
        assert text is not None
        reading = text.replace("message.role + '\\n'", "message.role + (message.language or '') + '\\n'")
        accepting = ChatEncoder(tokenizer, reading, ignored_keys=["id"], on_prompt_mismatch="accept")
        read = encode(accepting, marked)
        assert "assistanten\n" in tokenizer.decode(read.input_ids)

    @pytest.mark.parametrize("role", ["system", "user", "assistant"])
    def test_names_of_speakers(self, role: str, make_tokenizer: Any) -> None:
        tokenizer = make_tokenizer(eos_token="<|im_end|>")
        text = load_template("chatml", tokenizer)
        assert text is not None
        turns = [turn(one, "Hi", **({"name": "Ada"} if one == role else {})) for one in ("system", "user", "assistant")]
        with pytest.raises(RowError, match=rf"does not print the name 'Ada' of a {role} turn \(data.ignored_keys: \["):
            encode(ChatEncoder(tokenizer, text), turns)
        encode(ChatEncoder(tokenizer, text, ignored_keys=["name"]), turns)
        printing = text.replace("message.role + '\\n'", "message.role + (message.name or '') + '\\n'")
        assert printing != text
        accepting = ChatEncoder(tokenizer, printing, on_prompt_mismatch="accept")
        assert f"{role}Ada\n" in tokenizer.decode(encode(accepting, turns).input_ids)

    def test_names_of_tools_are_in_their_calls(self, make_tokenizer: Any) -> None:
        tokenizer = make_tokenizer(eos_token="<|eot_id|>")
        encoder = ChatEncoder(tokenizer, LOSING["llama3"], on_prompt_mismatch="accept")
        asked = [turn("user", "Sun?"), turn("assistant", None, tool_calls=[CALL])]
        answer = turn("assistant", "Yes.")
        given = [encode(encoder, [*asked, turn("tool", "yes", **more), answer]) for more in ({}, {"name": "look"})]
        assert given[0].input_ids.tolist() == given[1].input_ids.tolist()

    def test_of_prompts(self, make_tokenizer: Any) -> None:
        tokenizer = make_tokenizer(eos_token="<|im_end|>")
        encoder = ChatEncoder(tokenizer, load_template("chatml", tokenizer))
        for message in ({"role": "user", "text": "Hi"}, {"role": "user", "content": "Hi", "text": "Ho"}):
            with pytest.raises(RowError, match="message 1: "):
                encoder.prompt([message])
        parts = encoder.prompt([{"from": "human", "value": [{"type": "text", "text": "Hi"}]}])
        assert parts.tokens.tolist() == encoder.prompt([turn("user", "Hi")]).tokens.tolist()

    def test_choices_are_part_of_the_cache_key(self, make_tokenizer: Any) -> None:
        tokenizer = make_tokenizer(eos_token="<|im_end|>")
        choices: list[dict[str, Any]] = [{}, {"thinking": "keep"}, {"thinking": "strip"}, {"ignored_keys": ["id"]}]
        assert len({ChatEncoder(tokenizer, MARKED, **one).cache_key() for one in choices}) == 4
