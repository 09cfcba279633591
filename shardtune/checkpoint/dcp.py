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
from dataclasses import dataclass
from io import BufferedWriter, FileIO, IOBase
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future as TorchFuture

from shardtune.checkpoint.checksums import add_checksums, read_checksums, share
from shardtune.checkpoint.safetensors_file import StoredTensor, read_header
from shardtune.data.checksum import BLOCK_BYTES, content_fault
from shardtune.errors import CheckpointError, ShardtuneError

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
        dcp.save(_contiguous(tensors), storage_writer=_writer(folder, tensors), process_group=process_group)
    except (CheckpointException, OSError) as problem:
        raise _write_error(folder, problem) from problem


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
            raise _write_error(self.folder, problem) from problem


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
    writer = _writer(folder, tensors)
    save = dcp.async_save(_contiguous(tensors), storage_writer=writer, process_group=process_group)
    return PendingSave(folder, save if isinstance(save, Future) else save.upload_completion)


def load_tensors(
    path: str | Path, tensors: Mapping[str, torch.Tensor], *, process_group: dist.ProcessGroup | None = None
) -> None:
    """Fills `tensors` in place from the folder `path`; all ranks call it with the same names.

    Raises:
        CheckpointError: names, shapes or dtypes are not exactly those saved, or a file is damaged (nothing is changed
            then).
    """
    folder = Path(path)
    if not tensors:
        _check_same(folder, _Reader(str(folder)).read_metadata(), tensors)
        return
    planner = dcp.DefaultLoadPlanner(allow_partial_load=False)
    try:
        # The reader checks inside this call, in which the ranks exchange their errors: none waits for one that failed.
        reader = _Reader(str(folder), tensors)
        dcp.load(dict(tensors), storage_reader=reader, planner=planner, process_group=process_group)
    except (CheckpointException, OSError) as problem:
        for error, _ in problem.failures.values() if isinstance(problem, CheckpointException) else ():
            if isinstance(error, ShardtuneError):
                raise error from problem
        raise CheckpointError(
            f"the checkpoint cannot be read: {_cause(problem)}",
            where=str(folder),
            remedy="continue from another checkpoint",
        ) from problem


def stored_names(path: str | Path) -> list[str]:
    """The names of the tensors saved in a folder, sorted."""
    return sorted(_Reader(str(path)).read_metadata().state_dict_metadata)


class StoredTensors:
    """The tensors of a folder, each read whole, in this process alone.

    Args:
        path: the folder.
    """

    def __init__(self, path: str | Path) -> None:
        self._reader = _Reader(str(path))
        self._stored = self._reader.read_metadata()
        self._reader.storage_data = self._stored.storage_data

    @property
    def names(self) -> list[str]:
        """Of all tensors, sorted."""
        return sorted(self._stored.state_dict_metadata)

    def __getitem__(self, name: str) -> torch.Tensor:
        """A tensor on the CPU, joined from the parts that ranks wrote."""
        stored = self._stored.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        for chunk in stored.chunks:
            places = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            source = self._reader.stored(MetadataIndex(name, chunk.offsets))
            source.read_into(tensor[places], (0,) * tensor.ndim)
        return tensor


class _Reader(dcp.HuggingFaceStorageReader):
    """Reads with `pread` into the shards instead of mapping whole files, and damaged files are named.

    Args:
        path: the folder.
        expected: tensors that must be exactly those stored; None: whatever is stored.
    """

    def __init__(self, path: str, expected: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__(path)
        self._expected = expected
        self._problem: CheckpointError | None = None

    def read_metadata(self) -> Metadata:
        self._tensors = {}
        try:
            for file in sorted(Path(self.path).glob("*.safetensors")):
                self._tensors[file] = read_header(file, CheckpointError)[0]
            if self._expected is not None:
                _verify(Path(self.path))
        except CheckpointError as problem:
            if self._expected is None:
                raise
            self._tensors, self._problem = {}, problem  # torch would go on without metadata if it were raised here
        if not self._tensors:
            return Metadata(state_dict_metadata={}, storage_data={})
        return super().read_metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: object, **__: object) -> None:
        if self._problem is not None:
            raise self._problem
        if self._expected is not None:
            _check_same(Path(self.path), metadata, self._expected)
        super().set_up_storage_reader(metadata, is_coordinator)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        for item in plan.items:
            stored = self.stored(item.storage_index)
            target = planner.resolve_tensor(item).detach()
            # A request covers a block of the stored chunk, offsets counted inside it.
            stored.read_into(target, tuple(item.storage_offsets))
            planner.commit_tensor(item, target)
        future: TorchFuture[None] = TorchFuture()
        future.set_result(None)
        return future

    def stored(self, index: MetadataIndex) -> StoredTensor:
        """The part of a tensor that one rank wrote."""
        return self._tensors[Path(self.storage_data[index].relative_path)][index.fqn]


