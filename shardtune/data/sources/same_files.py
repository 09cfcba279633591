"""What to say of files that are read twice: for training and evaluation, or for training alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from shardtune.data.sources.hub import some_of
from shardtune.data.sources.source import ROBOT_KINDS, Source, SourceFile

Digest = Callable[[Path], str | None]


def notes_on_same_files(train: Sequence[Source], evals: Sequence[Source], digest: Digest) -> Iterator[str]:
    """At most one line on evaluation files that are training files too, and one on training files that occur twice.

    Files are the same by their real path, or by their content; two parts of one recording are not.

    Args:
        train: the sources of training.
        evals: those of all evaluation sets.
        digest: of a file's content, None where it is not known; it is asked for files of equal size alone.
    """
    known = _Known(digest)
    again = list[str]()
    for source in train:
        for file in source.files:
            told = known.same(file)
            if told is not None and (told.columns, told.format) == (source.columns, source.format):
                again.append(file.label)
            known.add(file, source)
    both = [file.label for source in evals for file in source.files if known.same(file) is not None]
    if again:
        yield f"rows of {some_of(again)} are among the training rows twice: the same file, or one of the same content"
    if both:
        yield f"eval rows of {some_of(both)} are training rows too: the score says nothing about new rows"


class _Known:
    """Files with their sources, found by real path or content.

    Args:
        digest: as of `notes_on_same_files`.
    """

    def __init__(self, digest: Digest) -> None:
        self._digest = digest
        self._places: dict[tuple[str, str], Source] = {}
        self._sizes: dict[int, list[tuple[SourceFile, Source]]] = {}
        self._contents: dict[str, Source] = {}

    def add(self, file: SourceFile, source: Source) -> None:
        """Add a file."""
        self._places.setdefault(_place(file), source)
        if file.kind not in ROBOT_KINDS:
            self._sizes.setdefault(file.path.stat().st_size, []).append((file, source))

    def same(self, file: SourceFile) -> Source | None:
        """The source of this file, or of one of its content; None if there is none."""
        if (place := _place(file)) in self._places:
            return self._places[place]
        alike = None if file.kind in ROBOT_KINDS else self._sizes.get(file.path.stat().st_size)
        if alike is None:
            return None
        while alike:  # those whose content has not been asked for
            other, source = alike.pop()
            if (content := self._digest(other.path)) is not None:
                self._contents[content] = source
        return self._contents.get(self._digest(file.path) or "")


def _place(file: SourceFile) -> tuple[str, str]:
    return os.path.realpath(file.path), file.part
