"""Errors of a user's own loader, each with its remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import format_exception
from typing import Any

from shardtune.data.user_loader.batch import COLLATE
from shardtune.errors import CheckpointError, ConfigError, DataError, counted

BUILD = "build_dataloader"
ALL_THE_SAME = "runner.allow_changes=[data.train_data_paths]"


def indivisible(global_batch_size: int, micro_batch_size: int, num_ranks: int) -> ConfigError:
    """The error for sizes that do not divide, with the nearest values of each that do."""
    unit = micro_batch_size * num_ranks
    below, above = global_batch_size // unit * unit, -(-global_batch_size // unit) * unit
    near = f"{below} or {above}" if below else f"{above}"
    per_rank, rest = divmod(global_batch_size, num_ranks)
    smaller = [size for size in range(1, per_rank + 1) if per_rank % size == 0] if not rest else []
    nearest = min(smaller, key=lambda size: abs(size - micro_batch_size), default=None)
    other = f", or actor.micro_batch_size to {nearest}" if nearest is not None else ""
    fitting = [n for n in range(1, num_ranks) if global_batch_size % (n * micro_batch_size) == 0]
    other += f", or start {fitting[-1]} rank{'s' if fitting[-1] > 1 else ''}" if fitting else ""
    return ConfigError(
        f"global_batch_size = {global_batch_size} is not divisible by micro_batch_size = "
        f"{micro_batch_size} times {num_ranks} rank{'s' if num_ranks > 1 else ''}",
        where="actor.global_batch_size",
        remedy=f"set actor.global_batch_size to {near}{other}",
    )


@contextmanager
def making(number: int) -> Iterator[None]:
    """Take a batch from the loader; an error that its samples caused is raised as a readable one."""
    try:
        yield
    except KeyError as error:
        raise _lacking(error, number) from error
    except RuntimeError as error:
        text = "".join(format_exception(error))  # all that comes out of a loader's process
        if "equal size" not in text or "default_collate" not in text:  # also in a collate function of the user's
            raise
        raise DataError(
            f"batch {number} cannot be made: a field differs in length between its samples",
            where=COLLATE,
            remedy="give the DataLoader a collate_fn that pads each field to the longest of the batch",
        ) from error


def _lacking(error: KeyError, number: int) -> DataError:
    text = str(error.args[0]) if error.args else ""
    inner = re.search(r"KeyError: '([^']+)'\s*$", text)  # only the text comes out of a loader's process
    return DataError(
        f"batch {number} cannot be made: a sample has no {inner[1] if inner else text!r}".replace('"', ""),
        where=COLLATE,
        remedy="give every sample the same fields: where one has none (an image, say), put in an empty or blank one",
    )


KEYS = ("num_samples", "sharded")
"""Of the dict that `build_dataloader` returns beside a loader."""


def built(returned: Any) -> tuple[Any, dict[str, Any]]:
    """The loader and the dict that `build_dataloader` returned; raises `DataError` for anything else."""
    pair = isinstance(returned, (tuple, list)) and len(returned) == 2
    if not pair or not isinstance(returned[1], Mapping):
        what = f"{len(returned)} things" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        raise DataError(
            f"{BUILD} returned {what}, not a loader and a dict",
            where=BUILD,
            remedy='return data_loader, {"num_samples": len(dataset)}',
        )
    unknown = [repr(key) for key in returned[1] if key not in KEYS]
    if unknown:
        raise DataError(
            f"the dict beside the loader has {', '.join(unknown)}, which nothing reads",
            where=BUILD,
            remedy=f"it may hold {' and '.join(map(repr, KEYS))}; keep anything else as an attribute of the worker",
        )
    return returned[0], dict(returned[1])


def between_batches(offset: int, rows: int) -> DataError:
    """The error for a position in the data that lies inside a batch."""
    return DataError(
        f"the position in the data is set to {offset} rows of the epoch, which is inside a batch: the ranks together "
        f"take {rows} rows at a time",
        where="_data_iter_offset",
        remedy="it counts rows, not batches, and advances by itself: set it only to a value that was read from it",
    )


def no_length(loader: object) -> DataError:
    """The error for a loader without a length."""
    return DataError(
        f"build_dataloader returned a {type(loader).__name__} without a length",
        where=BUILD,
        remedy="return a DataLoader over a map-style data set",
    )


def wrong_length(what: str, length: int) -> DataError:
    """The error for a loader that yields more or fewer batches than its length."""
    return DataError(
        f"the loader {what}, its length is {length}",
        where=BUILD,
        remedy="let __len__ return the number of batches that the loader yields",
    )


def too_large(rows: int, micro_batch_size: int) -> ConfigError:
    """The error for batches of more rows than a micro-batch."""
    return ConfigError(
        f"the loader yields batches of {counted(rows, 'row')}, actor.micro_batch_size is {micro_batch_size}",
        where=BUILD,
        remedy="build the loader with batch_size=self.cfg.actor.micro_batch_size",
    )


def ranks_differ() -> DataError:
    """The error for a loader that is not declared sharded and yields other batches on each rank."""
    return DataError(
        "the loader yields other batches on each rank, so rows would be left out",
        where=BUILD,
        remedy='return {"sharded": True} beside it, or let it yield the same batches on every rank',
    )


def data_changed(changes: Sequence[str]) -> CheckpointError:
    """The error for data that differ from a checkpoint's."""
    return CheckpointError(
        "the training data is not what this run was trained on so far:\n    " + "\n    ".join(changes),
        where=BUILD,
        remedy=f"put the data back, choose another runner.logger.experiment_name, or go on all the same with "
        f"{ALL_THE_SAME}",
    )


def what_differs(epoch: int, done: int) -> str:
    """What is the matter with a loader that, iterated again, yields other batches than before."""
    if done:
        return f"the first {done} batches of epoch {epoch} are not those that were trained on"
    return (
        "the loader yields other batches each time it is gone through, by something that no checkpoint holds, so those "
        f"of epoch {epoch} are not what they would have been"
    )


def other_batches(epoch: int, done: int) -> CheckpointError:
    """The error for a loader that, iterated again, yields other batches than before."""
    return CheckpointError(
        what_differs(epoch, done),
        where=BUILD,
        remedy="let the loader draw from torch's, numpy's or Python's generators (which are seeded for every epoch and "
        "batch), or from generators that are attributes of the data set, the sampler or the loader; or give it "
        f"state_dict and load_state_dict; to go on all the same: {ALL_THE_SAME}",
    )
