"""Every way to name data and every kind of file gives the same rows; every mistake is named with its place."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardtune.data.encoder import RowError
from shardtune.data.row_files import read_rows
from shardtune.data.sources.entries import named_sets
from shardtune.data.sources.resolve import data_fingerprints, resolve_sources
from shardtune.data.sources.source import prepare_row
from shardtune.errors import DataError

ROWS = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(600)]


def write_jsonl(path: Path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_json(path: Path):
    path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")


def write_data(path: Path):
    path.write_text(json.dumps({"data": ROWS}), encoding="utf-8")


def write_lines(path: Path):
    write_jsonl(path)


def write_csv(path: Path):
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["question", "answer"], delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(ROWS)


def write_parquet(path: Path):
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=100)


def write_arrow_stream(path: Path):
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=77)


def write_arrow_file(path: Path):
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def zstd(content: bytes) -> bytes:
    return pa.Codec("zstd").compress(content, asbytes=True)


KINDS = {
    "rows.jsonl": write_lines,
    "rows.ndjson": write_lines,
    "rows.json": write_json,
    "data.json": write_data,
    "lines.json": write_lines,
    "rows.csv": write_csv,
    "rows.tsv": write_csv,
    "rows.parquet": write_parquet,
    "rows.arrow": write_arrow_stream,
    "file.arrow": write_arrow_file,
}


def all_rows(sources):
    rows = [row for source in sources for file in source.files for _, row in read_rows(file.path, file.kind)]
    assert not any(isinstance(row, RowError) for row in rows)
    return rows


@pytest.fixture
def said():
    return []


@pytest.fixture
def resolve(data, said):
    def run(spec, **options):
        return resolve_sources(spec, data, report=said.append, **options)

    return run


class TestFiles:
    @pytest.mark.parametrize("name", KINDS)
    def test_every_kind(self, name, tmp_path, resolve, said):
        KINDS[name](tmp_path / name)
        (source,) = resolve(str(tmp_path / name))
        assert all_rows([source]) == ROWS
        assert [number for number, _ in read_rows(source.files[0].path, source.files[0].kind)] == list(range(1, 601))
        assert source.title == "question/answer"
        assert "question/answer" in said[0]
        assert name in said[0]

    @pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.arrow"])
    @pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
    def test_compressed(self, name, suffix, tmp_path, resolve):
        compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}[suffix]
        KINDS[name](tmp_path / name)
        path = tmp_path / (name + suffix)
        path.write_bytes(compress((tmp_path / name).read_bytes()))
        assert all_rows(resolve(path)) == ROWS

    def test_line_numbers_count_blank_lines(self, tmp_path):
        (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n  \n{"text": "b"}')
        assert list(read_rows(tmp_path / "a.jsonl", "jsonl")) == [(1, {"text": "a"}), (4, {"text": "b"})]

    def test_nested_nulls_of_tables_are_absent_keys(self, tmp_path):
        rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "x"}]}]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
        assert [row for _, row in read_rows(tmp_path / "a.parquet", "parquet")] == rows


class TestNaming:
    def test_keys_that_are_not_read_are_named(self, tmp_path, resolve, said):
        path = write_jsonl(tmp_path / "a.jsonl", [{"context": "c", **ROWS[0], "id": 1}])
        resolve(path)
        assert said[-1] == f"data: a: question/answer, 1 file ({path}); not read: context, id"
        resolve(path, name_format=lambda row: "mine")
        assert said[-1] == f"data: a: mine, 1 file ({path})"
        write_jsonl(path, [{"text": "a", **{f"k{number}": 1 for number in range(7)}}])
        resolve(path)
        assert said[-1].endswith("; not read: k0, k1, k2, k3, k4 and 2 more")
        write_jsonl(path, [{"prompt": "a", "chosen": "b", "rejected": "c", "": 1}])
        resolve({"path": str(path), "columns": {"completion": "chosen"}})
        assert said[-2].endswith("; not read: rejected, ''")
        assert "a: rows of preferences are trained by supervised fine-tuning, on the answer that is read" in said[-1]

    def test_lists_entries_and_unique_names(self, tmp_path, resolve):
        write_jsonl(tmp_path / "a" / "train.jsonl")
        write_jsonl(tmp_path / "b" / "train.jsonl")
        entry = {"path": str(tmp_path / "b/train.jsonl"), "weight": 0.5, "max_samples": 10, "name": None}
        first, second, third = resolve([tmp_path / "a/train.jsonl", entry, {**entry, "name": "small"}])
        assert [source.name for source in (first, second, third)] == ["train", "train-2", "small"]
        assert (first.weight, first.max_samples) == (1.0, None)
        assert (second.weight, second.max_samples) == (0.5, 10)

    def test_globs(self, tmp_path, resolve):
        for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "d.txt"):
            write_jsonl(tmp_path / name)
        (flat,) = resolve(str(tmp_path / "*.jsonl"))
        assert [file.path.name for file in flat.files] == ["a.jsonl", "b.jsonl"]
        (deep,) = resolve(str(tmp_path / "**" / "*.jsonl"))
        assert {file.path.name for file in deep.files} == {"a.jsonl", "b.jsonl", "c.jsonl"}

    def test_directory_of_files(self, tmp_path, resolve):
        for name in ("b.jsonl", "a.csv", "sub/c.jsonl.gz", "notes.txt", ".hidden.jsonl", "_tmp/d.jsonl"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            text = "question,answer\n1,2\n" if name.endswith("csv") else '{"question": "a", "answer": "b"}\n'
            (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
        (source,) = resolve(tmp_path)
        assert [file.path.name for file in source.files] == ["a.csv", "b.jsonl", "c.jsonl.gz"]

    def test_descriptions_of_data_sets_hold_no_rows(self, tmp_path, resolve, said):
        described = tmp_path / "dataset_info.json"
        described.write_text('{"builder_name": "json", "features": {}}')
        with pytest.raises(DataError, match="the directory holds no data file"):
            resolve(tmp_path)
        write_jsonl(tmp_path / "a.jsonl")
        (source,) = resolve(tmp_path)
        assert [file.path.name for file in source.files] == ["a.jsonl"]
        assert f"data: left out of {tmp_path}, as descriptions of data sets: {described}" in said
        for spec in (described, f"{tmp_path}/*.json*"):
            with pytest.raises(DataError, match=r"dataset_info.json describes a data set, and holds no rows"):
                resolve(str(spec))

    def test_directory_whose_names_tell_splits_apart(self, tmp_path, resolve):
        for name in ("data/train-0.jsonl", "data/train-1.jsonl", "data/test-0.jsonl"):
            write_jsonl(tmp_path / name, ROWS[:3])
        names = [file.path.name for file in resolve(tmp_path)[0].files]
        assert names == ["train-0.jsonl", "train-1.jsonl"]
        assert [file.path.name for file in resolve(tmp_path, purpose="eval")[0].files] == ["test-0.jsonl"]
        (chosen,) = resolve({"path": str(tmp_path), "split": "test"})
        assert [file.path.name for file in chosen.files] == ["test-0.jsonl"]
        with pytest.raises(DataError, match=r"(?s)no split 'dev'.*train, test|test, train"):
            resolve({"path": str(tmp_path), "split": "dev"})

    def test_files_of_other_splits_are_named(self, tmp_path, resolve, said):
        names = ["train.jsonl", "test/a.jsonl", "test/b.jsonl", "more.jsonl", "x/more.jsonl"]
        for name in names[:3]:
            write_jsonl(tmp_path / "set" / name)
        resolve(tmp_path / "set")
        assert said[0] == "data: set: split train; left out: test/a.jsonl, test/b.jsonl"
        for name in names[3:]:
            write_jsonl(tmp_path / "set" / name)
        resolve({"path": str(tmp_path / "set"), "name": "mine"}, purpose="eval")
        assert said[2] == "data: mine: split test; left out: more.jsonl, train.jsonl, x/more.jsonl"
        resolve({"path": str(tmp_path / "set"), "split": "train"})
        assert said[4] == "data: set: split train; left out: more.jsonl, test/a.jsonl, test/b.jsonl and 1 more"

    def test_files_named_for_splits_as_on_the_hub(self, tmp_path, resolve):
        """A local copy without its card: `train_sft` is a split of its own, not a part of `train`."""
        for name in ("train_sft", "test_sft"):
            write_jsonl(tmp_path / f"data/{name}-00000-of-00001-0a1b.jsonl", ROWS[: len(name)])
        assert len(all_rows(resolve({"path": str(tmp_path), "split": "train_sft"}))) == len("train_sft")
        assert len(all_rows(resolve(tmp_path))) == len("train_sft")
        assert len(all_rows(resolve(tmp_path, purpose="eval"))) == len("test_sft")
        for name in ("train_gen", "test_gen"):
            write_jsonl(tmp_path / f"data/{name}-00000-of-00001.jsonl", ROWS[:1])
        assert len(all_rows(resolve({"path": str(tmp_path), "split": "test_gen"}))) == 1
        assert len(all_rows(resolve({"path": str(tmp_path), "split": "test_sft"}))) == len("test_sft")
        with pytest.raises(DataError, match=r"(?s)several splits and none is named.*test_gen, test_sft, train_gen"):
            resolve(tmp_path)  # not both of train_gen and train_sft

    def test_a_pattern_takes_the_split_that_is_named(self, tmp_path, resolve, said):
        for name in ("train-0.jsonl", "train-1.jsonl", "test-0.jsonl", "more.jsonl"):
            write_jsonl(tmp_path / "both" / name, [{"text": name}])
        pattern = str(tmp_path / "both" / "*.jsonl")

        def names(spec):
            return [file.path.name for file in resolve(spec)[0].files]

        assert names({"path": pattern, "split": "train"}) == ["train-0.jsonl", "train-1.jsonl"]
        assert any(line.endswith("split train; left out: more.jsonl, test-0.jsonl") for line in said)
        assert names({"path": pattern, "split": "test"}) == ["test-0.jsonl"]
        assert len(names(pattern)) == 4
        with pytest.raises(DataError, match=r"(?s)no split 'valid'.*its splits are test, train"):
            resolve({"path": pattern, "split": "valid"})

    def test_a_split_of_what_has_none(self, tmp_path, resolve):
        import datasets

        saved = datasets.Dataset.from_list([{"text": "a"}])
        saved.save_to_disk(str(tmp_path / "saved"))
        for rows, where in (([{"text": "a"}], "rows in memory"), (str(tmp_path / "saved"), "saved")):
            assert len(resolve({"path": rows, "split": "train"})) == 1
            with pytest.raises(DataError, match=f"(?s)there is no (split )?'test'.*{where}"):
                resolve({"path": rows, "split": "test"})

    def test_files_whose_whole_name_is_the_split(self, tmp_path, resolve):
        for name in ("train_small", "train_large"):
            write_jsonl(tmp_path / f"{name}.jsonl", ROWS[: len(name)])
        (source,) = resolve({"path": str(tmp_path), "split": "train_small"})
        assert [file.path.name for file in source.files] == ["train_small.jsonl"]

    def test_rows_of_evaluation_have_no_weight(self, tmp_path, resolve):
        entry = {"path": str(write_jsonl(tmp_path / "a.jsonl", ROWS[:2])), "weight": 4.0}
        assert resolve(entry)[0].weight == 4.0
        with pytest.raises(DataError, match=r"the weight 4\.0 has no effect"):
            resolve(entry, purpose="eval")

    def test_a_file_has_no_splits(self, tmp_path, resolve):
        file = write_jsonl(tmp_path / "rows-test.jsonl", ROWS[:3])
        for split in (None, "train", "test"):
            assert len(all_rows(resolve({"path": str(file), "split": split}))) == 3
        for path in (file, tmp_path / "*.jsonl"):
            with pytest.raises(DataError, match=r"(?s)there is no 'train\[:50%\]'.*max_samples"):
                resolve({"path": str(path), "split": "train[:50%]"})

    def test_links(self, tmp_path, data, resolve):
        home, cache = tmp_path / "home", tmp_path / "cache"
        for place in ("home/b", "elsewhere", "home/.hidden", "home/a"):
            write_jsonl(tmp_path / place / f"{Path(place).name}.jsonl", ROWS[:2])
        for link, to in {
            "a/up": home,
            "a/back": home,
            "b/back": home / "a",
            "z": tmp_path / "elsewhere",
            "again": tmp_path / "elsewhere",
        }.items():
            (home / link).symlink_to(to)
        expected = ["a/a.jsonl", "again/elsewhere.jsonl", "b/b.jsonl"]
        for spec in (home, f"{home}/[ab]*/**/*.jsonl"):
            (source,) = resolve(str(spec))
            assert [str(file.path.relative_to(home)) for file in source.files] == expected
        before = data_fingerprints([str(home)], cache)
        write_jsonl(tmp_path / "elsewhere/elsewhere.jsonl", ROWS[1:3])
        assert data_fingerprints([str(home)], cache) != before
        (home / "b/torn.jsonl").symlink_to("nowhere.jsonl")
        (home / "b/torn.txt").symlink_to("nowhere.txt")
        for spec in (home, f"{home}/*/*.jsonl"):
            with pytest.raises(DataError, match=r"link to nowhere.jsonl(.|\n)*torn.jsonl(.|\n)*remove it"):
                resolve(str(spec))

    def test_a_link_in_a_run_leaves_nothing_out(self, tmp_path, resolve):
        write_jsonl(tmp_path / "home/data/a.jsonl", ROWS[:2])
        (tmp_path / "home/a_run").mkdir()
        (tmp_path / "home/a_run/manifest.json").write_text('{"versions": {"shardtune": "0"}}')
        (tmp_path / "home/a_run/link").symlink_to(tmp_path / "home/data")
        for spec in ("home", "home/**/*.jsonl", "h*/**/*.jsonl"):
            (source,) = resolve(str(tmp_path / spec))
            assert [file.path for file in source.files] == [tmp_path / "home/data/a.jsonl"]

    def test_the_file_of_quarantine_holds_no_rows(self, tmp_path, data, resolve, said):
        write_jsonl(tmp_path / "home/rows.jsonl", ROWS[:2])
        out = tmp_path / "home/out.jsonl"
        out.write_text('{"hash": "0123456789abcdef"}\n')
        data.quarantine = str(out)
        for spec in (str(tmp_path / "home"), f"{tmp_path}/**/*.jsonl"):
            said.clear()
            before = data_fingerprints(spec, tmp_path / "cache", quarantine=str(out))
            (source,) = resolve(spec)
            assert [file.path.name for file in source.files] == ["rows.jsonl"]
            assert said[0].endswith(f", as the file of data.quarantine: {out}")
            out.write_text(out.read_text() * 2)
            assert data_fingerprints(spec, tmp_path / "cache", quarantine=str(out)) == before
        with pytest.raises(DataError, match="lines are no rows"):
            resolve([str(tmp_path / "home/rows.jsonl"), str(out)])

    def test_named_sets(self):
        assert named_sets({"math": "a", "chat": ["b"]}) == {"math": "a", "chat": ["b"]}
        assert named_sets({"path": "a"}) == {"": {"path": "a"}}
        assert named_sets("a") == {"": "a"}
        assert named_sets(None) == {}


class TestInMemory:
    def test_a_table_of_pandas_is_its_rows(self, resolve):
        import pandas

        frame = pandas.DataFrame(ROWS, index=range(5, 605))
        frame["when"] = [pandas.NaT, *[None] * 599]
        assert [{key: row[key] for key in ("question", "answer")} for row in all_rows(resolve(frame))] == ROWS
        with pytest.raises(DataError, match="the column 'a' is there twice"):
            resolve(pandas.DataFrame([[1, 2]], columns=["a", "a"]))
        with pytest.raises(DataError, match="the column 0 has no name that is text"):
            resolve(pandas.DataFrame([[1, 2]]))

    def test_what_pandas_counts_as_missing_is_no_text(self, resolve):
        import pandas

        rows = [*ROWS[:2], {"question": "why?", "answer": float("nan")}]
        for given in (rows[2:], pandas.DataFrame(rows[2:])):
            with pytest.raises(DataError, match="its answer is null"):
                resolve(given)

    @pytest.mark.parametrize("kind", ["Dataset", "IterableDataset"])
    def test_several_data_sets_and_streams_are_refused_as_such(self, resolve, kind):
        import datasets

        one = datasets.Dataset.from_list(ROWS[:3])
        if kind == "IterableDataset":
            with pytest.raises(DataError, match=r"(?s)an IterableDataset is a stream.*list\(data\)"):
                resolve(one.to_iterable_dataset())
            several = datasets.IterableDatasetDict({"train": one.to_iterable_dataset()})
        else:
            several = datasets.DatasetDict({"train": one, "test": one})
        for use in (resolve, named_sets):
            with pytest.raises(DataError, match=rf"(?s){type(several).__name__} is several data sets: train.*'train'"):
                use(several)

    def test_no_rows_at_all(self, resolve):
        import datasets

        for empty in ([], datasets.Dataset.from_list([])):
            with pytest.raises(DataError, match=rf"(?s)the {type(empty).__name__} of rows is empty.*train_data"):
                resolve(empty)
        with pytest.raises(DataError, match=r"(?s)data cannot be read from generator.*pandas.DataFrame"):
            resolve(row for row in ROWS)


class TestDatasetsLibrary:
    def test_saved_to_disk(self, tmp_path, resolve):
        import datasets

        datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "one"), num_shards=3)
        (source,) = resolve(tmp_path / "one")
        assert len(source.files) == 3
        assert all_rows([source]) == ROWS

    def test_saved_with_splits(self, tmp_path, resolve):
        import datasets

        splits = {"train": datasets.Dataset.from_list(ROWS), "validation": datasets.Dataset.from_list(ROWS[:5])}
        datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "both"))
        assert all_rows(resolve(tmp_path / "both")) == ROWS
        assert all_rows(resolve(tmp_path / "both", purpose="eval")) == ROWS[:5]
        assert all_rows(resolve({"path": tmp_path / "both", "split": "validation"})) == ROWS[:5]
        with pytest.raises(DataError, match=r"(?s)no split 'test'.*train, validation"):
            resolve({"path": tmp_path / "both", "split": "test"})
        next((tmp_path / "both" / "train").glob("*.arrow")).unlink()
        with pytest.raises(DataError, match="lacks data-00000"):
            resolve(tmp_path / "both")

    def test_directory_laid_out_as_on_the_hub(self, tmp_path, resolve, said):
        folder = tmp_path / "arithmetic"
        write_jsonl(folder / "plus/train.jsonl", ROWS[:7])
        write_jsonl(folder / "plus/held.jsonl", ROWS[7:9])
        write_jsonl(folder / "minus/train.jsonl", ROWS[10:14])
        (folder / "README.md").write_text(
            "---\nlicense: mit\nconfigs:\n- config_name: plus\n  default: true\n  data_files:\n  - split: train\n"
            "    path: plus/train.jsonl\n  - split: validation\n    path: plus/held.jsonl\n- config_name: minus\n"
            "  data_files: minus/train.jsonl\n---\n# Arithmetic\n"
        )
        assert all_rows(resolve(folder)) == ROWS[:7]
        assert all_rows(resolve(f"{folder}:plus", purpose="eval")) == ROWS[7:9]
        assert all_rows(resolve({"path": f"{folder}:plus", "split": "validation"})) == ROWS[7:9]
        (minus,) = resolve(f"{folder}:minus")
        assert all_rows([minus]) == ROWS[10:14]
        assert minus.name == "arithmetic"
        (named,) = resolve({"path": str(folder), "name": "minus"})
        assert all_rows([named]) == ROWS[10:14]
        assert all_rows(resolve({"path": str(folder), "name": "my own name"})) == ROWS[:7]
        resolve(f"{folder}:minus")
        assert f"{folder}:minus (train)" in said[-1]
        with pytest.raises(DataError, match=r"(?s)cannot be loaded.*times.*minus"):
            resolve(f"{folder}:times")
        with pytest.raises(DataError, match=r"(?s)no split 'test'.*train, validation"):
            resolve({"path": str(folder), "split": "test"})

    def test_rows_of_a_directory_with_a_card_are_those_that_lie_there(self, tmp_path, resolve):
        card = "---\nconfigs:\n- config_name: one\n  data_files: rows.jsonl\n---\n"
        for number, place in enumerate(("a", "b")):
            write_jsonl(tmp_path / place / "set/rows.jsonl", ROWS[number : number + 3])
            (tmp_path / place / "set/README.md").write_text(card)
        first, second = (tmp_path / place / "set" for place in ("a", "b"))
        assert all_rows(resolve(first)) == ROWS[:3]
        assert all_rows(resolve(f"{second}:one")) == ROWS[1:4]
        cache, paths = tmp_path / "cache", [str(first), f"{first}:one"]
        before = data_fingerprints(paths, cache)
        assert None not in dict(before).values()
        write_jsonl(first / "rows.jsonl", ROWS[4:7])
        assert all_rows(resolve(first)) == ROWS[4:7]
        assert all(old != new for old, new in zip(before, data_fingerprints(paths, cache), strict=True))
        write_jsonl(first / "rows.jsonl", ROWS[:3])
        assert all_rows(resolve(first)) == ROWS[:3]
        assert data_fingerprints(paths, cache) == before
        write_jsonl(first / "other.jsonl", ROWS[:3])
        added = data_fingerprints(paths, cache)
        (first / "README.md").write_text(card.replace("rows", "other"))
        assert all(old != new for old, new in zip(added, data_fingerprints(paths, cache), strict=True))

    def test_hub_name_that_cannot_be_reached(self, resolve, monkeypatch):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        with pytest.raises(DataError, match=r"(?s)cannot be loaded.*nobody/nothing:main"):
            resolve("nobody/nothing:main")


class TestMemory:
    def test_rows(self, resolve):
        (source,) = resolve(ROWS)
        assert source.name == "memory"
        assert all_rows([source]) == ROWS
        assert resolve(ROWS)[0].files == source.files
        assert resolve(ROWS[:5])[0].files != source.files

    def test_dataset(self, resolve):
        import datasets

        dataset = datasets.Dataset.from_list(ROWS)
        (source,) = resolve(dataset)
        assert all_rows([source]) == ROWS
        assert all_rows(resolve([dataset.select(range(5)), ROWS[:0] or dataset])) == ROWS[:5] + ROWS

    def test_rows_that_cannot_be_kept(self, resolve):
        with pytest.raises(DataError, match=r"(?s)cannot be kept as JSON.*row 2"):
            resolve([{"text": "a"}, {"text": {1, 2}}])

    def test_rows_and_paths_mixed(self, resolve):
        with pytest.raises(DataError, match="mixes rows and paths"):
            resolve([{"text": "a"}, "b.jsonl"])
        with pytest.raises(DataError, match=r"(?s)the row is NoneType, not a dictionary.*row 2"):
            resolve([{"text": "a"}, None])


class TestColumnsAndTransform:
    def test_columns_of_recipe_and_entry(self, tmp_path, data, resolve):
        path = write_jsonl(tmp_path / "a.jsonl", [{"problem": "1?", "solution": "2"}])
        with pytest.raises(DataError, match=r"(?s)format that is not known.*a.jsonl: row 1"):
            resolve(path)
        data.columns = {"question": "problem", "answer": "solution"}
        (source,) = resolve(path)
        assert prepare_row({"problem": "1?", "solution": "2"}, source) == {"question": "1?", "answer": "2"}
        (entry,) = resolve({"path": str(path), "columns": {"answer": "problem"}})
        assert entry.columns == {"question": "problem", "answer": "problem"}
        data.columns = {}
        (entry,) = resolve({"path": str(path), "columns": {"text": "problem"}})
        with pytest.raises(
            DataError, match=r"the column 'problem' is to be read as 'quetion'(.|\n)*did you mean question"
        ):
            resolve({"path": str(path), "columns": {"text": "solution", "quetion": "problem"}})
        assert entry.title == "plain text"

    def test_a_column_in_whose_place_another_is_put_is_named(self, tmp_path, resolve, said):
        path = write_jsonl(tmp_path / "a.jsonl", [{"question": "1?", "problem": "2?", "answer": "3", "id": 4}])
        resolve({"path": str(path), "columns": {"question": "problem"}})
        assert said[-1].endswith("; not read: question, id")
        resolve({"path": str(path), "columns": {"question": "answer", "answer": "question"}})
        assert said[-1].endswith("; not read: problem, id")

    @pytest.mark.parametrize(
        ("columns", "remedy"),
        [
            ({"text": "essay"}, r"leave it out, or name the format of the rows: \{path: …, format: text\}"),
            ({"history": "essay"}, "leave it out$"),
        ],
    )
    def test_a_column_under_a_name_that_the_format_does_not_read(self, tmp_path, resolve, columns, remedy):
        path = write_jsonl(tmp_path / "a.jsonl", [{"question": "1?", "answer": "3", "essay": "long"}])
        with pytest.raises(DataError, match=f"(?s)'essay' is to be read as .*question/answer, .*{remedy}"):
            resolve({"path": str(path), "columns": columns})
        if "text" in columns:
            (source,) = resolve({"path": str(path), "columns": columns, "format": "text"})
            assert source.title == "plain text"

    def test_format_of_an_entry(self, tmp_path, resolve):
        row = {"text": "a story", "question": "1?", "answer": "2"}
        path = write_jsonl(tmp_path / "a.jsonl", [row])
        assert resolve(path)[0].title == "question/answer"
        assert resolve({"path": str(path), "format": "text"})[0].title == "plain text"
        with pytest.raises(DataError, match=r"(?s)'alpacka' is not known.*instruction"):
            resolve({"path": str(path), "format": "alpacka"})

    def test_transform(self, tmp_path, data, resolve):
        code = "def swap(row):\n    return None if row['skip'] else {'question': row['q'] + '?', 'answer': row['a']}\n"
        (tmp_path / "mine.py").write_text(code)
        path = write_jsonl(tmp_path / "a.jsonl", [{"q": "1", "a": "2", "skip": n == 0} for n in range(3)])
        data.transform = f"{tmp_path / 'mine.py'}:swap"
        (source,) = resolve(path)
        assert source.title == "question/answer"
        assert prepare_row({"q": "1", "a": "2", "skip": True}, source) is None
        with pytest.raises(RowError, match=r"data\.transform raised KeyError: 'skip'"):
            prepare_row({}, source)
        digest = source.transform.digest
        (tmp_path / "mine.py").write_text(code.replace("'?'", "'!'"))
        changed = resolve(path)[0]
        assert changed.transform.digest != digest
        assert prepare_row({"q": "1", "a": "2", "skip": False}, changed) == {"question": "1!", "answer": "2"}

    @pytest.mark.parametrize(
        ("code", "name", "match"),
        [("x = 1", "f", "no function 'f'"), ("import nonsense_x", "f", "nonsense_x"), (None, "f", "cannot be read")],
    )
    def test_broken_transform(self, tmp_path, data, resolve, code, name, match):
        if code is not None:
            (tmp_path / "bad.py").write_text(code)
        data.transform = f"{tmp_path / 'bad.py'}:{name}"
        with pytest.raises(DataError, match=match):
            resolve(write_jsonl(tmp_path / "a.jsonl"))

    def test_transform_that_gives_no_row(self, tmp_path, data, resolve):
        (tmp_path / "bad.py").write_text("def f(row):\n    return 'text'\n\ndef g(row):\n    return None\n")
        path = write_jsonl(tmp_path / "a.jsonl")
        data.transform = f"{tmp_path / 'bad.py'}:f"
        with pytest.raises(DataError, match="gave str, not a row"):
            resolve(path)
        data.transform = f"{tmp_path / 'bad.py'}:g"
        with pytest.raises(DataError, match="drops each of the first"):
            resolve(path)


class TestFaults:
    def test_missing_file_names_a_near_one(self, tmp_path, resolve):
        write_jsonl(tmp_path / "train.jsonl")
        with pytest.raises(DataError, match=r"(?s)trian.jsonl does not exist.*did you mean .*train.jsonl"):
            resolve(str(tmp_path / "trian.jsonl"))
        with pytest.raises(DataError, match=r"(?s)does not exist.*directory .*nowhere does not exist"):
            resolve(str(tmp_path / "nowhere" / "a.jsonl"))

    def test_a_pipe_is_named(self, tmp_path, resolve):
        os.mkfifo(tmp_path / "rows.jsonl")
        with pytest.raises(DataError, match=r"(?s)is a pipe.*write its rows into a file"):
            resolve(str(tmp_path / "rows.jsonl"))

    @pytest.mark.parametrize(
        ("name", "content", "match"),
        [
            ("a.jsonl", b"", "is empty"),
            ("a.jsonl", b"\n\n", r"(?s)holds no rows.*leave it out, or name another file"),
            ("a.json", b"[]", "holds no rows"),
            ("a.csv", b"question,answer\n", "holds no rows"),
            ("a.txt", b"hello", r"(?s)kind of the file a.txt is not known.*\.jsonl"),
            ("a", b"hello", "is not known"),
            ("a.json", b'{\n "question": "1",\n "answer": "2"\n}', r"(?s)not hold a list.*begins '\{"),
            ("a.json", b'"text"', "not hold a list"),
            ("a.json", b"[1, 2]", "(?s)not a JSON object.*row 1"),
            (
                "a.json",
                b'[[{"role": "user"}]]',
                r'(?s)is list, .*"user"}\]; write .* as {"messages": \[…\]}',
            ),
            ("a.jsonl", b'[{"from": "human"}]', r'(?s)a list of turns as {"conversations": \[…\]}.*row 1'),
            ("a.json", b'[{"text": "a"} {"text": "b"}]', "(?s)expected , or .*row 1"),
            ("a.json", b'[{"text": "a"}', "(?s)expected , or .*row 1"),
            ("a.jsonl", b'["a"]', "(?s)is list, not a JSON object.*row 1"),
            ("a.jsonl", b'{"text": "\xff"}', "(?s)not UTF-8.*row 1"),
            ("a.csv", b"text\n\xff\n", "not UTF-8"),
            ("a.csv", b"question,answer\n1,2,3\n", "(?s)3 cells, the header 2.*row 1"),
            ("a.parquet", b"no parquet", "cannot be read as parquet"),
            ("a.arrow", b"no arrow at all", "cannot be read as arrow"),
            ("a.jsonl.gz", b"no gzip", "cannot be read as jsonl"),
            ("a.jsonl.xz", b"no xz", "cannot be read as jsonl"),
        ],
    )
    def test_files(self, tmp_path, resolve, name, content, match):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=match) as caught:
            resolve(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)

    @pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
    def test_compressed_file_that_ends_too_soon(self, tmp_path, resolve, suffix):
        compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}[suffix]
        whole = compress("".join(json.dumps(row) + "\n" for row in ROWS).encode())
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(DataError, match="cannot be read as jsonl"):
            all_rows(resolve(path))

    def test_directories_and_globs(self, tmp_path, resolve):
        with pytest.raises(DataError, match="no data file"):
            resolve(tmp_path)
        with pytest.raises(DataError, match="nothing matches"):
            resolve(str(tmp_path / "*.jsonl"))

    @pytest.mark.parametrize(
        ("spec", "match"),
        [
            ({"path": "a.jsonl", "wieght": 2}, "unknown key 'wieght'"),
            ({"path": None}, "names no path"),
            ({"path": "a.jsonl", "max_samples": 0}, "max_samples is 0"),
            ({"path": "a.jsonl", "weight": -1}, "weight is -1"),
            ({"path": 7}, "is int, not text"),
            ([], "the list of rows is empty"),
            (7, "cannot be read from int"),
        ],
    )
    def test_entries(self, resolve, spec, match):
        with pytest.raises(DataError, match=match):
            resolve(spec)

    def test_bad_first_row_may_be_skipped(self, tmp_path, data, resolve):
        path = write_jsonl(tmp_path / "a.jsonl", [{"x": 1}, {"question": "1?", "answer": "2"}])
        with pytest.raises(DataError, match=r"a.jsonl: row 1\b"):
            resolve(path)
        data.on_bad_row = "skip"
        assert resolve(path)[0].title == "question/answer"
        write_jsonl(path, [{"x": 1}] * 30)
        with pytest.raises(DataError, match=r"a.jsonl: row 1\b") as error:
            resolve(path)
        assert "on_bad_row" not in error.value.remedy

    def test_rows_with_images(self, tmp_path, resolve):
        messages = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A cat."}]
        path = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages, "images": ["a.png"]}])
        with pytest.raises(DataError, match="takes text only"):
            resolve(path)