class _SummedStream(BufferedWriter):
    """A new file, and the checksum of what is written into it; the writer writes each file as one piece.

    Each block is hashed and then written, so that the second reads it from the processor's cache.
    """

    def __init__(self, path: Path, sums: dict[str, tuple[int, str]]) -> None:
        super().__init__(FileIO(path, "wb"))
        self._path, self._sums = path, sums

    def write(self, data: bytes, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        found, content = xxhash.xxh3_128(), memoryview(data)
        for start in range(0, len(content), BLOCK_BYTES):
            block = content[start : start + BLOCK_BYTES]
            found.update(block)
            super().write(block)
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
    """Writes the checksums of the files of all ranks into `checksums.json`; they go the way of the write results."""

    def __init__(self, folder: Path, files: dict[str, int]) -> None:
        super().__init__(str(folder), fqn_to_index_mapping=files, save_distributed=True)
        self._folder = folder
        self.fs = self._files = _SummedFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        super().write_data(plan, planner).wait()
        written: TorchFuture[list[WriteResult]] = TorchFuture()
        written.set_result(
            [WriteResult(MetadataIndex(name), size, digest) for name, (size, digest) in self._files.sums.items()]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = [file for of_rank in results for file in of_rank]
        sums = {file.index.fqn: [(file.size_in_bytes, file.storage_data)] for file in files}
        add_checksums(self._folder, sums, durably=False)


def _writer(folder: Path, tensors: Mapping[str, torch.Tensor]) -> dcp.HuggingFaceStorageWriter:
    files: dict[str, int] = {}
    number, size = 1, 0
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if size and size + local.nbytes > _FILE_BYTES:
            number, size = number + 1, 0
        files[name], size = number, size + local.nbytes
    return _Writer(folder, files)


def _verify(folder: Path) -> None:
    """Compare this rank's share of the files with `checksums.json`; a run's checkpoint has them elsewhere, verified."""
    together = dist.is_available() and dist.is_initialized()
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    for name, parts in share(read_checksums(folder) or {}, rank, num_ranks).items():
        fault = content_fault(folder / name, parts)
        if fault is not None:
            raise CheckpointError(f"{name} {fault}", where=str(folder), remedy="continue from another checkpoint")


def _contiguous(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach() if isinstance(tensor, DTensor) else tensor.detach().contiguous()
        for name, tensor in tensors.items()
    }


def _check_same(folder: Path, metadata: Metadata, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse stored tensors whose names, shapes or dtypes are not those expected, or of which a part is missing."""
    stored = {n: m for n, m in metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
    missing = [name for name in tensors if name not in stored]
    unexpected = [name for name in stored if name not in tensors]
    differing = [
        f"{name} (saved: {_form(meta.properties.dtype, meta.size)}; "
        f"expected: {_form(tensors[name].dtype, tensors[name].shape)})"
        for name, meta in stored.items()
        if name in tensors
        and (tuple(meta.size) != tuple(tensors[name].shape) or meta.properties.dtype != tensors[name].dtype)
    ]
    complaints = [
        f"{len(names)} {what}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
        for what, names in (
            ("not in it", missing),
            ("not in the model", unexpected),
            ("differ in shape or dtype", differing),
        )
        if names
    ]
    if complaints:
        raise CheckpointError(
            f"the checkpoint is of another model or optimizer: {'; '.join(complaints)}",
            where=str(folder),
            remedy="continue with the recipe it was made with, or start another run (runner.logger.experiment_name)",
        )
    for name, meta in stored.items():
        if sum(chunk.sizes.numel() for chunk in meta.chunks) < meta.size.numel():
            raise CheckpointError(
                f"a part of tensor '{name}' is missing: a file of the checkpoint is gone",
                where=str(folder),
                remedy="continue from another checkpoint",
            )


def _form(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _cause(problem: CheckpointException | OSError) -> str:
    """The message of a disk error; any other cause is not the user's to fix, and is raised again."""
    if isinstance(problem, OSError):
        return problem.strerror or str(problem)
    for rank, (error, _) in problem.failures.items():
        if isinstance(error, OSError | ShardtuneError):
            return f"rank {rank}: {error}"
    raise problem


def _write_error(folder: Path, problem: CheckpointException | OSError) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint cannot be written: {_cause(problem)}",
        where=str(folder),
        remedy="make room or give write permission, or set runner.logger.log_path to another directory",
    )
