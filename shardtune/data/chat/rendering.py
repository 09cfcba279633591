"""Rendering a conversation by its chat template, and finding the assistant's turns in the text that comes out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from shardtune.data.chat.arguments import DATE, Arguments, fault, variables, with_date, with_defaults
from shardtune.data.chat.changes import (
    Change,
    enclosed,
    is_at_its_place,
    is_left_out,
    is_printed,
    pieces_of,
    quoted,
    reason_of_change,
)
from shardtune.data.chat.outline import Outline, Shape, Span, given_pieces, probed, shape_of
from shardtune.data.chat.reasoning import KEY, TAGS, Thought, lost_thoughts
from shardtune.data.encoder import RowError
from shardtune.data.messages import REASONING_KEYS, message_keys, unknown_key, unknown_keys
from shardtune.data.row_formats import Chat
from shardtune.errors import DataError

# Two private-use characters: no text has them and no template strips, escapes or translates them.
_MARK = "\ue0f5\ue0f6"
_THOUGHT = "\ue0f8\ue0f9"
_AROUND_THOUGHTS = "<think>\n", "\n</think>\n\n"
_SHORT = 24  # content shorter than this may occur in the rendering by chance
_MOST_OUTLINES = 1024
_KEYS_OF_PARTS = ("text", "type", "image", "video", "audio")  # a template that reads them reads parts of a content
_OPENING = 5  # this many characters of a turn's opening are enough to recognise it
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_NONE: Arguments = MappingProxyType({})
_ADVICE = "put {% generation %} and {% endgeneration %} around the assistant's text in the chat template"


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation as text.

    Attributes:
        text: the whole of it.
        spans: one per assistant turn, in order.
        prompt: the rendering up to the beginning of the last of them; None if that was not rendered.
        lost: reasoning of the conversation that the turns do not have.
        changes: turns whose text is printed otherwise, or in part.
    """

    text: str
    spans: tuple[Span, ...]
    prompt: str | None = None
    lost: tuple[Thought, ...] = ()
    changes: tuple[Change, ...] = ()

    def opened(self, characters: int) -> Rendering:
        """The last turn begins so many characters later, which belong to its prompt."""
        if characters <= 0:
            return self
        last = self.spans[-1]
        moved = replace(last, start=last.start + characters)
        return replace(self, spans=(*self.spans[:-1], moved), prompt=self.text[: moved.start])


