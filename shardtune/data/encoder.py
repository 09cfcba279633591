"""The interface between rows and models: an encoder turns one row of a file into one `Sample`."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from shardtune.batch import Sample
from shardtune.config import ModelConfig
from shardtune.config.user_code import user_fault
from shardtune.data.robot.representation import Representation
from shardtune.errors import DataError, ShardtuneError

Row = Mapping[str, Any]
TooLong = Literal["truncate", "drop", "fail", "split"]


class RowError(Exception):
    """This one row cannot be used; the caller adds file and row number and applies `data.on_bad_row`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


NEVER_A_ROW = (NameError, ImportError, MemoryError)
"""Exceptions that are faults of the code or the machine, whatever the row holds."""
_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)


def caused_by(error: Exception, row: object = None) -> RowError:
    """The reason why a row cannot be used, of an exception that was raised while it was read or encoded.

    Parsers, chat templates, tokenizers and image decoders may raise anything for what they do not expect.

    Args:
        error: the exception.
        row: searched for text that is none.

    Raises:
        Exception: the given one, where it is no fault of the row: it has a message of its own (`ShardtuneError`), or is
            one of the machine, or of the user's code.
    """
    if isinstance(error, RowError):
        return error
    of_machine = isinstance(error, OSError) and error.errno in _OF_THE_MACHINE
    if of_machine or isinstance(error, (ShardtuneError, *NEVER_A_ROW)) or user_fault(error) is not None:
        raise error
    if isinstance(error, RecursionError):
        return RowError("the row is nested too deeply")
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as found:
        half = ord(found.object[found.start])
        return RowError(f"the row holds U+{half:04X}, half of a surrogate pair, which is no character")
    except Exception:  # the row itself has no text form; the first error is the reason
        pass
    return RowError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def bad_row(label: str, number: int, reason: str) -> DataError:
    """The error for a bad row where `data.on_bad_row` is `fail`."""
    return DataError(
        reason,
        where=f"{label}: row {number:,}",
        remedy="mend the row, or set data.on_bad_row=skip to leave such rows out",
    )


class RowDropped(Exception):
    """This row is left out because of `data.on_too_long: drop`; it is counted, not an error."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@runtime_checkable
class Encoder(Protocol):
    """Turns rows into samples. Must be picklable, and deterministic: equal `cache_key` and row give equal samples."""

    def encode(self, row: Row) -> Sample:
        """The whole row, however long. Raises `RowError` for a row that cannot be used."""
        ...

    def fit(self, sample: Sample) -> Sample | Sequence[Sample]:
        """The sample within the length limit, or several parts of it. Raises `RowDropped`, or `DataError` where too
        long is an error."""
        ...

    def weights(self, sample: Sample) -> Mapping[str, float]:
        """The weight of each loss term in this sample; a row whose weights are all 0 has no target and is dropped."""
        ...

    def at(self, folder: Path) -> Encoder:
        """The encoder of rows whose file is in `folder`, the base of relative paths in rows."""
        ...

    def cache_key(self) -> str:
        """Everything that `encode` and `fit` depend on besides the row, hashed or in full."""
        ...

    @property
    def title(self) -> Callable[[Row], str] | None:
        """Names what kind of row this is, raising `RowError` for one that cannot be used; None: by its chat format."""
        ...


@runtime_checkable
class NamesUnread(Protocol):
    """An encoder that knows which keys of a row it does not look at."""

    def unread(self, row: Row) -> Sequence[str]:
        """These keys of a row that can be encoded."""
        ...


@runtime_checkable
class ByUser(Protocol):
    """An encoder that calls a user's code, which may draw random numbers."""

    @property
    def repeats_bits(self) -> bool:
        """Whether the same file gives the same bits wherever it lies: no paths of images or videos are in its rows."""
        ...

    def drawn(self, row: Row) -> str | None:
        """What differs between two encodings of a row that can be encoded; None where they are the same."""
        ...


DRAWS = "each time that it encodes the same row"
"""In the note on an encoder that draws."""


