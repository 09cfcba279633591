"""Files that no reader expects: what is wrong with one row is that row's, and the rest is read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardtune.data.encoder import Row, RowError
from shardtune.data.files import json_text
from shardtune.data.row_files import kind_of, last_number, read_rows
from shardtune.errors import DataError


def read(file: Path) -> dict[int, Row | str]:
    """Rows by number, those that cannot be used as the reason."""
    rows = read_rows(file, str(kind_of(file)))
    return {number: row.reason if isinstance(row, RowError) else row for number, row in rows}


def test_a_line_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "MOST_ROW_BYTES", 1 << 20)
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


def test_values_of_which_a_row_could_have_only_the_last(tmp_path: Path) -> None:
    """Nothing that was written is lost without a word; the same value twice loses nothing."""
    lines = ['{"text": "a", "text": "b"}', '{"text": "c", "of": {"id": 1, "id": 2}}', '{"text": "d", "text": "d"}']
    reasons = {
        1: "the key 'text' is there twice, with different values",
        2: "the key 'id' is there twice, with different values",
        3: {"text": "d"},
    }
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert read(tmp_path / "a.jsonl") == reasons
    (tmp_path / "a.json").write_text(f"[{', '.join(lines)}]")
    assert read(tmp_path / "a.json") == reasons
    table = pa.table([["a"], ["b"]], names=["text", "text"])
    (tmp_path / "a.csv").write_text(",text,id,text,\n0,a,1,b,\n")
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as stream:
        stream.write_table(table)
    with pa.ipc.new_file(tmp_path / "file.arrow", table.schema) as file:
        file.write_table(table)
    for name in ("a.csv", "a.parquet", "stream.arrow", "file.arrow"):
        with pytest.raises(DataError, match="2 columns have the name 'text'") as told:
            read(tmp_path / name)
        assert told.value.where == str(tmp_path / name)


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


ONE, TWO = '[{"text": "a"}]', '[{"text": "b"}]'


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        (f"{ONE}\n\n{TWO}\n", "(?s)goes on after the list.*make it one list", 3),
        (f"{ONE}{{}}", "(?s)goes on after the list of its rows: '{}'.*make it one list", 1),
        (f"{ONE} junk", "(?s)'junk'.*take out what follows", 1),
        (f'{{"data": {ONE}', "does not end, so the file may be cut", 1),
        (f'{{"data": {ONE},\n"a": 1', "after the list comes ', \"a\": 1'|does not end", 1),
        (f'{{"data": {ONE}]', "does not end: after the list comes ']'", 1),
        (f'{{"data": {ONE}, "a": 1}}\n{TWO}', "goes on after the object", 2),
    ],
)
def test_a_list_of_json_ends_the_file(tmp_path: Path, text: str, message: str, line: int) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=message) as told:
        read(tmp_path / "a.json")
    assert told.value.where == f"{tmp_path / 'a.json'}: line {line}"


def test_further_keys_beside_a_list_of_json(tmp_path: Path) -> None:
    for text in (f"{ONE}\n \n", f'{{"data": {ONE}}}\n', f' {{"data":{ONE} , "a": {TWO}, "b": {{"data": []}} }} '):
        (tmp_path / "a.json").write_text(text)
        assert read(tmp_path / "a.json") == {1: {"text": "a"}}
        assert last_number(tmp_path / "a.json", "json") == 1


@pytest.mark.parametrize("indent", [None, 2])
def test_keys_before_a_list_of_json(indent: int | None, tmp_path: Path) -> None:
    value = {"version": "1.1", "about": {"data": [{"text": "c"}]}, "data": [{"text": "a"}], "b": 1}
    (tmp_path / "a.json").write_text(f" {json.dumps(value, indent=indent)}\n")
    assert read(tmp_path / "a.json") == {1: {"text": "a"}}


def test_a_field_of_rows_of_the_name_data_is_no_list_of_rows(tmp_path: Path) -> None:
    numbers, rows = {"label": 0, "data": [0.5, 1.5]}, [{"id": n, "data": [{"text": "a"}]} for n in (1, 2)]
    (tmp_path / "a.json").write_text(json.dumps(numbers))
    assert read(tmp_path / "a.json") == {1: numbers}
    (tmp_path / "a.json").write_text("\n".join(map(json.dumps, rows)))
    assert read(tmp_path / "a.json") == {1: rows[0], 2: rows[1]}


@pytest.mark.parametrize("indent", [None, 2])
def test_an_object_of_splits_is_named(indent: int | None, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"train": [{"text": "a"}, {"text": "b"}], "test": []}, indent=indent))
    with pytest.raises(DataError, match=r"one object with lists of rows as splits: train \(2\), test \(0\)"):
        read(tmp_path / "a.json")
    for row in ({"train": ["a"]}, {"train": [{"text": "a"}], "text": "b"}, {"messages": [{"role": "user"}]}):
        (tmp_path / "a.json").write_text(json.dumps(row))
        assert read(tmp_path / "a.json") == {1: row}


def test_two_lists_of_json_under_one_key_lose_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(f'{{"data": {ONE}, "b": 1, "data": {TWO}}}')
    with pytest.raises(DataError, match="the key 'data' is there twice"):
        read(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("text", "line", "beginning"),
    [
        ('a,b\n1,2\n3,"4\n5,6\n', 3, '"4'),
        ('a,b\r\n"x\r\ny","""z""\r\n1,2\r\n', 3, '"""z""'),
        ('a,b\n"x,y","two\nlines"\n"u ""v""","w" z\n', 4, '"w" z'),
        ('a,b\n1,"2\n3,4\n5,"6"\n', 2, '"2'),
        ('a,"b\n1,2\n', 1, '"b'),
    ],
)
@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_a_quote_that_does_not_end_is_named_by_the_line_where_it_begins(
    tmp_path: Path, text: str, line: int, beginning: str, delimiter: str
) -> None:
    file = tmp_path / ("a.csv" if delimiter == "," else "a.tsv")
    file.write_text(text.replace(",", delimiter), newline="")
    with pytest.raises(DataError, match="broken CSV") as told:
        read(file)
    assert told.value.where == f"{file}: line {line}"
    assert repr(beginning)[:-1] in told.value.what


