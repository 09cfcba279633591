"""Runs whose files are tokenised one by one: a plain loop's numbers, continuation, and faults in later files."""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoTokenizer

import shardtune
from shardtune.batch.seeds import derive_seed
from shardtune.data.cache.ahead import FilesAhead
from shardtune.data.loader.order import permute
from shardtune.errors import CheckpointError, DataError
from shardtune.run.diff.circumstances import files_read
from tests.support.dist.parity import EXACT
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import Trace, flat_script, recipe, run_recipe, save_model, save_rows
from tests.support.opened_rows import opened_files
from tests.support.tiny_run import Tiny, assert_same_tensors, lines, make_tiny, rows, signal_after, write_rows

STEPS = 7
FILES = 5
LONG = 9
"""The row that is dropped."""


def documented(sizes: list[int], dropped: set[int], batch: int, seed: int, mixed: int, steps: int) -> list[list[int]]:
    """The rows of the first steps, by a plain loop over the order that docs/data.md describes."""
    starts, found, epoch = np.cumsum([0, *sizes]).tolist(), list[list[int]](), 0
    while len(found) < steps:
        files = permute(np.arange(len(sizes)), len(sizes), derive_seed(seed, epoch, "files")).tolist()
        cuts = [0, *range(0 if epoch else 1, len(files), mixed), len(files)]
        windows = [files[start:stop] for start, stop in itertools.pairwise(cuts) if stop > start]
        order: list[int] = []
        for number, window in enumerate(windows):
            here = [row for file in window for row in range(starts[file], starts[file + 1])]
            key = derive_seed(derive_seed(seed, epoch, number, "window"), 0, "epoch")
            order += [here[place] for place in permute(np.arange(len(here)), len(here), key).tolist()]
        order = [row for row in order if row not in dropped]
        found += [order[start : start + batch] for start in range(0, len(order), batch)]
        epoch += 1
    return found[:steps]


@pytest.mark.lengthy
def test_one_and_two_ranks_have_the_numbers_of_a_plain_loop(tmp_path: Path) -> None:
    """In fp64, two micro-batches on each rank, into the second epoch; a row is too long and dropped."""
    model, whole = save_model("dense", tmp_path / "dense"), save_rows(tmp_path / "rows.jsonl", 35)
    texts = whole.read_text().splitlines()
    row = json.loads(texts[LONG])
    row["messages"][-1]["content"] = "too long " * 20
    texts[LONG] = json.dumps(row)
    whole.write_text("\n".join(texts) + "\n")
    parts = tmp_path / "parts"
    parts.mkdir()
    for file in range(FILES):
        (parts / f"{file}.jsonl").write_text("\n".join(texts[7 * file : 7 * file + 7]) + "\n")

    def made(micro_batch: int) -> dict[str, Any]:
        keys = {"data__cache": "by_file", "data__mixed_files": 2, "data__on_too_long": "drop", "data__max_length": 128}
        return recipe(
            model,
            whole,
            **keys,
            data__train_data_paths=str(parts),
            actor__micro_batch_size=micro_batch,
            runner__max_steps=STEPS,
            runner__seed=5,
        )

    one = run_recipe(made(4))
    gc.collect()  # ends the process that tokenises ahead into the cache
    shutil.rmtree(tmp_path / "cache")
    two = run_ranks(run_recipe, 2, made(2))[0]
    flat = flat_script()
    order = documented([7] * FILES, {LONG}, 8, 5, 2, STEPS)
    flat.steps_of = lambda *_: iter(order)
    given = {"lr": 1e-2, "clip": 0.5, "schedule": "linear", "warmup": 3, "precision": "fp64", "steps": STEPS}
    args = flat.arguments(f"--model={model}", f"--data={whole}", *(f"--{key}={value}" for key, value in given.items()))
    plain, trace = flat.load_model(args), Trace()
    for loss, norm in flat.train(plain, flat.read_rows(whole, AutoTokenizer.from_pretrained(model)), args):
        trace.losses.append(loss)
        trace.norms.append(norm)
    weights = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    assert sum(map(len, order[:5])) == 34
    for run in (one, two):
        assert np.abs(np.array(run.losses) - trace.losses).max() < EXACT
        assert np.abs(np.array(run.norms) / trace.norms - 1).max() < EXACT
        assert max(float((run.weights[name] - weight).abs().max()) for name, weight in weights.items()) < EXACT


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    made = make_tiny(tmp_path_factory.mktemp("tiny"), dropout=0.2)
    fill(made.folder / "parts")
    return made


