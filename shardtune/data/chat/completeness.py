"""Whether a chat template prints all of a conversation's turns as they are."""

from __future__ import annotations

from shardtune.data.chat.changes import (
    Change,
    enclosed,
    enclosed_value,
    has_both_marks,
    is_at_its_place,
    is_left_out,
    is_printed,
    is_value_printed,
    pieces_of,
    quoted,
    reason_of_change,
    values_of,
)
from shardtune.data.chat.printed_template import PrintedTemplate
from shardtune.data.chat.reasoning import TAGS
from shardtune.data.encoder import RowError
from shardtune.data.row_formats import Chat

_SHORT = 24  # content shorter than this may occur in the rendering by chance


class Completeness:
    """What a chat template leaves out of turns, or prints otherwise.

    Args:
        template: that printed them.
    """

    def __init__(self, template: PrintedTemplate) -> None:
        self._template = template

    def changes_of_given(self, chat: Chat, text: str) -> tuple[Change, ...]:
        """The turns that are not the assistant's and are changed. Raises `RowError` for one that is left out."""
        changes: list[Change] = []
        for index, message in enumerate(chat.messages):
            if message["role"] != "assistant" and message["content"].strip():
                changes += self._changes_of_turn(chat, index, text)
        if chat.tools and self._template.render(chat.messages, None, arguments=chat.arguments) == text:
            raise RowError("the row defines tools, but the chat template does not render tool definitions")
        return tuple(changes)

    def _changes_of_turn(self, chat: Chat, index: int, text: str) -> list[Change]:
        role, content = chat.messages[index]["role"], chat.messages[index]["content"]
        pieces = pieces_of(content, self._template.separator)
        is_whole = all(is_printed(piece, text) for piece in pieces)
        if is_whole and any(len(piece) >= _SHORT and _is_only_there(piece, chat, text) for piece in pieces):
            return []
        marked = self._with_content(chat, index, enclosed(content, self._template.separator))
        if not (marked is None and is_whole) and self._leaves_out(chat, index, marked):
            raise RowError(f"message {index + 1}: the chat template leaves out {role} turns")
        if is_whole and (marked is None or len(pieces) != 1 or is_at_its_place(pieces[0], marked, text)):
            return []
        return [Change(index, reason_of_change(pieces, marked or "", text, role))]

    def _leaves_out(self, chat: Chat, index: int, marked: str | None) -> bool:
        """Whether nothing of message `index` is printed: neither a mark around its text, nor a mark instead of it."""
        if not is_left_out(marked or ""):
            return False
        return is_left_out(self._with_content(chat, index, enclosed("", self._template.separator)) or "")

    def _with_content(self, chat: Chat, index: int, content: str) -> str | None:
        """The whole rendering with another text in message `index`; None if that cannot be rendered."""
        messages = list(chat.messages)
        messages[index] = {**messages[index], "content": content}
        try:
            return self._template.render(messages, chat.tools, arguments=chat.arguments)
        except RowError:
            return None

    def changes_of_answer(self, chat: Chat, index: int, turn: str) -> list[Change]:
        """The change of an assistant's turn. Raises `RowError` where its text or its calls are left out."""
        message = chat.messages[index]
        answer = TAGS.split(message["content"])[-1]
        changes: list[Change] = []
        if not self._has(turn, answer.strip()):
            changes += self._changes_of_missed(chat, index, answer, turn)
        for call in message.get("tool_calls") or ():
            if call["function"]["name"] not in turn:
                raise RowError(f"message {index + 1}: the chat template does not render tool calls")
        self._require_arguments(chat, index, turn)
        return changes

    def _require_arguments(self, chat: Chat, index: int, turn: str) -> None:
        """Refuse calls of which an argument, or a part of it, is left out. Any way of writing it is fine."""
        for number, call in enumerate(chat.messages[index].get("tool_calls") or ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            for place, value in values_of(arguments):
                if is_value_printed(value, turn):
                    continue
                marked = self._with_arguments(chat, index, number, enclosed_value(arguments, place))
                if marked is not None and not has_both_marks(marked):
                    raise RowError(
                        f"message {index + 1}: the chat template leaves out the argument {place[0]!r} of the call of "
                        f"{name}, or a part of it"
                    )

    def _with_arguments(self, chat: Chat, index: int, number: int, arguments: object) -> str | None:
        """The whole rendering with other arguments of a call; None if that cannot be rendered."""
        messages, calls = list(chat.messages), list(chat.messages[index]["tool_calls"])
        calls[number] = {**calls[number], "function": {**calls[number]["function"], "arguments": arguments}}
        messages[index] = {**messages[index], "tool_calls": calls}
        try:
            return self._template.render(messages, chat.tools, arguments=chat.arguments)
        except RowError:
            return None

    def _has(self, turn: str, answer: str) -> bool:
        """Whether a turn has the answer before the token that ends it, which an answer may also end with itself."""
        return turn.find(answer, 0, len(turn) - len(self._template.ending(turn))) >= 0 or turn.endswith(answer)

    def _changes_of_missed(self, chat: Chat, index: int, answer: str, turn: str) -> list[Change]:
        """The change of an answer that is not printed as one text without its blanks."""
        pieces = pieces_of(answer, self._template.separator)
        if all(self._has(turn, piece) or self._has(turn, quoted(piece)) for piece in pieces):
            return []
        before = chat.messages[index]["content"].removesuffix(answer)
        marked = self._with_content(chat, index, before + enclosed(answer, self._template.separator))
        if self._leaves_out(chat, index, marked):
            raise RowError(f"message {index + 1}: the chat template leaves out part of the assistant's turn")
        return [Change(index, reason_of_change(pieces, marked or "", turn, "assistant"))]


def _is_only_there(piece: str, chat: Chat, text: str) -> bool:
    """Whether a rendering has a piece as often as the turns have it; what was found is another turn's otherwise."""
    return text.count(piece) >= sum(message["content"].count(piece) for message in chat.messages)
