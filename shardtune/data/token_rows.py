"""Rows that are tokenised already: `input_ids`, and which of them are targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardtune.batch import IGNORED
from shardtune.config.values import OUT_OF_RANGE, in_range
from shardtune.data.encoder import Row, RowError
from shardtune.data.messages import excerpt, parsed

MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
"""Columns with 1 for a token that is a target and 0 for any other."""
_OF_DOCUMENTS = ("position_ids", "seq_lengths", "token_type_ids")
TOKEN_COLUMNS = ("labels", *MASKS, "loss_weights", "attention_mask", *_OF_DOCUMENTS)
"""The columns beside `input_ids` that are looked at."""
_LARGEST = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class Tokens:
    """A row of tokens.

    Attributes:
        ids: int32 [length].
        weights: float32 [length]; how much each counts as a target.
        marked: whether the row itself has targets; otherwise all of its tokens are.
    """

    ids: np.ndarray
    weights: np.ndarray
    marked: bool


def read_tokens(row: Row) -> Tokens:
    """The tokens of a row, as transformers and TRL have them.

    Targets are those that `labels` has as they are (the others are -100), that each mask has as 1, or as the numbers of
    `loss_weights`; where several are given, their product. Padding, which `attention_mask` has as 0 at one end, is left
    out.

    Raises:
        RowError: they contradict each other, or hold several documents.
    """
    ids = _whole_numbers(row, "input_ids")
    if not len(ids):
        raise RowError("input_ids is empty")
    if ids.min() < 0 or ids.max() > _LARGEST:
        raise RowError(f"input_ids has {ids[(ids < 0) | (ids > _LARGEST)][0]:,}, which is no token")
    weights = np.ones(len(ids), np.float32)
    given = [key for key in ("labels", *MASKS, "loss_weights") if row.get(key) is not None]
    for key in given:
        weights *= _from_labels(row, ids) if key == "labels" else _weights(row, key, len(ids))
    kept = _attended(row, len(ids))
    if given and weights[~kept].any():
        raise RowError("a target is left out by attention_mask")
    _check_one_document(row, kept)
    return Tokens(ids[kept].astype(np.int32), weights[kept], bool(given))


def _numbers(row: Row, key: str, length: int | None = None) -> np.ndarray:
    value = parsed(row[key], key)
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str | bytes):
        raise RowError(f"{key} is {type(value).__name__}, not a list of numbers")
    try:
        found = np.asarray(value)
    except ValueError:
        found = np.empty(0, object)
    if len(value) and (found.ndim != 1 or found.dtype.kind not in "biuf"):
        raise RowError(f"{key} is {excerpt(value)}, not a list of numbers")
    if length is not None and len(found) != length:
        raise RowError(f"{key} has {len(found):,} numbers, input_ids has {length:,}")
    return found


def _whole_numbers(row: Row, key: str, length: int | None = None) -> np.ndarray:
    found = _numbers(row, key, length)
    if found.dtype.kind == "f" and len(found):
        raise RowError(f"{key} is {excerpt(found[:5].tolist())}, not a list of whole numbers")
    return found.astype(np.int64)


def _from_labels(row: Row, ids: np.ndarray) -> np.ndarray:
    labels = _whole_numbers(row, "labels", len(ids))
    wrong = np.flatnonzero((labels != IGNORED) & (labels != ids))
    if len(wrong):
        place = int(wrong[0])
        shifted = labels[:-1] == ids[1:]
        hint = "; they are shifted by one place" if (shifted | (labels[:-1] == IGNORED)).all() else ""
        raise RowError(
            f"labels has {labels[place]:,} where input_ids has {ids[place]:,} (place {place:,}){hint}: a label is the "
            f"token of the same place, or {IGNORED}; the model shifts them"
        )
    return labels != IGNORED


def _weights(row: Row, key: str, length: int) -> np.ndarray:
    found = _numbers(row, key, length).astype(np.float64)
    if key in MASKS and not np.isin(found, (0, 1)).all():
        raise RowError(f"{key} has {found[~np.isin(found, (0, 1))][0]:g}; a mask has 0 and 1, loss_weights any weights")
    for weight in np.unique(found).tolist():
        if not (weight >= 0 and in_range(weight)):
            raise RowError(f"{key} has {weight:g}: {OUT_OF_RANGE}, and none is below 0")
    return found.astype(np.float32)


def _attended(row: Row, length: int) -> np.ndarray:
    """bool [length]: which tokens are no padding."""
    if row.get("attention_mask") is None:
        return np.ones(length, bool)
    found = _weights({"loss_mask": parsed(row["attention_mask"], "attention_mask")}, "loss_mask", length) > 0
    places = np.flatnonzero(found)
    if not len(places):
        raise RowError("attention_mask leaves out every token")
    if len(places) != places[-1] - places[0] + 1:
        raise RowError(
            f"attention_mask has 0 between tokens (place {int(np.flatnonzero(~found[places[0] :])[0] + places[0]):,}); "
            "only padding at an end is left out"
        )
    return found


def _check_one_document(row: Row, kept: np.ndarray) -> None:
    """Refuse what stands for several documents in one row, or for other inputs of a model."""
    several = "several documents in one row: give one row each, they are packed here"
    if row.get("position_ids") is not None:
        places = _whole_numbers(row, "position_ids", len(kept))[kept]
        if (np.diff(places) != 1).any() or places[0] not in (0, int(np.argmax(kept))):
            raise RowError(f"position_ids is not 0, 1, 2, …, so there are {several}")
    if row.get("seq_lengths") is not None and len(_numbers(row, "seq_lengths")) > 1:
        raise RowError(f"seq_lengths has more than one number, so there are {several}")
    if row.get("token_type_ids") is not None and _whole_numbers(row, "token_type_ids", len(kept))[kept].any():
        raise RowError("token_type_ids has other numbers than 0, which are not given to the model")