def fill(parts: Path) -> None:
    parts.mkdir()
    for file in range(6):
        write_rows(parts / f"{file}.jsonl", rows(6, start=6 * file))


def by_file(tiny: Tiny, name: str, **keys: Any) -> dict[str, Any]:
    given = {"data__cache": "by_file", "data__mixed_files": 2, "data__train_data_paths": str(tiny.folder / "parts")}
    cache = {"data__cache_dir": str(tiny.folder / f"cache-{name}")}
    return tiny.recipe(name, **{"runner__max_steps": 8, **given, **cache, **keys})


def killed(recipe: dict[str, Any], step: int) -> None:
    """Train in a copy of this process, which is killed after a step, before that is saved."""
    pid = os.fork()
    if pid == 0:
        with signal_after(step, signal.SIGKILL):
            shardtune.train(recipe)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


@pytest.mark.lengthy
def test_a_killed_run_goes_on_bit_for_bit_with_the_files_at_its_place(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the cache has been deleted, and with a limit below the size of a file."""
    keys = {"data__cache_limit": 1e-9, "data__mixed_files": 1}
    shardtune.train(by_file(tiny, "whole", **keys))
    recipe = by_file(tiny, "killed", **keys)
    killed(recipe, 8)
    built = tiny.folder / "cache-killed" / "entries"
    built.rename(tiny.folder / "deleted")  # in one step: processes of the killed one may still write into it
    monkeypatch.setattr(FilesAhead, "start", lambda self: lambda: None)
    shardtune.train(recipe)
    assert_same_tensors(*(tiny.run(name) / "checkpoints" / "global_step_8" for name in ("whole", "killed")))
    assert lines(tiny.run("killed")) == lines(tiny.run("whole"))
    state = json.loads((tiny.run("killed") / "checkpoints" / "global_step_8" / "worker.json").read_text())
    assert state["data"] == {"epoch": 1, "rows_consumed": 12}
    # The first file of all, as rows to show, and of the second epoch that of step 8 and the two behind it.
    assert len([*built.glob("*/[!.]*")]) <= 4


def first_files(number: int) -> list[int]:
    """The first of six files in the order of a run of the default seed."""
    return permute(np.arange(6), 6, derive_seed(42, 0, "files")).tolist()[:number]


def test_before_the_first_step_other_files_are_only_looked_at(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each, for the fingerprint of the data; their rows are neither hashed nor counted nor tokenised."""
    monkeypatch.setattr(FilesAhead, "start", lambda self: lambda: None)
    monkeypatch.setattr("shardtune.data.cache_directory._SETTLED_SECONDS", -1.0)  # remember new files, too
    given = {"runner__max_steps": 1, "actor__global_batch_size": 2, "actor__micro_batch_size": 2}
    with opened_files() as opened:
        shardtune.train(by_file(tiny, "first", **given))
    first = f"{first_files(1)[0]}.jsonl"
    counts = Counter(name for name in opened if name[0].isdigit())
    assert counts.pop(first) > 1
    assert set(counts.values()) == {1}
    folder = tiny.folder / "cache-first"
    assert len([*folder.glob("hashes/*")]) == len([*folder.glob("row_counts/*")]) == 1
    assert len([*folder.glob("entries/*/[!.]*")]) == 1
    manifest = json.loads((tiny.run("first") / "manifest.json").read_text())["data"]
    assert [manifest["rows_per_epoch"], len([one for one in manifest["train"] if one["rows"]])] == [None, 1]
    assert [one["file"] for one in manifest["train"] if one["content"]] == [str(tiny.folder / "parts" / first)]


def test_changed_files_are_refused_by_name(tiny: Tiny) -> None:
    """One that was read by its content, whatever its size; one that was not by its size; also of a finished run."""
    parts = tiny.folder / "changing"
    fill(parts)
    recipe = by_file(tiny, "changing", data__train_data_paths=str(parts), runner__max_steps=1)
    shardtune.train(recipe)
    read, last = parts / f"{first_files(1)[0]}.jsonl", parts / f"{first_files(6)[-1]}.jsonl"
    for file, changed, says in (
        (read, read.read_text().replace("say", "yas"), "other content"),
        (last, last.read_text().replace("say", "says"), rf"{last.stat().st_size:,} bytes -> "),
    ):
        whole = file.read_text()
        file.write_text(changed)
        with pytest.raises(CheckpointError, match=rf"{file.name}: {says}"):
            shardtune.train(recipe, "runner.max_steps=2")
        named = file if file == read else parts
        with pytest.raises(CheckpointError, match=rf"(?s)the run is finished, .*data.train_data_paths: {named} has"):
            shardtune.train(recipe)
        file.write_text(whole)  # with another time stamp
    shardtune.train(recipe)
    shardtune.train(recipe, "runner.max_steps=2")


def files_differ(folder: Path) -> str:
    """The error of a rank whose host has another file under the same name."""
    rank = dist.get_rank()
    values = json.loads((folder / "recipe.json").read_text())
    values["data"]["train_data_paths"] = str(folder / f"host-{rank}")
    values["data"]["cache_dir"] = str(folder / f"cache-{rank}")
    with pytest.raises(DataError, match="the ranks read different data files") as raised:
        run_recipe(values)
    return str(raised.value)


@pytest.mark.lengthy
def test_ranks_with_other_files_stop_at_the_step_that_needs_them(tmp_path: Path) -> None:
    model, whole = save_model("dense", tmp_path / "dense"), save_rows(tmp_path / "rows.jsonl", 12)
    texts = whole.read_text().splitlines()
    for host in range(2):
        (tmp_path / f"host-{host}").mkdir()
        for file in range(3):
            content = "\n".join(texts[4 * file : 4 * file + 4]) + "\n"
            (tmp_path / f"host-{host}" / f"{file}.jsonl").write_text(content)
    other = tmp_path / "host-1" / f"{permute(np.arange(3), 3, derive_seed(5, 0, 'files'))[1]}.jsonl"
    content = other.read_text()
    place = content.index("content") + 12
    other.write_text(content[:place] + ("y" if content[place] == "x" else "x") + content[place + 1 :])
    values = recipe(
        model,
        whole,
        data__cache="by_file",
        data__mixed_files=1,
        actor__micro_batch_size=1,
        actor__global_batch_size=2,
        runner__max_steps=4,
        runner__seed=5,
    )
    (tmp_path / "recipe.json").write_text(json.dumps(values))
    for error in run_ranks(files_differ, 2, tmp_path):
        assert f"{other} of rank 1, compared with rank 0" in error


def test_faults_of_a_later_file(tiny: Tiny, capfd: pytest.CaptureFixture[str]) -> None:
    """A bad row stops training at the step that needs it, with all before it saved; skipped, it is noted once."""
    parts = tiny.folder / "faulty"
    fill(parts)
    last = parts / f"{permute(np.arange(6), 6, derive_seed(42, 0, 'files'))[-1]}.jsonl"
    content = last.read_text()
    last.write_text(content.replace("{", "[", 1))
    recipe = by_file(tiny, "faulty", data__train_data_paths=str(parts))
    with pytest.raises(DataError, match=rf"(?s)broken JSON.*{last.name}: row 1"):
        shardtune.train(recipe)
    steps = [line["step"] for line in lines(tiny.run("faulty"))]
    assert steps == [1, 2, 3, 4]  # 6 rows each, of windows with 6, 12, 12 and 6; the fifth looks behind its last row
    dropped = tiny.run("faulty") / "dropped_rows.jsonl"
    assert not dropped.exists()
    allowed = "runner.allow_changes=[data.on_bad_row]"
    shardtune.train(recipe, "data.on_bad_row=skip", allowed)
    shardtune.train(recipe, "data.on_bad_row=skip", allowed, "runner.max_steps=9")
    noted = [json.loads(line) for line in dropped.read_text().splitlines()]
    assert [(line["set"], line["row"], line["cause"]) for line in noted] == [("train", 1, "bad")]
    last.write_text(content)
    with pytest.raises(CheckpointError, match="the training data is not what this run was trained on"):
        shardtune.train(recipe, "data.on_bad_row=skip", allowed, "runner.max_steps=10")
    assert "1 of 6 rows skipped, not usable" in capfd.readouterr().err
    assert torch.isfinite(torch.tensor(lines(tiny.run("faulty"))[-1]["train/loss"]))


def test_runs_that_read_files_of_other_content_differ_in_these() -> None:
    """A file that one of them has not read is not compared."""
    one, other = (
        [{"file": f"{number}.jsonl", "content": content} for number, content in enumerate(contents)]
        for contents in (("a", "b", "c", None), ("a", "x", None, "d"))
    )
    assert [difference.name for difference in files_read(one, other)] == ["training file 1.jsonl"]
