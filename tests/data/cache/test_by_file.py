"""Files that are tokenised one by one: only what is read, the same rows, limits, and what has changed meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from shardtune.config import Recipe, load_recipe
from shardtune.data.cache.ahead import FilesAhead, FileStepLoader
from shardtune.data.cache.by_file import RowsByFile, open_by_file
from shardtune.data.cache.data_files import NUMBER_BITS
from shardtune.data.loader.file_order import FileOrder
from shardtune.data.loader.order import DataOrder
from shardtune.data.loader.protocol import DataState
from shardtune.data.loader.step_loader import BatchMaker, Limits
from shardtune.data.prepare import WeighedRows
from shardtune.data.row_files import last_number, read_rows
from shardtune.data.sources.resolve import resolve_sources
from shardtune.errors import ConfigError, DataError
from shardtune.parallel.ranks import Ranks
from shardtune.run.resume_check import data_changes
from tests.data.cache.test_cache import WordEncoder
from tests.support.opened_rows import opened_files

Reader = Callable[..., RowsByFile]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five files; of the third one row is dropped as too long, and one line is blank."""
    for number in range(5):
        rows = [{"text": f"f{number} r{row}={'x' * (row + 1)}"} for row in range(6)]
        if number == 2:
            rows[1]["text"] = "y" * 80 + "=x"
        lines = [json.dumps(row) for row in rows]
        if number == 2:
            lines.insert(1, "")
        (tmp_path / f"f{number}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def recipe(folder: Path, **data: object) -> Recipe:
    given = {"train_data_paths": str(folder / "*.jsonl"), "cache_dir": str(folder / "cache"), "cache": "by_file"}
    return load_recipe(
        {
            "runner": {"max_steps": 5},
            "actor": {"model": {"model_path": "m"}},
            "data": {**given, "shuffle": False, "num_workers": 0, **data},
        }
    )


def opened(folder: Path, report: Callable[[str], None] = lambda _: None, **data: object) -> RowsByFile:
    made = recipe(folder, **data)
    encoder = WordEncoder(50, "drop")
    sources = resolve_sources(made.data.train_data_paths, made.data, name_format=lambda row: "", report=lambda _: None)
    return open_by_file(sources, encoder, made, report)


def at(file: int, row: int | list[int]) -> np.ndarray:
    """The index of rows of a file, by their numbers from 0."""
    return (np.int64(file) << NUMBER_BITS) + np.asarray(row, np.int64)


def entries(folder: Path) -> int:
    return len([*(folder / "cache" / "entries").glob("*/[!.]*")])


def test_only_the_files_that_are_read_are_tokenised(folder: Path) -> None:
    rows = opened(folder)
    assert (len(rows.data_files), entries(folder)) == (5, 1)
    seen: list[str] = []
    rows.follow(lambda file: seen.append(Path(file.report.files[0].label).name))
    assert rows.locate(int(at(3, 1))) == f"{folder / 'f3.jsonl'}:2"
    assert entries(folder) == 1
    assert rows.row(int(at(3, 1))).input_ids.tobytes().decode("utf-32-le") == "f3 r1=xx"
    assert (entries(folder), seen) == (2, ["f0.jsonl", "f3.jsonl"])
    # Row 2 of the third file is blank, row 3 too long.
    assert rows.are_kept(at(2, [*range(7)])).tolist() == [True, False, False, True, True, True, True]
    with pytest.raises(IndexError, match="row 3 was dropped"):
        rows.lengths[at(2, 2)]
    assert rows.lengths[np.stack([at(2, 0), at(4, 5), at(0, 0), at(2, 3)]).reshape(2, 2)].tolist() == [[7, 12], [7, 9]]
    assert int(rows.hashes[at(3, 1)]) == int(rows.hashes[at(3, [1])][0])
    assert [float(rows.term_weights["ce"][row]) for row in (0, 5)] == [1.0, 6.0]
    assert [rows.spans[number].stop - rows.spans[number].start for number in range(5)] == [6, 6, 7, 6, 6]
    # Random numbers are drawn by the numbers of rows end to end.
    numbers = [int(at(file, row)) for file, row in ((0, 5), (1, 0), (3, 1))]
    assert rows.data_files.running_numbers([*numbers, -1]) == [5, 6, 20, -1]
    again = opened(folder)
    assert again.fingerprint == rows.fingerprint
    assert again.files[2]["rows"] is None


def test_weights_that_are_rounded_for_each_file_are_said(folder: Path) -> None:
    for weight, path, is_said in ((0.5, "*", True), (2.0, "*", False), (0.5, "f1", False)):
        said: list[str] = []
        entry = {"path": str(folder / f"{path}.jsonl"), "name": "here", "weight": weight}
        opened(folder, said.append, train_data_paths=[entry])
        assert any("here: the weight 0.5 is rounded for each of its 5 files" in line for line in said) == is_said


def test_the_rows_that_a_weight_draws_are_the_same_wherever_the_files_lie(folder: Path, tmp_path: Path) -> None:
    def drawn(place: Path) -> list[int]:
        entry = {"path": str(place / "*.jsonl"), "name": "here", "weight": 0.5}
        files = opened(place, train_data_paths=[entry]).data_files
        return (
            DataOrder([files.span(number) for number in range(5)], seed=1, global_batch_size=4).rows(0, 0, 15).tolist()
        )

    assert drawn(Path(shutil.copytree(folder, tmp_path / "moved"))) == drawn(folder)


def test_a_file_that_changes_meanwhile_is_an_error(folder: Path) -> None:
    rows = opened(folder)
    file = folder / "f4.jsonl"
    file.write_text(file.read_text().replace("f4", "g4"))
    with pytest.raises(DataError, match="has changed since training began"):
        rows.row(int(at(4, 1)))
    file.unlink()
    with pytest.raises(DataError, match=r"cannot be read: No such file"):
        rows.row(int(at(4, 1)))


def test_bad_rows_are_met_where_their_file_is_read(folder: Path) -> None:
    for number in (1, 3):
        (folder / f"f{number}.jsonl").write_text('{"text": "a=b"}\n{"text": "none"}\n')
    rows = opened(folder)
    with pytest.raises(DataError, match="no ="):
        rows.row(int(at(1, 0)))
    rows = opened(folder, on_bad_row="skip", max_bad_rows=1)
    assert rows.are_kept(at(1, [0, 1])).tolist() == [True, False]
    rows.row(0)
    assert rows.row(int(at(1, 0))).length == 3  # opened again, its bad row counts once
    with pytest.raises(DataError, match=r"data\.max_bad_rows is 0"):
        rows.row(int(at(3, 0)))


def test_what_cannot_be_read_file_by_file_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_samples counts usable rows"):
        opened(folder, train_data_paths={"path": str(folder / "f1.jsonl"), "max_samples": 2})
    (folder / "f1.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"(?s)holds no rows.*f1.jsonl"):
        opened(folder).spans[1]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "lines.json", "a.csv", "a.parquet", "a.arrow"])
