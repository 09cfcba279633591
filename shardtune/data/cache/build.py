"""Encoding one file into a cache entry, in several processes, with the same result whatever their number."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import tee
from pathlib import Path

import numpy as np

from shardtune.batch import Sample
from shardtune.batch.seeds import derive_seed, generators_kept, seed_processor
from shardtune.data.cache.entry import EncodedRow, EncodedRows, EntryWriter, Tally
from shardtune.data.cache.fields import Kinds, kinds_of, require_same_kinds
from shardtune.data.cache_directory import content_size
from shardtune.data.encoder import ByUser, Encoder, NamesUnread, Row, RowDropped, RowError, bad_row, caused_by
from shardtune.data.files.chunk import Chunk, RowChunk
from shardtune.data.loader.prefetch import ProcessDied, computed_ahead
from shardtune.data.progress import BuildProgress
from shardtune.data.robot.frames import FrameRow
from shardtune.data.row_formats import format_of, in_format, unread_keys
from shardtune.data.sources.source import Source, SourceFile, prepare_row
from shardtune.errors import DataError, counted

# Below this many bytes starting processes costs more than it saves.
_SMALL_FILE = 1 << 20


@dataclass(frozen=True, slots=True)
class BuildTask:
    """What encoding a file takes.

    Attributes:
        skip_bad: bad rows are noted; otherwise the first is an error.
        max_bad: how many may be noted before that is an error, too.
        limit: stop behind so many kept rows.
    """

    source: Source
    file: SourceFile
    encoder: Encoder
    skip_bad: bool
    max_bad: int
    limit: int | None


def build_entry(task: BuildTask, folder: Path, num_workers: int, progress: BuildProgress) -> None:
    """Encodes the file into `folder`. Raises `DataError` at the first fault that the task does not allow."""
    writer, first = EntryWriter(folder), None
    try:
        with closing(_encoded_chunks(task, num_workers)) as results:
            for chunk, result in results:
                rows = _within_limit(task, chunk, result, writer.tally.kept)
                first = _check_fields(task, rows, first)
                writer.add(rows)
                _check_bad(task, writer.tally)
                progress.update(writer.tally.rows, chunk.progress)
                if writer.tally.kept == task.limit:
                    break
        _check_bad(task, writer.tally)
        if not writer.tally.rows:
            raise DataError("the data file holds no rows", where=task.file.label, remedy="write rows into it")
        writer.finish({"made_from": task.file.label})
    finally:
        writer.close()
    progress.finish(writer.tally.rows)


def _check_fields(task: BuildTask, rows: EncodedRows, first: tuple[int, Kinds] | None) -> tuple[int, Kinds] | None:
    """Row number and kinds of the file's first row, of which the fields of all others must be."""
    if not rows.tally.kept:
        return first
    number = int(rows.arrays["numbers"][0])
    if first is None:
        return number, rows.kinds
    require_same_kinds(rows.kinds, first[1], f"row {first[0]:,}", f"{task.file.label}: row {number:,}")
    return first


def _check_bad(task: BuildTask, tally: Tally) -> None:
    if tally.bad.count > task.max_bad:
        raise too_many_bad(task.file.label, tally, task.max_bad)


def too_many_bad(label: str, tally: Tally, most: int) -> DataError:
    """The error for more bad rows than the recipe allows."""
    rows = "; ".join(f"row {number:,}: {reason}" for number, reason in tally.bad.first[:5])
    return DataError(
        f"{counted(tally.bad.count, 'row')} cannot be used, data.max_bad_rows is {most:,}. The first: {rows}",
        where=label,
        remedy="mend the rows, name their format or columns, or raise data.max_bad_rows",
    )


def encode_chunk(task: BuildTask, chunk: Chunk, most: int | None = None) -> EncodedRows:
    """The usable rows of a chunk, and what became of the others; at most the first `most` usable ones.

    What a user's code draws for a row follows from the row and its number, so that it is drawn again without the cache.
    """
    if not isinstance(task.encoder, ByUser) and task.source.transform is None:
        return _encode_chunk(task, chunk, most, draws=False)
    with generators_kept():
        return _encode_chunk(task, chunk, most, draws=True)


def _encode_chunk(task: BuildTask, chunk: Chunk, most: int | None, *, draws: bool) -> EncodedRows:
    tally, kept = Tally(beside=list(chunk.beside) if isinstance(chunk, RowChunk) else []), []
    for number, row in chunk.rows():
        tally.rows += 1
        try:
            encoded = _encode_row(task, number, row, tally, draws=draws)
            if encoded:
                _require_fields_of(kept[0] if kept else encoded[0], encoded[0])
        except DataError as error:
            where = f"{task.file.label}: row {number:,}" + (f" ({error.where})" if error.where else "")
            raise DataError(error.what, where=where, remedy=error.remedy) from error
        except Exception as error:
            reason = _reason(row, caused_by(error, row))
            if not task.skip_bad:
                raise bad_row(task.file.label, number, reason) from error
            tally.bad.add(number, " ".join(reason.split()))
            continue
        kept += encoded if most is None else encoded[: most - len(kept)]
        if len(kept) == most:
            break
    tally.kept = len(kept)
    return EncodedRows.pack(kept, tally)


def _require_fields_of(first: EncodedRow, row: EncodedRow) -> None:
    if row.sample.fields or first.sample.fields:
        require_same_kinds(kinds_of(row.sample.fields), kinds_of(first.sample.fields), f"row {first.number:,}")


