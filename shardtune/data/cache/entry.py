"""One file's encoded rows on disk: flat arrays that are memory-mapped, so opening costs nothing per row."""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NotRequired, TypedDict

import numpy as np
import xxhash

from shardtune.batch import Sample
from shardtune.data.cache.blocks import TokenBlock, token_block
from shardtune.data.cache.fields import FieldColumn, FieldsReader, FieldsWriter, Kinds, pack_fields
from shardtune.data.checksum import is_sealed, sealed
from shardtune.data.durable import sync_folder

LAYOUT_VERSION = 5
ROWS, DESCRIPTION = "rows.bin", "entry.json"
ENCODED = "encoded"
"""In the description: a checksum of the rows that are kept, whatever the reasons are why others were dropped."""
_KEPT_NOTES = 100
_ALIGNMENT = 64
# Array -> element type. Loss weights are stored as runs of equal values, of which most rows have two or three: the
# weights 0 0 0 1 1 of a row are run_values 0 1 and run_lengths 3 2. The arrays of all rows are laid end to end; row i
# has the runs [run_offsets[i], run_offsets[i + 1]), and likewise its tokens, prompt, reference and question.
_ARRAYS = {
    "tokens": np.dtype("<i4"),
    "lengths": np.dtype("<i4"),
    "offsets": np.dtype("<i8"),
    "run_values": np.dtype("<f4"),
    "run_lengths": np.dtype("<i4"),
    "run_offsets": np.dtype("<i8"),
    "numbers": np.dtype("<i8"),
    "hashes": np.dtype("<u8"),
    "prompts": np.dtype("<i4"),
    "prompt_offsets": np.dtype("<i8"),
    "references": np.dtype("<u1"),
    "reference_offsets": np.dtype("<i8"),
    "questions": np.dtype("<u1"),
    "question_offsets": np.dtype("<i8"),
}
_WEIGHT = np.dtype("<f8")
_DROPPED_ROWS = "dropped"  # a line of JSON per dropped row: number, cause, reason
DROPPED = ("too_long", "no_target", "filtered", "bad")
"""The causes for which a row is dropped, as in `Tally`."""


@dataclass(slots=True)
class Notes:
    """Rows that something happened to: how many, and row number and reason of the first hundred, in a chunk of all."""

    count: int = 0
    first: list[tuple[int, str]] = field(default_factory=list)

    def add(self, number: int, reason: str) -> None:
        self.count += 1
        self.first.append((number, reason))

    def extend(self, other: Notes) -> None:
        self.count += other.count
        self.first.extend(other.first[: _KEPT_NOTES - len(self.first)])

    @classmethod
    def from_json(cls, content: NotesJson) -> Notes:
        return cls(content["count"], [(number, reason) for number, reason in content["first"]])


class NotesJson(TypedDict):
    """`Notes` in an entry's description."""

    count: int
    first: list[tuple[int, str]]


class TallyJson(TypedDict):
    """`Tally` in an entry's description."""

    rows: int
    kept: int
    truncated: NotesJson
    too_long: NotesJson
    no_target: NotesJson
    filtered: NotesJson
    bad: NotesJson
    left_out: NotesJson
    left_out_tokens: int
    trained_tokens: int
    prompt_differs: NotesJson
    split: NotesJson
    windows: int
    unread: NotRequired[dict[str, NotesJson]]  # of an earlier version: none
    formats: NotRequired[dict[str, NotesJson]]  # likewise
    control_tokens: NotRequired[dict[str, NotesJson]]  # likewise
    changed_turns: NotRequired[dict[str, NotesJson]]  # likewise
    beside: NotRequired[list[str]]  # likewise


