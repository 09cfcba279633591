"""Rendering a conversation by its chat template, and finding the assistant's turns in the text that comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from transformers import PreTrainedTokenizerFast

from shardtune.data.chat.arguments import Arguments
from shardtune.data.chat.changes import Change
from shardtune.data.chat.completeness import Completeness
from shardtune.data.chat.outline import Outline, Shape, Span, given_pieces, probed, shape_of
from shardtune.data.chat.printed_template import MARK, NO_ARGUMENTS, PrintedTemplate
from shardtune.data.chat.reasoning import KEY, Thought, lost_thoughts
from shardtune.data.encoder import RowError
from shardtune.data.row_formats import Chat

_THOUGHT = "\ue0f8\ue0f9"  # as `MARK`
_AROUND_THOUGHTS = "<think>\n", "\n</think>\n\n"
_MOST_OUTLINES = 1024
_OPENING = 5  # this many characters of a turn's opening are enough to recognise it
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


class ChatTemplate(PrintedTemplate):
    """A chat template that finds the assistant's turns in what it prints; arguments as `PrintedTemplate` has them."""

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerFast, arguments: Arguments = NO_ARGUMENTS) -> None:
        super().__init__(text, tokenizer, arguments)
        self._completeness = Completeness(self)
        self._outlines: dict[Shape, Outline | None] = {}

    def render_turns(self, chat: Chat) -> Rendering:
        """The conversation with its assistant turns found. Raises `RowError` where the template does not allow it.

        It is rendered once if its shape is known and its text matches the shape's outline, otherwise
        several times (see `_render_at_length`).
        """
        try:
            text, marks = self.render_marked(chat.messages, chat.tools, False, self.marks_generation, chat.arguments)
        except RowError as error:
            raise self._refused(chat, error) from error
        outline = self._outline(chat)
        spans = None if outline is None else outline.find(chat, text, self.separator)
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
            changes += self._completeness.changes_of_answer(chat, span.message, turn)
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
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}
        try:
            opening = self.render([question], None, prompt=True)
            text = self.render([question, {**answer, KEY: _THOUGHT}], None)
            earlier = self.render([question, answer, question, answer], None)
        except RowError:
            return _AROUND_THOUGHTS
        before, found, rest = text.removeprefix(opening).partition(_THOUGHT)
        # Behind the reasoning comes what opens the answer of a turn without any.
        after, mark, _ = rest.partition(earlier.removeprefix(opening).partition(MARK)[0] + MARK)
        is_known = text.startswith(opening) and earlier.startswith(opening) and found and mark and before and after
        return (before, after) if is_known else _AROUND_THOUGHTS

    def _are_whole(self, spans: Sequence[Span], text: str) -> bool:
        """Whether each turn ends where its text requires; always true for turns that the template marks."""
        return self.marks_generation or all(self.cut(text[s.start : s.stop]) == s.stop - s.start for s in spans)

    def _outline(self, chat: Chat) -> Outline | None:
        if any(isinstance(value, list | tuple | Mapping) for value in chat.arguments.values()):
            return None  # documents, which are others in each row
        shape = shape_of(chat, self.separator)
        if shape not in self._outlines:
            if len(self._outlines) >= _MOST_OUTLINES:
                self._outlines.clear()
            self._outlines[shape] = self._learn(probed(chat, self.separator))
        return self._outlines[shape]

    def _learn(self, chat: Chat) -> Outline | None:
        """The outline of a probed conversation; None where it cannot be rendered."""
        try:
            text, marks = self.render_marked(chat.messages, chat.tools, False, self.marks_generation, chat.arguments)
            rendering, befores = self._render_at_length(chat, text, marks)
            without_tools = self.render(chat.messages, None, arguments=chat.arguments) if chat.tools else None
        except RowError:
            return None
        pieces = len(given_pieces(chat, self.separator))
        endings = [self.ending(text[span.start : span.stop]) for span in rendering.spans]
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

    def _render_at_length(
        self, chat: Chat, text: str, marks: list[tuple[int, int]]
    ) -> tuple[Rendering, list[str | None] | None]:
        """Finds the turns by the marks of the template, or else by the renderings without and with each turn.

        Returns:
            The rendering, and the rendering up to each of the turns; None if the template marks them.
        """
        changes = self._completeness.changes_of_given(chat, text)
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
        inside = self.cut(block)
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
            cut = self.cut(after[len(before) :])
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
        return None if replaced is None else replaced.partition(MARK)[0]

    def _find_by_replacing(self, chat: Chat, index: int, text: str, before: str | None) -> Span:
        """The span of turn `index`: the part of the whole text that changes when the content of the turn changes.

        For templates that render a turn differently once others follow: those that drop old reasoning, or write the
        system prompt or the tools into the last question.
        """
        head, mark, rest = (self._replaced(chat, index) or "").partition(MARK)
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
        messages[index] = {**kept, "content": MARK}
        try:
            text = self.render(messages, chat.tools, arguments=chat.arguments)
        except RowError:
            return None
        return text if text.count(MARK) == 1 else None


def _turns(chat: Chat) -> list[int]:
    return [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]


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
