"""What is trained, character by character, for six template styles, with and without `{% generation %}`."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.chat.template import load_template
from shardtune.data.encoder import RowDropped, RowError
from shardtune.errors import DataError

TEMPLATES = Path(__file__).parents[2] / "support" / "templates"
TAGS = re.compile(r"\{% (end)?generation %\}")
CALL = {"name": "get_weather", "arguments": {"city": "Oslo"}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": {}}}]


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


MULTI = [turn("user", "Hi"), turn("assistant", "Hello!"), turn("user", "And 2+2?"), turn("assistant", "It is 4.")]
SYSTEM = [turn("system", "Be brief."), *MULTI]
TOOL_CALLS = [
    turn("user", "What is the weather in Oslo?"),
    turn("assistant", None, tool_calls=[{"type": "function", "function": CALL}]),
    turn("tool", '{"temp": 3}'),
    turn("assistant", "It is 3 degrees."),
    turn("user", "Thanks"),
    turn("assistant", "You are welcome."),
]
CALL_TEXT = {
    "chatml": '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call><|im_end|>',
    "llama3": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}<|eom_id|>',
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}]</s>',
    "gemma": '```tool_code\nget_weather{"city": "Oslo"}\n```<end_of_turn>',
    "phi": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]<|/tool_call|><|end|>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
}
# The special tokens of each style, and what its answers look like.
STYLES = {
    "chatml": ({"eos_token": "<|im_end|>"}, "{}<|im_end|>"),
    "llama3": ({"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}, "{}<|eot_id|>"),
    "mistral": ({"bos_token": "<s>", "eos_token": "</s>"}, " {}</s>"),
    "gemma": ({"bos_token": "<bos>", "eos_token": "<eos>"}, "{}<end_of_turn>"),
    "phi": ({"bos_token": "<s>", "eos_token": "<|endoftext|>"}, "{}<|end|>"),
    "deepseek": (
        {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
        "{}<｜end▁of▁sentence｜>",
    ),
}


@pytest.fixture(params=["marked", "prefix"])
def kind(request):
    return request.param


@pytest.fixture(params=STYLES)
def style(request, kind, make_tokenizer):
    """(name, tokenizer, template text, how an answer is written)."""
    text = (TEMPLATES / f"{request.param}.jinja").read_text(encoding="utf-8")
    special, answer = STYLES[request.param]
    return request.param, make_tokenizer(**special), text if kind == "marked" else TAGS.sub("", text), answer


def test_the_two_kinds_of_a_template_differ_only_in_their_marks(make_tokenizer):
    for name, (special, _) in STYLES.items():
        text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        tokenizer = make_tokenizer(**special)
        marked, plain = (
            tokenizer.apply_chat_template(SYSTEM, chat_template=template, tokenize=False)
            for template in (text, TAGS.sub("", text))
        )
        assert marked == plain
        assert "generation" in text
        assert "generation %}" not in TAGS.sub("", text)


class TestSupervisedText:
    def check(self, style, trained, row, expected, **options):
        _, tokenizer, template, answer = style
        encoder = ChatEncoder(tokenizer, template, **options)
        sample = encoder.encode(row)
        assert trained(tokenizer, sample) == [text if whole else answer.format(text) for text, whole in expected]
        assert sample.input_ids.dtype == np.int32
        assert sample.loss_weights.dtype == np.float32
        return sample

    def test_multi_turn(self, style, trained):
        self.check(style, trained, {"messages": MULTI}, [("Hello!", False), ("It is 4.", False)])

    def test_system(self, style, trained):
        self.check(style, trained, {"messages": SYSTEM}, [("Hello!", False), ("It is 4.", False)])

    def test_tool_calls(self, style, trained):
        expected = [(CALL_TEXT[style[0]], True), ("It is 3 degrees.", False), ("You are welcome.", False)]
        row = {"messages": TOOL_CALLS, "tools": TOOLS}
        self.check(style, trained, row, expected)

    def test_sharegpt_tool_calls(self, style, trained):
        conversations = [
            {"from": "human", "value": "What is the weather in Oslo?"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": '{"temp": 3}'},
            {"from": "gpt", "value": "It is 3 degrees."},
        ]
        row = {"conversations": conversations, "tools": json.dumps([TOOLS[0]["function"]])}
        self.check(style, trained, row, [(CALL_TEXT[style[0]], True), ("It is 3 degrees.", False)])

    def test_weighted(self, style, trained):
        messages = copy.deepcopy(MULTI)
        messages[1]["loss_weight"], messages[3]["loss_weight"] = 0, 0.5
        sample = self.check(style, trained, {"messages": messages}, [("It is 4.", False)])
        assert set(sample.loss_weights.tolist()) == {0.0, 0.5}

    def test_last_assistant(self, style, trained):
        self.check(style, trained, {"messages": MULTI}, [("It is 4.", False)], train_on="last_assistant")

    def test_system_prompt_of_the_recipe(self, style, trained):
        sample = self.check(
            style, trained, {"messages": MULTI[:2]}, [("Hello!", False)], system_prompt="Answer in French."
        )
        assert "Answer in French." in style[1].decode(sample.input_ids)

    def test_all_but_the_first_token(self, style, trained):
        _, tokenizer, template, _ = style
        sample = ChatEncoder(tokenizer, template, train_on="all").encode({"messages": MULTI})
        assert sample.loss_weights.tolist() == [0.0] + [1.0] * (sample.length - 1)

    def test_tokens_are_those_of_the_whole_rendering(self, style):
        """The date, where a template prints one, is a fixed one; nothing else differs from plain transformers."""
        name, tokenizer, template, _ = style
        sample = ChatEncoder(tokenizer, template).encode({"messages": SYSTEM})
        rendered = tokenizer.apply_chat_template(SYSTEM, chat_template=template, tokenize=False)
        if name == "llama3":
            rendered = re.sub(r"Today Date: .*\n", "Today Date: 01 Jan 2025\n", rendered)
        assert tokenizer.decode(sample.input_ids) == rendered
        assert sample.input_ids.tolist() == tokenizer(rendered, add_special_tokens=False)["input_ids"]
        bos = tokenizer.bos_token_id
        assert bos is None or sample.input_ids.tolist().count(bos) <= 1

    def test_prompt_and_reference(self, style):
        _, tokenizer, template, _ = style
        sample = ChatEncoder(tokenizer, template, with_prompts=True).encode({"messages": MULTI})
        expected = tokenizer.apply_chat_template(
            MULTI[:3], chat_template=template, tokenize=False, add_generation_prompt=True
        )
        expected = re.sub(r"Today Date: .*\n", "Today Date: 01 Jan 2025\n", expected)
        assert tokenizer.decode(sample.prompt_ids) == expected
        assert (sample.question, sample.reference) == ("And 2+2?", "It is 4.")

    def test_end_of_turn_stops_generation(self, style):
        _, tokenizer, template, answer = style
        ids = ChatEncoder(tokenizer, template).stop_token_ids
        assert tokenizer.convert_ids_to_tokens(ids[0]) == answer.format("").strip()
        assert tokenizer.eos_token_id in ids


REAL = [
    "A plain answer.",
    "  leading and trailing blanks  ",
    "Ends in newlines\n\n",
    "Several\n\nparagraphs, with <|end|>like things, é, 日本語 and 🙂.",
    "4",
]


@pytest.mark.parametrize("answer", REAL)
@pytest.mark.parametrize("name", ["chatml", "phi", "deepseek"])
def test_no_character_of_an_answer_is_lost_and_none_of_a_prompt_trained(name, answer, make_tokenizer, trained):
    special, written = STYLES[name]
    tokenizer = make_tokenizer(**special)
    template = TAGS.sub("", (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))
    encoder = ChatEncoder(tokenizer, template)
    sample = encoder.encode({"messages": [turn("user", "é 日本 2+2?"), turn("assistant", answer), *MULTI]})
    texts = trained(tokenizer, sample)
    assert texts == [written.format(text) for text in (answer, "Hello!", "It is 4.")]


def test_chat_that_begins_with_the_assistant(make_tokenizer, trained):
    tokenizer = make_tokenizer(eos_token="<|im_end|>")
    for text in (TEMPLATES / "chatml.jinja").read_text(), load_template("chatml", tokenizer):
        sample = ChatEncoder(tokenizer, text, with_prompts=True).encode({"messages": MULTI[1:]})
        assert trained(tokenizer, sample) == ["Hello!<|im_end|>", "It is 4.<|im_end|>"]


class TestUnstableTemplates:
    """Templates that render a turn differently once others follow."""

    # Like Qwen3: reasoning stays in the last turn only, which also gets an empty block where there is none.
    THINKING = """
{%- for message in messages %}
{%- if message.role == 'assistant' %}{%- set parts = message.content.split('</think>') %}
{{- '<|im_start|>assistant\\n' }}
{%- set thought = parts[0].split('<think>')[-1] if parts | length > 1 else '' %}
{%- if loop.last %}{{- '<think>' + thought + '</think>' }}{% endif %}
{{- parts[-1] + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

    def test_old_reasoning_is_not_rendered(self, make_tokenizer, trained):
        tokenizer = make_tokenizer(eos_token="<|im_end|>")
        messages = copy.deepcopy(MULTI)
        messages[1]["content"] = "<think>they greet</think>Hello!"
        messages[3]["content"] = "<think>add</think>It is 4."
        sample = ChatEncoder(tokenizer, self.THINKING, thinking="template").encode({"messages": messages})
        assert trained(tokenizer, sample) == ["Hello!<|im_end|>", "<think>add</think>It is 4.<|im_end|>"]
        assert sample.left_out == len(tokenizer("they greet", add_special_tokens=False)["input_ids"])

    def test_the_empty_block_of_a_last_turn_behind_another_one_is_trained(self, make_tokenizer, trained):
        """The turn before is rendered otherwise once others follow, so the prompt is no beginning of the whole."""
        tokenizer = make_tokenizer(eos_token="<|im_end|>")
        reads = self.THINKING.replace(
            "{%- if loop.last %}", "{%- set thought = message.reasoning_content or thought %}{%- if loop.last %}"
        )
        for template, given, thought in ((self.THINKING, {}, ""), (reads, {"reasoning_content": "so"}, "so")):
            turns = [turn("user", "Hi"), turn("assistant", "same"), {**turn("assistant", "same"), **given}]
            with pytest.raises(DataError, match="opens an answer otherwise"):
                ChatEncoder(tokenizer, template).encode({"messages": turns})
            sample = ChatEncoder(tokenizer, template, on_prompt_mismatch="accept").encode({"messages": turns})
            assert sample.prompt_differs
            whole = tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False)
            assert tokenizer.decode(sample.input_ids) == whole
            assert trained(tokenizer, sample) == ["same<|im_end|>", f"<think>{thought}</think>same<|im_end|>"]

    def test_generation_prompt_with_more_than_the_turn_has(self, make_tokenizer, trained):
        tokenizer = make_tokenizer(eos_token="</s>")
        template = (
            "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|assistant|>"
            "{{ m.content.split('</think>')[-1] }}</s>{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
        )
        with pytest.raises(DataError, match=r"(?s)otherwise for generation.*<think>\\n.*training has +'[^']*It is 4"):
            ChatEncoder(tokenizer, template).encode({"messages": MULTI})
        sample = ChatEncoder(tokenizer, template, on_prompt_mismatch="accept").encode({"messages": MULTI})
        assert trained(tokenizer, sample) == ["Hello!</s>", "It is 4.</s>"]
        assert sample.prompt_differs
        dropped = [turn("user", "Hi"), turn("assistant", "<think>hm</think>Hello!")]
        with pytest.raises(DataError, match=r"the chat template leaves out reasoning.*\(message 2\).*'hm'"):
            ChatEncoder(tokenizer, template).encode({"messages": dropped})

    def test_what_cannot_be_told_apart_is_an_error(self, make_tokenizer):
        tokenizer = make_tokenizer(eos_token="</s>")
        # The number of turns stands in front, and answers are written twice.
        template = "{{ messages | length }}{% for m in messages %}<|{{ m.role }}|>{{ m.content * 2 }}</s>{% endfor %}"
        with pytest.raises(RowError, match=r"message 2: .*put \{% generation %\}"):
            ChatEncoder(tokenizer, template).encode({"messages": MULTI})

    def test_straddling_token_counts_as_the_answers(self, make_tokenizer, trained):
        """The space belongs to the prompt, the token to the answer: it is trained, since the answer's text needs it."""
        tokenizer = make_tokenizer(eos_token="</s>")
        template = (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        )
        sample = ChatEncoder(tokenizer, template).encode({"messages": [turn("user", "Oslo?"), turn("assistant", "It")]})
        assert tokenizer.convert_ids_to_tokens(sample.input_ids)[-2:] == ["ĠIt", "</s>"]
        assert trained(tokenizer, sample) == [" It</s>"]


class TestRefusals:
    def refuse(self, make_tokenizer, template, messages, match, error=RowError, special=None, **row):
        tokenizer = make_tokenizer(**(special or {"eos_token": "</s>"}))
        with pytest.raises(error, match=match):
            ChatEncoder(tokenizer, template).encode({"messages": messages, **row})

    def test_no_template(self, make_tokenizer):
        self.refuse(make_tokenizer, None, MULTI, r"(?s)no chat template.*chatml or to a Jinja file", DataError)

    def test_template_that_refuses_system_turns(self, make_tokenizer):
        template = (
            "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
            "{% for m in messages %}{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
        )
        self.refuse(make_tokenizer, template, SYSTEM, "does not take system turns: .*System role not supported")

    @pytest.mark.parametrize("content", ["x", "Answer in the style of a pirate, always and everywhere."])
    def test_template_that_leaves_system_turns_out(self, make_tokenizer, content):
        template = (
            "{% for m in messages %}{% if m.role != 'system' %}{{ m.role }}\n{{ m.content }}</s>{% endif %}{% endfor %}"
        )
        messages = [turn("system", content), turn("user", "x is what?"), turn("assistant", "x")]
        self.refuse(make_tokenizer, template, messages, "message 1: the chat template leaves out system turns")

    def test_template_that_leaves_tools_out(self, make_tokenizer):
        template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
        self.refuse(make_tokenizer, template, MULTI, "does not render tool definitions", tools=TOOLS)
        self.refuse(make_tokenizer, template, TOOL_CALLS, "does not render tool calls")

    def test_prompts_with_tools_need_a_template_that_renders_them(self, make_tokenizer):
        template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
        encoder = ChatEncoder(make_tokenizer(eos_token="</s>"), template)
        asked = [turn("user", "What is x?")]
        assert encoder.prompt(asked, []).tokens.tolist() == encoder.prompt(asked).tokens.tolist()
        with pytest.raises(RowError, match="tools are given, but the chat template does not render tool definitions"):
            encoder.prompt(asked, TOOLS)

    def test_template_without_end_of_turn(self, make_tokenizer):
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        self.refuse(make_tokenizer, template, MULTI, "could never learn to stop", DataError)

    def test_end_of_turn_that_is_several_tokens(self, make_tokenizer):
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|fin|>\n{% endfor %}"
        self.refuse(make_tokenizer, template, MULTI, "holds no token that ends a turn", DataError)

    def test_marked_block_without_end_of_turn(self, make_tokenizer):
        template = (
            "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
            "{% endgeneration %}{% else %}{{ m.content }}{% endif %} . </s>{% endfor %}"
        )
        self.refuse(make_tokenizer, template, MULTI, "message 2: neither the .*generation.* block")

    def test_marks_that_do_not_match_the_turns(self, make_tokenizer):
        template = (
            "{% for m in messages %}<|{{ m.role }}|>{% if loop.last %}{% generation %}{{ m.content }}</s>"
            "{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
        )
        self.refuse(make_tokenizer, template, MULTI, "marks 1 turns .* 2 assistant turns")

    def test_weight_on_a_user_turn(self, make_tokenizer):
        messages = [turn("user", "Hi", loss_weight=1.0), turn("assistant", "Hello!")]
        template = (TEMPLATES / "mistral.jinja").read_text()
        self.refuse(make_tokenizer, template, messages, "message 1: loss_weight 1 on a user turn")

    def test_slow_tokenizer_is_refused(self, tmp_path):
        from transformers import PythonBackend

        class Slow(PythonBackend):
            def __init__(self) -> None:
                self.letters = {"a": 0}
                super().__init__()

            @property
            def vocab_size(self) -> int:
                return 1

            def get_vocab(self) -> dict[str, int]:
                return self.letters

        with pytest.raises(DataError, match="has no character offsets for its tokens"):
            ChatEncoder(Slow(), None)


def test_marked_turn_in_several_pieces(make_tokenizer, trained):
    tokenizer = make_tokenizer(eos_token="</s>")
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content[:2] }}"
        "{% endgeneration %}{% generation %}{{ m.content[2:] }}{% endgeneration %}</s>\n"
        "{% else %}{{ m.content }}</s>\n{% endif %}{% endfor %}"
    )
    sample = ChatEncoder(tokenizer, template).encode({"messages": MULTI})
    assert trained(tokenizer, sample) == ["Hello!</s>", "It is 4.</s>"]