@dataclass(slots=True)
class Tally:
    """What became of the rows of a file.

    Attributes:
        rows: rows read, usable or not.
        kept: rows in the data set; of a row that is split, each window.
        truncated: kept, but cut at `data.max_length`.
        too_long: dropped because of `data.on_too_long: drop`.
        no_target: dropped because nothing of them is trained: no token, or no weight in any loss term.
        filtered: dropped by `data.transform`.
        bad: not usable.
        left_out: kept, but without reasoning that the chat template does not print.
        left_out_tokens: of that reasoning.
        trained_tokens: of all kept rows, before they are cut.
        split: kept, in windows. windows: how many more rows of the data set that makes.
        prompt_differs: kept, but their answers are preceded by something else than the prompt of generation.
        unread: rows with a key that their format does not look at, by key; of the first hundred keys.
        formats: rows of each format of text and chats, by its title, with the first one.
        control_tokens: kept conversations whose turns spell out a special token, by its text; of the first hundred.
        changed_turns: kept conversations with turns whose text the chat template changes, by their role.
        beside: keys of the file beside its list of rows.
    """

    rows: int = 0
    kept: int = 0
    truncated: Notes = field(default_factory=Notes)
    too_long: Notes = field(default_factory=Notes)
    no_target: Notes = field(default_factory=Notes)
    filtered: Notes = field(default_factory=Notes)
    bad: Notes = field(default_factory=Notes)
    left_out: Notes = field(default_factory=Notes)
    left_out_tokens: int = 0
    trained_tokens: int = 0
    prompt_differs: Notes = field(default_factory=Notes)
    split: Notes = field(default_factory=Notes)
    windows: int = 0
    unread: dict[str, Notes] = field(default_factory=dict)
    formats: dict[str, Notes] = field(default_factory=dict)
    control_tokens: dict[str, Notes] = field(default_factory=dict)
    changed_turns: dict[str, Notes] = field(default_factory=dict)
    beside: list[str] = field(default_factory=list)

    def note_unread(self, keys: Sequence[str], number: int) -> None:
        """Count a row's keys that are not read."""
        _count_each(self.unread, keys, number)

    def note_control_tokens(self, tokens: Sequence[str], number: int) -> None:
        """Count a row by the special tokens that its turns spell out."""
        _count_each(self.control_tokens, tokens, number)

    def note_changed_turns(self, roles: Sequence[str], number: int) -> None:
        """Count a row by the roles of its turns whose text the chat template changes."""
        _count_each(self.changed_turns, roles, number)

    def note_format(self, title: str, number: int) -> None:
        """Count a row by its format."""
        _count(self.formats, title, number)

    def extend(self, other: Tally) -> None:
        self.rows += other.rows
        self.kept += other.kept
        self.truncated.extend(other.truncated)
        self.too_long.extend(other.too_long)
        self.no_target.extend(other.no_target)
        self.filtered.extend(other.filtered)
        self.bad.extend(other.bad)
        self.left_out.extend(other.left_out)
        self.left_out_tokens += other.left_out_tokens
        self.trained_tokens += other.trained_tokens
        self.prompt_differs.extend(other.prompt_differs)
        self.split.extend(other.split)
        self.windows += other.windows
        _add_up(self.unread, other.unread)
        _add_up(self.formats, other.formats)
        _add_up(self.control_tokens, other.control_tokens)
        _add_up(self.changed_turns, other.changed_turns)
        self.beside += other.beside

    def dropped(self) -> list[tuple[int, str, str]]:
        """The dropped rows among the noted ones, in order: number, cause, reason."""
        notes = {cause: getattr(self, cause) for cause in DROPPED}
        return sorted((number, cause, reason) for cause, rows in notes.items() for number, reason in rows.first)

    @classmethod
    def from_json(cls, content: TallyJson) -> Tally:
        return cls(
            rows=content["rows"],
            kept=content["kept"],
            truncated=Notes.from_json(content["truncated"]),
            too_long=Notes.from_json(content["too_long"]),
            no_target=Notes.from_json(content["no_target"]),
            filtered=Notes.from_json(content["filtered"]),
            bad=Notes.from_json(content["bad"]),
            left_out=Notes.from_json(content["left_out"]),
            left_out_tokens=content["left_out_tokens"],
            trained_tokens=content["trained_tokens"],
            prompt_differs=Notes.from_json(content["prompt_differs"]),
            split=Notes.from_json(content["split"]),
            windows=content["windows"],
            unread={key: Notes.from_json(notes) for key, notes in content.get("unread", {}).items()},
            formats={title: Notes.from_json(notes) for title, notes in content.get("formats", {}).items()},
            control_tokens={
                token: Notes.from_json(notes) for token, notes in content.get("control_tokens", {}).items()
            },
            changed_turns={role: Notes.from_json(notes) for role, notes in content.get("changed_turns", {}).items()},
            beside=content.get("beside", []),
        )


def _count_each(found: dict[str, Notes], names: Sequence[str], number: int) -> None:
    """Count a row under each of its names; of the first hundred names."""
    for name in names:
        if name in found or len(found) < _KEPT_NOTES:
            _count(found, name, number)


