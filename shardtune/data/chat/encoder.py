"""The encoder of causal language models: rows of any known format to tokens with their targets marked."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypedDict

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from shardtune.batch import Prompt, Sample
from shardtune.data.chat.control_tokens import matching_any
from shardtune.data.chat.outline import Span
from shardtune.data.chat.prompt_check import PromptMismatch, first_difference
from shardtune.data.chat.reasoning import TAGS, Thinking, Thought, before_last_question, thoughts, without_thoughts
from shardtune.data.chat.rendering import ChatTemplate, Rendering
from shardtune.data.chat.template import missing_template, refuse_without_template
from shardtune.data.encoder import LengthLimit, Row, RowError, TooLong
from shardtune.data.messages import shown_question
from shardtune.data.row_formats import Chat, Completion, Text, conversation, name_calls, read_example
from shardtune.data.token_rows import Tokens
from shardtune.errors import DataError

TrainOn = Literal["assistant", "last_assistant", "all"]
# Part of every cache key: raise it when the same row would be encoded differently.
ENCODING_VERSION = 7
NO_TURNS = "the row has no turns to put data.system_prompt before; give messages, or leave data.system_prompt out"
_MARK = "ANSWER"
_ANSWER = MappingProxyType({"role": "assistant", "content": "?"})


class About(TypedDict):
    """What a sample has besides its tokens; its attributes of the same names."""

    left_out: int
    prompt_differs: bool
    control_tokens: tuple[str, ...]
    changed_turns: tuple[str, ...]


class ChatEncoder:
    """Renders a row, tokenises the text once, and marks the tokens that are targets.

    A token is a target when at least one of its characters belongs to the text that is trained; so no character of an
    answer is lost at a border that a token straddles, and no token inside the prompt is ever trained.

    Args:
        tokenizer: a tokenizer, or the directory or name to load it from. It must provide character offsets ("fast").
        template: the Jinja text of the chat template; None raises an error for the first conversation.
        train_on: `assistant`, `last_assistant`, or `all` (every token but the first).
        system_prompt: put before conversations without a system turn.
        max_length: the maximum number of tokens of a row, for `fit`.
        on_too_long: the handling of a longer row by `fit`.
        split_stride: how many tokens further each part of a row that is split begins.
        with_prompts: also give `prompt_ids` and `reference`, for generative evaluation.
        thinking: the reasoning of trained turns that the template does not print: `keep` writes it before the answer,
            `template` leaves it out; `last` writes that of the turns after the last question and leaves out all other
            reasoning, `strip` leaves out all; None: it is an error.
        ignored_keys: keys of messages, and values of rows for the template, that have no meaning for training.
        template_kwargs: values for the template, such as `enable_thinking`; those of a row take precedence.
        on_prompt_mismatch: for a trained answer that is not preceded by the prompt that generation would use: `fail`
            raises an error, `accept` counts it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | str | Path,
        template: str | None,
        *,
        train_on: TrainOn = "assistant",
        system_prompt: str | None = None,
        max_length: int = 2048,
        on_too_long: TooLong = "truncate",
        split_stride: int | None = None,
        with_prompts: bool = False,
        thinking: Thinking | None = None,
        ignored_keys: Sequence[str] = (),
        template_kwargs: Mapping[str, object] = MappingProxyType({}),
        on_prompt_mismatch: PromptMismatch = "fail",
    ) -> None:
        refuse_without_template(template, template_kwargs)
        self.tokenizer = with_offsets(tokenizer)
        self.template = None if template is None else ChatTemplate(template, self.tokenizer, template_kwargs)
        self.train_on: TrainOn = train_on
        self.system_prompt = system_prompt
        self.limit = LengthLimit(max_length, on_too_long, split_stride)
        self.with_prompts = with_prompts
        self.thinking: Thinking | None = "strip" if thinking == "drop" else thinking
        self.ignored_keys = frozenset(ignored_keys)
        self.on_prompt_mismatch: PromptMismatch = on_prompt_mismatch

    def encode(self, row: Row) -> Sample:
        """The whole row. Raises `RowError` for a bad row, and `DataError` for a fault of all rows."""
        example = read_example(row)
        if isinstance(example, Chat):
            return self._encode_chat(self.prepared(example))
        if self.system_prompt is not None:
            raise RowError(NO_TURNS)
        if isinstance(example, Tokens):
            return self._encode_tokens(example)
        return self._encode_text(example)

    def fit(self, sample: Sample) -> Sample | list[Sample]:
        return self.limit.apply(sample)

    def weights(self, sample: Sample) -> Mapping[str, float]:
        return {"ce": sample.target_weight}

    def at(self, folder: Path) -> ChatEncoder:
        return self

    def cache_key(self) -> str:
        options = {
            "version": ENCODING_VERSION,
            "tokenizer": self._tokenizer_hash,
            "template": None if self.template is None else self.template.text,
            "train_on": self.train_on,
            "system_prompt": self.system_prompt,
            "max_length": self.limit.max_length,
            "on_too_long": [self.limit.on_too_long, self.limit.stride],
            "with_prompts": self.with_prompts,
            "thinking": self.thinking,
            "ignored_keys": sorted(self.ignored_keys),
            "template_kwargs": None if self.template is None else self.template.arguments,
            "on_prompt_mismatch": self.on_prompt_mismatch,
        }
        return hashlib.blake2b(json.dumps(options).encode(), digest_size=20).hexdigest()

    def prompt(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[dict[str, object]] | None = None,
        *,
        template_kwargs: Mapping[str, object] = MappingProxyType({}),
    ) -> Prompt:
        """A conversation for the assistant to continue, up to the beginning of its turn."""
        return Prompt(self._tokens(self._prompt_text(conversation(messages), tools, template_kwargs))[0])

    def _prompt_text(
        self, turns: Chat, tools: Sequence[dict[str, object]] | None, arguments: Mapping[str, object]
    ) -> str:
        if self.template is None:
            raise missing_template("data.chat_template")
        chat = self.prepared(replace(turns, tools=None if tools is None else tuple(tools), arguments=arguments))
        name_calls(chat.messages)
        chat, _ = self._without_thoughts(chat)
        prompt = self.template.render(chat.messages, tools, prompt=True, arguments=chat.arguments)
        if tools and prompt == self.template.render(chat.messages, None, prompt=True, arguments=chat.arguments):
            raise RowError("tools are given, but the chat template does not render tool definitions")
        return self._with_earlier_thoughts(chat, prompt, self.template)

    def _with_earlier_thoughts(self, chat: Chat, prompt: str, template: ChatTemplate) -> str:
        """The prompt of a conversation with the reasoning of earlier answers that training writes before them."""
        if self.thinking not in ("keep", "last") or not any(
            thoughts(message) for message in chat.messages if message["role"] == "assistant"
        ):
            return prompt
        answered = replace(chat, messages=(*chat.messages, dict(_ANSWER)), weights=(*chat.weights, None))
        try:
            rendering = template.render_turns(answered)
        except RowError:  # of a conversation that cannot be trained, so there is nothing to be alike
            return prompt
        written = [one for one in rendering.lost if self._is_trained(answered, rendering, one.message)]
        if not written:
            return prompt
        without = rendering.text[: rendering.spans[-1].start]
        opening = prompt[len(without) :] if prompt.startswith(without) else ""
        return f"{template.with_thoughts(rendering, written).prompt}{opening}"

    def text_prompt(self, text: str) -> Prompt:
        """A text to continue, with the tokens that begin rows of plain text."""
        return Prompt(self._opened(self._tokens(text)[0]))

    @property
    def title(self) -> Callable[[Row], str] | None:
        """Rows are named by their format."""
        return None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens at which a trained answer ends: the template's end-of-turn first, then the end of sequence."""
        ids: list[int] = []
        if self.template is not None:
            ids += self._tokens(self.template.end_of_turn)[0].tolist()
        eos = self.tokenizer.eos_token_id
        if isinstance(eos, int) and eos not in ids:
            ids.append(eos)
        return tuple(ids)

    @cached_property
    def answer_opening(self) -> tuple[int, ...]:
        """What the template puts before the text of an answer, where special tokens enclose the kind of the answer.

        Without them only the kind would be left in a decoded text. Worked example: with the template of gpt-oss they
        are the tokens of `<|channel|>final<|message|>`; with most others there are none.
        """
        if self.template is None:
            return ()
        asked = [{"role": "user", "content": "?"}]
        try:
            prompt = self.template.render(asked, None, prompt=True)
            whole = self.template.render([*asked, {"role": "assistant", "content": _MARK}], None)
        except RowError:  # a template for other conversations
            return ()
        if not whole.startswith(prompt) or _MARK not in whole[len(prompt) :]:
            return ()
        ids = self._tokens(whole[len(prompt) : whole.index(_MARK, len(prompt))])[0]
        is_lost = {*ids.tolist()} & {*self.tokenizer.all_special_ids} and self._decoded(ids).strip()
        return tuple(ids.tolist()) if is_lost else ()

    @cached_property
    def _tokenizer_hash(self) -> str:
        serialised = self.tokenizer.backend_tokenizer.to_str()
        # Padding and truncation come first; they are call-time state and do not reach these rows.
        serialised = serialised[serialised.index('"added_tokens"') :]
        settings = json.dumps([self.tokenizer.special_tokens_map, self._prefix.tolist()], sort_keys=True, default=str)
        return hashlib.blake2b((serialised + settings).encode(), digest_size=20).hexdigest()

    # -- conversations ---------------------------------------------------------------------------------------------

    def prepared(self, chat: Chat) -> Chat:
        """The conversation with the recipe's system prompt, and no key that means nothing."""
        if self.template is None:
            raise missing_template("data.chat_template")
        if self.ignored_keys:
            messages = [{key: m[key] for key in m if key not in self.ignored_keys} for m in chat.messages]
            arguments = {name: chat.arguments[name] for name in chat.arguments if name not in self.ignored_keys}
            chat = replace(chat, messages=tuple(messages), arguments=arguments)
        self.template.check_keys(chat)
        self.template.check_arguments(chat.arguments)
        return self._with_system(chat)

    def _with_system(self, chat: Chat) -> Chat:
        if self.system_prompt is None or any(message["role"] == "system" for message in chat.messages):
            return chat
        system = {"role": "system", "content": self.system_prompt}
        return replace(chat, messages=(system, *chat.messages), weights=(None, *chat.weights))

    def _encode_chat(self, chat: Chat) -> Sample:
        if self.template is None:
            raise missing_template("data.chat_template")
        self._check_weights(chat)
        chat, rendering, about = self._rendered(chat, self.template)
        ids, weights = self._weigh(chat, rendering)
        if not self.with_prompts:
            return Sample(ids, weights, **about)
        prompt, reference = self._question(chat, rendering)
        if prompt is None:
            return Sample(ids, weights, **about)
        question = shown_question(chat.messages[: rendering.spans[-1].message])
        return Sample(ids, weights, self._tokens(prompt)[0], reference, question, **about)

    def _rendered(self, chat: Chat, template: ChatTemplate) -> tuple[Chat, Rendering, About]:
        """The conversation as it is rendered, its rendering, how many tokens of reasoning that leaves out, whether
        generation would begin its last trained turn otherwise, and the special tokens that its turns spell out.

        Raises:
            DataError: reasoning is left out, and `thinking` is None; or generation begins otherwise, and that is not
                accepted.
        """
        chat, dropped = self._without_thoughts(chat)
        rendering = template.render_turns(chat)
        wrong = next((one for one in rendering.changes if self._is_trained(chat, rendering, one.message)), None)
        if wrong is not None:
            raise RowError(f"message {wrong.message + 1}: {wrong.reason}")
        gone = [one for one in dropped if self._is_trained(chat, rendering, one.message)]
        lost = [one for one in rendering.lost if self._is_trained(chat, rendering, one.message)]
        written = lost if self.thinking in ("keep", "last") else []
        left_out = sum(len(self._tokens(one.text)[0]) for one in (*gone, *([] if written else lost)))
        if lost and self.thinking is None:
            raise self._would_lose(chat, rendering, lost, left_out)
        rendering, differs = self._behind_prompt(chat, rendering, template, written)
        about: About = {
            "left_out": left_out,
            "prompt_differs": differs,
            "control_tokens": self._spelled_out(chat, rendering.text),
            "changed_turns": tuple(dict.fromkeys(chat.messages[one.message]["role"] for one in rendering.changes)),
        }
        return chat, rendering, about

    @cached_property
    def _special_tokens(self) -> re.Pattern[str]:
        """Matches any special token of the tokenizer but the tags of reasoning, which belong into an answer."""
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return matching_any(text for text in added if TAGS.fullmatch(text) is None)

    def _spelled_out(self, chat: Chat, rendered: str) -> tuple[str, ...]:
        """The special tokens that stand in the text of turns and calls, which the tokenizer reads as these tokens.

        Reasoning that is not rendered has none.
        """
        found = dict[str, None]()
        for message in chat.messages:
            calls = message.get("tool_calls")
            texts = [message["content"], json.dumps(calls, ensure_ascii=False) if calls else ""]
            texts += [one for one in thoughts(message) if one in rendered]
            found.update(dict.fromkeys(token for text in texts for token in self._special_tokens.findall(text)))
        return tuple(found)

    def _without_thoughts(self, chat: Chat) -> tuple[Chat, list[Thought]]:
        if self.thinking == "strip":
            return without_thoughts(chat)
        return without_thoughts(chat, before_last_question(chat)) if self.thinking == "last" else (chat, [])

    def _behind_prompt(
        self, chat: Chat, rendering: Rendering, template: ChatTemplate, written: Sequence[Thought]
    ) -> tuple[Rendering, bool]:
        """The rendering with reasoning that is written before answers; and whether the last trained turn is preceded by
        something else than the prompt with which the model would generate it."""
        whole = template.with_thoughts(rendering, written) if written else rendering
        trained = [span for span in rendering.spans if self._span_weight(chat, span, rendering.spans[-1]) > 0]
        last = trained[-1] if trained else None
        own = [one for one in written if last is not None and one.message == last.message]
        given = None if last is None else template.generation_prompt(chat, rendering, last, own)
        if last is None or given is None:
            return whole, False
        prompt, text = given
        if text.startswith(prompt):
            is_last = own and not template.marks_generation and last == rendering.spans[-1]
            return whole.opened(len(prompt) - last.start) if is_last else whole, False
        if self.on_prompt_mismatch == "fail":
            raise first_difference(prompt, text, last.message)
        return whole, True

    def _is_trained(self, chat: Chat, rendering: Rendering, message: int) -> bool:
        spans = [span for span in rendering.spans if span.message == message]
        return any(self._span_weight(chat, span, rendering.spans[-1]) > 0 for span in spans)

    def _would_lose(self, chat: Chat, rendering: Rendering, lost: Sequence[Thought], tokens: int) -> DataError:
        trained = int(np.count_nonzero(self._weigh(chat, rendering)[1]))
        turns = ", ".join(str(number + 1) for number in sorted({one.message for one in lost}))
        return DataError(
            f"the chat template leaves out reasoning of the assistant: {tokens:,} of the row's {tokens + trained:,} "
            f"tokens to be trained (message {turns}), which begin {lost[0].text[:60]!r}",
            remedy="set data.thinking: keep (it is written as <think>…</think> before the answer), last (only that "
            "after the last question), template (what the template leaves out is not trained, and counted) or strip "
            "(no reasoning is trained)",
        )

    def _weigh(self, chat: Chat, rendering: Rendering) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a rendering, int32 [tokens], and how much each counts as a target, float32 [tokens]."""
        ids, starts, stops = self._tokens(rendering.text)
        weights = np.full(len(ids), 1.0 if self.train_on == "all" else 0.0, np.float32)
        for span in rendering.spans:
            weights[(starts < span.stop) & (stops > span.start)] = self._span_weight(chat, span, rendering.spans[-1])
        weights[:1] = 0.0
        return ids, weights

    def _check_weights(self, chat: Chat) -> None:
        neutral = 1.0 if self.train_on == "all" else 0.0
        for number, (message, weight) in enumerate(zip(chat.messages, chat.weights, strict=True), 1):
            if message["role"] != "assistant" and weight not in (None, neutral):
                raise RowError(
                    f"message {number}: loss_weight {weight:g} on a {message['role']} turn; only assistant turns are "
                    f"weighted (data.train_on is {self.train_on})"
                )

    def _span_weight(self, chat: Chat, span: Span, last: Span) -> float:
        if self.train_on == "last_assistant" and span != last:
            return 0.0
        weight = chat.weights[span.message]
        return 1.0 if weight is None else weight

    def _question(self, chat: Chat, rendering: Rendering) -> tuple[str | None, str | None]:
        """The conversation up to the last answer, and that answer; None for a row with assistant turns only.

        An answer that calls tools is as it is rendered, and decoded as generated ones are.
        """
        text, last = rendering.text, rendering.spans[-1]
        if last.message == 0 or self.template is None:
            return None, None
        prompt = rendering.prompt
        if prompt is None:
            prompt = self.template.render(chat.messages[: last.message], chat.tools, True, chat.arguments)
        message = chat.messages[last.message]
        if message["content"].strip() and not message.get("tool_calls"):
            return prompt, message["content"]
        turn = text[last.start : last.stop].removesuffix(self.template.end_of_turn)
        return prompt, self._decoded(self._tokens(turn)[0])

    # -- tokens ----------------------------------------------------------------------------------------------------

    @cached_property
    def _largest_token(self) -> int:
        return max(self.tokenizer.get_vocab().values())

    def _encode_tokens(self, example: Tokens) -> Sample:
        """The tokens as they are: neither a begin nor an end token is added."""
        ids, weights = example.ids, example.weights.copy()
        if int(ids.max()) > self._largest_token:
            raise RowError(
                f"input_ids has {int(ids.max()):,}, and the tokenizer's tokens go up to {self._largest_token:,}: the "
                "row was tokenised by another one"
            )
        weights[:1] = 0.0
        targets = np.flatnonzero(weights)
        if not example.marked or not len(targets):
            return Sample(ids, weights)
        # The last answer: the targets from the last one back to the first that follows another token.
        gaps = np.flatnonzero(np.diff(targets) > 1)
        start = int(targets[gaps[-1] + 1 if len(gaps) else 0])
        if self.train_on == "last_assistant":
            weights[:start] = 0.0
        if not self.with_prompts:
            return Sample(ids, weights)
        answer = self._decoded(ids[start : int(targets[-1]) + 1])
        return Sample(ids, weights, ids[:start], answer, self._decoded(ids[:start]))

    def _decoded(self, ids: np.ndarray) -> str:
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    # -- text ------------------------------------------------------------------------------------------------------

    @cached_property
    def _prefix(self) -> np.ndarray:
        """int32 [tokens]: what this tokenizer puts before a text by itself, mostly a begin token or nothing."""
        whole, bare = (self.tokenizer("a", add_special_tokens=added)["input_ids"] for added in (True, False))
        places = range(len(whole) - len(bare) + 1)
        first = next((place for place in places if whole[place : place + len(bare)] == bare), 0)
        return np.array(whole[:first], np.int32)

    def _encode_text(self, example: Completion | Text) -> Sample:
        prompt, text = ("", example.text) if isinstance(example, Text) else (example.prompt, example.completion)
        ids, _, stops = self._tokens(prompt + text)
        trained = stops > (0 if self.train_on == "all" else len(prompt))
        ids, trained = self._closed(ids, trained)
        weights = trained.astype(np.float32)
        weights[:1] = 0.0
        if not self.with_prompts or isinstance(example, Text):
            return Sample(ids, weights)
        before = self._tokens(prompt)[0]
        return Sample(ids, weights, self._opened(before), text, prompt)

    def _closed(self, ids: np.ndarray, trained: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens between those that the tokenizer begins a text with, and the end token, which is a target."""
        eos = self.tokenizer.eos_token_id
        if not isinstance(eos, int):
            raise no_end_token()
        opened = self._opened(ids)
        trained = np.concatenate([np.full(len(opened) - len(ids), self.train_on == "all"), trained])
        if len(opened) and opened[-1] == eos:
            return opened, trained
        return np.append(opened, np.int32(eos)), np.append(trained, True)

    def _opened(self, ids: np.ndarray) -> np.ndarray:
        if np.array_equal(ids[: len(self._prefix)], self._prefix):
            return ids
        return np.concatenate([self._prefix, ids])

    def _tokens(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """int32 [tokens] each: ids, first character, end (one past the last). No special token is added."""
        encoded = self.tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        offsets = np.array(encoded["offset_mapping"], np.int32).reshape(-1, 2)
        return np.array(encoded["input_ids"], np.int32), offsets[:, 0], offsets[:, 1]


def with_offsets(tokenizer: PreTrainedTokenizerBase | str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer, loaded if a path or name is given. Raises `DataError` for one without character offsets."""
    loaded = AutoTokenizer.from_pretrained(str(tokenizer)) if isinstance(tokenizer, (str, Path)) else tokenizer
    if not isinstance(loaded, PreTrainedTokenizerFast):
        raise DataError(
            f"the tokenizer {loaded.name_or_path or type(loaded).__name__} has no character offsets for its tokens, "
            "so the trained tokens cannot be found",
            where="actor.tokenizer.tokenizer_model",
            remedy="use a tokenizer with a tokenizer.json",
        )
    return loaded


def no_end_token() -> DataError:
    """The error for rows of plain text whose tokenizer has no token to end them with."""
    return DataError(
        "the tokenizer has no end-of-sequence token, so the model could never learn to stop",
        where="actor.tokenizer.tokenizer_model",
        remedy="give the tokenizer an eos_token (tokenizer_config.json)",
    )