class TestBuiltinChatml:
    def test_renders_tools_and_calls(self, make_tokenizer, trained):
        tokenizer = make_tokenizer(eos_token="</s>")
        encoder = ChatEncoder(tokenizer, load_template("chatml", tokenizer))
        sample = encoder.encode({"messages": [turn("system", "Be brief."), *TOOL_CALLS], "tools": TOOLS})
        text = tokenizer.decode(sample.input_ids)
        assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
        assert json.dumps(TOOLS[0]) in text
        assert '<|im_start|>tool\n{"temp": 3}<|im_end|>\n' in text
        call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
        assert trained(tokenizer, sample) == [call, "It is 3 degrees.<|im_end|>", "You are welcome.<|im_end|>"]
        asked = ChatEncoder(tokenizer, load_template("chatml", tokenizer), with_prompts=True)
        for content in (None, "Let me see."):  # before the call
            called = {**TOOL_CALLS[1], "content": content}
            found = asked.encode({"messages": [TOOL_CALLS[0], called], "tools": TOOLS})
            assert found.reference == trained(tokenizer, found)[0].removesuffix("<|im_end|>")
            assert "get_weather" in found.reference

    def test_plain_chat_is_ordinary_chatml(self, make_tokenizer):
        tokenizer = make_tokenizer(eos_token="<|im_end|>")
        text = tokenizer.apply_chat_template(
            SYSTEM[:2], chat_template=load_template("chatml", tokenizer), tokenize=False, add_generation_prompt=True
        )
        assert text == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_ends_in_the_end_token_where_im_end_is_unknown(self, trained):
        backend = Tokenizer(
            models.BPE(vocab={"</s>": 0} | {c: i for i, c in enumerate(sorted(ALPHABET), 1)}, merges=[])
        )
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        tokenizer = _fast(backend, eos_token="</s>")
        sample = ChatEncoder(tokenizer, load_template("chatml", tokenizer)).encode({"messages": MULTI})
        assert trained(tokenizer, sample) == ["Hello!</s>", "It is 4.</s>"]
        with pytest.raises(DataError, match="neither <\\|im_end\\|> nor an end-of-sequence"):
            load_template("chatml", _fast(backend))


ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def _fast(backend, **special):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