def test_the_last_number_of_a_file_without_decoding_it(tmp_path: Path, name: str) -> None:
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq

    file, rows = tmp_path / name, [{"text": f"row {row}"} for row in range(600)]
    kind = file.suffixes[0][1:]
    match name:
        case "a.jsonl" | "lines.json":
            file.write_text("\n".join(map(json.dumps, rows)))
        case "a.jsonl.gz":
            file.write_bytes(gzip.compress(("\n\n".join(map(json.dumps, rows)) + "\n").encode()))
        case "a.json":
            file.write_text(json.dumps(rows))
        case "a.csv":
            file.write_text("text\n" + "\n".join('"two\nlines"' for _ in rows))
        case "a.parquet":
            pq.write_table(pa.Table.from_pylist(rows), file)
        case _:
            with pa.ipc.new_stream(file, pa.schema({"text": pa.string()})) as stream:
                stream.write_table(pa.Table.from_pylist(rows))
    assert last_number(file, kind) == [*read_rows(file, kind)][-1][0] == (1199 if name.endswith("gz") else 600)


def order(rows: RowsByFile) -> FileOrder:
    return FileOrder(rows, rows.spans, seed=3, shuffle=False, mixed_files=1, global_batch_size=2)


def present(rows: RowsByFile) -> list[int]:
    return [number for number in range(5) if rows.folder(number).is_dir()]


def test_the_files_needed_last_are_removed(folder: Path) -> None:
    rows = opened(folder)
    for number in range(5):
        rows.entry(number)
    size = sum(file.stat().st_size for file in rows.folder(1).iterdir())
    FilesAhead(rows, order(rows), None).remove_passed(0, 0)
    ahead = FilesAhead(rows, order(rows), 4.5 * size / 2**30)
    assert [*ahead.wanted(0, 3)] == [3, 4, 0]
    ahead.remove_passed(0, 3)
    assert present(rows) == [0, 2, 3, 4]  # the second is needed last; the window before may still be read
    FilesAhead(rows, order(rows), 1e-9).remove_passed(1, 0)
    assert present(rows) == [0, 2, 4]
    assert rows.row(int(at(1, 1))).length == 8
    assert rows.row(int(at(3, 1))).length == 8


def test_a_process_tokenises_ahead(folder: Path) -> None:
    rows = opened(folder)
    ahead = FilesAhead(rows, order(rows), None)
    end = ahead.start()
    try:
        await_files(rows, [0, 1, 2])
        ahead.move_to(DataState(0, 13))
        await_files(rows, [0, 1, 2, 3, 4])
        shutil.rmtree(rows.folder(3))
        ahead.move_to(DataState(0, 20))
        await_files(rows, [0, 1, 2, 3, 4])
    finally:
        end()
    assert rows.row(int(at(4, 5))).length == 12


