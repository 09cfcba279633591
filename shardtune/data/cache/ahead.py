"""Steps of rows whose files are tokenised one by one, by a process that is ahead of training; the same on all ranks."""

from __future__ import annotations

import atexit
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch

from shardtune.batch import Batch
from shardtune.data.cache.by_file import RowsByFile
from shardtune.data.loader.file_order import FileOrder
from shardtune.data.loader.prefetch import quiet_tokenizers
from shardtune.data.loader.protocol import DataState, Step
from shardtune.data.loader.step_loader import Maker, Rows, StepLoader
from shardtune.errors import DataError
from shardtune.parallel.ranks import Ranks

_POLL_SECONDS = 0.2
_NICE = 10
_GIB = 1 << 30
_WINDOW_BITS = 32
_WINDOWS_AHEAD = 2
_DIGEST_BYTES = 6
"""An integer of so many bytes is exact in fp64."""
_FORK = multiprocessing.get_context("fork")


class FileStepLoader(StepLoader):
    """Yields steps of rows that are tokenised file by file; on one rank of a host, a process tokenises ahead.

    Hosts may have other files under the same names, which are compared when a step is yielded: all ranks take steps
    together.

    Args:
        data: the rows with the weights of all loss terms.
        order: of their files.
        maker: cuts steps into micro-batches.
        files: the rows.
        ranks: of training.
        limit_gib: of the entries of all files; None: no limit.
        token_term: as of `StepLoader`.
        num_processes: as of `StepLoader`.
    """

    def __init__(
        self,
        data: Rows,
        order: FileOrder,
        maker: Maker,
        files: RowsByFile,
        ranks: Ranks,
        *,
        limit_gib: float | None,
        token_term: str | None = None,
        num_processes: int = 0,
    ) -> None:
        super().__init__(data, order, maker, token_term=token_term, num_processes=num_processes)
        self._files, self._file_order, self._ranks = files, order, ranks
        self._ahead = FilesAhead(files, order, limit_gib)

    is_counted = False

    def has_steps(self, steps: int, epochs: int) -> bool:
        files = self._files.data_files
        return self._file_order.has_steps(-(-steps // epochs), files.count, files.threads)

    def progress(self, state: DataState) -> float:
        return state.epoch + self._file_order.progress(state.epoch, state.rows_consumed)

    def state_at(self, progress: float) -> DataState:
        epoch = int(progress)
        return DataState(epoch, self._file_order.place_at(epoch, progress - epoch))

    def rows_at(self, state: DataState) -> tuple[DataState, DataState, np.ndarray]:
        found = super().rows_at(state)
        self._ahead.move_to(found[0])
        return found

    def steps(self, state: DataState) -> Iterator[Step[Batch]]:
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        if is_first:
            self._ahead.move_to(state)
        end = self._ahead.start() if is_first else _nothing
        try:
            for step in super().steps(state):
                self._require_same_files(step)
                yield self._numbered(step)
        finally:
            end()

    def step(self, state: DataState) -> Step[Batch]:
        return self._numbered(super().step(state))

    def alone(self, row: int | None, state: DataState | None = None) -> Batch:
        return replace(super().alone(row, state), numbered=self._files.data_files.running_numbers)

    def _numbered(self, step: Step[Batch]) -> Step[Batch]:
        """The step with the numbers by which random ones are drawn: those of all rows end to end."""
        numbered = self._files.data_files.running_numbers
        return replace(step, micro_batches=tuple(replace(batch, numbered=numbered) for batch in step.micro_batches))

    def _require_same_files(self, step: Step[Batch]) -> None:
        """Refuse a step that is made of other rows on another rank; all ranks call it.

        Raises:
            DataError: names the files; the same on all ranks.
        """
        if self._ranks.world_size == 1:
            return
        files = self._files.files_of(step.rows)
        content = [step.rows.tolist(), step.after.rows_consumed, [key for _, _, key in files]]
        digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=_DIGEST_BYTES).digest()
        number = torch.tensor(int.from_bytes(digest, "little"), dtype=torch.float64, device=self._ranks.host)
        most, least = self._ranks.largest_of(torch.stack([number, -number])).tolist()
        if most == -least:
            return
        found = self._ranks.gather(files)
        first = {place: key for place, _, key in found[0]}
        other = [
            f"{name} of rank {rank}"
            for rank, files in enumerate(found)
            for place, name, key in files
            if first.get(place) != key
        ]
        raise DataError(
            "the ranks read different data files",
            where=f"{', '.join(other[:4]) or 'files of earlier steps'}, compared with rank 0",
            remedy="give all hosts the same files, or put them where all hosts read them",
        )


class FilesAhead:
    """A process that tokenises the files of the windows that come next, and keeps the entries below a limit.

    What it cannot do is left to the rank that reads the file: it raises the error of a bad row, in the step that needs
    it, and tokenises a file itself where the process is gone.

    Args:
        files: the rows.
        order: of the files.
        limit_gib: of the entries of all files; None: none is removed.
    """

    def __init__(self, files: RowsByFile, order: FileOrder, limit_gib: float | None) -> None:
        self._files = files
        self._order = order
        self._limit = None if limit_gib is None else limit_gib * _GIB
        self._position = _FORK.RawValue("q", 0)

    def move_to(self, state: DataState) -> None:
        """Training has come to this position."""
        epoch, window = state.epoch, self._order.epoch(state.epoch).at(state.rows_consumed)
        if window is None:
            epoch, window = epoch + 1, 0
        self._position.value = epoch << _WINDOW_BITS | window  # one number, so that it is read as a whole

    def start(self) -> Callable[[], None]:
        """Start the process; returns what ends it."""
        if multiprocessing.current_process().daemon:  # which may have no processes of its own
            return _nothing
        process = _FORK.Process(target=self._run, args=(os.getpid(),), name="shardtune-files-ahead")
        try:
            with quiet_tokenizers():
                process.start()
        except OSError:  # no process, or no memory, to be had
            return _nothing
        kill = partial(_kill, process)
        atexit.register(kill)  # before multiprocessing waits for it

        def end() -> None:
            kill()
            atexit.unregister(kill)

        return end

    # In the process.

    def _run(self, parent: int) -> None:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # they reach a whole group; the parent decides when work ends
            threading.Thread(target=_follow, args=(parent,), daemon=True, name="shardtune-ahead-watch").start()
            with suppress(OSError):
                os.nice(_NICE)
            torch.set_num_threads(1)  # those of the parent are not in this process
            self._build_ahead()
        finally:
            os._exit(1)

    def _build_ahead(self) -> None:
        cache, failed = self._files.cache.quiet(), set[int]()
        while True:
            at = self._position.value
            epoch, window = at >> _WINDOW_BITS, at & ((1 << _WINDOW_BITS) - 1)
            self.remove_passed(epoch, window)
            for number in self.wanted(epoch, window):
                if self._position.value != at:
                    break
                if number in failed:
                    continue
                try:
                    self._files.build(number, cache)
                except Exception:  # raised again where a row of the file is needed
                    failed.add(number)
            while self._position.value == at:
                time.sleep(_POLL_SECONDS)

    def wanted(self, epoch: int, window: int) -> Iterator[int]:
        """The files of this window and of the next ones, in the order in which they are needed.

        Files are counted as far as they are taken.
        """
        seen = set[int]()
        for _ in range(1 + _WINDOWS_AHEAD):
            files = self._order.epoch(epoch).window(window)
            if files is None:
                epoch, window = epoch + 1, 0
                files = self._order.epoch(epoch).window(window)
                assert files is not None
            new = [number for number in files.tolist() if number not in seen]
            seen |= set(new)
            yield from new
            window += 1

    def remove_passed(self, epoch: int, window: int) -> None:
        """Remove the entries that are needed last until those that remain are within the limit.

        Those of the windows that ranks read or tokenise now are kept, and so is that of the first file.
        """
        if self._limit is None:
            return
        kept = {self._files.first_file, *self._before(epoch, window), *self.wanted(epoch, window)}
        folders = {number: self._files.data_files.known_folder(number) for number in range(len(self._files.data_files))}
        sizes = {number: _size(folder) for number, folder in folders.items() if folder is not None}
        total = sum(sizes.values())
        rest = self._order.epoch(epoch).rest(window), self._order.epoch(epoch + 1).rest(0)
        for number in reversed([*dict.fromkeys(np.concatenate(rest).tolist())]):
            if total <= self._limit:
                return
            if sizes.get(number) and number not in kept:
                _remove(self._files.folder(number))
                total -= sizes[number]

    def _before(self, epoch: int, window: int) -> list[int]:
        """The files of the window before, in which other ranks may still be."""
        if window:
            files = self._order.epoch(epoch).window(window - 1)
        else:
            files = self._order.epoch(epoch - 1).last() if epoch else None
        return [] if files is None else files.tolist()


def _nothing() -> None:
    return


def _kill(process: BaseProcess) -> None:
    process.kill()
    process.join()


def _follow(parent: int) -> None:
    """Ends this process when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)


def _size(folder: Path) -> int:
    """The bytes of an entry; 0 if it is not there."""
    try:
        return sum(file.stat().st_size for file in folder.iterdir())
    except OSError:
        return 0


def _remove(folder: Path) -> None:
    """Remove an entry, at once for those who look for it; whoever has it open keeps its rows."""
    gone = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    with suppress(OSError):
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