class TestText:
    def test_completion_and_end_token_are_trained(self, make_tokenizer, trained):
        tokenizer = make_tokenizer(bos_token="<s>", eos_token="</s>")
        encoder = ChatEncoder(tokenizer, None, with_prompts=True)
        sample = encoder.encode({"prompt": "2+2 =", "completion": " 4."})
        assert trained(tokenizer, sample) == [" 4.</s>"]
        assert tokenizer.decode(sample.input_ids) == "2+2 = 4.</s>"  # this tokenizer adds no begin token by itself
        assert tokenizer.decode(sample.prompt_ids) == "2+2 ="
        assert sample.reference == " 4."
        again = encoder.encode({"prompt": "2+2 =", "completion": " 4.</s>"})
        assert again.input_ids.tolist() == sample.input_ids.tolist()

    def test_begin_token_where_the_tokenizer_adds_one(self, backend, trained):
        bos = copy.deepcopy(backend)
        bos.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", bos.token_to_id("<s>"))]
        )
        tokenizer = _fast(bos, bos_token="<s>", eos_token="</s>")
        encoder = ChatEncoder(tokenizer, None, with_prompts=True)
        sample = encoder.encode({"text": "Hello!"})
        assert tokenizer.decode(sample.input_ids) == "<s>Hello!</s>"
        assert trained(tokenizer, sample) == ["Hello!</s>"]
        assert sample.prompt_ids is None
        assert encoder.encode({"text": "<s>Hello!"}).input_ids.tolist() == sample.input_ids.tolist()
        chosen = encoder.encode({"prompt": "Hi", "completion": " there"})
        assert tokenizer.decode(chosen.prompt_ids) == "<s>Hi"

    def test_what_the_tokenizer_begins_a_text_with_need_not_be_its_begin_token(self, backend, trained):
        opened = copy.deepcopy(backend)
        tokens = [(token, opened.token_to_id(token)) for token in ("<|user|>", "<s>")]
        opened.post_processor = processors.TemplateProcessing(single="<|user|> <s> $A", special_tokens=tokens)
        for special in ({}, {"bos_token": "<|user|>"}):  # GLM has [gMASK] and <sop>, and no begin token
            tokenizer = _fast(opened, eos_token="</s>", **special)
            encoder = ChatEncoder(tokenizer, None, with_prompts=True)
            sample = encoder.encode({"text": "Hello!"})
            assert sample.input_ids.tolist() == [*tokenizer("Hello!")["input_ids"], tokenizer.eos_token_id]
            assert trained(tokenizer, sample) == ["Hello!</s>"]
            assert encoder.text_prompt("Hi").tokens.tolist() == tokenizer("Hi")["input_ids"]
            everything = ChatEncoder(tokenizer, None, train_on="all").encode({"text": "Hello!"})
            assert everything.loss_weights.tolist() == [0.0] + [1.0] * (sample.length - 1)

    def test_all(self, make_tokenizer, trained):
        tokenizer = make_tokenizer(eos_token="</s>")
        sample = ChatEncoder(tokenizer, None, train_on="all").encode({"prompt": "Hi there", "completion": "Hello!"})
        assert sample.loss_weights.tolist() == [0.0] + [1.0] * (sample.length - 1)

    def test_needs_an_end_token(self, make_tokenizer):
        with pytest.raises(DataError, match="no end-of-sequence token"):
            ChatEncoder(make_tokenizer(), None).encode({"text": "Hello!"})

    def test_system_prompt_has_no_place(self, make_tokenizer):
        with pytest.raises(RowError, match="no turns"):
            ChatEncoder(make_tokenizer(eos_token="</s>"), None, system_prompt="Be brief.").encode({"text": "Hello!"})


