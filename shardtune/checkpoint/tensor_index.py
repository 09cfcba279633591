"""`index.json` of a folder of tensors: which file holds which part of each, so that a rank opens only its own files.

Each rank writes files of its own, so a folder has as many as there were ranks. The index is written with them and read
once, by one rank, which sends it to the others. It takes about 100 bytes per tensor, on any number of ranks: the parts
of ranks that follow one another are equal and equally far apart, and one line describes them all. Where the bytes of a
part lie, the header of its file says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardtune.checkpoint.atomic import read_json
from shardtune.checkpoint.safetensors_file import DTYPE_NAMES, DTYPES, read_header
from shardtune.data.checksum import is_sealed, sealed
from shardtune.errors import CheckpointError

INDEX = "index.json"
_OFFSETS = "DCP_SHARDING_INFO"
"""The key in a file's header under which torch's writer keeps where each part begins in its tensor."""
_ANOTHER = "continue from another checkpoint"


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a tensor that one file holds.

    Attributes:
        file: its name.
        offsets: where the block begins in the tensor.
        sizes: of the block.
    """

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Series:
    """Parts of one size at equal distances, in files at equal distances.

    Worked example: the rows of a 10 x 4 matrix on four ranks, three to a rank, are `Series(3, 0, 1, (0, 0), (3, 0),
    (3, 4))`, which begin at rows 0, 3 and 6, and `Series(1, 3, 0, (9, 0), (0, 0), (1, 4))`.

    Attributes:
        count: how many.
        file: the number of the first one's file.
        file_step: from one to the next.
        offsets: where the first one begins in the tensor.
        step: from one to the next, in each dimension; not negative.
        sizes: of each.
    """

    count: int
    file: int
    file_step: int
    offsets: tuple[int, ...]
    step: tuple[int, ...]
    sizes: tuple[int, ...]

    def touching(self, offsets: Sequence[int], sizes: Sequence[int]) -> range:
        """The numbers of the parts that have elements in common with a block."""
        first, last = 0, self.count - 1
        for begin, step, length, from_, size in zip(self.offsets, self.step, self.sizes, offsets, sizes, strict=True):
            if step:  # part k covers begin + k step … + length
                first = max(first, (from_ - begin - length) // step + 1)
                last = min(last, (from_ + size - 1 - begin) // step)
            elif begin >= from_ + size or begin + length <= from_:
                return range(0)
        return range(first, last + 1)

    def offsets_of(self, number: int) -> tuple[int, ...]:
        """Where a part begins in the tensor."""
        return tuple(begin + number * step for begin, step in zip(self.offsets, self.step, strict=True))


@dataclass(frozen=True, slots=True)
class IndexedTensor:
    """A stored tensor.

    Attributes:
        dtype: of its elements.
        shape: of the whole.
        parts: what files hold of it; none of a tensor without elements.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Series, ...]

    @property
    def stored_elements(self) -> int:
        """The elements in all files together."""
        return sum(series.count * math.prod(series.sizes) for series in self.parts)


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """The tensors of a folder, and the files they are in.

    Attributes:
        files: names, sorted.
        tensors: by name.
    """

    files: tuple[str, ...]
    tensors: Mapping[str, IndexedTensor]

    @classmethod
    def of(cls, folder: Path) -> TensorIndex:
        """That of a folder; what earlier versions wrote has no index, and the header of every file is read.

        Raises:
            CheckpointError: the index, or a file without one, is damaged.
        """
        return cls._read(folder / INDEX) if (folder / INDEX).exists() else cls._of_headers(folder)

    @classmethod
    def _read(cls, path: Path) -> TensorIndex:
        document = read_json(path)
        try:
            if not is_sealed(document):
                raise ValueError("it has no checksum of its own")
            return cls.of_document(document)
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            raise CheckpointError(f"{INDEX} is damaged: {problem}", where=str(path), remedy=_ANOTHER) from problem

    @classmethod
    def _of_headers(cls, folder: Path) -> TensorIndex:
        files = sorted(folder.glob("*.safetensors"))
        forms: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        rows: dict[str, list[tuple[int, ...]]] = {}
        for number, file in enumerate(files):
            tensors, metadata = read_header(file, CheckpointError)
            begins = _begins(file, metadata)
            for name, stored in tensors.items():
                offsets = begins.get(name, (0,) * len(stored.shape))
                dtype, shape = forms.get(name, (stored.dtype, stored.shape))
                if not len(offsets) == len(stored.shape) == len(shape):
                    raise _damaged(file, f"tensor '{name}' has another number of dimensions than elsewhere")
                ends = (begin + size for begin, size in zip(offsets, stored.shape, strict=True))
                forms[name] = dtype, tuple(map(max, shape, ends))
                rows.setdefault(name, []).append((number, *offsets, *stored.shape))
        return cls(
            tuple(file.name for file in files),
            {name: IndexedTensor(*form, series_of(np.array(rows[name]))) for name, form in forms.items()},
        )

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> TensorIndex:
        """That of a JSON value that `to_document` made.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: the value is no index.
        """
        files = tuple(map(str, document["files"]))
        if any(Path(name).name != name for name in files):
            raise ValueError("it names a file outside of its folder")
        tensors = {}
        for name, (dtype, shape, parts) in document["tensors"].items():
            series = tuple(_read_series(each, len(shape), len(files)) for each in parts)
            tensors[name] = IndexedTensor(DTYPES[dtype], tuple(map(int, shape)), series)
        return cls(files, tensors)

    def to_document(self) -> dict[str, object]:
        """As a JSON value."""
        tensors = {
            name: [DTYPE_NAMES[tensor.dtype], tensor.shape, [_written(series) for series in tensor.parts]]
            for name, tensor in self.tensors.items()
        }
        return {"files": self.files, "tensors": tensors}

    def to_text(self) -> str:
        """The content of `index.json`, with its checksum."""
        return json.dumps(sealed(self.to_document()), separators=(",", ":")) + "\n"

    def parts(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Part]:
        """The parts of a tensor that have elements in common with a block of it."""
        for series in self.tensors[name].parts if math.prod(sizes) else ():
            for number in series.touching(offsets, sizes):
                file = self.files[series.file + number * series.file_step]
                yield Part(file, series.offsets_of(number), series.sizes)


def series_of(parts: np.ndarray) -> tuple[Series, ...]:
    """The parts of a tensor as few series; parts without elements are left out.

    Args:
        parts: integers [parts, 1 + 2 x dimensions]: the number of the file, offsets, sizes.
    """
    dims = parts.shape[1] // 2
    parts = parts[(parts[:, 1 + dims :] > 0).all(axis=1)]
    if dims:  # by offsets, the first dimension fastest: so the ranks that cut it follow one another
        parts = parts[np.lexsort(parts[:, 1 : 1 + dims].T)]
    steps = np.diff(parts, axis=0)
    joins = (steps[:, 1 : 1 + dims] >= 0).all(axis=1) & (steps[:, 1 + dims :] == 0).all(axis=1)
    goes_on = joins[1:] & (steps[1:] == steps[:-1]).all(axis=1)
    ends = np.append(np.flatnonzero(~goes_on), len(goes_on))
    found, first = [], 0
    while first < len(parts):
        more = 0
        if first < len(steps) and joins[first]:
            more = int(ends[np.searchsorted(ends, first)]) - first + 1
        found.append(_series(parts[first], steps[first] if more else np.zeros_like(parts[first]), more + 1, dims))
        first += more + 1
    return tuple(found)


def _series(part: np.ndarray, step: np.ndarray, count: int, dims: int) -> Series:
    file, *numbers = part.tolist()
    file_step, *steps = step.tolist()
    return Series(count, file, file_step, tuple(numbers[:dims]), tuple(steps[:dims]), tuple(numbers[dims:]))


def _written(series: Series) -> list[object]:
    return [series.count, series.file, series.file_step, series.offsets, series.step, series.sizes]


def _read_series(stored: Sequence[Any], dims: int, num_files: int) -> Series:
    count, file, file_step, *places = stored
    offsets, step, sizes = (tuple(map(int, each)) for each in places)
    series = Series(int(count), int(file), int(file_step), offsets, step, sizes)
    last = series.file + (series.count - 1) * series.file_step
    if (
        not all(0 <= number < num_files for number in (series.file, last))
        or series.count < 1
        or any(len(each) != dims for each in (offsets, step, sizes))
        or any(number < 0 for number in (*offsets, *step))
        or any(number < 1 for number in sizes)
    ):
        raise ValueError(f"{stored} describes no parts of a tensor of {dims} dimensions in {num_files} files")
    return series


def _begins(file: Path, metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Where the parts in a file begin in their tensors."""
    try:
        stored: dict[str, dict[str, list[int]]] = json.loads(metadata.get(_OFFSETS, "{}"))
        return {name: tuple(map(int, entry["saved_offsets"])) for name, entry in stored.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise _damaged(file, f"{_OFFSETS}: {problem}") from problem


def _damaged(file: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{file.name} has a damaged safetensors header: {what}", where=str(file), remedy=_ANOTHER)
