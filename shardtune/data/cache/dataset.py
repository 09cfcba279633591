"""The encoded rows of all sources as one sequence, read straight from the cache's files."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import merge
from typing import Any, Protocol

import numpy as np

from shardtune.batch import Sample
from shardtune.data.cache.blocks import TokenBlock
from shardtune.data.cache.entry import Entry, Notes, Tally
from shardtune.data.cache.fields import Kinds, require_same_kinds
from shardtune.data.row_shapes import shown_key
from shardtune.errors import DataError, counted

_OUTCOMES = {
    "truncated": "cut to data.max_length",
    "split": "split into windows of data.max_length",
    "left_out": "trained without reasoning that they have",
    "prompt_differs": "trained behind another prompt than that of generation",
    "too_long": "dropped, longer than data.max_length",
    "no_target": "dropped, without a target",
    "filtered": "dropped by data.transform",
    "bad": "skipped, not usable",
}
QUARANTINED = "quarantined"
_SHOWN_KEYS = 5


@dataclass(frozen=True, slots=True)
class SourceSpan:
    """The rows `[start, stop)` come from the source `name`, of which an epoch holds `weight` times as many."""

    name: str
    start: int
    stop: int
    weight: float


@dataclass(frozen=True, slots=True)
class FileReport:
    """What became of the rows of one file.

    Attributes:
        source: of the file.
        label: its name.
        tally: counts rows, and names the first of them.
        quarantined: those left out by `data.quarantine`, with the reason.
    """

    source: str
    label: str
    tally: Tally
    quarantined: Notes


@dataclass(frozen=True, slots=True)
class DataReport:
    """What became of every row that was read, file by file."""

    files: tuple[FileReport, ...]

    def count(self, outcome: str) -> int:
        """Rows over all files: `rows`, `kept`, or an outcome such as `truncated` or `bad`."""
        if outcome == QUARANTINED:
            return sum(file.quarantined.count for file in self.files)
        values = [getattr(file.tally, outcome) for file in self.files]
        return sum(value.count if isinstance(value, Notes) else value for value in values)

    def lines(self, examples: int = 3, *, max_length: int | None = None) -> Iterator[str]:
        """One line per file and outcome, with the first rows it befell; none where all is well.

        Args:
            examples: how many of these rows.
            max_length: the limit, for the rows that are longer.
        """
        limit = "data.max_length" if max_length is None else f"data.max_length: {max_length:,}"
        named: dict[str, set[str]] = {}
        beside: dict[str, list[str]] = {}
        for file in self.files:
            for outcome, text in _OUTCOMES.items():
                notes: Notes = getattr(file.tally, outcome)
                if notes.count:
                    share = f" ({_share(file.tally)})" if outcome == "left_out" else ""
                    share += f" ({file.tally.windows + notes.count:,} windows)" if outcome == "split" else ""
                    rows = f"{notes.count:,} of {file.tally.rows:,} rows"
                    what = text.replace("data.max_length", limit)
                    yield f"{file.label}: {rows} {what}{share}: {_first(notes, examples)}"
            known = named.setdefault(file.source, set(_of_all_rows(file)))
            yield from _unread(file, known)
            known.update(_of_all_rows(file))
            yield from _beside(file, beside.setdefault(file.source, []))
            yield from _control_tokens(file)
            yield from _changed_turns(file)
        for source in dict.fromkeys(file.source for file in self.files):
            yield from _several_formats(source, [file for file in self.files if file.source == source])

    def quarantined(self, examples: int = 3) -> Iterator[str]:
        """One line per file with rows that `data.quarantine` leaves out, with the first of them."""
        for file in self.files:
            if file.quarantined.count:
                rows = f"{file.quarantined.count:,} of {file.tally.rows:,} rows"
                yield f"{file.label}: {rows} left out by data.quarantine: {_first(file.quarantined, examples)}"

    def counts(self) -> list[dict[str, object]]:
        """For each file how many rows it has, how many are kept, and how many were cut or dropped for which cause."""
        found = []
        for file in self.files:
            outcomes = {outcome: getattr(file.tally, outcome).count for outcome in _OUTCOMES}
            kept = file.tally.kept - file.quarantined.count
            about = {"source": file.source, "file": file.label, "rows": file.tally.rows, "kept": kept}
            if file.tally.split.count:
                about["windows"] = file.tally.windows + file.tally.split.count
            if file.tally.left_out_tokens:
                about["left_out_tokens"] = file.tally.left_out_tokens
            outcomes[QUARANTINED] = file.quarantined.count
            found.append({**about, **{outcome: count for outcome, count in outcomes.items() if count}})
        return found


def _of_all_rows(file: FileReport) -> list[str]:
    """The keys of all rows of a file that are not read; those of a source's first file are named with the source."""
    encoded = file.tally.rows - file.tally.filtered.count - file.tally.bad.count
    return [key for key, notes in file.tally.unread.items() if notes.count == encoded]


