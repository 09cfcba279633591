"""Training rows whose files are tokenised one by one, when their turn comes (`data.cache: by_file`)."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shardtune.batch import Sample
from shardtune.config import Recipe
from shardtune.config.schema import DataConfig
from shardtune.data.cache.cache import EntryCache
from shardtune.data.cache.data_files import NUMBER_BITS, ROW_MASK, DataFile, DataFiles, Spans, changed_file
from shardtune.data.cache.dataset import Part, SourceSpan, TokenDataset
from shardtune.data.cache.entry import Entry
from shardtune.data.cache.fields import require_same_kinds
from shardtune.data.cache_directory import cache_root
from shardtune.data.encoder import Encoder
from shardtune.data.loader.file_order import order_of_files
from shardtune.data.sources.source import Source
from shardtune.errors import ConfigError, DataError

KEY = "data.cache: by_file"
MIXED_FILES = 4


class Column:
    """A value of each row, read from the entries of the files that the rows are in."""

    def __init__(self, rows: RowsByFile, of: Callable[[Entry], np.ndarray]) -> None:
        self._rows = rows
        self._of = of

    def __getitem__(self, rows: np.ndarray | int) -> np.ndarray:
        """The values of rows, in the shape of `rows`. Raises `IndexError` where one has been dropped."""
        return self._rows.values(np.asarray(rows, np.int64), self._of)


class RowsByFile:
    """Rows by index, of files that are tokenised when one of their rows is read.

    The index of a row is given by its file's number and its number in the file (`NUMBER_BITS`). So it is known before
    any file is read, and rows that are dropped leave gaps. Only the entries read last are open.

    Args:
        files: in the order of their sources; each has rows.
        sources: name and weight of each source.
        cache: finds or builds entries.
        encoder: of the rows.
        first: the files in the order in which they are tried for rows to show, and for the kinds of all rows.
        most_open: entries that are open at once.

    Attributes:
        first: the rows of the first of those files that has any.
        first_file: that file.
        first_trained: the index of the first row there.
        fields: type and number of dimensions of each field, the same in all rows.
        left_out: empty; no row is known to be left out before its file is read.
    """

    def __init__(
        self,
        files: DataFiles,
        sources: Mapping[str, float],
        cache: EntryCache,
        encoder: Encoder,
        *,
        first: Sequence[int],
        most_open: int,
    ) -> None:
        self.data_files = files
        self.cache = cache
        self.left_out = np.empty(0, np.int64)
        self._weights = dict(sources)
        self._encoder = encoder
        self._most_open = most_open
        self._open: OrderedDict[int, Entry] = OrderedDict()
        self._lock = threading.RLock()
        self._read: set[int] = set()
        self._followers: list[Callable[[TokenDataset], None]] = []
        self._first: tuple[int, Entry] | None = None
        for number in first:
            entry = self.entry(number)
            if len(entry):
                self._first = number, entry
                break
        else:
            labels = [one.file.label for one in islice(files, 4)]
            raise DataError(
                "no row with a target is left",
                where=", ".join(labels) + (", …" if len(files) > len(labels) else ""),
                remedy="shardtune data preview with data.cache: whole shows what becomes of the rows",
            )
        self.first, self.first_file = self._dataset(number), number
        self.first_trained = (number << NUMBER_BITS) + int(entry.numbers[0]) - 1
        self.fields = entry.kinds

    # Files.

    def entry(self, number: int) -> Entry:
        """The entry of a file, tokenised now if it is not in the cache.

        Raises:
            DataError: the file has changed, or a row of it cannot be used.
        """
        with self._lock:
            found = self._open.pop(number, None) or self._opened(number)
            self._open[number] = found
            while len(self._open) > self._most_open:
                self._open.popitem(last=False)
            return found

    def _opened(self, number: int) -> Entry:
        one = self.data_files[number]
        entry = self.cache.find(one.source, one.file, self._encoder, None)
        if entry.key != self.data_files.key(number):
            raise changed_file(one.file)
        if number not in self._read:
            self.cache.count_bad(entry, one.file)
            if len(entry):
                self._require_alike(entry, one)
            self._read.add(number)
            for follow in self._followers:
                follow(self._of(entry, one))
        return entry

    def _require_alike(self, entry: Entry, one: DataFile) -> None:
        if self._first is None:
            return
        number, first = self._first
        label = self.data_files[number].file.label
        where = f"{one.file.label}: row {entry.numbers[0]:,}"
        require_same_kinds(entry.kinds, first.kinds, f"{label}: row {first.numbers[0]:,}", where)
        further = sorted(entry.terms.keys() - first.terms.keys())
        if further:
            raise DataError(
                f"its rows weigh in the loss term {further[0]!r}, and none of {label} does",
                where=one.file.label,
                remedy="with data.cache: by_file the first file has rows for all loss terms; data.cache: whole does "
                "not need that",
            )

    def _dataset(self, number: int) -> TokenDataset:
        return self._of(self.entry(number), self.data_files[number])

    def _of(self, entry: Entry, one: DataFile) -> TokenDataset:
        return TokenDataset([Part(entry, one.source.name, one.file.label)], {one.source.name: one.source.weight})

    def follow(self, follow: Callable[[TokenDataset], None]) -> None:
        """Call `follow` with the rows of each file that has been read, and of each other one when it is read first."""
        with self._lock:
            for number in sorted(self._read):
                follow(self._dataset(number))
            self._followers.append(follow)

    def build(self, number: int, cache: EntryCache) -> None:
        """Tokenise a file, if it is not in the cache, without opening it here, and count its rows."""
        one = self.data_files[number]
        if not self.folder(number).is_dir():
            cache.find(one.source, one.file, self._encoder, None)
        self.data_files.places(number)

    def folder(self, number: int) -> Path:
        """Where the entry of a file lies, or will lie."""
        return self.data_files.folder(number)

    def files_of(self, rows: np.ndarray) -> list[tuple[int, str, str]]:
        """Number and label of each file that rows are in, in order, and the name of its entry."""
        numbers = np.unique(rows >> NUMBER_BITS).tolist()
        return [(number, self.data_files[number].file.label, self.data_files.key(number)) for number in numbers]

    # Rows.

    def row(self, index: int) -> Sample:
        """The sample `index`; its tokens and fields are read-only views of the cache."""
        number, inner = self._place(index)
        entry = self.entry(number)
        return entry.row(int(_inner(entry, np.array([inner]))[0]))

    def locate(self, index: int) -> str:
        """Where row `index` comes from: `file:row`."""
        file, row = self.origin(index)
        return f"{file}:{row}"

    def origin(self, index: int) -> tuple[str, int]:
        """The file of row `index`, and its number in there."""
        number, inner = self._place(index)
        return self.data_files[number].file.label, inner

    def _place(self, index: int) -> tuple[int, int]:
        """The file of a row, and its number in there."""
        if not 0 <= index < len(self.data_files) << NUMBER_BITS:
            raise IndexError(f"row {index} of {len(self.data_files)} files")
        return index >> NUMBER_BITS, (index & ROW_MASK) + 1

    def _by_file(self, rows: np.ndarray) -> Iterator[tuple[Entry, np.ndarray, np.ndarray]]:
        """For each file that rows are in its entry, where they stand in `rows`, and their numbers in the file."""
        which = rows >> NUMBER_BITS
        for number in np.unique(which).tolist():
            here = np.flatnonzero(which == number)
            yield self.entry(number), here, (rows[here] & ROW_MASK) + 1

    def values(self, rows: np.ndarray, of: Callable[[Entry], np.ndarray]) -> np.ndarray:
        """A value of each row; see `Column`."""
        flat = rows.reshape(-1)
        found = np.zeros(flat.shape, of(self._sample).dtype)
        for entry, here, numbers in self._by_file(flat):
            found[here] = of(entry)[_inner(entry, numbers)]
        return found.reshape(rows.shape)

    @property
    def _sample(self) -> Entry:
        assert self._first is not None
        return self._first[1]

    def are_kept(self, rows: np.ndarray) -> np.ndarray:
        """bool [rows]: whether there is a row at each place, and it was not dropped when its file was tokenised."""
        kept = np.zeros(rows.shape, bool)
        for entry, here, numbers in self._by_file(rows):
            kept[here] = _search(entry, numbers)[1]
        return kept

    @property
    def lengths(self) -> Column:
        """int32: tokens of a row, or the size of a row without tokens."""
        return Column(self, lambda entry: entry.lengths)

    @property
    def hashes(self) -> Column:
        """uint64: the hash of a row as stored in its file."""
        return Column(self, lambda entry: entry.hashes)

    @cached_property
    def term_weights(self) -> Mapping[str, Column]:
        """float64 per loss term; 0 where a row has no such term."""

        def column(name: str) -> Column:
            return Column(self, lambda entry: entry.terms[name] if name in entry.terms else np.zeros(len(entry)))

        return {name: column(name) for name in sorted(self._sample.terms)}

    def field_counts(self, name: str) -> Column:
        """int64: how many elements along its first dimension a field has in a row."""
        return Column(self, lambda entry: entry.field_counts(name))

    # Descriptions.

    @cached_property
    def sources(self) -> tuple[SourceSpan, ...]:
        """The sources in order; together they cover the indices of all files."""
        spans, start = [], 0
        numbers = Counter(one.source.name for one in self.data_files)
        for name, weight in self._weights.items():
            stop = start + (numbers[name] << NUMBER_BITS)
            spans.append(SourceSpan(name, start, stop, weight))
            start = stop
        return tuple(spans)

    @property
    def spans(self) -> Spans:
        """The places of each file, in order, with the weight of its source; a file is counted when its own is read."""
        return self.data_files.spans

    @cached_property
    def fingerprint(self) -> str:
        """Equal for files of equal sizes in equal order with equal source weights and encoding, wherever they lie.

        The content of a file counts once it is read, for each step (`files_of`) and in checkpoints (`files`).
        """
        content = [self.data_files.fingerprint(), self.data_files.key(self.first_file)]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    def content(self) -> str:
        """As `fingerprint`; rows of files that are not read yet are not known."""
        return self.fingerprint

    def describe(self) -> str:
        """The number of files and their bytes."""
        number, size = len(self.data_files), sum(one.size for one in self.data_files)
        return f"{number:,} file{'' if number == 1 else 's'} with {_in_words(size)}"

    @property
    def files(self) -> list[dict[str, Any]]:
        """Each file with its size and time stamp; once it is read, with its rows and hashes."""
        return self.data_files.records()


TrainingRows = TokenDataset | RowsByFile


def rows_to_show(rows: TrainingRows) -> TokenDataset:
    """Rows to show and to try something with: all of them, or those of the first file."""
    return rows.first if isinstance(rows, RowsByFile) else rows


def _search(entry: Entry, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The places in an entry of the rows with these numbers in their file, and which of these rows it has."""
    if not len(entry):
        return np.zeros(numbers.shape, np.int64), np.zeros(numbers.shape, bool)
    inner = np.minimum(np.searchsorted(entry.numbers, numbers), len(entry) - 1)
    return inner, entry.numbers[inner] == numbers


