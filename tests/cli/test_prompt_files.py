"""`generate --file`: how rows are read, and what is written of each; what `Run.generate` takes."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from shardtune.cli.generate import _prompts, _rows_in_errors
from shardtune.cli.prompt_files import answer_line, read_prompts
from shardtune.config.schema.data import DataConfig
from shardtune.data.sources.inference_rows import InferenceRows
from shardtune.data.sources.transform import load_transform
from shardtune.errors import ConfigError, DataError
from shardtune.run.given_prompts import conversation
from shardtune.run.run import Run
from tests.support.workspace import write_rows

ASKED, ANSWERED = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}


def test_a_line_has_the_rows_own_keys_and_its_answer(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows(file, [
        {"id": 7, "messages": [ASKED, ANSWERED]},
        {"instruction": "Add", "input": "5 and 6.", "output": "11", "level": {"a": 1}},
        {"prompt": "Q", "answer": "gold", "row": 3, "tools": [{"name": "f"}], "images": ["a.png"]},
        {"prompt": "Q", "completion": "A"},
    ])  # fmt: skip
    questions, notes = read_prompts(file, InferenceRows())
    assert [json.loads(answer_line(question, "M")) for question in questions] == [
        {"row": 1, "id": 7, "prompt": [ASKED], "reference": "A", "answer": "M"},
        {"row": 2, "level": {"a": 1}, "prompt": "Add\n\n5 and 6.", "reference": "11", "answer": "M"},
        {"row": 3, "given_answer": "gold", "given_row": 3, "prompt": "Q", "images": ["a.png"], "tools": [{"name": "f"}],
         "answer": "M"},
        {"row": 4, "prompt": "Q", "reference": "A", "answer": "M"},
    ]  # fmt: skip
    assert [question.raw for question in questions] == [False, False, False, True]
    assert notes == [
        '3 rows have their answer: it is left out of the prompt and written as "reference"',
        "1 row has prompt and completion as text: the prompt is continued without the chat template, as in training",
    ]


def test_a_row_of_text_is_continued_as_it_is_beside_one_that_is_asked(tmp_path: Path) -> None:
    write_rows(file := tmp_path / "rows.jsonl", [{"prompt": "Q", "completion": "A"}, {"prompt": "Q"}])
    questions, _ = read_prompts(file, InferenceRows())
    assert [prompt.raw for prompt in _prompts(questions, None, False, {})] == [True, False]
    assert [prompt.raw for prompt in _prompts(questions, None, True, {})] == [True, True]


def test_listed_images_without_places_go_where_training_has_them(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    row = {"messages": [ASKED, ANSWERED, ASKED, ANSWERED], "image": "a.png"}
    write_rows(file, [row, {**row, "messages": row["messages"][:3]}])
    (answered, open_ended), _ = read_prompts(file, InferenceRows())
    assert answered.prompt == open_ended.prompt == [{**ASKED, "content": "<image>Q"}, ANSWERED, ASKED]


def test_rows_may_be_in_any_format_of_training(tmp_path: Path) -> None:
    rows = [{"question": "One?", "answer": "1", "level": 3}, {"question": "Two?", "answer": "2", "level": 4}]
    table = pa.Table.from_pylist(rows)
    csv.write_csv(table, tmp_path / "rows.csv")
    pq.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    (tmp_path / "rows.txt").write_text("\n".join(map(json.dumps, rows)))
    for name in ("rows.csv", "rows.parquet", "rows.json", "rows.jsonl.gz", "rows.txt"):
        questions, _ = read_prompts(tmp_path / name, InferenceRows())
        lines = [json.loads(answer_line(question, "M")) for question in questions]
        level = 3 if name != "rows.csv" else "3"  # a cell is text
        expected = {"row": 1, "level": level, "prompt": "One?", "reference": "1", "answer": "M"}
        assert (name, lines[0], lines[1]["row"]) == (name, expected, 2)
    pq.write_table(pa.table({"question": ["Q", None]}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="question") as told:
        read_prompts(tmp_path / "rows.parquet", InferenceRows())
    assert told.value.where == f"{tmp_path}/rows.parquet: row 2"


def test_images_of_a_table_are_their_size_in_the_line(tmp_path: Path) -> None:
    image = {"bytes": b"1234", "path": None}
    pq.write_table(pa.Table.from_pylist([{"prompt": "Q", "images": [image]}]), tmp_path / "rows.parquet")
    (question,), _ = read_prompts(tmp_path / "rows.parquet", InferenceRows())
    assert question.images == [{"bytes": b"1234"}]
    assert json.loads(answer_line(question, "M"))["images"] == [{"bytes": "<4 bytes>"}]


@pytest.mark.parametrize(
    ("media", "says"),
    [
        ({"video": "a.mp4"}, "the row has video; of media this model takes images only"),
        ({"images": ["a.png"], "audios": ["a.wav"]}, "the row has audios"),
        ({"images": ["a.png"], "image": "b.png"}, "the row has both image and images"),
    ],
)
def test_media_that_would_be_left_out_are_refused(media: dict[str, Any], says: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows(file, [{"prompt": "Q", **media}])
    with pytest.raises(DataError, match=says):
        read_prompts(file, InferenceRows())


def test_a_pipe_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"(?s)is a pipe.*write its rows into a file"):
        read_prompts(tmp_path / "rows.jsonl", InferenceRows())


def test_a_key_that_is_there_twice(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "Q"}\n{"prompt": "Q", "id": 1, "id": 2}\n')
    with pytest.raises(DataError, match="the key 'id' is there twice, with different values") as told:
        read_prompts(file, InferenceRows())
    assert (told.value.where, told.value.remedy) == (f"{file}:2", "mend the row, or take it out")


def test_a_row_that_cannot_be_asked_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows(file, [{"prompt": "Q"}, {"messages": [ANSWERED]}])
    with pytest.raises(DataError, match="nothing to answer") as told:
        read_prompts(file, InferenceRows())
    assert told.value.where == f"{file}:2"


def test_an_error_on_a_prompt_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "Q"}\n\n{"prompt": "Q"}\n')
    questions, _ = read_prompts(file, InferenceRows())
    with pytest.raises(DataError, match="no character") as told, _rows_in_errors(file, questions):
        raise DataError("this is no character", where="prompt 2", remedy="mend it")
    assert (told.value.where, told.value.remedy) == (f"{file}:3", "mend it")


def test_rows_are_read_as_training_read_them(tmp_path: Path) -> None:
    """`data.transform`, then `data.columns`; a column of answers may be missing, and rows that are dropped count."""
    code = tmp_path / "prepare.py"
    code.write_text("def shout(row):\n    return None if row['skip'] else {**row, 'problem': row['problem'].upper()}\n")
    rows = InferenceRows(load_transform(f"{code}:shout"), {"question": "problem", "answer": "solution"})
    file = tmp_path / "rows.jsonl"
    given = {"problem": "one?", "question": "not this", "skip": False}
    write_rows(file, [given, {"problem": "two?", "skip": True}, {**given, "solution": "1"}])
    questions, notes = read_prompts(file, rows)
    assert [(one.prompt, one.reference, one.kept["row"]) for one in questions] == [
        ("ONE?", None, 1),
        ("ONE?", "1", 3),
    ]
    assert notes[0] == "1 row is left out: data.transform drops it"
    write_rows(file, [given])
    assert [one.prompt for one in read_prompts(file, InferenceRows())[0]] == ["not this"]


def test_a_row_that_the_transform_fails_on_is_named(tmp_path: Path) -> None:
    (tmp_path / "prepare.py").write_text("def score(row):\n    return None if row['score'] < 1 else row\n")
    rows = InferenceRows(load_transform(f"{tmp_path}/prepare.py:score"))
    file = tmp_path / "rows.jsonl"
    write_rows(file, [{"prompt": "Q", "score": 2}, {"prompt": "Q"}])
    with pytest.raises(DataError, match=r"data\.transform raised KeyError: 'score'") as told:
        read_prompts(file, rows)
    assert told.value.where == f"{file}:2"
    assert "--prepared" in str(told.value.remedy)
    write_rows(file, [{"prompt": "Q", "score": 0}] * 2)
    with pytest.raises(DataError, match="has no rows") as told:
        read_prompts(file, rows)
    assert str(told.value.remedy).startswith("2 rows are left out: data.transform drops them")


def test_prepared_rows() -> None:
    data = DataConfig(transform="prepare.py:one", columns={"question": "problem"})
    assert InferenceRows.of(data, prepared=True) == InferenceRows()
    with pytest.raises(ConfigError, match=r"neither data\.transform nor"):
        InferenceRows.of(DataConfig(), prepared=True)


@pytest.mark.parametrize(
    ("prompts", "options", "says"),
    [
        ([{"question": "Q"}], {}, r"prompt is a dict \(its keys: question\), neither text nor a list of turns"),
        ({"question": "Q"}, {}, "prompt is a dict"),
        (["Q", ["Q"]], {}, "prompt is a list, neither"),
        (["Q"], {"raw": [True, False]}, "1 prompt, and raw is given for 2"),
        (["Q", "Q"], {"raw": [False, True], "system": "S"}, "and has no --system"),
    ],
)
def test_python_refuses_what_is_no_prompt(prompts: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Run(Path("none")).generate(prompts, **options)


def test_a_rows_own_system_turn_takes_precedence() -> None:
    own = [{"role": "developer", "content": "S"}, ASKED]
    assert conversation(own, "T") == own
    assert conversation("Q", "T") == [{"role": "system", "content": "T"}, ASKED]