def _unread(file: FileReport, known: Collection[str]) -> Iterator[str]:
    """A line on keys of some rows, or of all rows of this file, that are not read and were not named.

    Args:
        file: the file.
        known: the keys of all rows of an earlier file of the source.
    """
    elsewhere = {key for key in _of_all_rows(file) if key in known}
    found = {shown_key(key): notes for key, notes in file.tally.unread.items() if key not in elsewhere}
    if found:
        yield f"{file.label}: not read are keys that some rows have: {_counted(found, file.tally.rows)}"


def _beside(file: FileReport, known: list[str]) -> Iterator[str]:
    """A line on keys of the file beside its list of rows, once for all files of a source.

    Args:
        file: the file.
        known: the keys that were named; those of this file are added.
    """
    found = [key for key in file.tally.beside if key not in known]
    known += found
    if found:
        shown = [shown_key(key) for key in found[:_SHOWN_KEYS]]
        more = f" and {len(found) - _SHOWN_KEYS:,} more" if len(found) > _SHOWN_KEYS else ""
        yield f"{file.label}: rows are the list under data; not read beside it: {', '.join(shown)}{more}"


def _control_tokens(file: FileReport) -> Iterator[str]:
    """A line on turns whose text has special tokens: one that ends a turn ends it, whoever wrote it."""
    what = "the text of turns has special tokens of the tokenizer, which the model receives as such"
    yield from _noted(file, what, file.tally.control_tokens, "data.transform may write them otherwise")


def _changed_turns(file: FileReport) -> Iterator[str]:
    """A line on turns that are not trained and whose text the model does not receive as the row has it."""
    what = "the chat template leaves out or changes text of turns that are not trained"
    yield from _noted(file, what, file.tally.changed_turns, "shardtune data preview shows what is left")


def _noted(file: FileReport, what: str, found: Mapping[str, Notes], then: str) -> Iterator[str]:
    if found:
        yield f"{file.label}: {what}: {_counted(found, file.tally.rows)}; {then}"


def _counted(found: Mapping[str, Notes], rows: int) -> str:
    """Names with how many of the rows they are in, and the first of these; of the first five names."""
    shown = [f"{name} ({notes.count:,} of {rows:,}, row {notes.first[0][0]:,})" for name, notes in found.items()]
    if len(shown) > _SHOWN_KEYS:
        shown[_SHOWN_KEYS:] = [f"and {len(shown) - _SHOWN_KEYS:,} more"]
    return ", ".join(shown)


def _several_formats(source: str, files: Sequence[FileReport]) -> Iterator[str]:
    """A line where the rows of a source have several formats: the first row's alone is named with the source."""
    counts, first = Counter[str](), dict[str, str]()
    for file in files:
        for title, notes in file.tally.formats.items():
            counts[title] += notes.count
            place = f"{file.label}: " if len(files) > 1 else ""
            first.setdefault(title, f"{place}row {notes.first[0][0]:,}")
    if len(counts) > 1:
        shown = (f"{title} ({count:,}, from {first[title]})" for title, count in counts.items())
        yield f"{source}: rows have {len(counts)} formats: {', '.join(shown)}"


def _digest(numbers: Sequence[int]) -> str:
    return hashlib.blake2b(json.dumps(numbers).encode(), digest_size=8).hexdigest()


def _share(tally: Tally) -> str:
    whole = tally.left_out_tokens + tally.trained_tokens
    return f"{tally.left_out_tokens:,} of {whole:,} tokens to be trained, {tally.left_out_tokens / whole:.1%}"


