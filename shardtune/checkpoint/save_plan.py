"""Which rank writes which part of which tensor, decided by rank 0 from a few numbers of each rank.

torch's planner collects an object for every part of every tensor on rank 0, and sends an object for each of them to
every rank: with 300 tensors on 1,024 ranks that takes half a minute. Here a rank sends one array, and gets one back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from shardtune.checkpoint.tensor_index import IndexedTensor, TensorIndex, series_of
from shardtune.data.checksum import checksum

SMALL_BYTES = 64 << 10
"""Of a part that several ranks have, up to which the first of them writes it: one file has all counters of steps."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a rank has of the tensors.

    Attributes:
        names: the checksum of the names of all tensors, in their order.
        places: integers [parts, 1 + 2 x dimensions], a row for each tensor of which the rank has a part: the tensor's
            number, offsets and sizes. Tensors of fewer dimensions have zeros and ones in the last columns.
    """

    names: str
    places: np.ndarray


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that a rank has written.

    Attributes:
        name: of the file.
        size: in bytes.
        digest: of its content.
        tensors: the numbers of the tensors of which it holds a part.
    """

    name: str
    size: int
    digest: str
    tensors: np.ndarray


class PartsPlanner(dcp.DefaultSavePlanner):
    """Lets each part be written by one of the ranks that have it."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._items: list[WriteItem] = []
        self._written: list[np.ndarray] = []

    def create_local_plan(self) -> SavePlan:
        """The plan of this rank: what it has."""
        numbers = {name: number for number, name in enumerate(self.state_dict)}
        items = super().create_local_plan().items
        self._items = [item for item in items if math.prod(_sizes(item)) or not self.state_dict[item.index.fqn].numel()]
        dims = max((tensor.ndim for tensor in self.state_dict.values()), default=0)
        places = [_place(item, numbers[item.index.fqn], dims) for item in self._items]
        names = checksum("\n".join(self.state_dict).encode())
        return SavePlan([], planner_data=Parts(names, np.array(places, np.int64).reshape(-1, 1 + 2 * dims)))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans of all ranks: which of their parts they write."""
        parts: list[Parts] = [plan.planner_data for plan in all_plans]
        if any(of_rank.names != parts[0].names for of_rank in parts):
            raise ValueError("the ranks save tensors of different names, or in different orders")
        tensors = list(self.state_dict.values())
        chosen = choose_writers([of_rank.places for of_rank in parts], [tensor.element_size() for tensor in tensors])
        self._written = [of_rank.places[kept] for of_rank, kept in zip(parts, chosen, strict=True)]
        self._check_complete()
        return [SavePlan([], planner_data=kept) for kept in chosen], Metadata({})

    def _check_complete(self) -> None:
        tensors, written = self.state_dict, np.concatenate(self._written)
        elements = np.zeros(len(tensors), np.int64)
        np.add.at(elements, written[:, 0], written[:, 1 + written.shape[1] // 2 :].prod(axis=1))
        for (name, tensor), found in zip(tensors.items(), elements.tolist(), strict=True):
            if found != tensor.numel():
                raise ValueError(f"the ranks have {found:,} elements of tensor '{name}', which has {tensor.numel():,}")

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan of this rank as torch's writer takes it: the parts that it writes."""
        items = [item for item, kept in zip(self._items, new_plan.planner_data, strict=True) if kept]
        return super().finish_plan(replace(new_plan, items=items, planner_data=None))

    def index(self, files: Sequence[Sequence[WrittenFile]]) -> TensorIndex:
        """The index of what was written, on rank 0.

        Args:
            files: of each rank.
        """
        names = sorted(file.name for of_rank in files for file in of_rank)
        numbers = {name: number for number, name in enumerate(names)}
        file_of = np.full((len(files), len(self.state_dict)), -1)
        for rank, of_rank in enumerate(files):
            for file in of_rank:
                file_of[rank, file.tensors] = numbers[file.name]
        return TensorIndex(tuple(names), _indexed(self.state_dict, self._written, file_of))


def choose_writers(places: Sequence[np.ndarray], element_bytes: Sequence[int]) -> list[np.ndarray]:
    """Which of its parts each rank writes: of those that have a part, the one with the fewest bytes so far.

    Args:
        places: of each rank, as `Parts.places`.
        element_bytes: of each tensor.

    Returns:
        For each rank a boolean for each of its rows.
    """
    rows = np.concatenate(places)
    ranks = np.repeat(np.arange(len(places)), [len(of_rank) for of_rank in places])
    dims = rows.shape[1] // 2
    order = np.lexsort((ranks, *rows[:, 1 : 1 + dims].T, rows[:, 0]))
    rows, ranks = rows[order], ranks[order]
    begins = np.flatnonzero(np.append(True, (rows[1:, : 1 + dims] != rows[:-1, : 1 + dims]).any(axis=1)))[: len(rows)]
    counts = np.diff(np.append(begins, len(rows)))
    sizes = rows[begins, 1 + dims :].prod(axis=1) * np.array(element_bytes, np.int64)[rows[begins, 0]]
    kept = np.zeros(len(rows), bool)
    kept[_chosen(ranks, rows[begins, 0], begins, counts, sizes, len(places))] = True
    found = np.empty(len(rows), bool)
    found[order] = kept
    return np.split(found, np.cumsum([len(of_rank) for of_rank in places])[:-1])


def _chosen(
    ranks: np.ndarray, tensors: np.ndarray, begins: np.ndarray, counts: np.ndarray, sizes: np.ndarray, num_ranks: int
) -> np.ndarray:
    """The row that is written of each part, whose rows, one per rank that has it, lie together.

    A rank has one part of a tensor, so the parts of one tensor have different ranks, and are assigned at once.
    """
    chosen, load = begins.copy(), np.zeros(num_ranks, np.int64)
    np.add.at(load, ranks[begins[counts == 1]], sizes[counts == 1])
    shared = np.flatnonzero((counts > 1) & (sizes > SMALL_BYTES))
    alike = np.stack([tensors[shared], counts[shared]], axis=1)
    cuts = np.flatnonzero((alike[1:] != alike[:-1]).any(axis=1)) + 1
    for group in np.split(shared, cuts) if len(shared) else ():
        rows = begins[group, None] + np.arange(int(counts[group[0]]))
        least = load[ranks[rows]].argmin(axis=1)
        chosen[group] += least
        load[ranks[chosen[group]]] += sizes[group]
    return chosen


def _indexed(
    tensors: Mapping[str, torch.Tensor], written: Sequence[np.ndarray], file_of: np.ndarray
) -> dict[str, IndexedTensor]:
    rows = np.concatenate(written)
    ranks = np.repeat(np.arange(len(written)), [len(of_rank) for of_rank in written])
    rows = np.column_stack([rows, file_of[ranks, rows[:, 0]]])
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    bounds = np.searchsorted(rows[:, 0], np.arange(len(tensors) + 1))
    width, found = (rows.shape[1] - 2) // 2, {}
    for number, (name, tensor) in enumerate(tensors.items()):
        of_tensor = rows[bounds[number] : bounds[number + 1]]
        dims = range(1, 1 + tensor.ndim)
        parts = series_of(of_tensor[:, [-1, *dims, *(width + each for each in dims)]])
        found[name] = IndexedTensor(tensor.dtype, tuple(tensor.shape), parts)
    return found


def _place(item: WriteItem, number: int, dims: int) -> list[int]:
    assert item.tensor_data is not None
    offsets, sizes = item.tensor_data.chunk.offsets, _sizes(item)
    return [number, *offsets, *[0] * (dims - len(offsets)), *sizes, *[1] * (dims - len(sizes))]


def _sizes(item: WriteItem) -> Sequence[int]:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes
