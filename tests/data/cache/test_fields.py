"""Named arrays in the cache: they come back as they were, without a copy, and rows that differ in kind are refused."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from shardtune.batch import Sample
from shardtune.data.cache import build as build_module
from shardtune.data.cache import fields
from shardtune.data.cache.cache import build_dataset
from shardtune.data.encoder import LengthLimit, Row
from shardtune.data.sources.resolve import resolve_sources
from shardtune.errors import DataError

COUNT = 700  # three chunks


def mixed(n: int) -> Sample:
    """Row n with fields of many types: of one shape in all rows, of differing ones, and of one shape up to row 300."""
    rng = np.random.default_rng(n)
    return Sample(
        fields={
            "image": rng.integers(0, 256, (3, 4, 2), np.uint8).transpose(2, 0, 1),
            "half": rng.standard_normal((n % 4, 2)).astype(np.float16),
            "signal": rng.standard_normal(n % 5),
            "late": np.full((2, 1 + (n > 300)), n, np.int16),
            "swapped": np.array([n, -n], ">i4"),
            "flag": np.array(n % 2 == 0),
            "target": np.int64(n),  # pyright: ignore[reportArgumentType]
            "mask/of it": rng.integers(0, 2, (1, n % 3, 2)).astype(bool),
            "nothing": np.empty((0, 7), np.float32),
        },
        size=1 + n % 9,
    )


def tokens_and_fields(n: int) -> Sample:
    """Tokens in some rows only, with prompts in some of those."""
    ids = np.arange(n % 3, dtype=np.int32)
    prompt = ids[:1] if n % 3 == 2 else None
    reference, question = (None, None) if prompt is None else ("yes", "well, ü?")
    fields = {"labels": np.arange(n % 2, dtype=np.int64)}
    return Sample(ids, np.ones(len(ids), np.float32), prompt, reference, question, fields, size=7)


class ArrayEncoder:
    """Encodes row `{"n": n}` by a function."""

    title = None

    def __init__(self, make: Callable[[int], Sample] = mixed, name: str = "mixed") -> None:
        self.make = make
        self.name = name

    def encode(self, row: Row) -> Sample:
        return self.make(row["n"])

    def fit(self, sample: Sample) -> Sample:
        return LengthLimit(1, "fail").apply(sample) if not len(sample.input_ids) else sample

    def weights(self, sample: Sample) -> Mapping[str, float]:
        return {"loss/rows": 1.0, "size": float(sample.length)}

    def at(self, folder: Path) -> ArrayEncoder:
        return self

    def cache_key(self) -> str:
        return self.name


@pytest.fixture
def build(data):
    """Builds the data set of a path (or list), by a function from row number to sample."""

    def run(spec, make=mixed, *, num_workers=0, on_bad_row: Literal["fail", "skip"] = "fail"):
        sources = resolve_sources(spec, data, name_format=lambda row: "arrays", report=lambda line: None)
        return build_dataset(
            sources,
            ArrayEncoder(make, make.__name__),
            cache_dir=data.cache_dir,
            num_workers=num_workers,
            on_bad_row=on_bad_row,
            report=lambda line: None,
        )

    return run


@pytest.fixture
def many_processes(monkeypatch):
    """Files of any size are encoded in several processes."""
    monkeypatch.setattr(build_module, "_SMALL_FILE", 0)


def write(path: Path, numbers) -> str:
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in numbers))
    return str(path)


def assert_same(sample: Sample, expected: Sample) -> None:
    assert sample.input_ids.tolist() == expected.input_ids.tolist()
    assert sample.loss_weights.tolist() == expected.loss_weights.tolist()
    assert (sample.prompt_ids is None) == (expected.prompt_ids is None)
    assert (sample.reference, sample.question) == (expected.reference, expected.question)
    assert sample.length == expected.length
    assert sample.fields.keys() == expected.fields.keys()
    for name, array in sample.fields.items():
        assert isinstance(array, np.ndarray)
        assert array.shape == expected.fields[name].shape
        assert array.dtype == expected.fields[name].dtype.newbyteorder("=")
        assert np.array_equal(array, expected.fields[name])


class TestRows:
    @pytest.mark.lengthy
    def test_come_back_as_they_were_whatever_the_number_of_processes(
        self, tmp_path, data, build, many_processes, monkeypatch
    ):
        monkeypatch.setattr(fields, "_BLOCK", 100)
        path = write(tmp_path / "a.jsonl", range(COUNT))
        files = []
        for num_workers in (0, 2):
            data.cache_dir = str(tmp_path / f"cache{num_workers}")
            dataset = build(path, num_workers=num_workers)
            assert len(dataset) == COUNT
            for n in range(COUNT):
                assert_same(dataset.row(n), mixed(n))
            assert dataset.lengths.tolist() == [mixed(n).size for n in range(COUNT)]
            assert dataset.term_weights["loss/rows"].tolist() == [1.0] * COUNT
            (file,) = Path(data.cache_dir).glob("entries/*/*/rows.bin")
            files.append(file.read_bytes())
        assert files[0] == files[1]

    def test_are_read_only_views_of_the_file(self, tmp_path, build):
        dataset = build(write(tmp_path / "a.jsonl", range(5)))
        first, again = dataset.row(4), dataset.row(4)
        for name, array in first.fields.items():
            assert not array.flags.owndata
            assert not array.flags.writeable
            if array.size:
                assert np.shares_memory(array, again.fields[name])
            assert array.flags.aligned

    @pytest.mark.lengthy
    def test_of_one_shape_take_no_room_but_their_elements(self, tmp_path, data, build):
        build(write(tmp_path / "a.jsonl", range(COUNT)))
        (entry,) = Path(data.cache_dir).glob("entries/*/*/entry.json")
        content = json.loads(entry.read_text())
        sizes = {name: size for name, (_, size) in content["arrays"].items()}
        for place, about in enumerate(content["fields"]):
            name, even = f"field{place}", about["name"] not in ("half", "late", "mask/of it", "signal")
            arrays = [mixed(n).fields[about["name"]] for n in range(COUNT)]
            assert sizes[name] == sum(array.nbytes for array in arrays)
            assert (about["shape"] is not None) == even
            assert (f"{name}_shapes" not in sizes) == (f"{name}_offsets" not in sizes) == even

    def test_tokens_beside_fields(self, tmp_path, build):
        dataset = build(write(tmp_path / "a.jsonl", range(50)), tokens_and_fields)
        for n in range(50):
            assert_same(dataset.row(n), tokens_and_fields(n))
        assert dataset.lengths.tolist() == [n % 3 or 7 for n in range(50)]
        assert dataset.fields == {"labels": fields.FieldKind(np.dtype("<i8"), 1)}

    def test_only_a_size(self, tmp_path, build):
        def sized(n: int) -> Sample:
            return Sample(size=n)

        dataset = build(write(tmp_path / "a.jsonl", range(3, 6)), sized)
        assert [dataset.row(n).length for n in range(3)] == dataset.lengths.tolist() == [3, 4, 5]

    def test_rows_of_tokens_have_no_field_arrays(self, tmp_path, data, build):
        def tokens(n: int) -> Sample:
            return Sample(np.arange(n + 1, dtype=np.int32), np.ones(n + 1, np.float32))

        dataset = build(write(tmp_path / "a.jsonl", range(3)), tokens)
        assert dataset.row(2).fields == dataset.fields == {}
        (entry,) = Path(data.cache_dir).glob("entries/*/*/entry.json")
        assert not [name for name in json.loads(entry.read_text())["arrays"] if name.startswith("field")]

    def test_travel_to_other_processes_and_into_views(self, tmp_path, build):
        dataset = build([write(tmp_path / "a.jsonl", range(20)), write(tmp_path / "b.jsonl", range(20, 40))])
        view = pickle.loads(pickle.dumps(dataset)).select(np.array([3, 37]))
        assert_same(view.row(0), mixed(3))
        assert_same(view.row(1), mixed(37))
        assert view.fields == dataset.fields
        assert view.fields["half"] == fields.FieldKind(np.dtype("<f2"), 2)


def test_length_limit_leaves_rows_without_tokens():
    sample = Sample(size=100, fields={"x": np.zeros(100)})
    assert LengthLimit(10, "fail").apply(sample) is sample
    both = LengthLimit(2, "truncate").apply(Sample(np.arange(3), np.ones(3), fields={"x": np.zeros(100)}))
    assert (len(both.input_ids), len(both.fields["x"])) == (2, 100)


def one(value: Any, **others: Any) -> Sample:
    return Sample(fields={"x": value, **others})


X = np.zeros((2, 2), np.float32)
OTHERS = {
    "float64 of 2 dimensions, in row 1 it is float32 of 2 dimensions": one(X.astype(np.float64)),
    "float32 of 1 dimension, in row 1 it is float32 of 2 dimensions": one(X[0]),
    "float32 of 0 dimensions, in row 1 it is float32 of 2 dimensions": one(X[0, 0]),
    "the row lacks the field 'x', which row 1 has": Sample(fields={"y": X}),
    "the row has the field 'y', which row 1 has not": one(X, y=X),
    "'x' is list, not a numpy array": one(X.tolist()),
    "'x' is MaskedArray, not a numpy array": one(np.ma.masked_less(X, 1)),
    "'x' is an array of dtype object": one(np.array([None])),
    "'x' is an array of dtype <U3": one(np.array(["abc"])),
    "'x' is an array of dtype complex64": one(X.astype(np.complex64)),
}


class TestRefused:
    @pytest.mark.parametrize("says", OTHERS)
    def test_row_of_another_kind(self, tmp_path, build, says):
        def differing(n: int) -> Sample:
            return OTHERS[says] if n == 3 else one(X)

        path = write(tmp_path / "a.jsonl", range(5))
        with pytest.raises(DataError, match=rf"(?s){re.escape(says)}.*a.jsonl: row 4\n.*remedy") as caught:
            build(path, differing, on_bad_row="skip")
        assert caught.value.exit_code == 2

    def test_text_has_a_remedy(self, tmp_path, build):
        def text(n: int) -> Sample:
            return one(np.array(["words"]))

        with pytest.raises(DataError, match=r"(?s)row 1\n.*token ids or np.frombuffer"):
            build(write(tmp_path / "a.jsonl", range(2)), text)

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_chunk_of_another_kind_than_the_first(self, tmp_path, build, many_processes, num_workers):
        def differing(n: int) -> Sample:
            return one(X if n < 512 else X[0])

        path = write(tmp_path / "a.jsonl", range(COUNT))
        with pytest.raises(
            DataError, match=r"(?s)'x' is float32 of 1 dim.* in row 1 it is .*2 dim.*a.jsonl: row 513\n"
        ):
            build(path, differing, num_workers=num_workers)
        # The rows behind the limit do not matter.
        assert len(build({"path": path, "max_samples": 512}, differing, num_workers=num_workers)) == 512

    def test_row_within_a_chunk_of_another_process(self, tmp_path, build, many_processes):
        def differing(n: int) -> Sample:
            return one(X.astype(np.float64) if n == 599 else X)

        with pytest.raises(DataError, match=r"(?s)float64 of 2 dim.*in row 513 it is float32.*a.jsonl: row 600\n"):
            build(write(tmp_path / "a.jsonl", range(COUNT)), differing, num_workers=2)

    def test_file_of_another_kind(self, tmp_path, build):
        def differing(n: int) -> Sample:
            return one(X if n < 10 else X.astype(np.uint8))

        first, second = write(tmp_path / "a.jsonl", range(5)), write(tmp_path / "b.jsonl", range(10, 15))
        with pytest.raises(
            DataError, match=r"(?s)is uint8 of 2 dim.*, in .*a.jsonl: row 1 it is float32.*b.jsonl: row 1"
        ):
            build([first, second], differing)
        # Once more with both entries in the cache.
        with pytest.raises(DataError, match=r"(?s)b.jsonl: row 1\n.*np\.asarray\(value, np\.float32\)"):
            build([first, second], differing)
        assert len(build(second, differing)) == 5


class TestEntries:
    @pytest.mark.parametrize("damage", ["no description", "short file", "old layout", "older build"])
    def test_that_are_torn_or_old_are_built_again(self, tmp_path, data, build, damage):
        path = write(tmp_path / "a.jsonl", range(20))
        build(path)
        (entry,) = Path(data.cache_dir).glob("entries/*/*/entry.json")
        rows, content = entry.with_name("rows.bin"), json.loads(entry.read_text())
        whole = rows.read_bytes()
        match damage:
            case "no description":
                entry.unlink()
            case "short file":
                os.truncate(rows, rows.stat().st_size - 1)
            case "old layout":
                entry.write_text(json.dumps({**content, "layout": 1}))
            case "older build":  # of the first layout, as it was: no fields, terms by their names
                arrays = {"tokens": [0, 0], "lengths": [0, 0], "term_ce": [0, 0]}
                entry.write_text(json.dumps({"layout": 1, "size": 0, "arrays": arrays, "tally": content["tally"]}))
                rows.write_bytes(b"")
        dataset = build(path)
        assert_same(dataset.row(19), mixed(19))
        assert rows.read_bytes() == whole
        assert json.loads(entry.read_text()) == content
