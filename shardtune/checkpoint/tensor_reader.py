"""Reads this rank's parts of stored tensors: from the files that hold them, each opened once for all that is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from shardtune.checkpoint.checksums import read_checksums, share
from shardtune.checkpoint.safetensors_file import StoredTensor, opened, read_header
from shardtune.checkpoint.tensor_index import INDEX, Part, TensorIndex
from shardtune.data.checksum import content_fault
from shardtune.errors import CheckpointError
from shardtune.parallel.meta_init import shard_of

T = TypeVar("T")
_ANOTHER = "continue from another checkpoint"


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    """A value, or the error in its place."""

    value: T | None = None
    error: Exception | None = None

    @classmethod
    def of(cls, action: Callable[[], T]) -> _Outcome[T]:
        try:
            return cls(action())
        except Exception as error:
            return cls(error=error)


class Together:
    """The ranks that load together: an error of one of them is raised on all, so that none waits for it.

    Args:
        group: of the ranks; None: all, or this process alone.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._several = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1

    @property
    def place(self) -> tuple[int, int]:
        """The number of this rank, and how many there are."""
        return (dist.get_rank(self._group), dist.get_world_size(self._group)) if self._several else (0, 1)

    def by_first(self, action: Callable[[], T]) -> T:
        """What an action returns on the first rank, on all ranks."""
        if not self._several:
            return action()
        first = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        box = [_Outcome.of(action) if self.place[0] == 0 else None]
        dist.broadcast_object_list(box, src=first, group=self._group)
        outcome = box[0]
        assert outcome is not None
        if outcome.error is not None:
            raise outcome.error
        return outcome.value  # pyright: ignore[reportReturnType]

    def by_each(self, action: Callable[[], T]) -> T:
        """What an action returns on this rank, once it has succeeded on all of them."""
        if not self._several:
            return action()
        mine = _Outcome.of(action)
        errors: list[Exception | None] = [None] * self.place[1]
        dist.all_gather_object(errors, mine.error, group=self._group)
        if mine.error is not None:
            raise mine.error
        for error in errors:
            if error is not None:
                raise error
        return mine.value  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True)
class _Read:
    """A block of a stored part, and the memory that it goes to.

    Attributes:
        source: the part.
        offsets: where the block begins in the part.
        target: a view of a tensor's memory.
    """

    source: StoredTensor
    offsets: tuple[int, ...]
    target: torch.Tensor


Plan = Mapping[Path, list[_Read]]
"""What is read, by file."""


def plan_reads(folder: Path, index: TensorIndex, tensors: Mapping[str, torch.Tensor]) -> Plan:
    """Find what this rank reads; of the files that it needs the headers are read.

    Args:
        folder: of the files.
        index: of the folder.
        tensors: that are going to be filled; each must be stored.

    Raises:
        CheckpointError: a file is gone or damaged.
    """
    plan: dict[Path, list[_Read]] = {}
    headers: dict[Path, Mapping[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        mine = shard_of(tensor)
        for part in index.parts(name, mine.offsets, mine.local.shape):
            file = folder / part.file
            if file not in headers:
                headers[file] = read_header(file, CheckpointError)[0]
            source = stored_part(index, name, part, headers[file], file)
            plan.setdefault(file, []).append(_overlap(source, part, mine.local, mine.offsets))
    return plan


def stored_part(
    index: TensorIndex, name: str, part: Part, header: Mapping[str, StoredTensor], file: Path
) -> StoredTensor:
    """A part of a tensor in its file.

    Raises:
        CheckpointError: the file's header does not have it as the index does.
    """
    found = header.get(name)
    if found is None or (found.shape, found.dtype) != (part.sizes, index.tensors[name].dtype):
        raise CheckpointError(
            f"{file.name} does not hold the part of tensor '{name}' that {INDEX} names",
            where=str(file),
            remedy=_ANOTHER,
        )
    return found


def read_planned(plan: Plan) -> None:
    """Fill the planned tensors, in the order in which the bytes lie in each file."""
    for file, reads in plan.items():
        with opened(file) as descriptor:
            for read in sorted(reads, key=lambda read: read.source.start):
                read.source.read_from(descriptor, read.target, read.offsets)


def verify_share(folder: Path, rank: int, num_ranks: int) -> None:
    """Compare a rank's share of the files with `checksums.json`; a run's checkpoint has them elsewhere, verified.

    Raises:
        CheckpointError: a file is damaged.
    """
    for name, parts in share(read_checksums(folder) or {}, rank, num_ranks).items():
        fault = content_fault(folder / name, parts)
        if fault is not None:
            raise CheckpointError(f"{name} {fault}", where=str(folder), remedy=_ANOTHER)


def check_same(folder: Path, index: TensorIndex, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse stored tensors whose names, shapes or dtypes are not those expected, or of which a part is missing.

    Raises:
        CheckpointError: names them.
    """
    complaints = list(_differences(index, tensors))
    if complaints:
        raise CheckpointError(
            f"the checkpoint is of another model or optimizer: {'; '.join(complaints)}",
            where=str(folder),
            remedy="continue with the recipe it was made with, or start another run (runner.logger.experiment_name)",
        )
    for name, tensor in tensors.items():
        if index.tensors[name].stored_elements < tensor.numel():
            raise CheckpointError(
                f"a part of tensor '{name}' is missing: a file of the checkpoint is gone",
                where=str(folder),
                remedy=_ANOTHER,
            )


def _differences(index: TensorIndex, tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    stored = index.tensors
    differing = [
        f"{name} (saved: {_form(stored[name].dtype, stored[name].shape)}; "
        f"expected: {_form(tensor.dtype, tuple(tensor.shape))})"
        for name, tensor in tensors.items()
        if name in stored and (stored[name].shape, stored[name].dtype) != (tuple(tensor.shape), tensor.dtype)
    ]
    for names, what in (
        ([name for name in tensors if name not in stored], "not in it"),
        ([name for name in stored if name not in tensors], "not in the model"),
        (differing, "differ in shape or dtype"),
    ):
        if names:
            yield f"{len(names)} {what}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"


def _form(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _overlap(source: StoredTensor, part: Part, local: torch.Tensor, offsets: tuple[int, ...]) -> _Read:
    """The elements that a stored part and this rank's part of a tensor have in common."""
    begins = tuple(map(max, part.offsets, offsets))
    ends = [min(a + n, b + m) for a, n, b, m in zip(part.offsets, part.sizes, offsets, local.shape, strict=True)]
    inside = tuple(slice(begin - own, end - own) for begin, end, own in zip(begins, ends, offsets, strict=True))
    return _Read(source, tuple(b - a for a, b in zip(part.offsets, begins, strict=True)), local[inside])
