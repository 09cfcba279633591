"""The check that a trained answer is preceded by the prompt with which the model would generate it."""

from __future__ import annotations

from itertools import takewhile
from typing import Literal

from shardtune.errors import DataError

PromptMismatch = Literal["fail", "accept"]
_SHOWN = 30


def first_difference(prompt: str, text: str, message: int) -> DataError:
    """The error for a prompt that the trained text does not begin with, with the first difference.

    Args:
        prompt: the conversation up to the answer, with what opens the answer in generation.
        text: the conversation with the answer, as it is trained.
        message: index of the answer.
    """
    place = sum(1 for _ in takewhile(bool, map(str.__eq__, prompt, text)))
    start = max(place - _SHOWN, 0)
    generated, trained = (one[start : place + _SHOWN] for one in (prompt, text))
    return DataError(
        f"the chat template opens an answer otherwise for generation than in training (message {message + 1}, from "
        f"character {place + 1:,} on), so the model would answer prompts that it was not trained on:\n"
        f"    generation has {generated!r},\n    training has   {trained!r}",
        where="the chat template",
        remedy="give the answers their reasoning (reasoning_content), or set data.template_kwargs so that both agree "
        "(such as enable_thinking: false), or choose another data.chat_template; data.on_prompt_mismatch: accept "
        "trains such rows as they are, and counts them",
    )
