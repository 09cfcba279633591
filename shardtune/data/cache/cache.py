"""The cache of tokenised rows: content-addressed, one entry per file, built by one process, shared by all."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from shardtune.data.cache.build import BuildTask, build_entry, too_many_bad
from shardtune.data.cache.dataset import Part, TokenDataset
from shardtune.data.cache.entry import LAYOUT_VERSION, Entry
from shardtune.data.cache.verified import check_rows, trust_rows
from shardtune.data.cache_directory import cache_error, cache_folder, cache_root, print_line, writable
from shardtune.data.durable import sync_folder
from shardtune.data.encoder import Encoder, FrameOptions, bad_row
from shardtune.data.file_lock import FileLock
from shardtune.data.progress import show_progress
from shardtune.data.robot.content import content_digest
from shardtune.data.sources.source import ROBOT_KINDS, Source, SourceFile
from shardtune.errors import DataError
from shardtune.launch.progress import PROGRESS

# Part of every key: raise it when reading or recognising rows gives something else than before.
READING_VERSION = 5
_WAIT_LINE_SECONDS = 10.0


def build_dataset(
    sources: Sequence[Source],
    encoder: Encoder,
    *,
    cache_dir: str | Path | None = None,
    num_workers: int = 0,
    on_bad_row: Literal["fail", "skip"] = "fail",
    max_bad_rows: int = 100,
    report: Callable[[str], None] = print_line,
) -> TokenDataset:
    """The rows of all sources, tokenised; what the cache already holds is only opened.

    Safe to call in every rank at once: one builds a missing entry, the others wait for it and report that.

    Args:
        cache_dir: `data.cache_dir`; None: the user's cache directory.
        num_workers: processes that encode; below 2 and for small files this one does.
        on_bad_row: `fail` raises `DataError` at the first bad row, `skip` notes up to `max_bad_rows` over all files.
    """
    cache = EntryCache(cache_root(cache_dir), num_workers, max_bad_rows if on_bad_row == "skip" else None, report)
    parts: list[Part] = []
    for source in sources:
        room = source.max_samples
        for file in source.files:
            entry = cache.open(source, file, encoder, room)
            parts.append(Part(entry, source.name, file.label))
            room = None if room is None else room - len(entry)
            if room == 0:
                break
    dataset = TokenDataset(parts, {source.name: source.weight for source in sources})
    if not len(dataset):
        raise DataError(
            "no row is left to train or evaluate on:\n    " + "\n    ".join(dataset.report.lines()),
            where=", ".join(part.label for part in parts),
            remedy="data preview shows what is trained; data.max_length, data.train_on or an adapter's weights decide",
        )
    return dataset


class EntryCache:
    """Finds or builds the entries of one data set.

    Args:
        root: the cache directory.
        num_workers: processes per build.
        max_bad_rows: how many bad rows over all files are skipped; None: the first is an error.
        report: receives what is built and what is waited for.
    """

    def __init__(self, root: Path, num_workers: int, max_bad_rows: int | None, report: Callable[[str], None]) -> None:
        self._root = root
        self._num_workers = num_workers
        self._bad_left = max_bad_rows
        self._report = report

    def open(self, source: Source, file: SourceFile, encoder: Encoder, limit: int | None) -> Entry:
        """The entry of `file`, built if it is not there; at most `limit` rows of it. Its bad rows count from here on.

        Raises:
            DataError: it cannot be built, or has a bad row that may not be skipped, or too many.
        """
        entry = self.find(source, file, encoder, limit)
        self.count_bad(entry, file)
        return entry

    @property
    def root(self) -> Path:
        """The cache directory."""
        return self._root

    def key(
        self, source: Source, file: SourceFile, encoder: Encoder, limit: int | None, content: str | None = None
    ) -> str:
        """The name of the entry of a file as it is now, or with the content of that hash."""
        try:
            return entry_key(source, file, _at(encoder, source, file), limit, self._root, content)
        except OSError as error:
            raise unreadable(file, error) from error

    def folder(self, key: str) -> Path:
        """Where the entry of that name lies, or will lie."""
        return self._root / "entries" / key[:2] / key

    def find(self, source: Source, file: SourceFile, encoder: Encoder, limit: int | None) -> Entry:
        """As `open`, without counting bad rows."""
        folder = self.folder(self.key(source, file, encoder, limit))
        encoder = _at(encoder, source, file)
        entry, fault = _open_entry(folder)
        if fault is not None:
            self._report(f"data: the cached rows of {file.label} are damaged ({fault}): they are made again")
        if entry is None:
            task = BuildTask(source, file, encoder, self._bad_left is not None, self._bad_left or 0, limit)
            try:
                entry = self._build(task, folder)
            except OSError as error:
                raise cache_error(error, self._root) from error
        return entry

    def quiet(self) -> EntryCache:
        """The same cache, which reports nothing."""
        return EntryCache(self._root, self._num_workers, self._bad_left, lambda _: None)

    def count_bad(self, entry: Entry, file: SourceFile) -> None:
        """Refuse bad rows that may not be skipped, also of an entry that was built where they might be."""
        bad = entry.tally.bad
        if bad.count and self._bad_left is None:
            raise bad_row(file.label, *bad.first[0])
        if self._bad_left is not None:
            if bad.count > self._bad_left:
                raise too_many_bad(file.label, entry.tally, self._bad_left)
            self._bad_left -= bad.count

    def _build(self, task: BuildTask, folder: Path) -> Entry:
        locks = cache_folder(self._root, "locks")
        writable(folder.parent)
        lock = FileLock(locks / folder.name)
        waiting = _Waiting(task.file.label, self._report)

        def is_built(holder: str, seconds: float) -> bool:
            waiting(holder, seconds)
            return _open_entry(folder)[0] is not None

        try:
            if lock.acquire(is_built) and _open_entry(folder)[0] is None:
                self._build_locked(task, folder)
        finally:
            lock.release()
        entry, _ = _open_entry(folder)
        if entry is None:
            raise DataError(
                "the cache entry vanished as soon as it was built", where=str(folder), remedy="set data.cache_dir"
            )
        return entry

    def _build_locked(self, task: BuildTask, folder: Path) -> None:
        for torn in (folder, *folder.parent.glob(f".{folder.name}.*")):
            shutil.rmtree(torn, ignore_errors=True)
        partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        partial.mkdir()
        try:
            with show_progress(Path(task.file.label).name, self._report) as progress:
                build_entry(task, partial, self._num_workers, progress)
            trust_rows(partial)
            with suppress(FileExistsError):
                partial.rename(folder)
            sync_folder(folder.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


class _Waiting:
    """Reports that another process builds, first after a second and then now and then."""

    def __init__(self, label: str, report: Callable[[str], None]) -> None:
        self._label = label
        self._report = report
        self._next = 1.0

    def __call__(self, holder: str, seconds: float) -> None:
        PROGRESS.beats += 1  # the other one is watched where it works
        if seconds >= self._next:
            self._next = seconds + _WAIT_LINE_SECONDS
            self._report(f"data: waiting for {holder} to tokenise {self._label} ({seconds:.0f} s)")


def _at(encoder: Encoder, source: Source, file: SourceFile) -> Encoder:
    """The encoder of a file's rows. Frames name files by whole paths: those in a moved data set stay what they were."""
    return encoder.at(file.folder if source.frames is None else Path(file.folder.anchor))


