"""Builds prompts from conversations and texts, with or without images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from shardtune.batch import Prompt
from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.encoder import caused_by
from shardtune.data.images.chat_encoder import ImageChatEncoder
from shardtune.data.row_formats import read_arguments, read_tools
from shardtune.errors import DataError, ModelError


class PromptBuilder:
    """Encodes conversations and texts as prompts, with errors that name the prompt.

    Args:
        encoder: the model's.
        where: names the model in errors.
    """

    def __init__(self, encoder: ChatEncoder, where: str) -> None:
        self._encoder = encoder
        self._where = where
        self._count = 0

    def turns(
        self,
        messages: Sequence[Mapping[str, object]],
        images: Sequence[object] = (),
        tools: object = None,
        template_kwargs: object = None,
    ) -> Prompt:
        """A conversation to answer; see `ImageChatEncoder.prompt` for the place of images, `read_tools` for tools,
        `read_arguments` for values of the chat template."""
        with self._named(*messages):
            known, given = read_tools(tools), read_arguments(template_kwargs)
            if isinstance(self._encoder, ImageChatEncoder):
                return self._encoder.prompt(messages, known, images, template_kwargs=given)
            if images or any(_has_image(message) for message in messages):
                raise self._takes_text_only()
            return self._encoder.prompt(messages, known, template_kwargs=given)

    def text(self, text: str, images: Sequence[object] = ()) -> Prompt:
        """A text to continue."""
        with self._named(text):
            if isinstance(self._encoder, ImageChatEncoder):
                return self._encoder.text_prompt(text, images)
            if images:
                raise self._takes_text_only()
            return self._encoder.text_prompt(text)

    @contextmanager
    def _named(self, *given: object) -> Iterator[None]:
        self._count += 1
        try:
            yield
        except Exception as error:
            raise DataError(
                caused_by(error, list(given)).reason,
                where=f"prompt {self._count:,}",
                remedy="mend the prompt, its tools, its images or their places (<image>)",
            ) from error

    def _takes_text_only(self) -> ModelError:
        return ModelError(
            f"the model takes text and no images ({self._where})",
            where=f"prompt {self._count:,}",
            remedy="leave the images out, or use a run whose actor.model.model_type is vision_language",
        )


def _parts(message: Mapping[str, object]) -> list[object]:
    content = message.get("content")
    return list(content) if isinstance(content, Sequence) and not isinstance(content, str) else []


def _has_image(message: Mapping[str, object]) -> bool:
    return any(
        isinstance(part, Mapping) and part.get("type") in ("image", "image_url", "input_image")
        for part in _parts(message)
    )
