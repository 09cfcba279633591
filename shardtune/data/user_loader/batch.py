"""A batch of a user's own loader: its rows, its targets, its fields, and a hash of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NoReturn

import numpy as np
import torch

from shardtune.batch import IGNORED
from shardtune.errors import DataError

LABELS = "labels"
COUNTING = (LABELS, "input_ids")
MASKS = ("attention_mask", "target_combined_attention_mask")
COLLATE = "build_dataloader: collate_fn"


@dataclass(frozen=True, slots=True)
class UserBatch:
    """One micro-batch of a user's own loader.

    Attributes:
        fields: as the loader yields it.
        weights: of each loss term over this batch.
        counts: False for a filler that only keeps ranks in step; its weights are 0.
    """

    fields: Any
    weights: Mapping[str, float]
    counts: bool = True

    @property
    def metric_weight(self) -> float:
        """How much a mean over the batch counts in a metric: its targets, or its rows where it has no labels."""
        return self.weights.get("loss") or float(rows_of(self.fields) or 1)


class MissingField(DataError, KeyError):
    """A worker reads a field that its collate function does not produce; a `KeyError` to the worker itself."""


class Fields(dict[str, object]):
    """A batch whose error for a missing key lists the keys it has."""

    def __missing__(self, key: object) -> NoReturn:
        raise missing_field(key, self)

    def pop(self, key: str, *default: object) -> object:
        return super().pop(key, *default) if default else super().pop(key) if key in self else self[key]


def missing_field(key: object, batch: Mapping[str, object]) -> MissingField:
    """The error of a worker that reads a field that a batch lacks."""
    produced = ", ".join(str(name) for name in batch) or "nothing"
    return MissingField(
        f"the batch has no {key!r}; the collate function produced: {produced}",
        where=COLLATE,
        remedy=f"let collate_fn put {key!r} into the dict it returns, or read one of the fields that are there",
    )


def with_names(batch: Any) -> Any:
    """The batch for a user's method: a plain dict becomes one whose error for a missing key lists its keys."""
    return Fields(batch) if type(batch) is dict else batch


def require_dict(batch: object) -> Mapping[str, object]:
    """The batch as a mapping of fields; raises `DataError` for anything else."""
    if isinstance(batch, Mapping):
        return batch
    raise DataError(
        f"the loader yields {kind_of(batch)}, not a dict of tensors",
        where=COLLATE,
        remedy="let collate_fn return one dict, each field stacked: torch.stack([sample[name] for sample in samples])",
    )


def kind_of(batch: object) -> str:
    """The type of a batch, in words."""
    if isinstance(batch, (list, tuple)):
        kinds = sorted({type(item).__name__ for item in batch})
        return f"a {type(batch).__name__} of {len(batch)} {kinds[0] if len(kinds) == 1 else 'thing'}s"
    return f"a {type(batch).__name__}"


def targets_of(batch: object, *, shifted: bool) -> float:
    """How many targets a mean loss over this batch averages: labels that count, or rows where there are no labels.

    Args:
        batch: a mapping, whose `labels` (if any) are int64 [rows, length] with -100 for tokens that are not targets.
        shifted: whether the model compares logits with the next label, so that a row's first label is never a target.
    """
    labels = require_dict(batch).get(LABELS)
    if isinstance(labels, torch.Tensor):
        counted = labels[:, 1:] if shifted and labels.ndim > 1 else labels
        return float((counted != IGNORED).sum())
    rows = rows_of(batch)
    if rows is None:
        raise DataError("a batch holds neither a tensor nor a list, so its rows cannot be counted", where=COLLATE)
    return float(rows)


def rows_of(batch: object) -> int | None:
    """Samples in a batch; None where they cannot be counted.

    They are counted by `labels` or `input_ids`, else by the first tensor's first dimension or the first list.
    """
    if isinstance(batch, Mapping):
        named = [batch[name] for name in COUNTING if name in batch]
        return next((size for size in map(_size, [*named, *batch.values()]) if size is not None), None)
    return _size(batch)


def _size(value: object) -> int | None:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return int(value.shape[0]) if value.ndim else None
    return len(value) if isinstance(value, (list, tuple)) else None


def rows_agreed(batch: object) -> int | None:
    """The rows of a batch whose tensors all have as many; None where they differ, as with images laid end to end."""
    if not isinstance(batch, Mapping):
        return None
    sizes = {value.shape[0] for value in batch.values() if isinstance(value, torch.Tensor) and value.ndim}
    return sizes.pop() if len(sizes) == 1 else None


class SameFields:
    """Checks that all batches of a loader have the same fields."""

    def __init__(self) -> None:
        self._fields: set[str] | None = None

    def check(self, batch: object, number: int) -> None:
        """Refuse a batch whose fields differ from those of earlier batches.

        Args:
            batch: the next one.
            number: of the batch, counted from 0.
        """
        if not isinstance(batch, Mapping):
            return
        fields = {str(name) for name in batch}
        known, self._fields = self._fields, fields
        if known is None or fields == known:
            return
        lost, new = sorted(known - fields), sorted(fields - known)
        missing = f"has no {', '.join(map(repr, lost))}, which those before it have" if lost else ""
        added = f"has {', '.join(map(repr, new))}, which those before it lack" if new else ""
        raise DataError(
            f"batch {number} {' and '.join(filter(None, (missing, added)))}",
            where=COLLATE,
            remedy="give every batch the same fields: where no sample has one (an image, say), put in a blank one and "
            "mask it",
        )


def tokens_of(batch: object) -> int:
    """Input tokens without padding where the batch has a mask or ids, otherwise rows."""
    found = num_tokens(batch)
    return (rows_of(batch) or 0) if found is None else found


def num_tokens(batch: object) -> int | None:
    """Input tokens without padding; None for a batch without a mask or ids."""
    if isinstance(batch, Mapping):
        mask = next((batch[name] for name in MASKS if name in batch), None)
        ids = batch.get("input_ids")
        if isinstance(mask, torch.Tensor):
            return int((mask != 0).sum())
        if isinstance(ids, torch.Tensor):
            return ids.numel()
    return None


def describe_batch(batch: object) -> str:
    """The fields of a batch, as `input_ids int64 [2, 32], labels int64 [2, 32]`."""
    if not isinstance(batch, Mapping):
        return kind_of(batch)
    return ", ".join(f"{name} {_describe(value)}" for name, value in batch.items())


def _describe(value: object) -> str:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return kind_of(value) if isinstance(value, (list, tuple)) else type(value).__name__


def fingerprint(batch: object) -> str:
    """A hash of all numbers and texts in a batch."""
    digest = blake2b(digest_size=16)
    for piece in _pieces(batch):
        digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.hexdigest()


def _pieces(value: object) -> Iterator[bytes]:
    """A value as bytes, with its type and shape, so that different values of the same bytes differ."""
    yield type(value).__name__.encode()
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            yield str(name).encode()
            yield from _pieces(value[name])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _pieces(item)
    elif isinstance(value, torch.Tensor):
        yield f"{value.dtype} {list(value.shape)}".encode()
        if not value.is_meta:
            yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {list(value.shape)}".encode() + value.tobytes()
    elif isinstance(value, (str, int, float, bool, bytes)) or value is None:
        yield repr(value).encode()