@dataclass(frozen=True, slots=True)
class FrameOptions:
    """How robot data become rows: one per frame.

    Attributes:
        chunk: the actions of a row, from its frame on.
        observations: the frames that a row shows: its own and those before it.
        representation: how actions are represented; None: they are absolute.
        returns: whether a row has its `return`, where the data give it.
        discount: returns are computed from rewards, of which one k frames later counts discount^k; None: they are read.
    """

    chunk: int = 1
    observations: int = 1
    representation: Representation | None = None
    returns: bool = False
    discount: float | None = None

    @classmethod
    def of(cls, model: ModelConfig, chunk: int, observations: int = 1) -> FrameOptions:
        """With the representation of actions that `actor.model` has, and the returns of its value head."""
        form = Representation.of(model.action_representation, model.action_representation_mask)
        discount = model.value_head.discount if model.add_value_head else None
        return cls(chunk, observations, form, model.add_value_head, discount)


@runtime_checkable
class FrameEncoder(Encoder, Protocol):
    """An encoder of robot data, whose rows are `FrameRow`s, see `shardtune.data.robot.frames`."""

    @property
    def frames(self) -> FrameOptions:
        """How the rows are to be read."""
        ...


def frames_of(encoder: Encoder) -> FrameOptions | None:
    """The encoder's options for reading robot data; None if it encodes other rows."""
    return encoder.frames if isinstance(encoder, FrameEncoder) else None


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """How long a row may be, in tokens, and what happens to a longer one.

    Attributes:
        max_length: tokens of a row.
        on_too_long: what happens to a longer one.
        stride: how many tokens further each part of a row that is split begins; None: so many that every token but
            the first is a target once.
    """

    max_length: int
    on_too_long: TooLong
    stride: int | None = None

    def apply(self, sample: Sample) -> Sample | list[Sample]:
        """The sample, its first `max_length` tokens, or its windows. A prompt that does not fit itself is left out.

        Fields are not cut: only the encoder can map them to tokens.
        """
        if len(sample.input_ids) <= self.max_length:
            return sample
        reason = f"the row has {sample.length:,} tokens, data.max_length is {self.max_length:,}"
        if self.on_too_long == "drop":
            raise RowDropped(f"{sample.length:,} tokens")
        if self.on_too_long == "fail":
            raise DataError(reason, remedy="raise data.max_length, or set data.on_too_long to truncate, drop or split")
        if self.on_too_long == "split":
            return self._windows(sample, reason)
        return self._part(sample, 0)

    def _windows(self, sample: Sample, reason: str) -> list[Sample]:
        """The parts of a long row: each target is one in the first part that has it, behind as many tokens as repeat
        the end of the part before.

        Worked example: 7 tokens in windows of 4 with a stride of 3 are 0 1 2 3 and 3 4 5 6; token 3 is a target in the
        first alone, and in the second what the others are predicted from.
        """
        if sample.fields:
            raise DataError(
                f"{reason}, and a row with images or other fields cannot be split",
                remedy="set data.on_too_long to truncate or drop, or raise data.max_length",
            )
        stride = self.stride or self.max_length - 1
        further = -(-(len(sample.input_ids) - self.max_length) // stride)
        parts = [self._part(sample, 0)]
        for number in range(1, further + 1):
            part = self._part(sample, number * stride)
            weights = part.loss_weights.copy()
            weights[: self.max_length - stride] = 0.0
            parts.append(replace(part, loss_weights=weights, prompt_ids=None, reference=None, question=None))
        return parts

    def _part(self, sample: Sample, start: int) -> Sample:
        prompt_fits = sample.prompt_ids is not None and len(sample.prompt_ids) <= self.max_length
        return replace(
            sample,
            input_ids=sample.input_ids[start : start + self.max_length],
            loss_weights=sample.loss_weights[start : start + self.max_length],
            prompt_ids=sample.prompt_ids if prompt_fits else None,
            reference=sample.reference if prompt_fits else None,
            question=sample.question if prompt_fits else None,
        )