def _count(found: dict[str, Notes], name: str, number: int) -> None:
    notes = found.setdefault(name, Notes())
    notes.count += 1
    if not notes.first:
        notes.first.append((number, ""))


def _add_up(found: dict[str, Notes], others: Mapping[str, Notes]) -> None:
    """Add the counts of later rows, by name; of the first hundred names."""
    for name, notes in others.items():
        if name in found:
            found[name].count += notes.count
        elif len(found) < _KEPT_NOTES:
            found[name] = Notes(notes.count, list(notes.first))


@dataclass(slots=True)
class EncodedRows:
    """Consecutive encoded rows as flat arrays: the result of a worker process.

    The keys are those of `_ARRAYS`, with counts per row (`token_counts`, `run_counts`, `prompt_counts`,
    `reference_counts`, `question_counts`) in place of offsets.
    """

    arrays: dict[str, np.ndarray]
    terms: dict[str, np.ndarray]
    fields: dict[str, FieldColumn]
    tally: Tally

    @property
    def kinds(self) -> Kinds:
        """What the fields of all these rows are."""
        return {name: column.kind for name, column in self.fields.items()}

    @classmethod
    def pack(cls, rows: Sequence[EncodedRow], tally: Tally) -> EncodedRows:
        """Rows whose fields have the same kinds."""
        token_counts = [len(row.sample.input_ids) for row in rows]
        lengths = [count or row.sample.length for count, row in zip(token_counts, rows, strict=True)]
        runs = [_runs(row.sample.loss_weights) for row in rows]
        prompts = [_prompt(row.sample) for row in rows]
        references = [_text(row.sample.reference) for row in rows]
        questions = [_text(row.sample.question) for row in rows]
        names = sorted({name for row in rows for name in row.weights})
        arrays = {
            "tokens": _joined([row.sample.input_ids for row in rows], "tokens"),
            "token_counts": np.array(token_counts, np.int64),
            "lengths": np.array(lengths, _ARRAYS["lengths"]),
            "run_values": _joined([values for values, _ in runs], "run_values"),
            "run_lengths": _joined([lengths for _, lengths in runs], "run_lengths"),
            "run_counts": np.array([len(values) for values, _ in runs], np.int64),
            "numbers": np.array([row.number for row in rows], _ARRAYS["numbers"]),
            "hashes": np.array([row.digest for row in rows], _ARRAYS["hashes"]),
            "prompts": _joined(prompts, "prompts"),
            "prompt_counts": np.array([len(prompt) for prompt in prompts], np.int64),
            "references": _joined(references, "references"),
            "reference_counts": np.array([len(reference) for reference in references], np.int64),
            "questions": _joined(questions, "questions"),
            "question_counts": np.array([len(question) for question in questions], np.int64),
        }
        terms = {name: np.array([row.weights.get(name, 0.0) for row in rows], _WEIGHT) for name in names}
        return cls(arrays, terms, pack_fields([row.sample.fields for row in rows if row.sample.fields]), tally)


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """One encoded row with its number in the file, the hash of its content, and its weight in each loss term."""

    number: int
    digest: int
    sample: Sample
    weights: Mapping[str, float]


def _joined(pieces: Sequence[np.ndarray], name: str) -> np.ndarray:
    return np.concatenate([*pieces, np.empty(0, _ARRAYS[name])]).astype(_ARRAYS[name], copy=False)


def _text(text: str | None) -> np.ndarray:
    return np.frombuffer((text or "").encode(), np.uint8)


def _prompt(sample: Sample) -> np.ndarray:
    return np.empty(0, np.int32) if sample.prompt_ids is None else sample.prompt_ids


