"""The files of training rows that are read one by one: the size of each, and what has been found out about it since."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from shardtune.data.cache.cache import READING_VERSION, EntryCache, unreadable
from shardtune.data.cache_directory import file_digest, known_digest, row_count
from shardtune.data.encoder import Encoder
from shardtune.data.loader.order import OrderSource
from shardtune.data.row_files import last_number
from shardtune.data.sources.source import Source, SourceFile
from shardtune.errors import DataError

NUMBER_BITS = 32
"""The index of a row is its file's number, shifted by so many bits, and its number in the file, from 0."""
ROW_MASK = (1 << NUMBER_BITS) - 1


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of training rows, as it was when they were opened.

    Attributes:
        source: of the file.
        file: the file.
        size: bytes.
        changed: nanoseconds; the time stamp of its last change.
    """

    source: Source
    file: SourceFile
    size: int
    changed: int

    @classmethod
    def of(cls, source: Source, file: SourceFile) -> DataFile:
        """A file as it is now. Raises `DataError` if it cannot be read."""
        try:
            status = file.path.stat()
        except OSError as error:
            raise unreadable(file, error) from error
        return cls(source, file, status.st_size, status.st_mtime_ns)

    def require_unchanged(self) -> None:
        """Raise `DataError` if the file is no longer what it was."""
        now = DataFile.of(self.source, self.file)
        if (now.size, now.changed) != (self.size, self.changed):
            raise changed_file(self.file)


def changed_file(file: SourceFile) -> DataError:
    """The error for a file that is not what it was at the start."""
    return DataError(
        "the data file has changed since training began",
        where=file.label,
        remedy="put it back and run the same command again: it continues from the last checkpoint",
    )


@dataclass(slots=True)
class _Known:
    """What has been found out about the files, by number: the hash of the content, the entry, the number of rows."""

    contents: dict[int, str] = field(default_factory=dict)
    keys: dict[int, str] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)


class DataFiles:
    """Files of training rows in the order of their sources, which are hashed and counted when that is needed.

    What is found out about a file stays: one that changes later is an error where it is read.

    Args:
        files: of all sources.
        cache: finds their entries.
        encoder: of the rows.
        threads: that hash or count several files.

    Attributes:
        threads: at least one.
    """

    def __init__(self, files: Sequence[DataFile], cache: EntryCache, encoder: Encoder, threads: int) -> None:
        self._files = tuple(files)
        self._cache = cache
        self._encoder = encoder
        self.threads = max(1, threads)
        self._known = _Known()
        self._places_before: list[int] = []

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> DataFile:
        return self._files[number]

    def __iter__(self) -> Iterator[DataFile]:
        return iter(self._files)

    # Content.

    def content(self, number: int) -> str:
        """The hash of a file's content. Raises `DataError` if it cannot be read, or has changed."""
        known, one = self._known.contents, self._files[number]
        if number not in known:
            try:
                content = file_digest(one.file.path, self._cache.root)
            except OSError as error:
                raise unreadable(one.file, error) from error
            one.require_unchanged()
            known[number] = content
        return known[number]

    def key(self, number: int) -> str:
        """The name of a file's cache entry."""
        keys, one = self._known.keys, self._files[number]
        if number not in keys:
            keys[number] = self._cache.key(one.source, one.file, self._encoder, None, self.content(number))
        return keys[number]

    def folder(self, number: int) -> Path:
        """Where the entry of a file lies, or will lie."""
        return self._cache.folder(self.key(number))

    def known_folder(self, number: int) -> Path | None:
        """As `folder`, without reading the file; None if its content is not known."""
        if number not in self._known.contents:
            try:
                content = known_digest(self._files[number].file.path, self._cache.root)
            except OSError:
                return None
            if content is None:
                return None
            self._known.contents[number] = content
        return self.folder(number)

    # Rows.

    def places(self, number: int) -> int:
        """The number of a file's last row; each row has a place in the order, whatever becomes of it.

        Raises:
            DataError: the file has no rows, or cannot be read.
        """
        known, one = self._known.rows, self._files[number]
        file = one.file
        if number not in known:
            kind = f"{file.kind} {READING_VERSION}"
            try:
                rows = row_count(file.path, kind, self._cache.root, lambda: last_number(file.path, file.kind))
            except OSError as error:
                raise unreadable(file, error) from error
            if not rows:
                raise DataError("the data file holds no rows", where=file.label, remedy="write rows into it")
            one.require_unchanged()
            known[number] = rows
        return known[number]

    def span(self, number: int) -> OrderSource:
        """The indices of a file's rows, with the weight of its source; the file is counted.

        Its rows are drawn by its number and not by its path, which is another one on another host, or when it is moved.
        """
        one, start = self._files[number], number << NUMBER_BITS
        name, stop = f"{one.source.name}: {one.file.label}", start + self.places(number)
        return OrderSource(name, start, stop, one.source.weight, drawn_by=f"file {number}")

    @property
    def spans(self) -> Spans:
        """`span` of each file, counted where it is read."""
        return Spans(self)

    def running_numbers(self, rows: Sequence[int]) -> list[int]:
        """The numbers of rows among the places of all files, end to end; all files are counted. -1 stays.

        Worked example: of files with 3 and 4 places the second row of the second has the index 2^32 + 1, and the
        number 3 + 1 = 4.
        """
        if not self._places_before:
            self.count_all()
        return [-1 if row < 0 else self._places_before[row >> NUMBER_BITS] + (row & ROW_MASK) for row in rows]

    def count(self, numbers: Iterable[int]) -> list[int]:
        """Count files, in threads: `places` of each."""
        return self._each(self.places, numbers)

    def count_all(self) -> None:
        """Count all files."""
        self._places_before = [0, *accumulate(self.count(range(len(self._files))))][:-1]

    def _each(self, of: Callable[[int], Any], numbers: Iterable[int]) -> list[Any]:
        """A value of several files; hashing and reading leave Python to other threads."""
        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(of, numbers))

    # Records.

    def records(self) -> list[dict[str, Any]]:
        """Each file with its size, its time stamp, and what is known about it."""
        known = self._known
        return [
            {
                "source": one.source.name,
                "file": one.file.label,
                "size": one.size,
                "changed": one.changed,
                "rows": known.rows.get(number),
                "content": known.contents.get(number),
                "key": self.key(number) if number in known.contents else None,
            }
            for number, one in enumerate(self._files)
        ]

    def recall(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Take over what was known about these files, where they are still what they were.

        A file of the recorded size and time stamp is; one with another time stamp is hashed if its hash is recorded.
        Records of an earlier version have no sizes, and all hashes.
        """
        if len(records) != len(self._files):
            return
        touched = list[int]()
        for number, (record, one) in enumerate(zip(records, self._files, strict=True)):
            if record.get("size", one.size) != one.size:
                continue
            if record.get("changed") == one.changed:
                self._take(number, record)
            elif record.get("key") is not None:
                touched.append(number)
        self._each(self.content, touched)
        for number in touched:
            if self.key(number) == records[number]["key"]:
                self._take(number, records[number])

    def _take(self, number: int, record: Mapping[str, Any]) -> None:
        """What was known about a file that is still the same."""
        if record.get("content") is not None:
            self._known.contents.setdefault(number, record["content"])
        if record.get("rows") is not None:
            self._known.rows.setdefault(number, record["rows"])

    def fingerprint(self) -> str:
        """Equal for files of equal sizes in equal order with equal source weights, wherever they lie."""
        names = list(dict.fromkeys(one.source.name for one in self._files))
        content = [[names.index(one.source.name), one.source.weight, one.size] for one in self._files]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


class Spans:
    """The span of each file; see `DataFiles.span`."""

    def __init__(self, files: DataFiles) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int, /) -> OrderSource:
        return self._files.span(number)
