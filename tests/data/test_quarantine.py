"""Rows that `data.quarantine` leaves out: which they are, and the order of all others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardtune.batch import Sample
from shardtune.data.cache.cache import build_dataset
from shardtune.data.cache.dataset import TokenDataset
from shardtune.data.encoder import Row
from shardtune.data.loader.order import DataOrder, OrderSource
from shardtune.data.quarantine import line_of, read_quarantine, without_quarantined
from shardtune.data.sources.resolve import resolve_sources
from shardtune.errors import ConfigError, DataError

LENGTHS = np.array([3 + number * 7 % 11 for number in range(60)], np.int32)
CUTS = [
    {"global_batch_size": 8},
    {"global_batch_size": 3},
    {"global_batch_tokens": 40, "lengths": LENGTHS},
    {"global_batch_size": 8, "shuffle": False},
]
WEIGHTS = [(1.0, 1.0), (2.0, 1.0), (0.5, 1.7)]
GONE = np.array([0, 3, 4, 17, 39, 40, 41, 59])


def order(weights: tuple[float, float], cut: dict, left_out: np.ndarray | None = None) -> DataOrder:
    """40 rows and 20 rows."""
    sources = [OrderSource("a", 0, 40, weights[0]), OrderSource("b", 40, 60, weights[1])]
    return DataOrder(sources, seed=7, left_out=left_out, **cut)


def steps_of(data: DataOrder, epoch: int) -> tuple[list[list[int]], list[int]]:
    """The steps of an epoch, and the place at which each begins."""
    steps, places, start = [], [], 0
    while start < data.rows_per_epoch:
        rows, end = data.cut(epoch, start)
        steps.append(rows.tolist())
        places.append(start)
        start = end
    return steps, places


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_other_rows_keep_their_order(cut: dict, weights: tuple[float, float]) -> None:
    """An epoch is the one without a quarantine, with these rows taken out and then cut into steps."""
    plain, data = order(weights, cut), order(weights, cut, GONE)
    for epoch in range(3):
        places = plain.rows(epoch, 0, plain.rows_per_epoch)
        kept = places[~np.isin(places, GONE)].tolist()
        steps, _ = steps_of(data, epoch)
        assert [row for step in steps for row in step] == kept
        assert all(steps)
        assert data.num_steps(epoch) == len(steps)
        assert data.num_rows(epoch) == len(kept)
        for number in (0, 1, len(steps) - 1, len(steps)):
            assert data.first_rows(epoch, number).tolist() == [row for step in steps[:number] for row in step]
        if "global_batch_size" in cut:
            assert {len(step) for step in steps[:-1]} <= {cut["global_batch_size"]}
        else:
            assert all(LENGTHS[step].sum() <= 40 for step in steps)
    assert data.rows_per_epoch == plain.rows_per_epoch


def test_steps_before_the_first_such_row_are_what_they_were() -> None:
    plain, data = order((1.0, 1.0), CUTS[0]), order((1.0, 1.0), CUTS[0], GONE)
    (before, _), (after, _) = steps_of(plain, 0), steps_of(data, 0)
    first = next(number for number, step in enumerate(before) if set(step) & set(GONE.tolist()))
    assert first == 0 or before[:first] == after[:first]
    late = np.array(before[5][-1:])
    assert steps_of(order((1.0, 1.0), CUTS[0], late), 0)[0][:5] == before[:5]


def test_a_quarantine_in_the_middle_of_an_epoch_leaves_each_other_row_once() -> None:
    """A position is a place, whatever is left out."""
    plain = order((1.0, 1.0), CUTS[0])
    steps, places = steps_of(plain, 0)
    done, rest = [row for step in steps[:3] for row in step], []
    data, start = order((1.0, 1.0), CUTS[0], GONE), places[3]
    while start < data.rows_per_epoch:
        rows, start = data.cut(0, start)
        rest += rows.tolist()
    assert not set(rest) & set(GONE.tolist())
    assert sorted([*done, *rest, *sorted(set(GONE.tolist()) - set(done))]) == list(range(60))


def test_an_epoch_without_a_row_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"that data\.quarantine keeps"):
        order((1.0, 1.0), CUTS[0], np.arange(60))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "it is no JSON"),
        ("[1]", "it is a list, not an object"),
        ('{"hash": "0123456789abcdef", "rwo": 3}', "it has 'rwo'"),
        ('{"hash": 17}', "16 hexadecimal digits"),
        ('{"hash": "0123456789ABCDEF"}', "16 hexadecimal digits"),
        ('{"row": 3}', "16 hexadecimal digits"),
        ('{"hash": "0123456789abcdef", "row": "3"}', "its row has another type"),
        ('{"hash": "0123456789abcdef", "file": 3}', "its file has another type"),
    ],
)
def test_a_line_that_names_no_row_is_refused(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "quarantine.jsonl"
    file.write_text(f'{{"hash": "0123456789abcdef"}}\n\n{line}\n')
    with pytest.raises(DataError, match=message) as error:
        read_quarantine(file)
    assert str(error.value.where) == f"{file}:3"


def test_rows_are_found_by_their_content(tmp_path: Path, dataset: TokenDataset) -> None:
    """In the file of that name, wherever it lies; what is not found is reported."""
    name = Path(dataset.origin(0)[0]).name
    digests = [f"{int(digest):016x}" for digest in dataset.hashes]
    contents = [
        {"hash": digests[2], "file": f"/elsewhere/{name}", "row": 99, "reason": "odd"},
        {"hash": digests[5]},
        {"hash": digests[6], "file": "another.jsonl", "row": 7},
        {"hash": "0" * 16, "row": 4},
    ]
    file, told = tmp_path / "quarantine.jsonl", list[str]()
    file.write_text("".join(line_of(content) for content in contents))
    kept = without_quarantined(dataset, file, held_out=None, report=told.append)
    assert kept.left_out.tolist() == [2, 5]
    assert [text for text in told if "2 of 4 lines" in text and "line 3 (another.jsonl:7), line 4 (row:4)" in text]
    assert len(kept) == len(dataset)
    assert kept.fingerprint != dataset.fingerprint
    assert [row["row"] for row in kept.dropped()] == [3, 6]
    assert [(row["cause"], row["reason"]) for row in kept.dropped()] == [("quarantined", "odd"), ("quarantined", "")]
    assert kept.files[0]["key"] == dataset.files[0]["key"]
    assert kept.files[0]["left_out"]["rows"] == 2
    assert kept.first_trained == 0
    assert dataset.leave_out({0: "", 1: ""}).first_trained == 2
    assert kept.trained_lengths.tolist() == [0 if row in (2, 5) else size for row, size in enumerate(dataset.lengths)]
    file.write_text("".join(line_of({"hash": digest}) for digest in digests))
    with pytest.raises(DataError, match="all 10 training rows are left out"):
        without_quarantined(dataset, file, held_out=None, report=told.append)


def test_evaluation_rows_stay(tmp_path: Path, dataset: TokenDataset) -> None:
    train, held_out = dataset.split_by_hash(0.5)
    file, told = tmp_path / "quarantine.jsonl", list[str]()
    file.write_text("".join(line_of({"hash": f"{int(rows.hashes[0]):016x}"}) for rows in (train, held_out)))
    kept = without_quarantined(train, file, held_out=held_out, report=told.append)
    assert kept.left_out.tolist() == [0]
    assert len(told) == 1
    assert "1 of 2 lines" in told[0]
    assert "names an evaluation row, which stays: line 2" in told[0]


class Letters:
    """A token per letter of `text`, all trained."""

    title = None

    def encode(self, row: Row) -> Sample:
        letters = np.frombuffer(row["text"].encode(), np.uint8).astype(np.int32)
        return Sample(letters, np.ones(len(letters), np.float32))

    def fit(self, sample: Sample) -> Sample:
        return sample

    def weights(self, sample: Sample) -> dict[str, float]:
        return {"ce": sample.target_weight}

    def at(self, folder: Path) -> Letters:
        return self

    def cache_key(self) -> str:
        return "letters"


class Shapes(Letters):
    """The last row's field has another shape."""

    def encode(self, row: Row) -> Sample:
        return replace(super().encode(row), fields={"x": np.zeros((2 if row["text"] == "row 9" else 1, 3))})

    def cache_key(self) -> str:
        return "shapes"


def built(folder: Path, data: Any, encoder: Letters) -> TokenDataset:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(10)))
    sources = resolve_sources(str(file), data, name_format=lambda row: "text", report=lambda text: None)
    return build_dataset(sources, encoder, cache_dir=data.cache_dir, report=lambda text: None)


@pytest.fixture
def dataset(tmp_path: Path, data: Any) -> TokenDataset:
    return built(tmp_path, data, Letters())


def test_what_is_left_out_may_be_of_another_shape(tmp_path: Path, data: Any) -> None:
    rows = built(tmp_path, data, Shapes())
    assert rows.of_other_shape("x") == 9
    assert rows.leave_out({0: ""}).of_other_shape("x") == 9
    assert rows.leave_out({9: ""}).of_other_shape("x") is None