# -- What is read of files that are not needed yet --------------------------------------------------------------------


def loader(rows: RowsByFile, files: FileOrder, processes: int = 0) -> FileStepLoader:
    weighed = WeighedRows(rows, {"alike": 0.5})
    ranks = Ranks(0, 1, torch.device("cpu"))
    return FileStepLoader(
        weighed, files, BatchMaker(weighed, Limits(None)), rows, ranks, limit_gib=None, num_processes=processes
    )


def test_before_the_first_step_only_the_files_of_its_window_are_read(folder: Path) -> None:
    with opened_files() as read:
        rows = opened(folder)
        files = order(rows)
        first = loader(rows, files).step(DataState())
    assert set(read) == {"f0.jsonl"}
    assert first.rows.tolist() == [0, 1]
    assert first.denominators == {"ce": 3.0, "rows": 2.0, "alike": 1.0}
    with opened_files() as read:
        loader(rows, files).step(DataState(0, 5))  # it looks behind its last row
    assert set(read) == {"f1.jsonl"}


def test_records_spare_reading_files_again(folder: Path) -> None:
    before = opened(folder)
    before.entry(1)
    loader(before, order(before)).step(DataState(0, 14))
    records = before.files
    assert [record["rows"] for record in records] == [6, 6, 7, None, None]
    assert records[4]["key"] is None
    rows = opened(folder)
    rows.data_files.recall(records)
    with opened_files() as read:
        assert [rows.data_files.places(number) for number in range(3)] == [6, 6, 7]
        assert rows.files[:2] == records[:2]
    assert read == []
    # A file that was copied has another time stamp, and is hashed; one with other content is not what it was.
    for number in (1, 2):
        file = folder / f"f{number}.jsonl"
        file.write_text(file.read_text() if number == 1 else file.read_text().replace("f2", "g2"))
    rows = opened(folder)
    rows.data_files.recall(records)
    with opened_files() as read:
        assert rows.data_files.places(1) == 6
        assert read == []
    changes = data_changes(records, rows.files)
    assert changes == [f"{folder / 'f2.jsonl'}: other content"]
    (folder / "f4.jsonl").write_text("{}\n")
    assert data_changes(records, opened(folder).files)[-1] == f"{folder / 'f4.jsonl'}: 135 bytes -> 3 bytes"


def test_records_of_an_earlier_version_are_compared_by_their_hashes(folder: Path) -> None:
    before = opened(folder)
    for number in range(5):
        before.entry(number)
        before.data_files.places(number)
    records = [{name: one[name] for name in ("source", "file", "rows", "key")} for one in before.files]
    rows = opened(folder)
    rows.data_files.recall(records)
    assert not data_changes(records, rows.files)
    assert [one["rows"] for one in rows.files] == [6, 6, 7, 6, 6]
    file = folder / "f3.jsonl"
    file.write_text(file.read_text().replace("f3", "g3"))
    rows = opened(folder)
    rows.data_files.recall(records)
    assert [line.split(":")[0] for line in data_changes(records, rows.files)] == [str(file)]


def test_a_file_that_was_changed_without_its_time_stamp_is_found_when_it_is_read(folder: Path) -> None:
    before = opened(folder)
    before.entry(3)
    file = folder / "f3.jsonl"
    stamp = file.stat().st_mtime_ns
    file.write_text(file.read_text().replace("f3", "g3"))
    os.utime(file, ns=(stamp, stamp))
    rows = opened(folder)
    rows.data_files.recall(before.files)
    assert not data_changes(before.files, rows.files)
    with pytest.raises(DataError, match=r"(?s)has changed since training began.*f3.jsonl"):
        rows.row(int(at(3, 0)))


@pytest.mark.parametrize("processes", [0, 1])
def test_random_numbers_are_drawn_by_the_numbers_of_rows_end_to_end(folder: Path, processes: int) -> None:
    rows = opened(folder)
    steps = loader(rows, order(rows), processes).steps(DataState(0, 18))
    found = [next(steps) for _ in range(2)]
    assert [step.rows.tolist() for step in found] == [[int(at(2, 6)), int(at(3, 0))], at(3, [1, 2]).tolist()]
    assert [step.micro_batches[0].draws.rows for step in found] == [[18, 19], [20, 21]]
    assert found[0].micro_batches[0].rows == tuple(found[0].rows.tolist())
    alone = loader(rows, order(rows)).alone(int(at(4, 0)))
    assert alone.draws.rows == [25]


def await_files(rows: RowsByFile, wanted: list[int]) -> None:
    until = time.monotonic() + 20
    while present(rows) != wanted:
        assert time.monotonic() < until
        time.sleep(0.02)
