"""Files that no reader expects: what is wrong with one row is that row's, and the rest is read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardtune.data import row_files
from shardtune.data.encoder import Row, RowError
from shardtune.data.row_files import kind_of, read_rows
from shardtune.errors import DataError


def read(file: Path) -> dict[int, Row | str]:
    """Rows by number, those that cannot be used as the reason."""
    rows = read_rows(file, str(kind_of(file)))
    return {number: row.reason if isinstance(row, RowError) else row for number, row in rows}


def test_a_line_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "MOST_ROW_BYTES", 1 << 20)
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"text": "a"}\n' + b" " * (5 << 20) + b'\n\n{"text": "b"}'))
    assert read(file) == {1: {"text": "a"}, 2: "the line is longer than 1 MB, so it is not one row", 4: {"text": "b"}}
    file.write_bytes(gzip.compress(b"\0" * (3 << 20)))
    assert list(read(file)) == [1]


def test_rows_that_no_parser_takes(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"a": 1}\n' + '{"a": ' + "9" * 5000 + "}\n" + '{"a": ' + "[" * 3000 + "]" * 3000 + "}\n")
    first, second, third = read(file).values()
    assert first == {"a": 1}
    assert "limit (4300 digits)" in str(second)
    assert third == "the row is nested too deeply"
    (tmp_path / "a.json").write_text('[{"a": 1}, {"a": ' + "9" * 5000 + "}]")
    with pytest.raises(DataError, match=r"limit \(4300 digits\)") as told:
        read(tmp_path / "a.json")
    assert told.value.where == f"{tmp_path / 'a.json'}: row 2"


def test_a_cell_that_python_cannot_have(tmp_path: Path) -> None:
    texts = pa.Array.from_buffers(pa.string(), 3, pa.array([b"a", b"\xff", b"b"]).buffers())
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    found = read(tmp_path / "a.parquet")
    assert (found[1], found[3]) == ({"text": "a"}, {"text": "b"})
    assert "'utf-8' codec can't decode byte 0xff" in str(found[2])


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.xz", "a.jsonl.bz2", "a.jsonl.zst", "a.parquet", "a.arrow"])
def test_bytes_that_are_something_else(tmp_path: Path, name: str) -> None:
    good = gzip.compress(json.dumps({"text": "a" * 999}).encode())
    for content in (b"\xff" * 40, good[:12] + b"\xff" * 40):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match="cannot be read as"):
            read(tmp_path / name)
