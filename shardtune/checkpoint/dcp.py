"""Named tensors, sharded or not, in safetensors files by torch's distributed checkpoint; no file is ever unpickled.

Every rank writes its own shards; any other number of ranks reads them back, bit for bit. Optimizer state is flattened
into named tensors and a JSON description that is enough to rebuild it before a first step.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedWriter, FileIO, IOBase
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future as TorchFuture

from shardtune.checkpoint.atomic import write_text
from shardtune.checkpoint.checksums import add_checksums
from shardtune.checkpoint.safetensors_file import StoredTensor, read_header, with_sorted_metadata
from shardtune.checkpoint.save_plan import PartsPlanner, WrittenFile
from shardtune.checkpoint.tensor_index import INDEX, TensorIndex
from shardtune.checkpoint.tensor_reader import (
    Plan,
    Together,
    check_same,
    plan_reads,
    read_planned,
    stored_part,
    verify_share,
)
from shardtune.data.checksum import BLOCK_BYTES, checksum
from shardtune.errors import CheckpointError

# The writer holds one file's bytes in memory, twice, while it writes them.
_FILE_BYTES = 256 << 20

# One process without a process group is a supported case here, not an oversight.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def save_tensors(
    path: str | Path, tensors: Mapping[str, torch.Tensor], *, process_group: dist.ProcessGroup | None = None
) -> None:
    """Writes `tensors` into the folder `path`, durably; all ranks call it with the same names in the same order.

    A plain tensor is the same on all ranks and is written by one of them; of a DTensor each rank writes its shard.
    Returns when the files of all ranks are on the disk. `checksums.json` beside them is there once the whole folder is
    synced (`publish`, `sync_tree`).

    Raises:
        CheckpointError: the disk is full or cannot be written; on every rank.
    """
    folder = Path(path)
    if not tensors:
        return
    try:
        planner = PartsPlanner()
        writer = _Writer(folder, planner)
        dcp.save(_contiguous(tensors), storage_writer=writer, planner=planner, process_group=process_group)
    except (CheckpointException, OSError) as problem:
        raise write_error(folder, problem) from problem


@dataclass(frozen=True, slots=True)
class PendingSave:
    """A save that runs in parallel to training. When rank 0's is done, the files of all ranks are on the disk."""

    folder: Path
    future: Future[None] | None

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self.future is None or self.future.done()

    def wait(self) -> None:
        """Returns when the files are on the disk.

        Raises:
            CheckpointError: as `save_tensors` does.
        """
        if self.future is None:
            return
        try:
            self.future.result()
        except (CheckpointException, OSError) as problem:
            raise write_error(self.folder, problem) from problem


def async_save_tensors(
    path: str | Path, tensors: Mapping[str, torch.Tensor], *, process_group: dist.ProcessGroup | None = None
) -> PendingSave:
    """Copies `tensors` to host memory, then writes them from a thread; they may change as soon as this returns.

    Args:
        process_group: with several ranks, a gloo group that nothing else uses: its collectives run beside training.
    """
    folder = Path(path)
    if not tensors:
        return PendingSave(folder, None)
    if process_group is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError("several ranks save asynchronously through a process group of their own")
    planner = PartsPlanner()
    writer = _Writer(folder, planner)
    save = dcp.async_save(_contiguous(tensors), storage_writer=writer, planner=planner, process_group=process_group)
    return PendingSave(folder, save if isinstance(save, Future) else save.upload_completion)


@torch.no_grad()
def load_tensors(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    widen: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Fills `tensors` in place from the folder `path`; all ranks call it with the same names.

    The first rank reads the index and sends it to the others; each rank opens the files that hold its own parts.

    Args:
        widen: whether tensors may have been saved in a dtype whose values theirs holds too, such as bf16 for fp32.

    Raises:
        CheckpointError: names, shapes or dtypes are not exactly those saved, or a file is damaged (nothing is changed
            then); on every rank.
    """
    folder, ranks = Path(path), Together(process_group)
    with _readable(folder):
        index = ranks.by_first(lambda: TensorIndex.of(folder))
        narrow = _as_saved(index, tensors) if widen else {}
        plan = ranks.by_each(lambda: _checked_plan(folder, index, {**tensors, **narrow}, ranks))
        ranks.by_each(lambda: read_planned(plan))
    for name, tensor in narrow.items():
        tensors[name].copy_(tensor)


def _as_saved(index: TensorIndex, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fresh tensors for those that were saved in a dtype of fewer values."""
    saved = {name: index.tensors[name].dtype for name in tensors if name in index.tensors}
    return {
        name: torch.empty_like(tensors[name].detach(), dtype=dtype)
        for name, dtype in saved.items()
        if dtype != tensors[name].dtype == torch.promote_types(dtype, tensors[name].dtype)
    }


def _checked_plan(folder: Path, index: TensorIndex, tensors: Mapping[str, torch.Tensor], ranks: Together) -> Plan:
    check_same(folder, index, tensors)
    plan = plan_reads(folder, index, tensors)
    verify_share(folder, *ranks.place)
    return plan


def stored_names(path: str | Path) -> list[str]:
    """The names of the tensors saved in a folder, sorted.

    Raises:
        CheckpointError: its index cannot be read.
    """
    with _readable(Path(path)):
        return sorted(TensorIndex.of(Path(path)).tensors)


class StoredTensors:
    """The tensors of a folder, each read whole, in this process alone.

    Args:
        path: the folder.
    """

    def __init__(self, path: str | Path) -> None:
        self._folder = Path(path)
        self._index = TensorIndex.of(self._folder)
        self._headers: dict[str, Mapping[str, StoredTensor]] = {}

    @property
    def names(self) -> list[str]:
        """Of all tensors, sorted."""
        return sorted(self._index.tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        """A tensor on the CPU, joined from the parts that ranks wrote."""
        stored = self._index.tensors[name]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        for part in self._index.parts(name, (0,) * tensor.ndim, stored.shape):
            file = self._folder / part.file
            if part.file not in self._headers:
                self._headers[part.file] = read_header(file, CheckpointError)[0]
            source = stored_part(self._index, name, part, self._headers[part.file], file)
            places = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))
            source.read_into(tensor[places], (0,) * tensor.ndim)
        return tensor