def unreadable(file: SourceFile, error: OSError) -> DataError:
    """The error for a data file that cannot be read."""
    return DataError(
        f"the data file cannot be read: {error.strerror}", where=file.label, remedy="check its permissions"
    )


def entry_key(
    source: Source, file: SourceFile, encoder: Encoder, limit: int | None, root: Path, content: str | None = None
) -> str:
    """The name of a file's entry: the hash of everything that its rows depend on.

    Args:
        content: the hash of the file's content, where it is known.
    """
    depends = {
        "versions": [READING_VERSION, LAYOUT_VERSION],
        "content": content_digest(file.path, root, file.part) if content is None else content,
        "kind": file.kind,
        "suffix": file.path.suffix,
        "columns": dict(source.columns),
        "format": source.format,
        "transform": None
        if source.transform is None
        else [source.transform.digest, source.transform.spec.rpartition(":")[2]],
        "limit": limit,
        "encoder": encoder.cache_key(),
    }
    if source.frames is not None:
        # Rows of plain files may name images by paths beside the file; robot data sets and recordings hold them.
        folder = (source.prefix(file) or None) if file.kind in ROBOT_KINDS else str(file.folder)
        depends["frames"] = [source.frames.chunk, source.name, file.part, folder]
        others = replace(source.frames, chunk=1, representation=None)
        if others != FrameOptions():
            depends["frames_have"] = asdict(others)
    if source.representation is not None:
        depends["representation"] = asdict(source.representation)
    return hashlib.blake2b(json.dumps(depends, sort_keys=True).encode(), digest_size=20).hexdigest()


def _open_entry(folder: Path) -> tuple[Entry | None, str | None]:
    """The entry if it is whole, and what is wrong with one that is there and is not."""
    try:
        check_rows(folder)
        return Entry(folder), None
    except FileNotFoundError as error:
        return None, f"{Path(error.filename).name} is missing" if folder.is_dir() else None
    except NotADirectoryError as error:  # in the place of the entry, or of the cache: there is no entry then
        return None, str(error) if folder.exists() else None
    except Exception as error:  # whatever is wrong with its description
        return None, str(error)