class ChatTemplate:
    """A chat template with its tokenizer's special tokens.

    Args:
        text: the Jinja source.
        tokenizer: for the special tokens that the template may print, and to check which texts are single tokens.
        arguments: further values for the template, which those of a row replace.

    Raises:
        DataError: the template does not read one of the arguments.
    """

    _separator = ""
    """What a turn has in place of something other than text."""

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerFast, arguments: Arguments = _NONE) -> None:
        self.text = text
        self.arguments = {name: value for name, value in arguments.items() if value is not None}
        self._tokenizer = tokenizer
        self._special = dict(tokenizer.special_tokens_map)
        self._added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        self.marks_generation = _GENERATION.search(text) is not None
        self._outlines: dict[Shape, Outline | None] = {}
        self._read: dict[str, bool] = {}
        self._prints: dict[str, bool] = {}
        self._printed: set[tuple[str, str]] = set()
        self._dated: dict[object, str] = {}
        wrong = self.fault_of(self.arguments)
        if wrong is not None:
            raise DataError(wrong, where="data.template_kwargs", remedy="leave it out, or give what the template reads")

    @property
    def with_arguments(self) -> str:
        """The template that renders by itself what this one renders with the recipe's arguments."""
        return with_defaults(self.text, self.arguments)

    @cached_property
    def _variables(self) -> frozenset[str]:
        return variables(self.text)

    def render(
        self,
        messages: Sequence[dict],
        tools: Sequence[dict] | None,
        prompt: bool = False,
        arguments: Arguments = _NONE,
    ) -> str:
        """The conversation as text; with `prompt`, followed by what opens the assistant's next turn."""
        return self._render(messages, tools, prompt, marked=False, arguments=arguments)[0]

    def _render(
        self,
        messages: Sequence[dict],
        tools: Sequence[dict] | None,
        prompt: bool,
        marked: bool,
        arguments: Arguments,
    ) -> tuple[str, list[tuple[int, int]]]:
        values = {**self._special, **self.arguments, **arguments}
        day = values.pop(DATE, None)
        if day not in self._dated:
            self._dated[day] = with_date(self.text, day)
        try:
            rendered: Any = render_jinja_template(
                conversations=[self.shown(messages)],
                tools=list(tools) if tools else None,
                chat_template=self._dated[day],
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                **values,
            )
        except Exception as error:  # a template is user code and may raise anything
            raise RowError(f"the chat template refuses the conversation: {error}") from error
        texts, marks = rendered
        return texts[0], marks[0] if marked else []

    def shown(self, messages: Sequence[dict]) -> list[dict]:
        """The messages as the template is given them."""
        return [self._renamed(message) for message in messages]

    def _renamed(self, message: dict) -> dict:
        """The message with its reasoning under the name that the template reads."""
        if KEY not in message or self._reasoning_key == KEY:
            return message
        return {self._reasoning_key if key == KEY else key: value for key, value in message.items()}

    @cached_property
    def _reasoning_key(self) -> str:
        return next((key for key in REASONING_KEYS if self._reads(key)), KEY)

    def _reads(self, key: str) -> bool:
        """Whether the template has `message.key`, or the key in quotes."""
        if key not in self._read:
            name = re.escape(key)
            self._read[key] = re.search(rf"\.{name}\b|(['\"]){name}\1", self.text) is not None
        return self._read[key]

    def check_keys(self, chat: Chat) -> None:
        """Raises `RowError` for a key of a message that means nothing in a row, and that the template does not read."""
        for number, message in enumerate(chat.messages, 1):
            for key in unknown_keys(message):
                if key in _KEYS_OF_PARTS or not self._reads(key):
                    raise RowError(
                        f"message {number}: {unknown_key(key, message_keys())} "
                        "(data.ignored_keys names keys to leave out)"
                    )
                if message[key] and not self._prints_key(chat, number - 1, key):
                    raise RowError(
                        f"message {number}: the key {key!r} changes nothing of what the chat template prints "
                        f"(data.ignored_keys: [{key}] leaves it out)"
                    )
            if "name" in message and not self._prints_name(message["role"]):
                raise RowError(
                    f"message {number}: the chat template does not print the name {message['name']!r} of a "
                    f"{message['role']} turn (data.ignored_keys: [name] leaves names out)"
                )

    def _prints_name(self, role: str) -> bool:
        """Whether the names of a role's turns are printed. Those of tools are in the calls that they answer."""
        if role not in self._prints:
            roles = (*(("system",) if role == "system" else ()), "user", "assistant")
            turns = [{"role": one, "content": "?", **({"name": _MARK} if one == role else {})} for one in roles]
            try:
                self._prints[role] = role == "tool" or _MARK in self.render(turns, None)
            except RowError:  # nothing is known; the row itself says what the template refuses
                self._prints[role] = True
        return self._prints[role]

    def _prints_key(self, chat: Chat, index: int, key: str) -> bool:
        """Whether the rendering depends on a key of message `index`, as far as another value shows it. A template may
        have the key of a call or a tool alone, not of a message."""
        message = chat.messages[index]
        place = (message["role"], key)
        if place in self._printed:
            return True
        others = [{name: value for name, value in message.items() if name != key}]
        others += [{**message, key: value} for value in (True, _MARK)]
        try:
            before, after = chat.messages[:index], chat.messages[index + 1 :]
            texts = {
                self.render([*before, one, *after], chat.tools, arguments=chat.arguments) for one in (message, *others)
            }
        except RowError:  # one of the values cannot be printed, so it is read; or the row itself is refused later
            return True
        if len(texts) > 1:
            self._printed.add(place)
        return len(texts) > 1

    def fault_of(self, arguments: Arguments) -> str | None:
        """Why the template cannot take arguments; None where it takes all of them."""
        return fault(arguments, self._variables, self._special) if arguments else None

    def check_arguments(self, arguments: Arguments) -> None:
        """Raises `RowError` for an argument of a row that the template does not read."""
        wrong = self.fault_of(arguments)
        if wrong is not None:
            raise RowError(f"chat_template_kwargs: {wrong} (data.ignored_keys names keys to leave out)")

    @cached_property
    def end_of_turn(self) -> str:
        """The text of the token that ends an assistant turn. Raises `DataError` for a template without one."""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        try:
            _, mark, tail = self.render(messages, None).partition(_MARK)
        except RowError as error:
            raise DataError(
                f"{error.reason} (a user turn and an answer)",
                where="the chat template",
                remedy="mend it, or choose another with data.chat_template",
            ) from error
        if not mark:
            raise DataError(
                "the chat template leaves out the assistant's answer",
                where="the chat template",
                remedy="choose another with data.chat_template",
            )
        found = self._first_added(tail)
        if found is not None:
            return found
        if len(self._tokenizer(tail.strip(), add_special_tokens=False)["input_ids"]) == 1:
            return tail.strip()
        raise DataError(
            f"the chat template ends the assistant's turn with {tail!r}, which holds no token that ends a turn, "
            "so the model could never learn to stop",
            where="the chat template",
            remedy="end the turn with {{ eos_token }}, or with a token that the tokenizer has",
        )

    def _first_added(self, text: str) -> str | None:
        places = [(text.find(token), token) for token in self._added if token in text]
        return min(places, key=lambda place: place[0])[1] if places else None

    def render_turns(self, chat: Chat) -> Rendering:
        """The conversation with its assistant turns found. Raises `RowError` where the template does not allow it.

        It is rendered once if its shape is known and its text matches the shape's outline, otherwise
        several times (see `_render_at_length`).
        """
        try:
            text, marks = self._render(chat.messages, chat.tools, False, self.marks_generation, chat.arguments)
        except RowError as error:
            raise self._refused(chat, error) from error
        outline = self._outline(chat)
        spans = None if outline is None else outline.find(chat, text, self._separator)
        if outline is None or spans is None or not self._are_whole(spans, text):
            rendering, _ = self._render_at_length(chat, text, marks)
        elif self.marks_generation:
            marked = self._marked_spans(text, marks, _turns(chat))
            rendering = Rendering(text, tuple(marked), text[: marked[-1].start] if outline.prompt_is_prefix else None)
        else:
            rendering = Rendering(text, tuple(spans), text[: spans[-1].start] if outline.prompt_is_prefix else None)
        lost: list[Thought] = []
        changes = list(rendering.changes)
        for span in rendering.spans:
            message, turn = chat.messages[span.message], text[span.start : span.stop]
            changes += self._changes_of_answer(chat, span.message, turn)
            lost += [Thought(span.message, one) for one in lost_thoughts(message, turn)]
        return replace(rendering, lost=tuple(lost), changes=tuple(changes)) if lost or changes else rendering

    def with_thoughts(self, rendering: Rendering, lost: Sequence[Thought]) -> Rendering:
        """The rendering with lost reasoning written before the answers of its turns, as part of the turns."""
        before, after = self._around_thoughts
        pieces, spans, done, size = [], [], 0, 0
        for span in rendering.spans:
            thoughts = "".join(before + one.text + after for one in lost if one.message == span.message)
            turn = rendering.text[span.start : span.stop]
            between, turn = rendering.text[done : span.start], thoughts + (turn.lstrip("\n") if thoughts else turn)
            start = size + len(between)
            done, size = span.stop, start + len(turn)
            pieces += [between, turn]
            spans.append(Span(span.message, start, size))
        text = "".join([*pieces, rendering.text[done:]])
        return Rendering(text, tuple(spans), text[: spans[-1].start], changes=rendering.changes)

    @cached_property
    def _around_thoughts(self) -> tuple[str, str]:
        """What the template writes before and after the reasoning of a last turn; <think> tags where it prints none."""
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}
        try:
            opening = self.render([question], None, prompt=True)
            text = self.render([question, {**answer, KEY: _THOUGHT}], None)
            earlier = self.render([question, answer, question, answer], None)
        except RowError:
            return _AROUND_THOUGHTS
        before, found, rest = text.removeprefix(opening).partition(_THOUGHT)
        # Behind the reasoning comes what opens the answer of a turn without any.
        after, mark, _ = rest.partition(earlier.removeprefix(opening).partition(_MARK)[0] + _MARK)
        is_known = text.startswith(opening) and earlier.startswith(opening) and found and mark and before and after
        return (before, after) if is_known else _AROUND_THOUGHTS

    def _are_whole(self, spans: Sequence[Span], text: str) -> bool:
        """Whether each turn ends where its text requires; always true for turns that the template marks."""
        return self.marks_generation or all(self._cut(text[s.start : s.stop]) == s.stop - s.start for s in spans)

    def _outline(self, chat: Chat) -> Outline | None:
        if any(isinstance(value, list | tuple | Mapping) for value in chat.arguments.values()):
            return None  # documents, which are others in each row
        shape = shape_of(chat, self._separator)
        if shape not in self._outlines:
            if len(self._outlines) >= _MOST_OUTLINES:
                self._outlines.clear()
            self._outlines[shape] = self._learn(probed(chat, self._separator))
        return self._outlines[shape]

    def _learn(self, chat: Chat) -> Outline | None:
        """The outline of a probed conversation; None where it cannot be rendered."""
        try:
            text, marks = self._render(chat.messages, chat.tools, False, self.marks_generation, chat.arguments)
            rendering, befores = self._render_at_length(chat, text, marks)
            without_tools = self.render(chat.messages, None, arguments=chat.arguments) if chat.tools else None
        except RowError:
            return None
        pieces = len(given_pieces(chat, self._separator))
        endings = [self._ending(text[span.start : span.stop]) for span in rendering.spans]
        prompt = befores[-1] if befores else self._before(chat, rendering.spans[-1].message)
        return Outline.learn(text, pieces, rendering.spans, endings, befores, prompt, without_tools)

    def generation_prompt(
        self, chat: Chat, rendering: Rendering, span: Span, thoughts: Sequence[Thought]
    ) -> tuple[str, str] | None:
        """The prompt with which a model would generate a turn, and the text that has to begin with it.

        Args:
            chat: the conversation.
            rendering: of it.
            span: of the turn.
            thoughts: reasoning that is written before the answer of the turn, and not in the rendering.

        Returns:
            None for a turn that answers nothing, or where the template cannot render either of the two.
        """
        is_last = span.message == len(chat.messages) - 1
        if not span.message or (thoughts and not is_last):
            return None
        prompt = rendering.prompt if is_last else None
        if prompt is None:
            prompt = self._try(chat, span.message, prompt=True)
        if is_last:
            text = self.with_thoughts(rendering, thoughts).text if thoughts else rendering.text
        else:
            text = self._try(chat, span.message + 1, prompt=False)
        return None if prompt is None or text is None else (prompt, text)

    def _ending(self, turn: str) -> str:
        """The token that a turn ends with; "" where it has none."""
        return next((token for token in (self.end_of_turn, *self._added) if turn.endswith(token)), "")

    def _render_at_length(
        self, chat: Chat, text: str, marks: list[tuple[int, int]]
    ) -> tuple[Rendering, list[str | None] | None]:
        """Finds the turns by the marks of the template, or else by the renderings without and with each turn.

        Returns:
            The rendering, and the rendering up to each of the turns; None if the template marks them.
        """
        changes = self._changes_of_given(chat, text)
        turns = _turns(chat)
        if self.marks_generation:
            return Rendering(text, tuple(self._marked_spans(text, marks, turns)), changes=changes), None
        befores = [self._before(chat, index) for index in turns]
        spans = [self._find_span(chat, index, text, before) for index, before in zip(turns, befores, strict=True)]
        return Rendering(text, tuple(spans), befores[-1], changes=changes), befores

    def _refused(self, chat: Chat, error: RowError) -> RowError:
        """The template's error; it names a role if the conversation can be rendered without that role."""
        for role in ("system", "tool"):
            others = [message for message in chat.messages if message["role"] != role]
            if len(others) == len(chat.messages):
                continue
            try:
                self.render(others, chat.tools, arguments=chat.arguments)
            except RowError:
                continue
            return RowError(f"the chat template does not take {role} turns: {error.reason}")
        return error

    # -- spans by {% generation %} ---------------------------------------------------------------------------------

    def _marked_spans(self, text: str, marks: list[tuple[int, int]], turns: list[int]) -> list[Span]:
        """One span per turn from the template's own marks; a turn may be marked in several pieces."""
        groups: list[list[tuple[int, int]]] = []
        for mark in sorted(marks):
            same_turn = groups and len(marks) != len(turns) and self.end_of_turn not in text[groups[-1][0][0] : mark[0]]
            if same_turn:
                groups[-1].append(mark)
            else:
                groups.append([mark])
        if len(groups) != len(turns):
            raise RowError(
                f"the chat template marks {len(groups)} turns with {{% generation %}}, but the row has {len(turns)} "
                "assistant turns"
            )
        return [
            Span(turn, group[0][0], self._end_of_marked(text, group[0][0], group[-1][1], turn))
            for turn, group in zip(turns, groups, strict=True)
        ]

    def _end_of_marked(self, text: str, start: int, stop: int, turn: int) -> int:
        """The end of the marked turn: after its end-of-turn token, also when that directly follows the block."""
        block = text[start:stop]
        inside = self._cut(block)
        if inside is not None and not block[inside:].strip():
            return start + inside
        ends = [self.end_of_turn, self._special.get("eos_token") or self.end_of_turn]
        for end in ends:
            if text.startswith(end, stop):
                return stop + len(end)
        if inside is not None:
            return start + inside
        raise RowError(
            f"message {turn + 1}: neither the {{% generation %}} block of the chat template nor the text behind it "
            f"({text[stop : stop + 20]!r}) ends the turn with {self.end_of_turn!r}; put it inside the block"
        )

    # -- spans by the prefix rule ----------------------------------------------------------------------------------

    def _before(self, chat: Chat, index: int) -> str | None:
        """The rendering up to the beginning of turn `index`; None if that cannot be rendered."""
        return self._try(chat, index, prompt=True) if index else self._opening(chat)

    def _find_span(self, chat: Chat, index: int, text: str, before: str | None) -> Span:
        """The span of turn `index`: between the renderings without and with it, if both are prefixes of the text."""
        after = text if index == len(chat.messages) - 1 else self._try(chat, index + 1, prompt=False)
        if before is not None and after is not None and after.startswith(before):
            cut = self._cut(after[len(before) :])
            # Differences after the end of the turn (for example a closing token at the very end) do not matter.
            if cut is not None and text.startswith(after[: len(before) + cut]):
                return Span(index, len(before), len(before) + cut)
        return self._find_by_replacing(chat, index, text, before)

    def _try(self, chat: Chat, count: int, prompt: bool) -> str | None:
        try:
            return self.render(chat.messages[:count], chat.tools, prompt, chat.arguments)
        except RowError:
            return None

    def _opening(self, chat: Chat) -> str | None:
        """The opening of a conversation that begins with the assistant: everything before its text."""
        replaced = self._replaced(chat, 0)
        return None if replaced is None else replaced.partition(_MARK)[0]

    def _find_by_replacing(self, chat: Chat, index: int, text: str, before: str | None) -> Span:
        """The span of turn `index`: the part of the whole text that changes when the content of the turn changes.

        For templates that render a turn differently once others follow: those that drop old reasoning, or write the
        system prompt or the tools into the last question.
        """
        head, mark, rest = (self._replaced(chat, index) or "").partition(_MARK)
        if mark and not text.startswith(head):
            head = head.rstrip()
        stop = len(text) - len(rest)
        if not mark or not text.startswith(head) or not text.endswith(rest) or stop < len(head):
            raise self._unstable(index)
        start = len(head) if before is None else _start_of_turn(head, before, self._opening_of(chat, index, before))
        if not rest.lstrip().startswith(self.end_of_turn):
            raise self._unstable(index)
        return Span(index, start, text.index(self.end_of_turn, stop) + len(self.end_of_turn))

    def _opening_of(self, chat: Chat, index: int, before: str) -> str:
        """What opens turn `index` behind the turns before it; "" where those end differently without it."""
        earlier = self._try(chat, index, prompt=False)
        return before[len(earlier) :] if earlier is not None and before.startswith(earlier) else ""

    def _unstable(self, index: int) -> RowError:
        return RowError(
            f"message {index + 1}: the chat template renders this turn differently once others follow, so its text "
            f"cannot be separated from the rest; {_ADVICE}"
        )

    def _replaced(self, chat: Chat, index: int) -> str | None:
        """The whole rendering with only the mark in message `index`; None if that cannot be rendered."""
        messages = list(chat.messages)
        kept = {key: messages[index][key] for key in ("role", "name", "tool_call_id", KEY) if key in messages[index]}
        messages[index] = {**kept, "content": _MARK}
        try:
            text = self.render(messages, chat.tools, arguments=chat.arguments)
        except RowError:
            return None
        return text if text.count(_MARK) == 1 else None

    def _cut(self, turn: str) -> int | None:
        """The length of the turn up to and including its end-of-turn token; None where it has none."""
        place = turn.rfind(self.end_of_turn)
        if place >= 0:
            return place + len(self.end_of_turn)
        # Some templates end a tool call with a special token.
        stripped = turn.rstrip()
        return len(stripped) if any(stripped.endswith(token) for token in self._added) else None

    # -- completeness checks ---------------------------------------------------------------------------------------

    def _changes_of_given(self, chat: Chat, text: str) -> tuple[Change, ...]:
        """The turns that are not the assistant's and are changed. Raises `RowError` for one that is left out."""
        changes: list[Change] = []
        for index, message in enumerate(chat.messages):
            if message["role"] != "assistant" and message["content"].strip():
                changes += self._changes_of_turn(chat, index, text)
        if chat.tools and self.render(chat.messages, None, arguments=chat.arguments) == text:
            raise RowError("the row defines tools, but the chat template does not render tool definitions")
        return tuple(changes)

    def _changes_of_turn(self, chat: Chat, index: int, text: str) -> list[Change]:
        role, content = chat.messages[index]["role"], chat.messages[index]["content"]
        pieces = pieces_of(content, self._separator)
        is_whole = all(is_printed(piece, text) for piece in pieces)
        if is_whole and any(len(piece) >= _SHORT and _is_only_there(piece, chat, text) for piece in pieces):
            return []
        marked = self._with_content(chat, index, enclosed(content, self._separator))
        if not (marked is None and is_whole) and self._leaves_out(chat, index, marked):
            raise RowError(f"message {index + 1}: the chat template leaves out {role} turns")
        if is_whole and (marked is None or len(pieces) != 1 or is_at_its_place(pieces[0], marked, text)):
            return []
        return [Change(index, reason_of_change(pieces, marked or "", text, role))]

    def _leaves_out(self, chat: Chat, index: int, marked: str | None) -> bool:
        """Whether nothing of message `index` is printed: neither a mark around its text, nor a mark instead of it."""
        if not is_left_out(marked or ""):
            return False
        return is_left_out(self._with_content(chat, index, enclosed("", self._separator)) or "")

    def _with_content(self, chat: Chat, index: int, content: str) -> str | None:
        """The whole rendering with another text in message `index`; None if that cannot be rendered."""
        messages = list(chat.messages)
        messages[index] = {**messages[index], "content": content}
        try:
            return self.render(messages, chat.tools, arguments=chat.arguments)
        except RowError:
            return None

    def _changes_of_answer(self, chat: Chat, index: int, turn: str) -> list[Change]:
        """The change of an assistant's turn. Raises `RowError` where its text or its calls are left out."""
        message = chat.messages[index]
        answer = TAGS.split(message["content"])[-1]
        changes: list[Change] = []
        if not self._has(turn, answer.strip()):
            changes += self._changes_of_missed(chat, index, answer, turn)
        for call in message.get("tool_calls") or ():
            if call["function"]["name"] not in turn:
                raise RowError(f"message {index + 1}: the chat template does not render tool calls")
        return changes

    def _has(self, turn: str, answer: str) -> bool:
        """Whether a turn has the answer before the token that ends it, which an answer may also end with itself."""
        return turn.find(answer, 0, len(turn) - len(self._ending(turn))) >= 0 or turn.endswith(answer)

    def _changes_of_missed(self, chat: Chat, index: int, answer: str, turn: str) -> list[Change]:
        """The change of an answer that is not printed as one text without its blanks."""
        pieces = pieces_of(answer, self._separator)
        if all(self._has(turn, piece) or self._has(turn, quoted(piece)) for piece in pieces):
            return []
        before = chat.messages[index]["content"].removesuffix(answer)
        marked = self._with_content(chat, index, before + enclosed(answer, self._separator))
        if self._leaves_out(chat, index, marked):
            raise RowError(f"message {index + 1}: the chat template leaves out part of the assistant's turn")
        return [Change(index, reason_of_change(pieces, marked or "", turn, "assistant"))]


def _turns(chat: Chat) -> list[int]:
    return [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]


def _is_only_there(piece: str, chat: Chat, text: str) -> bool:
    """Whether a rendering has a piece as often as the turns have it; what was found is another turn's otherwise."""
    return text.count(piece) >= sum(message["content"].count(piece) for message in chat.messages)


def _start_of_turn(head: str, before: str, opening: str) -> int:
    """Where a turn begins.

    Args:
        head: the rendering up to the text of the turn.
        before: the rendering of the turns before it, with the opening of such a turn.
        opening: that opening alone; "" where it is not known.
    """
    if head.startswith(before):
        return len(before)
    # Blanks that the opening does not end in belong to the turn, as in Mistral's "[/INST] answer".
    bare, prompt = head.rstrip(), before.rstrip()
    if bare.endswith(prompt[-_OPENING:]) and head[len(bare) :].startswith(before[len(prompt) :]):
        return len(bare) + len(before) - len(prompt)
    # Only the turns before it are rendered otherwise. Behind the opening stands what belongs to the turn, as an empty
    # block of reasoning.
    place = head.rfind(opening) if opening.strip() else -1
    return len(head) if place < 0 else place + len(opening)
