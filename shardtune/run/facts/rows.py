"""The first rows of a recipe, as they are in its files and as its encoder makes samples of them."""

from __future__ import annotations

from collections.abc import Iterator

from shardtune.batch import Sample
from shardtune.config import Recipe
from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.encoder import Row, RowError, frames_of
from shardtune.data.images.chat_encoder import ImageChatEncoder
from shardtune.data.images.rows import read_image_row
from shardtune.data.row_formats import Example, in_format, read_example
from shardtune.data.sources.resolve import resolve_sources
from shardtune.data.sources.source import prepare_row
from shardtune.training.worker.run_context import silent


def first_rows(recipe: Recipe, encoder: ChatEncoder, count: int) -> list[tuple[Row, Sample]]:
    """The first usable rows of the recipe's training data, none of them cut.

    Raises:
        DataError: the data are for a loader of the user's.
    """
    found: list[tuple[Row, Sample]] = []
    for pair in _rows(recipe, encoder):
        found.append(pair)
        if len(found) == count:
            break
    return found


def _rows(recipe: Recipe, encoder: ChatEncoder) -> Iterator[tuple[Row, Sample]]:
    data = recipe.data
    sources = resolve_sources(
        data.train_data_paths, data, name_format=encoder.title, frames=frames_of(encoder), report=silent
    )
    for source in sources:
        for file in source.files:
            for _, row in source.rows(file):
                try:
                    usable = None if isinstance(row, RowError) else prepare_row(row, source)
                    if usable is None:
                        continue
                    usable = usable if source.format is None else in_format(usable, source.format)
                    sample = encoder.at(file.folder).encode(usable)
                except RowError:
                    continue
                yield usable, sample


def example_of(encoder: ChatEncoder, row: Row) -> Example:
    """A row's conversation or text, with a mark in the place of each image."""
    return read_image_row(row)[0] if isinstance(encoder, ImageChatEncoder) else read_example(row)