class TestTooLong:
    def encoder(self, make_tokenizer, length, policy):
        tokenizer = make_tokenizer(**STYLES["chatml"][0])
        text = load_template("chatml", tokenizer)
        return ChatEncoder(tokenizer, text, max_length=length, on_too_long=policy, with_prompts=True)

    def test_truncate(self, make_tokenizer):
        encoder = self.encoder(make_tokenizer, 20, "truncate")
        whole = encoder.encode({"messages": MULTI})
        cut = encoder.fit(whole)
        assert whole.length > cut.length == 20
        assert cut.input_ids.tolist() == whole.input_ids[:20].tolist()
        assert cut.loss_weights.tolist() == whole.loss_weights[:20].tolist()
        assert cut.prompt_ids is None
        assert encoder.weights(cut) == {"ce": cut.loss_weights.sum()}

    def test_prompt_within_the_limit_is_kept(self, make_tokenizer):
        whole = self.encoder(make_tokenizer, 100, "truncate").encode({"messages": MULTI})
        cut = self.encoder(make_tokenizer, whole.length - 1, "truncate").fit(whole)
        assert cut.prompt_ids is not None
        assert cut.reference == "It is 4."

    def test_drop_and_fail(self, make_tokenizer):
        sample = self.encoder(make_tokenizer, 20, "drop").encode({"messages": MULTI})
        with pytest.raises(RowDropped, match="tokens"):
            self.encoder(make_tokenizer, 20, "drop").fit(sample)
        with pytest.raises(DataError, match=r"max_length is 20"):
            self.encoder(make_tokenizer, 20, "fail").fit(sample)
        assert self.encoder(make_tokenizer, sample.length, "fail").fit(sample) is sample