class _SummedStream(BufferedWriter):
    """A new safetensors file, and the checksum of what is written into it; the writer writes each file as one piece.

    Each block is hashed and then written, so that the second reads it from the processor's cache.
    """

    def __init__(self, path: Path, sums: dict[str, tuple[int, str]]) -> None:
        super().__init__(FileIO(path, "wb"))
        self._path, self._sums = path, sums

    def write(self, data: bytes, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        content = memoryview(data)
        header, rest = with_sorted_metadata(content)
        found = xxhash.xxh3_128()
        for block in (header, *(rest[start : start + BLOCK_BYTES] for start in range(0, len(rest), BLOCK_BYTES))):
            found.update(block)
            super().write(block)
        self.flush()  # the writer syncs the file next, without this
        self._sums[self._path.name] = len(content), found.hexdigest()
        return len(content)


class _SummedFiles(FileSystem):
    """Files of which the size and checksum are noted, by name, from the bytes in memory."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[IOBase]:
        with _SummedStream(Path(path), self.sums) as stream:
            yield stream


class _Writer(dcp.HuggingFaceStorageWriter):
    """Writes what is in the files of all ranks into `index.json`, and their checksums into `checksums.json`.

    Args:
        folder: created here.
        planner: of this save.
    """

    def __init__(self, folder: Path, planner: PartsPlanner) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder, self._planner = folder, planner
        self.fs = self._files = _SummedFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        files = _cut(plan)
        storage = {**plan.storage_data, "fqn_to_index_mapping": files}
        super().write_data(replace(plan, storage_data=storage), planner).wait()
        numbers = {name: number for number, name in enumerate(self._planner.state_dict)}
        held: dict[int, list[int]] = {}
        for name, number in files.items():
            held.setdefault(number, []).append(numbers[name])
        sums = sorted(self._files.sums.items())  # by the numbers in their names
        written: TorchFuture[list[WriteResult]] = TorchFuture()
        written.set_result(
            [
                WriteResult(MetadataIndex(name), size, WrittenFile(name, size, digest, np.array(tensors)))
                for (name, (size, digest)), tensors in zip(sums, held.values(), strict=True)
            ]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = [[result.storage_data for result in of_rank] for of_rank in results]
        text = self._planner.index(files).to_text()
        write_text(self._folder / INDEX, text)  # durably, as the files are
        sums = {file.name: [(file.size, file.digest)] for of_rank in files for file in of_rank}
        content = text.encode()
        add_checksums(self._folder, {**sums, INDEX: [(len(content), checksum(content))]}, durably=False)


def _cut(plan: SavePlan) -> dict[str, int]:
    """The number of the file, from 1, for each tensor of which this rank writes a part."""
    files: dict[str, int] = {}
    number, size = 1, 0
    for item in plan.items:
        part = item.tensor_storage_size() or 0
        if size and size + part > _FILE_BYTES:
            number, size = number + 1, 0
        files[item.index.fqn], size = number, size + part
    return files


def _contiguous(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach() if isinstance(tensor, DTensor) else tensor.detach().contiguous()
        for name, tensor in tensors.items()
    }


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turn an error of the disk into one that names the folder."""
    try:
        yield
    except OSError as problem:
        raise CheckpointError(
            f"the checkpoint cannot be read: {problem.strerror or problem}",
            where=str(problem.filename or folder),
            remedy="continue from another checkpoint",
        ) from problem


def _cause(problem: CheckpointException | OSError) -> str:
    """The message of a disk error; any other cause is not the user's to fix, and is raised again."""
    if isinstance(problem, OSError):
        return problem.strerror or str(problem)
    for rank, (error, _) in problem.failures.items():
        if isinstance(error, OSError):
            return f"rank {rank}: {error}"
    raise problem


def write_error(folder: Path, problem: CheckpointException | OSError) -> CheckpointError:
    """The error for a checkpoint that cannot be written; what is no fault of the disk is raised again."""
    return CheckpointError(
        f"the checkpoint cannot be written: {_cause(problem)}",
        where=str(folder),
        remedy="make room or give write permission, or choose another directory (of a run: runner.logger.log_path)",
    )