def _inner(entry: Entry, numbers: np.ndarray) -> np.ndarray:
    """The places in an entry of rows that it has."""
    inner, are_there = _search(entry, numbers)
    if not are_there.all():
        raise IndexError(f"row {numbers[~are_there][0]} was dropped")
    return inner


def open_by_file(
    sources: Sequence[Source], encoder: Encoder, recipe: Recipe, report: Callable[[str], None]
) -> RowsByFile:
    """The rows of all sources; only the first file of the order is tokenised here.

    Args:
        sources: of plain files of rows.
        encoder: of the rows.
        recipe: its `data` section is read, and its seed.
        report: receives a line.

    Raises:
        ConfigError: a source cannot be read file by file.
        DataError: a file has no rows, or cannot be read.
    """
    data, root = recipe.data, cache_root(recipe.data.cache_dir)
    cache = EntryCache(root, data.num_workers, data.max_bad_rows if data.on_bad_row == "skip" else None, report)
    for source in sources:
        _require_plain(source)
    files = [DataFile.of(source, file) for source in sources for file in source.files]
    rows = RowsByFile(
        DataFiles(files, cache, encoder, data.num_workers),
        {source.name: source.weight for source in sources},
        cache,
        encoder,
        first=order_of_files(len(files), recipe.runner.seed, 0, data.shuffle).tolist(),
        most_open=3 * mixed_files(data) + 1,
    )
    report(f"data: {rows.describe()}, tokenised one by one while training goes on")
    for source in sources:
        if len(source.files) > 1 and source.weight != round(source.weight):
            report(
                f"data: {source.name}: the weight {source.weight:g} is rounded for each of its {len(source.files):,} "
                "files, not for all of them together: the more rows a file has, the closer"
            )
    return rows


def mixed_files(data: DataConfig) -> int:
    """How many files rows are shuffled within."""
    return MIXED_FILES if data.mixed_files is None else data.mixed_files


def _require_plain(source: Source) -> None:
    if source.max_samples is not None:
        what, remedy = "max_samples counts usable rows over all files of a source", "leave max_samples out"
    elif source.frames is not None:
        what, remedy = "robot data are windows of whole episodes and not read row by row", "leave it out"
    else:
        return
    raise ConfigError(f"{KEY}: {what}", where=f"the source {source.name}", remedy=f"{remedy}, or set data.cache: whole")


def _in_words(size: int) -> str:
    """Bytes in the unit that suits them."""
    for unit, name in ((1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size} bytes"