class TestTemplateChoice:
    def test_own_file_and_missing(self, make_tokenizer, tmp_path):
        tokenizer = make_tokenizer(eos_token="</s>")
        assert load_template(None, tokenizer) is None
        tokenizer.chat_template = "own"
        assert load_template(None, tokenizer) == "own"
        tokenizer.chat_template = {"default": "one of two", "rag": "other"}
        assert load_template(None, tokenizer) == "one of two"
        file = tmp_path / "mine.jinja"
        file.write_text("mine")
        assert load_template(str(file), tokenizer) == "mine"
        with pytest.raises(DataError, match=r"nowhere.jinja cannot be read"):
            load_template(str(tmp_path / "nowhere.jinja"), tokenizer)


def test_cache_key_changes_with_all_that_matters_and_nothing_else(make_tokenizer):
    template = (TEMPLATES / "chatml.jinja").read_text()
    tokenizer = make_tokenizer(eos_token="<|im_end|>")
    base = ChatEncoder(tokenizer, template)
    others = [
        ChatEncoder(make_tokenizer(eos_token="</s>"), template),
        ChatEncoder(tokenizer, TAGS.sub("", template)),
        ChatEncoder(tokenizer, template, train_on="all"),
        ChatEncoder(tokenizer, template, system_prompt="Be brief."),
        ChatEncoder(tokenizer, template, max_length=100),
        ChatEncoder(tokenizer, template, on_too_long="drop"),
        ChatEncoder(tokenizer, template, with_prompts=True),
    ]
    keys = [encoder.cache_key() for encoder in [base, *others]]
    assert len(set(keys)) == len(keys)
    fresh = make_tokenizer(eos_token="<|im_end|>")
    fresh(["a", "a b c d"], truncation=True, max_length=2)
    assert ChatEncoder(fresh, template).cache_key() == base.cache_key()


def test_encoder_travels_to_other_processes(make_tokenizer):
    encoder = ChatEncoder(make_tokenizer(eos_token="<|im_end|>"), (TEMPLATES / "chatml.jinja").read_text())
    copied = pickle.loads(pickle.dumps(encoder))
    assert copied.cache_key() == encoder.cache_key()
    row = {"question": "2+2?", "answer": "4"}
    assert copied.encode(row).input_ids.tolist() == encoder.encode(row).input_ids.tolist()


def test_loads_the_tokenizer_from_a_directory(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer(eos_token="<|im_end|>")
    tokenizer.save_pretrained(tmp_path)
    template = (TEMPLATES / "chatml.jinja").read_text()
    row = {"question": "2+2?", "answer": "4"}
    loaded = ChatEncoder(tmp_path, template).encode(row)
    assert loaded.input_ids.tolist() == ChatEncoder(tokenizer, template).encode(row).input_ids.tolist()
