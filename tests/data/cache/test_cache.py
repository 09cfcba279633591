"""The cache: built once, by one process, with the same result however it is built; read without copying."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import psutil
import pytest

from shardtune.batch import Sample
from shardtune.data import progress
from shardtune.data.cache import build as build_module
from shardtune.data.cache import verified
from shardtune.data.cache.cache import build_dataset
from shardtune.data.cache.entry import EncodedRow, EncodedRows, Entry, EntryWriter, Tally
from shardtune.data.chat import ChatEncoder
from shardtune.data.encoder import Encoder, LengthLimit, Row, RowError
from shardtune.data.row_formats import ChatTitle
from shardtune.data.sources.resolve import resolve_sources
from shardtune.errors import DataError
from tests.support.tiny_run import flip_bit

FORK = multiprocessing.get_context("fork")


class WordEncoder:
    """An encoder of another kind than the chat's: a token per letter of `text`, the letters behind `=` trained."""

    title = None

    def __init__(self, max_length=50, on_too_long="truncate", log: Path | None = None, delay=0.0) -> None:
        self.limit = LengthLimit(max_length, on_too_long)
        self.log = log
        self.delay = delay

    def encode(self, row: Row) -> Sample:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{os.getpid()}\n")
        time.sleep(self.delay)
        text = row["text"]
        if text == "die":
            os._exit(9)
        if text == "fault":
            raise DataError("nothing works", where="somewhere")
        if "=" not in text:
            raise RowError("no =")
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        weights = np.zeros(len(ids), np.float32)
        weights[text.index("=") + 1 :] = row.get("w", 1.0)
        prompt = ids[: text.index("=") + 1] if row.get("ask") else None
        return Sample(ids, weights, prompt, text.partition("=")[2] if row.get("ask") else None)

    def fit(self, sample: Sample) -> Sample:
        return self.limit.apply(sample)

    def weights(self, sample: Sample) -> Mapping[str, float]:
        return {"ce": sample.target_weight, "rows": float(sample.target_weight > 0)}

    def at(self, folder: Path) -> WordEncoder:
        return self

    def cache_key(self) -> str:
        return f"words-{self.limit}"


@pytest.fixture
def said():
    return []


@pytest.fixture
def build(data, said):
    """Builds the data set of a path (or list) with a `WordEncoder`."""

    def run(spec, encoder=None, *, num_workers=0, max_bad_rows=100, is_text=False, **keys):
        for name, value in keys.items():
            setattr(data, name, value)
        title = ChatTitle(lambda row: "words") if is_text else lambda row: "words"
        sources = resolve_sources(spec, data, name_format=title, report=said.append)
        return build_dataset(
            sources,
            encoder or WordEncoder(),
            cache_dir=data.cache_dir,
            num_workers=num_workers,
            on_bad_row=data.on_bad_row,
            max_bad_rows=max_bad_rows,
            report=said.append,
        )

    return run


@pytest.fixture
def many_processes(monkeypatch):
    """Files of any size are encoded in several processes."""
    monkeypatch.setattr(build_module, "_SMALL_FILE", 0)