@pytest.mark.parametrize(
    ("name", "text", "encoding", "says"),
    [
        ("a.csv", "question;answer\na,b;c\n", "utf-8", "divided by ';', and not by ','"),
        ("a.csv", '"question";"answer"\n"a";"b"\n', "utf-8-sig", "divided by ';'"),
        ("a.tsv", "question,answer\na,b\n", "utf-8", "divided by ','"),
        ("a.csv", "question\tanswer\n", "utf-8", r"divided by '\\t'(.|\n)*name the file .tsv"),
        ("a.jsonl", ONE, "utf-16", "is UTF-16"),
    ],
)
def test_tables_and_text_of_another_kind_are_refused_as_a_file(
    tmp_path: Path, name: str, text: str, encoding: str, says: str
) -> None:
    (tmp_path / name).write_text(text, encoding=encoding)
    with pytest.raises(DataError, match=says):
        read(tmp_path / name)


def test_a_table_of_one_column_whose_name_has_another_delimiter(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text; more\nhello; world\nagain\nand\n", encoding="utf-8")
    assert read(tmp_path / "a.csv")[1] == {"text; more": "hello; world"}


def test_cells_in_quotes(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('a,b\n"1,2","say ""so""\r\nand\nmore"\n\n5" disk, "x"\n"",""\n', newline="")
    assert read(tmp_path / "a.csv") == {
        1: {"a": "1,2", "b": 'say "so"\r\nand\nmore'},
        2: {"a": '5" disk', "b": ' "x"'},
        3: {"a": "", "b": ""},
    }