def _first(notes: Notes, examples: int) -> str:
    named = notes.first[:examples]
    reasons = {reason for _, reason in named}
    more = ", …" if notes.count > len(named) else ""
    if len(reasons) == 1 and next(iter(reasons)):
        rows = ", ".join(f"{number:,}" for number, _ in named)
        return f"row {rows}{more} ({named[0][1]})"
    return "; ".join(f"row {number:,}" + (f": {reason}" if reason else "") for number, reason in named) + more


@dataclass(frozen=True, slots=True)
class Part:
    """One cache entry and the file it was made from."""

    entry: Entry
    source: str
    label: str


class HasEntries(Protocol):
    """Rows of cache entries."""

    @property
    def entry_keys(self) -> list[str]: ...


def _shared_kinds(parts: Sequence[Part]) -> Kinds:
    """The kinds of the fields of all rows; those of an entry without rows are unknown."""
    filled = [part for part in parts if len(part.entry)]
    firsts = [f"{part.label}: row {part.entry.numbers[0]:,}" for part in filled]
    for part, where in zip(filled, firsts, strict=True):
        require_same_kinds(part.entry.kinds, filled[0].entry.kinds, firsts[0], where)
    return filled[0].entry.kinds if filled else {}


class TokenDataset:
    """Rows by index; nothing is kept in memory per row that a mapped file does not hold.

    Args:
        parts: the entries, in the order of their sources.
        sources: name and weight of each source.
        index: int64 [rows], ascending; which rows of the parts these are. None: all.
        reasons: of the rows that are left out of training, by index. They keep their index, as the order of rows and
            what a loss draws for a row depend on it.

    Attributes:
        fields: type and number of dimensions of each field, the same in all rows.
        left_out: int64, ascending; the rows that are left out of training.

    Raises `DataError` where the rows of one file have other fields than those of another.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        sources: Mapping[str, float],
        index: np.ndarray | None = None,
        reasons: Mapping[int, str] | None = None,
    ) -> None:
        self._reasons = dict(reasons or {})
        self.left_out = np.array(sorted(self._reasons), np.int64)
        self._parts = tuple(parts)
        self._weights = dict(sources)
        self._index = index
        self._entries = [part.entry for part in parts]
        self._starts = [0, *np.cumsum([len(part.entry) for part in parts]).tolist()]
        self._length = self._starts[-1] if index is None else len(index)
        self.fields = _shared_kinds(parts)

    def __len__(self) -> int:
        return self._length

    def row(self, index: int) -> Sample:
        """The sample `index`; its tokens and fields are read-only views of the cache."""
        place, inner = self._place(index)
        return self._entries[place].row(inner)

    def __getitem__(self, index: int) -> Sample:
        return self.row(index)

    def locate(self, index: int) -> str:
        """Where row `index` comes from: `file:row`."""
        file, row = self.origin(index)
        return f"{file}:{row}"

    def origin(self, index: int) -> tuple[str, int]:
        """The file of row `index`, and its number in there."""
        place, inner = self._place(index)
        return self._parts[place].label, int(self._entries[place].numbers[inner])

    def find(self, file: int, number: int) -> int | None:
        """The index of row `number` of the file `file` (as in `report.files`); None if it is not among these rows."""
        numbers = self._entries[file].numbers
        inner = int(np.searchsorted(numbers, number))
        if inner == len(numbers) or numbers[inner] != number:
            return None
        whole = self._starts[file] + inner
        if self._index is None:
            return whole
        index = int(np.searchsorted(self._index, whole))
        return index if index < len(self._index) and self._index[index] == whole else None

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self._length:
            raise IndexError(f"row {index} of {self._length}")
        if self._index is not None:
            index = int(self._index[index])
        place = bisect_right(self._starts, index) - 1 if len(self._entries) > 1 else 0
        # Empty entries share their start with the next one; bisect_right lands on the last, which holds the row.
        return place, index - self._starts[place]

    def blocks(self, most_tokens: int, most_rows: int) -> Iterator[tuple[int, TokenBlock]]:
        """All rows in order, many at once: each time the index of the first one, and their tokens.

        Args:
            most_tokens: tokens of a block at most, unless a single row has more.
            most_rows: rows of a block at most.
        """
        cuts = self._starts if self._index is None else np.searchsorted(self._index, self._starts).tolist()
        for entry, base, start, stop in zip(self._entries, self._starts, cuts, cuts[1:], strict=False):
            ends = np.cumsum(self.lengths[start:stop], dtype=np.int64)
            place = start
            while place < stop:
                before = int(ends[place - start - 1]) if place > start else 0
                fitting = int(np.searchsorted(ends, before + most_tokens, side="right"))
                end = min(max(start + fitting, place + 1), place + most_rows)
                rows = np.arange(place, end) if self._index is None else self._index[place:end]
                yield place, entry.block(rows - base)
                place = end

    @cached_property
    def lengths(self) -> np.ndarray:
        """int32 [rows]: tokens of each row, or the size of a row without tokens."""
        return self._gather([entry.lengths for entry in self._entries])

    @property
    def trained_lengths(self) -> np.ndarray:
        """As `lengths`, with 0 for rows that are left out of training."""
        if not len(self.left_out):
            return self.lengths
        lengths = self.lengths.copy()
        lengths[self.left_out] = 0
        return lengths

    @property
    def first_trained(self) -> int:
        """The first row that is not left out of training; there is one."""
        gone = np.flatnonzero(self.left_out != np.arange(len(self.left_out)))
        return int(gone[0]) if len(gone) else len(self.left_out)

    @cached_property
    def hashes(self) -> np.ndarray:
        """uint64 [rows]: the hash of each row as stored in its file."""
        return self._gather([entry.hashes for entry in self._entries])

    @cached_property
    def term_weights(self) -> Mapping[str, np.ndarray]:
        """float64 [rows] per loss term; 0 where a row has no such term."""
        names = sorted({name for entry in self._entries for name in entry.terms})
        return {
            name: self._gather([entry.terms.get(name, np.zeros(len(entry))) for entry in self._entries])
            for name in names
        }

    def field_counts(self, name: str) -> np.ndarray:
        """int64 [rows]: how many elements along its first dimension a field has in each row."""
        return self._gather([entry.field_counts(name) for entry in self._entries if len(entry)])

    def of_other_shape(self, name: str) -> int | None:
        """The first row in which a field has another shape than in `first_trained`; None if all have one."""
        entries = [entry for entry in self._entries if len(entry)]
        of_all = {entry.field_shape(name) for entry in entries}
        if len(of_all) == 1 and None not in of_all:
            return None
        shapes = self._gather([entry.field_shapes(name) for entry in entries])
        differ = (shapes != shapes[self.first_trained]).any(axis=1)
        differ[self.left_out] = False
        return int(differ.argmax()) if differ.any() else None

    def _gather(self, pieces: list[np.ndarray]) -> np.ndarray:
        whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return whole if self._index is None else whole[self._index]

    @cached_property
    def sources(self) -> tuple[SourceSpan, ...]:
        """The sources in order; together they cover all rows. One without rows (in a view) is empty."""
        spans, start = [], 0
        for name, weight in self._weights.items():
            stop = start + sum(len(part.entry) for part in self._parts if part.source == name)
            spans.append((name, start, stop, weight))
            start = stop
        if self._index is None:
            return tuple(SourceSpan(*span) for span in spans)
        cuts = np.searchsorted(self._index, [0, *(stop for _, _, stop, _ in spans)]).tolist()
        return tuple(
            SourceSpan(name, first, last, weight)
            for (name, _, _, weight), first, last in zip(spans, cuts[:-1], cuts[1:], strict=True)
        )

    @cached_property
    def report(self) -> DataReport:
        """What became of the rows of each file; the same for every view of the data set, but for what is left out."""
        notes = [Notes() for _ in self._parts]
        for place, number, reason in self._quarantined():
            notes[place].add(number, reason)
        reports = zip(self._parts, notes, strict=True)
        return DataReport(tuple(FileReport(part.source, part.label, part.entry.tally, out) for part, out in reports))

    def _quarantined(self) -> Iterator[tuple[int, int, str]]:
        """Of each row that is left out its part, its number there, and the reason."""
        for index in self.left_out.tolist():
            place, inner = self._place(index)
            yield place, int(self._entries[place].numbers[inner]), self._reasons[index]

    def dropped(self) -> Iterator[dict[str, object]]:
        """Every row of these files that is not among the rows, or left out of training, with its cause and reason."""
        left_out = [(place, number, QUARANTINED, reason) for place, number, reason in self._quarantined()]
        for place, part in enumerate(self._parts):
            others = [(number, cause, reason) for of_part, number, cause, reason in left_out if of_part == place]
            for number, cause, reason in merge(part.entry.dropped(), others):
                yield {"source": part.source, "file": part.label, "row": number, "cause": cause, "reason": reason}

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal rows in equal order with equal source weights, wherever the files lie."""
        order = list(self._weights)
        content = [[order.index(part.source), self._weights[part.source], part.entry.key] for part in self._parts]
        digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=16)
        if self._index is not None:
            digest.update(np.ascontiguousarray(self._index, np.int64).data)
        if len(self.left_out):
            digest.update(b"left out" + self.left_out.tobytes())
        return digest.hexdigest()

    def content(self) -> str:
        """A hash of the rows as their files store them, row by row, and of their encoded lengths."""
        digest = hashlib.blake2b(np.ascontiguousarray(self.hashes).data, digest_size=16)
        digest.update(np.ascontiguousarray(self.lengths).data)
        digest.update(self.left_out.tobytes())
        return digest.hexdigest()

    @property
    def files(self) -> list[dict[str, Any]]:
        """Each file with its rows and the hash of their content and encoding, for comparing two states of the data.

        Where rows of it are left out of training, `left_out` has how many, and a hash of their numbers.
        """
        numbers: dict[int, list[int]] = {}
        for place, number, _ in self._quarantined():
            numbers.setdefault(place, []).append(number)
        left_out = {place: {"left_out": {"rows": len(gone), "key": _digest(gone)}} for place, gone in numbers.items()}
        return [
            {"source": part.source, "file": part.label, "rows": len(part.entry), "key": part.entry.key}
            | left_out.get(place, {})
            for place, part in enumerate(self._parts)
        ]

    @property
    def encoded(self) -> list[str | None]:
        """A checksum of the encoded rows of each file, in order; None where an earlier version wrote them."""
        return [part.entry.encoded for part in self._parts]

    @property
    def entry_keys(self) -> list[str]:
        """The names of the entries of all files, in order."""
        return [part.entry.key for part in self._parts]

    def shares_files(self, other: HasEntries) -> bool:
        """Whether both are of the same files, encoded alike."""
        return self.entry_keys == other.entry_keys

    def leave_out(self, reasons: Mapping[int, str]) -> TokenDataset:
        """The same rows, of which some are left out of training.

        Args:
            reasons: by index.
        """
        return TokenDataset(self._parts, self._weights, self._index, reasons)

    def select(self, index: np.ndarray) -> TokenDataset:
        """A view of the rows `index` (ascending), sharing the files."""
        chosen = np.asarray(index, np.int64)
        places = np.flatnonzero(np.isin(chosen, self.left_out)).tolist() if self._reasons else ()
        reasons = {place: self._reasons[int(chosen[place])] for place in places}
        if self._index is not None:
            chosen = self._index[chosen]
        return TokenDataset(self._parts, self._weights, chosen, reasons)

    def split_by_hash(self, fraction: float) -> tuple[TokenDataset, TokenDataset]:
        """(the rest, about `fraction` of the rows), each row's side decided by its own content.

        So rows added later move no other row across, and equal rows are never on both sides.
        """
        if not 0 < fraction < 1:
            raise DataError(
                f"data.eval_split is {fraction:g}", where="data.eval_split", remedy="a share above 0, below 1"
            )
        held_out = self.hashes < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
        train, evaluation = self.select(np.flatnonzero(~held_out)), self.select(np.flatnonzero(held_out))
        if not len(train) or not len(evaluation):
            raise DataError(
                f"data.eval_split {fraction:g} of {counted(len(self), 'row')} leaves {len(train):,} for training and "
                f"{len(evaluation):,} for evaluation",
                where="data.eval_split",
                remedy="choose another share, or name data.eval_data_paths",
            )
        return train, evaluation
