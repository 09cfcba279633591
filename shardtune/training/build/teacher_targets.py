"""The teacher's most probable tokens of each target, computed once before training and kept beside the row cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import torch

from shardtune.batch import Batch, PackedBatch
from shardtune.checkpoint.atomic import write_json
from shardtune.config import Recipe
from shardtune.data.cache.dataset import TokenDataset
from shardtune.data.cache_directory import cache_root, writable
from shardtune.data.sources.fingerprint import contents
from shardtune.errors import DataError
from shardtune.models.distillation import TeacherLogits, TopTokens
from shardtune.models.loss import chunk_rows
from shardtune.models.pretrained import model_directory
from shardtune.parallel.ranks import Ranks
from shardtune.training.build.teacher import ShardedTeacher

R = TypeVar("R")
FOLDER = "teachers"
TOKENS, LOG_P, ROWS, DONE = "tokens.bin", "log_p.bin", "rows.bin", "done.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class TargetTable:
    """The files of the teacher's tokens: a place for each token of each row, of which those of targets are written.

    Worked example: rows of 3 and 2 tokens have the places 0 to 2 and 3 to 4. The target that is predicted from token 1
    of row 1 is at place 3 + 1.

    Attributes:
        folder: of the files.
        starts: int64 [rows + 1], the first place of each row.
        top_k: tokens of a target.
        columns: the teacher's logits that count.
        dtype: of their log-probabilities.
    """

    folder: Path
    starts: np.ndarray
    top_k: int
    columns: int
    dtype: np.dtype

    @classmethod
    def of(cls, recipe: Recipe, rows: TokenDataset, columns: int) -> TargetTable:
        """The table of a recipe's teacher and rows; its directory is named by both."""
        teacher = recipe.actor.teacher
        precision = teacher.precision or recipe.actor.model.precision
        assert teacher.model_path is not None
        assert teacher.top_k is not None
        told = [
            VERSION,
            contents(model_directory(teacher.model_path)),
            rows.fingerprint,
            teacher.top_k,
            columns,
            precision,
        ]
        key = hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=20).hexdigest()
        starts = np.concatenate([[0], np.cumsum(rows.lengths, dtype=np.int64)])
        dtype = np.dtype(np.float64 if precision == "fp64" else np.float32)
        return cls(cache_root(recipe.data.cache_dir) / FOLDER / key, starts, teacher.top_k, columns, dtype)

    @property
    def is_complete(self) -> bool:
        """Whether its files are there, whole."""
        sizes = {TOKENS: self._bytes(4), LOG_P: self._bytes(self.dtype.itemsize)}
        files = [self.folder / name for name in sizes]
        return (self.folder / DONE).is_file() and [file.stat().st_size for file in files] == list(sizes.values())

    def _bytes(self, item: int) -> int:
        return int(self.starts[-1]) * self.top_k * item

    def places(self, batch: PackedBatch) -> np.ndarray:
        """int64 [targets]: the place of each target of a micro-batch; 0 for those of fillers."""
        positions, bounds = batch.target_positions.cpu().numpy(), batch.cu_seqlens.cpu().numpy()
        document = np.searchsorted(bounds, positions, side="right") - 1
        row = np.asarray(batch.rows, np.int64)[document]
        return np.where(row < 0, 0, self.starts[row] + positions - bounds[document])

    def read(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int32 and log-probabilities [places, top_k]."""
        shape = (int(self.starts[-1]), self.top_k)
        files = ((TOKENS, np.dtype(np.int32)), (LOG_P, self.dtype))
        tokens, log_p = (np.memmap(self.folder / name, dtype, "r", shape=shape)[places] for name, dtype in files)
        return tokens, log_p

    # Writing, by all ranks.

    def write(self, folder: Path, teacher: ShardedTeacher, batches: Iterable[Batch]) -> None:
        """Compute this rank's micro-batches and write them into files of a directory, beside what others write."""
        folder.mkdir(parents=True, exist_ok=True)
        sizes = {TOKENS: self._bytes(4), LOG_P: self._bytes(self.dtype.itemsize), ROWS: len(self.starts) - 1}
        files = {name: os.open(folder / name, os.O_CREAT | os.O_RDWR, 0o644) for name in sizes}
        try:
            for name, file in files.items():
                os.truncate(file, sizes[name])
            for batch in batches:
                packed = cast(PackedBatch, batch)
                part = teacher.part(packed)
                number = len(packed.targets) if part is None else len(part.positions)
                found = teacher.compute(packed, partial(self._top, number, packed.targets.device))
                tokens, log_p = found if part is None else (part.gather(values) for values in found)
                self._put(files, packed, tokens.cpu().numpy(), log_p.cpu().numpy())
            for file in files.values():
                os.fsync(file)
        finally:
            for file in files.values():
                os.close(file)

    def _top(
        self, number: int, device: torch.device, logits: TeacherLogits | TopTokens
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int32 and log-probabilities [number, top_k] of this rank's targets."""
        assert not isinstance(logits, TopTokens)
        tokens = torch.empty(number, self.top_k, dtype=torch.int32, device=device)
        log_p = tokens.to(torch.float64 if self.dtype == np.float64 else torch.float32)
        size = max(1, chunk_rows(torch.device("cpu"), 2**17))
        for start in range(0, number, size):
            rows = slice(start, start + size)
            found = logits(rows, False)[:, : self.columns].log_softmax(-1).topk(self.top_k, dim=-1)
            tokens[rows], log_p[rows] = found.indices, found.values
        return tokens, log_p

    def _put(self, files: dict[str, int], batch: PackedBatch, tokens: np.ndarray, log_p: np.ndarray) -> None:
        places = self.places(batch)
        positions, bounds = batch.target_positions.cpu().numpy(), batch.cu_seqlens.cpu().numpy()
        document = np.searchsorted(bounds, positions, side="right") - 1
        for number, row in enumerate(batch.rows):
            if row < 0:
                continue
            own = np.flatnonzero(document == number)
            for piece in np.split(own, np.flatnonzero(np.diff(places[own]) != 1) + 1) if len(own) else ():
                for name, values in ((TOKENS, tokens), (LOG_P, log_p)):
                    written = np.ascontiguousarray(values[piece])
                    offset = int(places[piece[0]]) * self.top_k * written.itemsize
                    os.pwrite(files[name], written.tobytes(), offset)
            os.pwrite(files[ROWS], b"\1", row)

    def publish(self, folder: Path, ranks: Ranks) -> None:
        """Check that all rows are in a directory and give it its name; every rank calls it.

        Raises:
            DataError: this host lacks rows of other hosts.
        """
        ranks.barrier()
        missing = int((np.fromfile(folder / ROWS, np.uint8) != 1).sum())
        if ranks.largest(float(missing)):
            raise DataError(
                f"the hosts do not share the directory of the teacher's tokens: {missing:,} rows are missing here",
                where=str(folder.parent),
                remedy="set data.cache_dir to a directory that all hosts have, or leave actor.teacher.top_k out",
            )
        if ranks.is_main:
            write_json(folder / DONE, {"top_k": self.top_k, "places": int(self.starts[-1])})
            if self.is_complete:  # another run was faster
                shutil.rmtree(folder, ignore_errors=True)
            else:
                shutil.rmtree(self.folder, ignore_errors=True)
                folder.rename(self.folder)
        ranks.barrier()


class StoredTeacher:
    """A teacher whose most probable tokens are read from files.

    Args:
        table: complete.
        device: of the micro-batches.
    """

    def __init__(self, table: TargetTable, device: torch.device) -> None:
        self._table = table
        self._device = device

    def compute(self, batch: PackedBatch, use: Callable[[TeacherLogits | TopTokens], R]) -> R:
        """See `shardtune.models.distillation.Teacher`."""
        tokens, log_p = self._table.read(self._table.places(batch))
        found = TopTokens(torch.from_numpy(tokens).long().to(self._device), torch.from_numpy(log_p).to(self._device))
        return use(found)


def stored_teacher(
    recipe: Recipe,
    rows: TokenDataset,
    ranks: Ranks,
    columns: int,
    make: Callable[[], tuple[ShardedTeacher, Iterable[Batch]]],
    report: Callable[[str], None],
) -> StoredTeacher:
    """The teacher's tokens of the training rows, computed now if they are not in the cache; every rank calls it.

    Args:
        recipe: of the run.
        rows: of training.
        ranks: of the run.
        columns: the teacher's logits that count: those that the model has too.
        make: makes the teacher with its weights, and this rank's micro-batches of all rows.
        report: receives a line for the user.
    """
    table = TargetTable.of(recipe, rows, columns)
    if ranks.largest(float(not table.is_complete)):
        writable(table.folder.parent)
        report(f"data: computing the teacher's {table.top_k} most probable tokens of the targets of {len(rows):,} rows")
        temporary = ranks.broadcast(table.folder.with_name(f".{table.folder.name}.tmp-{uuid.uuid4().hex[:8]}"))
        teacher, batches = make()
        with torch.no_grad():
            table.write(temporary, teacher, batches)
        table.publish(temporary, ranks)
    return StoredTeacher(table, ranks.device)
