"""Tokenises the files that come next while training goes on, and removes entries that are passed."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
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

_POLL_SECONDS = 0.2
_NICE = 10
_GIB = 1 << 30
_WINDOW_BITS = 32
_WINDOWS_AHEAD = 2
_FORK = multiprocessing.get_context("fork")


class FileStepLoader(StepLoader):
    """Yields steps of rows that are tokenised file by file; on one rank of a host, a process tokenises ahead.

    Args:
        data: the rows with the weights of all loss terms.
        order: of their files.
        maker: cuts steps into micro-batches.
        files: the rows.
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
        *,
        limit_gib: float | None,
        token_term: str | None = None,
        num_processes: int = 0,
    ) -> None:
        super().__init__(data, order, maker, token_term=token_term, num_processes=num_processes)
        self._ahead = FilesAhead(files, order, limit_gib)

    def rows_at(self, state: DataState) -> tuple[DataState, DataState, np.ndarray]:
        found = super().rows_at(state)
        self._ahead.move_to(found[0])
        return found

    def steps(self, state: DataState) -> Iterator[Step[Batch]]:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            yield from super().steps(state)
            return
        self._ahead.move_to(state)
        end = self._ahead.start()
        try:
            yield from super().steps(state)
        finally:
            end()


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
        window = self._order.epoch(state.epoch).window_at(state.rows_consumed)
        self._position.value = state.epoch << _WINDOW_BITS | window  # one number, so that it is read as a whole

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
                if number in failed or self._files.folder(number).is_dir():
                    continue
                try:
                    self._files.build(number, cache)
                except Exception:  # raised again where a row of the file is needed
                    failed.add(number)
            while self._position.value == at:
                time.sleep(_POLL_SECONDS)

    def wanted(self, epoch: int, window: int) -> list[int]:
        """The files of this window and of the next ones, in the order in which they are needed."""
        windows = self._windows(epoch, window)
        return list(dict.fromkeys(np.concatenate(windows[: 1 + _WINDOWS_AHEAD]).tolist()))

    def _windows(self, epoch: int, window: int) -> list[np.ndarray]:
        """The windows from this one to the end of the next epoch."""
        return [*self._order.epoch(epoch).windows[window:], *self._order.epoch(epoch + 1).windows]

    def remove_passed(self, epoch: int, window: int) -> None:
        """Remove the entries that are needed last until those that remain are within the limit.

        Those of the windows that ranks read or tokenise now are kept, and so is that of the first file.
        """
        if self._limit is None:
            return
        before = self._order.epoch(epoch if window else max(0, epoch - 1)).windows[window - 1]  # of other ranks
        kept = {self._files.first_file, *before.tolist(), *self.wanted(epoch, window)}
        sizes = {number: _size(self._files.folder(number)) for number in range(len(self._files.data_files))}
        total = sum(sizes.values())
        needed = dict.fromkeys(np.concatenate(self._windows(epoch, window)).tolist())
        for number in reversed([*needed]):
            if total <= self._limit:
                return
            if sizes[number] and number not in kept:
                _remove(self._files.folder(number))
                total -= sizes[number]


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