def _runs(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The values of the runs of equal weights, and how long each is.

    Worked example: in 0 0 0 1 1 the neighbours differ at place 2 (0 and 1), so a run starts at 2 + 1; with the first
    the starts are 0 3, the values 0 1, and the lengths the differences of 0 3 5.
    """
    if not len(weights):
        return weights, np.empty(0, np.int32)
    starts = np.concatenate([[0], np.flatnonzero(weights[1:] != weights[:-1]) + 1])
    return weights[starts], np.diff(starts, append=len(weights)).astype(np.int32)


class _Summed:
    """A stream with the checksum of what is written into it.

    Attributes:
        also: a second checksum, to which what is written is added.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._sum = stream, xxhash.xxh3_128()
        self.also: xxhash.xxh3_128 | None = None

    def write(self, content: bytes, /) -> int:
        self._sum.update(content)
        if self.also is not None:
            self.also.update(content)
        return self._stream.write(content)

    def checksum(self) -> str:
        return self._sum.hexdigest()


class EntryWriter:
    """Writes an entry into a new directory, piece by piece, in bounded memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}
        self._ends = dict.fromkeys((name for name in _ARRAYS if name.endswith("offsets")), 0)
        self._terms: dict[str, str] = {}  # the array of each, numbered as they appear
        self._fields = FieldsWriter(self._append)
        self.tally = Tally()
        for name in self._ends:
            self._append(name, np.zeros(1, np.int64))
        self._append(_DROPPED_ROWS, np.empty(0, np.uint8))

    def add(self, rows: EncodedRows) -> None:
        counts = {
            "offsets": rows.arrays["token_counts"],
            "run_offsets": rows.arrays["run_counts"],
            "prompt_offsets": rows.arrays["prompt_counts"],
            "reference_offsets": rows.arrays["reference_counts"],
            "question_offsets": rows.arrays["question_counts"],
        }
        for name in _ARRAYS:
            if name in counts:
                # Counts 5 2 behind an array that ends at 10 are the offsets 15 17: a row's end is the next one's start.
                ends = self._ends[name] + np.cumsum(counts[name], dtype=np.int64)
                self._ends[name] = int(ends[-1]) if len(ends) else self._ends[name]
                self._append(name, ends)
            else:
                self._append(name, rows.arrays[name])
        self._fields.add(rows.fields)
        kept = len(rows.arrays["lengths"])
        for name in sorted(rows.terms.keys() - self._terms.keys()):
            self._terms[name] = f"weights{len(self._terms)}"
            self._append(self._terms[name], np.zeros(self.tally.kept, _WEIGHT))
        for name, array in self._terms.items():
            self._append(array, rows.terms.get(name, np.zeros(kept)).astype(_WEIGHT, copy=False))
        self.tally.extend(rows.tally)
        lines = "".join(f"{json.dumps(row)}\n" for row in rows.tally.dropped())
        self._append(_DROPPED_ROWS, np.frombuffer(lines.encode(), np.uint8))

    def finish(self, about: Mapping[str, str]) -> None:
        """Joins the arrays into one file, so that opening takes one mapping, and makes it durable.

        The description comes last: an entry without one is torn.
        """
        terms = sorted(self._terms)
        last = {self._terms[name]: f"term{place}" for place, name in enumerate(terms)}
        self.close()
        places: dict[str, tuple[int, int]] = {}
        kept = xxhash.xxh3_128()
        with (self._folder / ROWS).open("wb") as rows:
            summed = _Summed(rows)
            for name in (*(name for name in self._files if name not in last), *last):
                summed.write(bytes(-rows.tell() % _ALIGNMENT))  # behind 70 bytes, 58 zeros up to 128
                start, piece = rows.tell(), self._folder / f"{name}.part"
                with piece.open("rb") as file:
                    summed.also = None if name == _DROPPED_ROWS else kept
                    shutil.copyfileobj(file, summed, 1 << 20)
                    summed.also = None
                piece.unlink()
                places[last.get(name, name)] = (start, rows.tell() - start)
            size = rows.tell()
            rows.flush()
            os.fsync(rows.fileno())
        content = {"layout": LAYOUT_VERSION, "size": size, "arrays": places, "terms": terms}
        content |= {"fields": self._fields.about(), "tally": asdict(self.tally), **about}
        content |= {ROWS: summed.checksum(), ENCODED: kept.hexdigest()}
        with (self._folder / DESCRIPTION).open("w", encoding="utf-8") as file:
            json.dump(sealed(content), file)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._folder)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _append(self, name: str, values: np.ndarray) -> None:
        if name not in self._files:
            self._files[name] = (self._folder / f"{name}.part").open("wb")
        self._files[name].write(np.ascontiguousarray(values).data)


class Entry:
    """An entry on disk, opened by mapping its files; cheap to open in every process.

    Attributes:
        key: what names it.
        lengths: int32 [rows], tokens, or the size of a row without tokens.
        numbers: int64 [rows], the row's number in its file. hashes: uint64 [rows].
        terms: float64 [rows] per loss term.
        kinds: what each field's arrays are; the same in all rows.
        encoded: a checksum of the rows; None: the entry was written by an earlier version.
    """

    def __init__(self, folder: Path) -> None:
        """Raises `ValueError` or `OSError` for an entry that is torn or of another layout."""
        content = read_description(folder)
        if content["layout"] != LAYOUT_VERSION:
            raise ValueError(f"layout {content['layout']}")
        whole = _map(folder / ROWS, content["size"])
        places: dict[str, tuple[int, int]] = content["arrays"]

        def array(name: str, dtype: np.dtype) -> np.ndarray:
            start, size = places[name]
            return whole[start : start + size].view(dtype)

        arrays = {name: array(name, dtype) for name, dtype in _ARRAYS.items()}
        self.folder = folder
        self.key = folder.name
        self.encoded: str | None = content.get(ENCODED)
        self.tally = Tally.from_json(content["tally"])
        self.lengths = arrays["lengths"]
        self.numbers = arrays["numbers"]
        self.hashes = arrays["hashes"]
        self.terms = {name: array(f"term{place}", _WEIGHT) for place, name in enumerate(content["terms"])}
        self._fields = FieldsReader(content["fields"], array, len(self.lengths))
        self.kinds = self._fields.kinds
        self._arrays = arrays
        self._dropped = array(_DROPPED_ROWS, np.dtype(np.uint8))
        self._tokens, self._offsets = arrays["tokens"], arrays["offsets"]
        self._values, self._runs, self._run_offsets = (
            arrays[name] for name in ("run_values", "run_lengths", "run_offsets")
        )
        self._is_plain = not self.kinds and not len(arrays["prompts"])

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[type[Entry], tuple[Path]]:
        return Entry, (self.folder,)

    def row(self, index: int) -> Sample:
        """Row `index`; its tokens and fields are read-only views of the file."""
        tokens = self._tokens[self._offsets[index] : self._offsets[index + 1]]
        first, last = self._run_offsets[index], self._run_offsets[index + 1]
        weights = np.repeat(self._values[first:last], self._runs[first:last])
        if self._is_plain and len(tokens):
            return Sample(tokens, weights)
        size = 0 if len(tokens) else int(self.lengths[index])
        return Sample(tokens, weights, *self._prompt(index), self._fields.row(index), size)

    def block(self, rows: np.ndarray) -> TokenBlock:
        """The tokens of the rows `rows` (int64, ascending), and which of them are targets."""
        return token_block(self._tokens, self._offsets, self._values, self._runs, self._run_offsets, rows)

    def dropped(self) -> Iterator[tuple[int, str, str]]:
        """Each dropped row of the file in order: its number, the cause (one of `DROPPED`), and the reason."""
        for line in self._dropped.tobytes().splitlines():
            number, cause, reason = json.loads(line)
            yield number, cause, reason

    def field_counts(self, name: str) -> np.ndarray:
        """int64 [rows]: how many elements along its first dimension a field has in each row."""
        return self._fields.counts(name)

    def field_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape that a field has in all rows, if that is one."""
        return self._fields.shape(name)

    def field_shapes(self, name: str) -> np.ndarray:
        """int64 [rows, dimensions]: the shape of a field in each row."""
        return self._fields.shapes(name)

    def _prompt(self, index: int) -> tuple[np.ndarray | None, str | None, str | None]:
        """The prompt of a row, its reference and its question."""
        arrays = self._arrays
        start, stop = arrays["prompt_offsets"][index : index + 2]
        if start == stop:
            return None, None, None
        return arrays["prompts"][start:stop], self._text("reference", index), self._text("question", index)

    def _text(self, kind: str, index: int) -> str:
        start, stop = self._arrays[f"{kind}_offsets"][index : index + 2]
        return self._arrays[f"{kind}s"][start:stop].tobytes().decode()


def read_description(folder: Path) -> dict[str, Any]:
    """What `entry.json` says of an entry. Raises `ValueError` or `OSError` if it is damaged or gone."""
    content = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    if is_sealed(content) != (ROWS in content):  # entries of earlier versions have no checksums
        raise ValueError("its checksum is gone")
    return content


def _map(path: Path, size: int) -> np.ndarray:
    """The bytes of a file that must have `size` of them."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != size:
            raise ValueError("the file is torn")
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