def write(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(dataset):
    samples = [dataset.row(index) for index in range(len(dataset))]
    return [(bytes(s.input_ids.astype(np.uint8)).decode(), s.loss_weights.tolist(), s.reference) for s in samples]


def entry_files(cache: Path):
    return {path.name: path.read_bytes() for path in sorted(cache.glob("entries/*/*/*.bin"))}


ROWS = [{"text": f"{n}+{n}={2 * n}", "w": (1.0, 0.5, 0.137)[n % 3], "ask": n % 2 == 1} for n in range(1500)]


def test_word_encoder_is_an_encoder():
    assert isinstance(WordEncoder(), Encoder)


class TestRows:
    @pytest.mark.lengthy
    def test_samples_come_back_as_they_were_encoded(self, tmp_path, build):
        dataset = build(write(tmp_path / "a.jsonl", ROWS))
        assert len(dataset) == len(ROWS)
        encoder = WordEncoder()
        for index, row in enumerate(ROWS):
            expected, sample = encoder.encode(row), dataset.row(index)
            assert sample.input_ids.tolist() == expected.input_ids.tolist()
            assert sample.loss_weights.tolist() == expected.loss_weights.tolist()
            assert sample.reference == expected.reference
            assert (sample.prompt_ids is None) == (expected.prompt_ids is None)
            if expected.prompt_ids is not None:
                assert sample.prompt_ids.tolist() == expected.prompt_ids.tolist()
        assert sample.input_ids.dtype == np.int32
        assert sample.loss_weights.dtype == np.float32
        assert dataset.lengths.tolist() == [len(row["text"]) for row in ROWS]
        assert dataset.lengths.dtype == np.int32
        weights = dataset.term_weights
        assert weights["ce"].tolist() == [encoder.encode(row).target_weight for row in ROWS]
        assert weights["rows"].tolist() == [1.0] * len(ROWS)
        assert weights["ce"].dtype == np.float64

    def test_tokens_are_a_view_of_the_file(self, tmp_path, build):
        sample = build(write(tmp_path / "a.jsonl", ROWS)).row(3)
        assert not sample.input_ids.flags.owndata
        assert not sample.input_ids.flags.writeable

    def test_several_sources(self, tmp_path, build):
        first = write(tmp_path / "a.jsonl", ROWS[:3])
        (tmp_path / "b").mkdir()
        for number in range(3):
            write(tmp_path / "b" / f"{number}.jsonl", ROWS[10 * number : 10 * number + 2])
        dataset = build([str(first), {"path": str(tmp_path / "b"), "weight": 2.5, "name": "second"}])
        texts = [text for text, _, _ in rows_of(dataset)]
        assert texts == [ROWS[n]["text"] for n in (0, 1, 2, 0, 1, 10, 11, 20, 21)]
        spans = [(span.name, span.start, span.stop, span.weight) for span in dataset.sources]
        assert spans == [("a", 0, 3, 1.0), ("second", 3, 9, 2.5)]
        assert dataset.locate(0) == f"{first}:1"
        assert dataset.locate(8) == f"{tmp_path / 'b' / '2.jsonl'}:2"
        with pytest.raises(IndexError):
            dataset.row(9)
        with pytest.raises(IndexError):
            dataset.locate(-1)

    def test_file_all_of_whose_rows_are_dropped(self, tmp_path, build):
        write(tmp_path / "a.jsonl", [{"text": "x="}])
        write(tmp_path / "b.jsonl", ROWS[:2])
        dataset = build([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")])
        assert [text for text, _, _ in rows_of(dataset)] == ["0+0=0", "1+1=2"]
        assert [span.stop - span.start for span in dataset.sources] == [0, 2, 0]

    def test_travels_to_other_processes(self, tmp_path, build):
        dataset = build(write(tmp_path / "a.jsonl", ROWS[:50]))
        for one in (dataset, dataset.select(np.array([3, 7]))):
            copied = pickle.loads(pickle.dumps(one))
            assert rows_of(copied) == rows_of(one)
            assert copied.fingerprint == one.fingerprint

    @pytest.mark.lengthy
    def test_random_access_is_cheap(self, tmp_path, build):
        dataset = build(write(tmp_path / "a.jsonl", ROWS))
        order = np.random.default_rng(0).permutation(len(ROWS)).tolist()
        began = time.process_time()
        for index in order:
            dataset.row(index)
        assert (time.process_time() - began) / len(ROWS) < 50e-6


class TestViews:
    def test_select(self, tmp_path, build):
        write(tmp_path / "a.jsonl", ROWS[:10])
        write(tmp_path / "b.jsonl", ROWS[10:20])
        dataset = build([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])
        view = dataset.select(np.array([1, 9, 10, 19]))
        assert [text for text, _, _ in rows_of(view)] == [ROWS[n]["text"] for n in (1, 9, 10, 19)]
        assert view.lengths.tolist() == dataset.lengths[[1, 9, 10, 19]].tolist()
        assert [(span.start, span.stop) for span in view.sources] == [(0, 2), (2, 4)]
        assert view.locate(2).endswith("b.jsonl:1")
        inner = view.select(np.array([1, 3]))
        assert [text for text, _, _ in rows_of(inner)] == [ROWS[n]["text"] for n in (9, 19)]
        assert len({dataset.fingerprint, view.fingerprint, inner.fingerprint}) == 3

    @pytest.mark.lengthy
    def test_split_by_hash(self, tmp_path, build):
        dataset = build(write(tmp_path / "a.jsonl", [*ROWS, *ROWS[:100]]))
        train, held = dataset.split_by_hash(0.2)
        assert len(train) + len(held) == len(dataset)
        assert 0.15 < len(held) / len(dataset) < 0.25
        held_texts = {text for text, _, _ in rows_of(held)}
        assert not held_texts & {text for text, _, _ in rows_of(train)}
        longer = build(write(tmp_path / "b.jsonl", [*ROWS[700:], {"text": "new=row"}, *ROWS[:700]]))
        again = {text for text, _, _ in rows_of(longer.split_by_hash(0.2)[1])}
        assert again - {"new=row"} == held_texts
        other = build(tmp_path / "a.jsonl", WordEncoder(max_length=40))  # the sides do not depend on the encoder
        assert other.fingerprint != dataset.fingerprint
        assert {text for text, _, _ in rows_of(other.split_by_hash(0.2)[1])} == held_texts

    def test_a_column_that_is_null_is_none(self, tmp_path, build):
        """Parquet has a null for each column that another row has: equal rows are on one side of a split."""
        whole = [{"text": "a=b", "meta": {"n": 1}}, {"text": "a=b", "meta": None}, {"text": "a=b", "meta": {"n": None}}]
        alike = [
            {"text": "a=b", "meta": {"n": 1, "of": None}, "other": None},
            {"text": "a=b"},
            {"text": "a=b", "meta": {}},
        ]
        first, second = (build(write(tmp_path / f"{n}.jsonl", rows)) for n, rows in enumerate((whole, alike)))
        assert first.hashes.tolist() == second.hashes.tolist()
        assert len({*first.hashes.tolist()}) == 3

    def test_split_that_leaves_nothing(self, tmp_path, build):
        dataset = build(write(tmp_path / "a.jsonl", ROWS[:1]))
        with pytest.raises(DataError, match=r"of 1 row leaves"):
            dataset.split_by_hash(0.5)
        with pytest.raises(DataError, match="eval_split is 1"):
            dataset.split_by_hash(1.0)


class TestReport:
    def test_every_outcome_with_its_rows(self, tmp_path, data, build):
        (tmp_path / "mine.py").write_text("def f(row):\n    return None if row['text'] == 'filtered' else row\n")
        texts = ["1=1", "bad", "x=" + "y" * 100, "filtered", "1=2", "x" * 99 + "=y", "1="]
        path = write(tmp_path / "a.jsonl", [{"text": text} for text in texts])
        dataset = build(path, on_bad_row="skip", transform=f"{tmp_path / 'mine.py'}:f")
        assert [text for text, _, _ in rows_of(dataset)] == ["1=1", ("x=" + "y" * 100)[:50], "1=2"]
        assert [dataset.locate(n).rpartition(":")[2] for n in range(3)] == ["1", "3", "5"]
        counts = {
            name: dataset.report.count(name) for name in ("rows", "kept", "truncated", "no_target", "filtered", "bad")
        }
        assert counts == {"rows": 7, "kept": 3, "truncated": 1, "no_target": 2, "filtered": 1, "bad": 1}
        lines = list(dataset.report.lines())
        assert f"{path}: 1 of 7 rows cut to data.max_length: row 3 (102 tokens)" in lines
        assert f"{path}: 1 of 7 rows skipped, not usable: row 2 (no =)" in lines
        assert f"{path}: 2 of 7 rows dropped, without a target: row 6: cut before the answer; row 7" in lines
        assert f"{path}: 1 of 7 rows dropped by data.transform: row 4" in lines
        dropped = build(path, WordEncoder(on_too_long="drop"))
        assert dropped.report.count("too_long") == 2
        assert (
            f"{path}: 2 of 7 rows dropped, longer than data.max_length: row 3: 102 tokens; row 6: 101 tokens"
            in list(dropped.report.lines())
        )
        with pytest.raises(DataError, match=r"(?s)102 tokens, data.max_length is 50.*a.jsonl: row 3"):
            build(path, WordEncoder(on_too_long="fail"))

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_special_tokens_in_the_text_of_turns(self, tmp_path, build, make_tokenizer, many_processes, num_workers):
        """Also in calls and in reasoning, but not its tags; plain text may have its own."""
        tokenizer = make_tokenizer(eos_token="</s>")
        template = "{% for m in messages %}{{ m.role + m.content }}{{ m.tool_calls | tojson if m.tool_calls }}</s>"
        asked = {"role": "user", "content": "<s>old</s> prices?"}
        answers = [
            {"content": "It is 4."},
            {"content": "It is 4.</s>"},
            {"content": "", "tool_calls": [{"name": "look", "arguments": {"at": "<|im_end|>"}}]},
            {"content": "4", "thinking": "<think>hm<|im_end|>"},
        ]
        rows = [
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", **answer}]} for answer in answers
        ]
        rows += [{"messages": [asked, {"role": "assistant", "content": "4"}]}, {"text": "a</s>b"}]
        path = write(tmp_path / f"a{num_workers}.jsonl", rows)
        for thinking in ("keep", "keep", "template"):  # the second is from the cache
            encoder = ChatEncoder(tokenizer, template + "{% endfor %}", thinking=thinking)
            report = build(path, encoder, num_workers=num_workers).report
            [line] = [line for line in report.lines() if "the text of turns" in line]
            assert line == (
                f"{path}: the text of turns has special tokens of the tokenizer, which the model receives as such: "
                f"</s> (2 of 6, row 2), <|im_end|> ({1 + (thinking == 'keep')} of 6, row 3), <s> (1 of 6, row 5); "
                "data.transform may write them otherwise"
            )

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_turns_whose_text_the_template_changes(self, tmp_path, build, make_tokenizer, many_processes, num_workers):
        """Questions are counted; a changed answer makes its row bad."""
        template = "{% for m in messages %}{{ m.role + m.content[:20] }}</s>{% endfor %}"
        encoder = ChatEncoder(make_tokenizer(eos_token="</s>"), template)
        rows = [{"question": question, "answer": "4"} for question in ("2+2?", "What is it? " * 3, "Tell me: " * 4)]
        path = write(tmp_path / f"a{num_workers}.jsonl", rows)
        for _ in range(2):  # the second is from the cache
            assert list(build(path, encoder, num_workers=num_workers).report.lines()) == [
                f"{path}: the chat template leaves out or changes text of turns that are not trained: "
                "user (2 of 3, row 2); shardtune data preview shows what is left"
            ]
        write(path, [*rows, {"question": "2+2?", "answer": "It is four. " * 3}])
        with pytest.raises(DataError, match=r"(?s)message 2: .* leaves out part of .*, from 'ur. It.*row 4"):
            build(path, encoder, num_workers=num_workers)

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_keys_beside_the_list_of_rows(self, tmp_path, build, many_processes, num_workers):
        """Named for the first file of a source that has them, also from the cache."""
        rows, folder = [{"text": "2+2=4"}], tmp_path / str(num_workers)
        folder.mkdir()
        values = {"a": {"version": "1", "data": rows, "validation": rows}, "b": {"data": rows}, "c": {"data": rows}}
        values["c"]["version"] = "2"
        for name, value in values.items():
            (folder / f"{name}.json").write_text(json.dumps(value))
        for _ in range(2):
            (line,) = build(folder, num_workers=num_workers).report.lines()
            assert line == f"{folder / 'a.json'}: rows are the list under data; not read beside it: version, validation"

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_keys_of_some_rows_that_are_not_read(self, tmp_path, build, many_processes, num_workers):
        """Also those that the first row has not; keys of all rows are named with the source."""
        rows = [{"text": f"{n}={n}", "id": n, **({"note": "x"} if n % 2 else {})} for n in range(6)]
        path = write(tmp_path / "a.jsonl", rows)
        dataset = build(path, num_workers=num_workers, is_text=True)
        line = f"{path}: not read are keys that some rows have: note (3 of 6, row 2)"
        assert list(dataset.report.lines()) == [line]
        assert list(build(path, num_workers=num_workers, is_text=True).report.lines()) == [line]  # from the cache
        assert {key: notes.count for key, notes in dataset.report.files[0].tally.unread.items()} == {"id": 6, "note": 3}
        asked = {"question": "9", "answer": "9", "text": "9=9"}
        write(path, [{"text": "1=1"}, asked, asked, {"text": "2=2"}, {"text": f"{num_workers}=0"}])
        *_, line = build(path, num_workers=num_workers, is_text=True).report.lines()
        assert line == "a: rows have 2 formats: plain text (3, from row 1), question/answer (2, from row 2)"

    def test_nothing_left(self, tmp_path, build):
        with pytest.raises(DataError, match=r"(?s)no row is left.*2 of 2 rows dropped, without a target.*a.jsonl"):
            build(write(tmp_path / "a.jsonl", [{"text": "1="}, {"text": "2="}]))


class TestBadRows:
    def rows(self, bad=(4999,)):
        return [{"text": "bad" if n in bad else f"{n}={n}"} for n in range(5100)]

    @pytest.mark.lengthy
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_fail_names_file_and_row(self, tmp_path, build, many_processes, num_workers, data):
        path = write(tmp_path / "a.jsonl", self.rows())
        with pytest.raises(DataError, match=r"(?s)no =.*a.jsonl: row 5,000\n.*on_bad_row=skip"):
            build(path, num_workers=num_workers)
        kept = ("hashes", "cache")  # digests of files, and the mark of the cache itself
        left = [path for path in Path(data.cache_dir).rglob("*") if path.is_file() and path.parent.name not in kept]
        assert left == []

    @pytest.mark.lengthy
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_broken_json(self, tmp_path, build, many_processes, num_workers):
        path = write(tmp_path / "a.jsonl", self.rows(bad=()))
        lines = path.read_text().splitlines()
        lines[4999] = '{"text": "1=1", "more: 7}'
        path.write_text("\n".join(lines))
        with pytest.raises(DataError, match=r'(?s)broken JSON: .*"more: 7.*a.jsonl: row 5,000'):
            build(path, num_workers=num_workers)
        assert len(build(path, num_workers=num_workers, on_bad_row="skip")) == 5099

    @pytest.mark.lengthy
    def test_broken_json_list(self, tmp_path, build):
        text = json.dumps(self.rows(bad=()))
        (tmp_path / "a.json").write_text(text.replace('{"text": "4999=4999"}', '{"text": "4999=4999"'))
        with pytest.raises(DataError, match=r"(?s)broken JSON.*a.json: row 5,000"):
            build(tmp_path / "a.json", on_bad_row="skip")

    @pytest.mark.lengthy
    def test_skip_up_to_the_limit_over_all_files(self, tmp_path, build):
        first = write(tmp_path / "a.jsonl", self.rows(bad=(1, 3)))
        second = write(tmp_path / "b.jsonl", self.rows(bad=(7,)))
        paths = [str(first), str(second)]
        with pytest.raises(DataError, match=r"(?s)1 row cannot be used, data.max_bad_rows is 0.*row 8: no =.*b.jsonl"):
            build(paths, on_bad_row="skip", max_bad_rows=2)
        dataset = build(paths, on_bad_row="skip", max_bad_rows=3)
        assert len(dataset) == 2 * 5100 - 3
        # Also where the entries are there already.
        with pytest.raises(DataError, match="cannot be used"):
            build(paths, on_bad_row="skip", max_bad_rows=2)
        with pytest.raises(DataError, match=r"a.jsonl: row 2\n"):
            build(paths, on_bad_row="fail")

    def test_fault_of_every_row_is_not_skipped(self, tmp_path, build):
        path = write(tmp_path / "a.jsonl", [{"text": "1=1"}, {"text": "fault"}])
        with pytest.raises(DataError, match=r"(?s)nothing works.*a.jsonl: row 2 \(somewhere\)"):
            build(path, on_bad_row="skip")


class TestLimit:
    @pytest.mark.lengthy
    def test_first_usable_rows_over_all_files(self, tmp_path, build):
        for name, rows in (("a", ROWS[:3]), ("b", ROWS[3:9]), ("c", ROWS[9:])):
            write(tmp_path / f"{name}.jsonl", rows)
        dataset = build({"path": str(tmp_path / "*.jsonl"), "max_samples": 7})
        assert [text for text, _, _ in rows_of(dataset)] == [row["text"] for row in ROWS[:7]]
        assert [file.label[-7:] for file in dataset.report.files] == ["a.jsonl", "b.jsonl"]
        whole = build(str(tmp_path / "*.jsonl"))
        assert len(whole) == len(ROWS)

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_rows_behind_the_limit_do_not_matter(self, tmp_path, build, many_processes, num_workers):
        rows = [*ROWS[:300], {"text": "bad"}]
        dataset = build({"path": str(write(tmp_path / "a.jsonl", rows)), "max_samples": 300}, num_workers=num_workers)
        assert len(dataset) == 300
        assert dataset.report.count("rows") == 300
        with pytest.raises(DataError, match=r"row 301\n"):
            build({"path": str(tmp_path / "a.jsonl"), "max_samples": 301}, num_workers=num_workers)


class TestKeys:
    def test_built_once(self, tmp_path, build):
        path, log = write(tmp_path / "a.jsonl", ROWS[:20]), tmp_path / "log"
        first = build(path, WordEncoder(log=log))
        again = build(path, WordEncoder(log=log))
        assert len(log.read_text().splitlines()) == 20
        assert first.fingerprint == again.fingerprint

    def test_content_counts_and_not_the_place(self, tmp_path, build):
        path, log = write(tmp_path / "a.jsonl", ROWS[:20]), tmp_path / "log"
        first = build(path, WordEncoder(log=log))
        moved = shutil.copy(path, tmp_path / "b.jsonl")
        second = build(moved, WordEncoder(log=log))
        assert len(log.read_text().splitlines()) == 20
        assert second.fingerprint == first.fingerprint
        assert second.locate(0) == f"{moved}:1"
        before = path.stat()
        write(path, [{"text": "7+7=14"}, *ROWS[1:20]])  # one character more
        write(path, [{"text": "7+7=1", "w": 1.0, "ask": False}, *ROWS[1:20]])
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # same size and time as before
        assert path.stat().st_size == before.st_size
        third = build(path, WordEncoder(log=log))
        assert third.fingerprint != first.fingerprint
        assert rows_of(third)[0][0] == "7+7=1"

    def test_hash_of_an_unchanged_file_is_remembered(self, tmp_path, build, monkeypatch):
        path = write(tmp_path / "a.jsonl", ROWS[:20])
        monkeypatch.setattr("shardtune.data.cache_directory._SETTLED_SECONDS", -1.0)
        first = build(path)
        monkeypatch.setattr("hashlib.file_digest", None)
        assert build(path).fingerprint == first.fingerprint

    def test_all_that_decides_about_rows(self, tmp_path, data, build):
        path = str(write(tmp_path / "a.jsonl", [{"text": "1=1", "other": "2=2"}] * 3))
        (tmp_path / "mine.py").write_text("def f(row):\n    return row\n\ndef g(row):\n    return row\n")
        seen = {build(path).fingerprint}
        seen.add(build({"path": path, "columns": {"text": "other"}}).fingerprint)
        seen.add(build({"path": path, "weight": 2.0}).fingerprint)
        seen.add(build({"path": path, "max_samples": 2}).fingerprint)
        seen.add(build(path, WordEncoder(max_length=7)).fingerprint)
        seen.add(build([path, path]).fingerprint)
        seen.add(build(path, transform=f"{tmp_path / 'mine.py'}:f").fingerprint)
        seen.add(build(path, transform=f"{tmp_path / 'mine.py'}:g").fingerprint)
        assert len(seen) == 8
        (tmp_path / "sub").mkdir()
        shutil.copy(tmp_path / "mine.py", tmp_path / "sub" / "mine.py")
        assert build(path, transform=f"{tmp_path / 'sub' / 'mine.py'}:g").fingerprint in seen
        (tmp_path / "sub" / "mine.py").write_text("def g(row):\n    return row  # changed\n")
        (tmp_path / "sub" / "mine.py").rename(tmp_path / "sub" / "mine2.py")
        assert build(path, transform=f"{tmp_path / 'sub' / 'mine2.py'}:g").fingerprint not in seen
        assert build({"path": path, "name": "named"}, transform=None).fingerprint in seen

    def test_default_place(self, tmp_path, data, build, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        build(write(tmp_path / "a.jsonl", ROWS[:2]), cache_dir=None)
        assert list((tmp_path / "xdg" / "shardtune" / "entries").glob("*/*/entry.json"))


class TestProcesses:
    @pytest.mark.lengthy
    def test_same_bytes_whatever_the_number(self, tmp_path, data, build, many_processes):
        path = write(tmp_path / "a.jsonl", ROWS)
        results = []
        for num_workers in (0, 2, 5):
            data.cache_dir = str(tmp_path / f"cache{num_workers}")
            log = tmp_path / f"log{num_workers}"
            dataset = build(path, WordEncoder(log=log), num_workers=num_workers)
            workers = set(log.read_text().split())
            assert (str(os.getpid()) in workers) == (num_workers == 0)
            results.append((dataset.fingerprint, entry_files(Path(data.cache_dir))))
        assert results[0] == results[1] == results[2]
        assert list(results[0][1]) == ["rows.bin"]

    def test_tables_in_several_processes(self, tmp_path, build, many_processes):
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
        texts = [text for text, _, _ in rows_of(build(tmp_path / "a.parquet", num_workers=2))]
        assert texts == [row["text"] for row in ROWS]

    def test_process_that_dies(self, tmp_path, build, many_processes):
        path = write(tmp_path / "a.jsonl", [*ROWS, {"text": "die"}])
        with pytest.raises(DataError, match=r"(?s)a process that tokenises the data died.*data.num_workers"):
            build(path, num_workers=2)

    def test_one_builder_of_many(self, tmp_path, build, said):
        path, log = write(tmp_path / "a.jsonl", ROWS[:60]), tmp_path / "log"

        def rank(number: int) -> None:
            dataset = build(path, WordEncoder(log=log, delay=0.03))
            (tmp_path / f"rank{number}").write_text(json.dumps([len(dataset), dataset.fingerprint, said]))

        ranks = [FORK.Process(target=rank, args=(number,)) for number in range(4)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            assert process.exitcode == 0
        results = [json.loads((tmp_path / f"rank{number}").read_text()) for number in range(4)]
        assert {(length, fingerprint) for length, fingerprint, _ in results} == {
            (60, build(path, WordEncoder()).fingerprint)
        }
        builders = set(log.read_text().split())
        assert len(builders) == 1
        assert len(log.read_text().split()) == 60
        waits = [line for _, _, lines in results for line in lines if "waiting for process" in line]
        assert waits
        assert all(builders.copy().pop() in line and "a.jsonl" in line for line in waits)

    def test_killed_builder_is_taken_over(self, tmp_path, data, build, many_processes):
        path, log = write(tmp_path / "a.jsonl", ROWS), tmp_path / "log"
        child = FORK.Process(target=lambda: build(path, WordEncoder(log=log, delay=0.02), num_workers=2))
        child.start()
        deadline = time.monotonic() + 20
        while not (log.exists() and len(log.read_text().split()) > 5) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert child.pid is not None
        workers = psutil.Process(child.pid).children()
        assert len(workers) == 2
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert not list(Path(data.cache_dir).glob("entries/*/*/entry.json"))
        dataset = build(path)
        assert len(dataset) == len(ROWS)
        assert not list(Path(data.cache_dir).glob("entries/*/.*"))
        assert not list(Path(data.cache_dir).glob("locks/*"))
        # The processes of the killed one notice, too.
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive


class TestTornEntries:
    @pytest.mark.parametrize("damage", ["no description", "short file", "missing file", "garbage"])
    def test_are_built_again(self, tmp_path, data, build, damage):
        path = write(tmp_path / "a.jsonl", ROWS[:20])
        expected = rows_of(build(path))
        (entry,) = Path(data.cache_dir).glob("entries/*/*/entry.json")
        rows = entry.with_name("rows.bin")
        match damage:
            case "no description":
                entry.unlink()
            case "short file":
                os.truncate(rows, rows.stat().st_size - 4)
            case "missing file":
                rows.unlink()
            case "garbage":
                entry.write_text('{"layout": 1')
        assert rows_of(build(path)) == expected
        assert entry.exists()

    @pytest.mark.lengthy
    def test_a_flipped_bit_is_found_with_a_line_and_without_reading_untouched_files_again(
        self, tmp_path, build, data, said, monkeypatch
    ):
        path = write(tmp_path / "a.jsonl", ROWS[:20])
        expected = rows_of(build(path))
        (entry,) = Path(data.cache_dir).glob("entries/*/*/entry.json")
        rows, memo = entry.with_name("rows.bin"), next(Path(data.cache_dir).glob("hashes/*"), None)
        for file in (rows, entry):
            for place in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
                for bit in (0, 6):
                    flip_bit(file, place, bit)
                    said.clear()
                    assert rows_of(build(path)) == expected
                    assert any("rows of" in line and "damaged" in line for line in said), f"{file.name} {place} {bit}"
        if memo is not None:
            flip_bit(memo)
            assert rows_of(build(path)) == expected
        monkeypatch.setattr(verified, "content_fault", None)  # nothing is hashed
        assert rows_of(build(path)) == expected
        monkeypatch.setattr(verified, "TRUSTED_SECONDS", 0.0)
        with pytest.raises(TypeError):
            verified.check_rows(entry.parent)

    def test_entries_of_earlier_versions_without_checksums_are_read(self, tmp_path, build, data, said):
        path = write(tmp_path / "a.jsonl", ROWS[:20])
        expected = rows_of(build(path))
        (entry,) = Path(data.cache_dir).glob("entries/*/*/entry.json")
        known = json.loads(entry.read_text())
        entry.write_text(json.dumps({key: known[key] for key in known if key not in ("rows.bin", "checksum")}))
        said.clear()
        assert rows_of(build(path)) == expected
        assert not any("damaged" in line for line in said)


class TestPlace:
    @pytest.mark.parametrize("place", ["file", "file/cache"])
    def test_that_cannot_be_written(self, tmp_path, build, said, place):
        path = write(tmp_path / "a.jsonl", ROWS[:2])
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(DataError, match=r"(?s)cache cannot be written.*file.*set data.cache_dir"):
            build(path, cache_dir=str(tmp_path / place))
        assert not any("damaged" in line for line in said), said

    def test_built_entries_are_read_where_nothing_can_be_written(self, tmp_path, data, build, monkeypatch):
        path = write(tmp_path / "a.jsonl", ROWS[:2])
        expected = build(path).fingerprint

        def refuse(*args, **kwargs):
            raise PermissionError(13, "Permission denied")

        for name in ("mkdir", "touch", "replace", "rename"):
            monkeypatch.setattr(Path, name, refuse)
        assert build(path).fingerprint == expected

    def test_full_disk(self, tmp_path, build, monkeypatch):
        path = write(tmp_path / "a.jsonl", ROWS[:2])

        def refuse(descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(DataError, match=r"(?s)No space left on device.*has room"):
            build(path)


@pytest.mark.lengthy
def test_progress_bar_on_a_terminal(tmp_path, build, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    build(write(tmp_path / "a.jsonl", ROWS), WordEncoder(delay=0.0005))
    shown = capsys.readouterr().err
    assert "tokenising a.jsonl" in shown
    assert "rows" in shown


@pytest.mark.lengthy
def test_plain_lines_now_and_then_elsewhere(tmp_path, build, monkeypatch, said):
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    build(write(tmp_path / "a.jsonl", ROWS))
    lines = [line for line in said if line.startswith("data: tokenising a.jsonl: ")]
    assert len(lines) == 6
    assert "16%, 256 rows" in lines[0]
    assert "100%, 1,500 rows" in lines[-1]


def test_says_what_it_does(tmp_path, build, said):
    build(write(tmp_path / "a.jsonl", ROWS[:20]))
    assert said[0].startswith("data: a: words, 1 file")
    assert said[1].startswith("data: tokenised a.jsonl: 20 rows in ")
    build(tmp_path / "a.jsonl")
    assert len(said) == 3


def test_the_checksum_of_rows_is_that_of_their_values(tmp_path: Path) -> None:
    """Whatever the pieces in which they were encoded, and the reasons why others were dropped."""

    def checksum(name: str, *, pieces: int = 1, reason: str = "", value: float = 1.0) -> str | None:
        folder = tmp_path / name
        folder.mkdir()
        writer = EntryWriter(folder)
        rows = [
            EncodedRow(number, number, Sample(fields={"x": np.full(3, value + number, np.float32)}), {"mse": 3.0})
            for number in range(4)
        ]
        for start in range(0, 4, 4 // pieces):
            tally = Tally(rows=4 // pieces, kept=4 // pieces)
            if reason and not start:
                tally.bad.add(9, reason)
            writer.add(EncodedRows.pack(rows[start : start + 4 // pieces], tally))
        writer.finish({})
        return Entry(folder).encoded

    whole = checksum("whole")
    assert whole is not None
    assert whole == checksum("pieces", pieces=2) == checksum("dropped", reason="no file: a/1.wav")
    assert whole != checksum("other", value=2.0)