def _within_limit(task: BuildTask, chunk: Chunk, result: EncodedRows | DataError, kept: int) -> EncodedRows:
    """The chunk's rows up to the task's limit, beyond which not even a bad row matters."""
    room = None if task.limit is None else task.limit - kept
    if isinstance(result, DataError):
        if room is None:
            raise result
        return encode_chunk(task, chunk, room)
    return result if room is None or result.tally.kept < room else encode_chunk(task, chunk, room)


def _encode_row(task: BuildTask, number: int, row: Row | RowError, tally: Tally, *, draws: bool) -> list[EncodedRow]:
    """The row encoded, in windows where it is split; nothing of one that is dropped.

    Args:
        draws: whether a user's code may draw.
    """
    if isinstance(row, RowError):
        raise row
    digest = _row_digest(row)  # once, as it takes longer than all else where a row has the bytes of an image
    if draws:
        seed_processor(derive_seed(number, digest, "encode"))
    prepared = prepare_row(row, task.source)
    if prepared is None:
        tally.filtered.add(number, "")
        return []
    given = prepared
    if task.source.format is not None:
        prepared = in_format(prepared, task.source.format)
    whole = task.encoder.encode(prepared)
    if task.source.is_text:
        known = format_of(given, task.source.format)
        tally.note_format(known.title, number)
        tally.note_unread(unread_keys(given, known), number)
    elif isinstance(task.encoder, NamesUnread):
        tally.note_unread(task.encoder.unread(prepared), number)
    if isinstance(row, FrameRow):
        tally.note_unread(row.unread, number)
    try:
        fitted = task.encoder.fit(whole)
    except RowDropped as dropped:
        tally.too_long.add(number, dropped.reason)
        return []
    parts = [fitted] if isinstance(fitted, Sample) else fitted
    weighed = [(part, task.encoder.weights(part)) for part in parts]
    kept = [(part, weights) for part, weights in weighed if any(weights.values())]
    sample = parts[0]
    if not kept:
        is_cut = len(parts) == 1 and sample.length < whole.length
        tally.no_target.add(number, "cut before the answer" if is_cut else "")
        return []
    if len(parts) > 1:
        idle = f", {len(parts) - len(kept):,} without a target" if len(kept) < len(parts) else ""
        tally.split.add(number, f"{whole.length:,} tokens in {len(parts):,} windows{idle}")
        tally.windows += len(kept) - 1
    elif sample.length < whole.length:
        tally.truncated.add(number, _cut(whole, sample))
    if whole.left_out:
        tally.left_out.add(number, f"{whole.left_out:,} tokens")
    if whole.prompt_differs:
        tally.prompt_differs.add(number, "")
    tally.note_control_tokens(whole.control_tokens, number)
    tally.note_changed_turns(whole.changed_turns, number)
    tally.left_out_tokens += whole.left_out
    tally.trained_tokens += int(np.count_nonzero(whole.loss_weights))
    return [EncodedRow(number, digest, part, weights) for part, weights in kept]


def _cut(whole: Sample, sample: Sample) -> str:
    """What is longer than `data.max_length`: the row's tokens, or some of its fields, beside which others are whole."""
    if len(whole.input_ids):
        return f"{whole.length:,} tokens"
    shapes = {name: zip(array.shape, sample.fields[name].shape, strict=True) for name, array in whole.fields.items()}
    cut = {name: [before for before, after in pairs if before != after] for name, pairs in shapes.items()}
    return ", ".join(f"{name} of length {lengths[0]:,}" for name, lengths in cut.items() if lengths)


def _reason(row: Row | RowError, error: RowError) -> str:
    return f"{row.place}: {error.reason}" if isinstance(row, FrameRow) and row.place else error.reason


def _row_digest(row: Row) -> int:
    """A hash of the row as stored in the file, so that the same row has it under every tokenizer and template.

    A column that is null is none: Parquet has a null in each row for a column that another row has. All frames of an
    episode have one hash: `data.eval_split` goes by it, and neighbouring frames are nearly the same.
    """
    if isinstance(row, FrameRow):
        return row.digest
    text = json.dumps(row, sort_keys=True, default=str)
    if "null" in text:
        text = json.dumps(_without_nulls(row), sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _without_nulls(value: object) -> object:
    """A value of a row without the keys that are null, in the dicts in it too; nulls in lists are kept."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


# -- processes -----------------------------------------------------------------------------------------------------


def _encoded_chunks(task: BuildTask, num_workers: int) -> Generator[tuple[Chunk, EncodedRows | DataError], None, None]:
    """The chunks of the file in order, each with its encoded rows or with the error of one."""
    alone = multiprocessing.current_process().daemon  # it may have no processes of its own
    if num_workers < 2 or alone or content_size(task.file.path) < _SMALL_FILE:
        num_workers = 0
    chunks, ahead = tee(task.source.chunks(task.file))
    try:
        with closing(computed_ahead(partial(_encoded, task), ahead, num_workers)) as results:
            yield from zip(chunks, results, strict=False)  # not strict: nothing is read behind the last chunk
    except ProcessDied as error:
        raise DataError(
            "a process that tokenises the data died; the machine may be out of memory",
            where=task.file.label,
            remedy="lower data.num_workers",
        ) from error


def _encoded(task: BuildTask, chunk: Chunk) -> EncodedRows | DataError:
    """An error is a value here: behind `task.limit` rows it does not matter."""
    try:
        return encode_chunk(task, chunk)
    except DataError as error:
        return error
