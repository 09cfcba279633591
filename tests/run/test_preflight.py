"""What ranks compare before they train: what differs is told by rank and host, on all of them alike."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file, save_file

import shardtune.run.api as api
import shardtune.run.preflight as preflight
from shardtune.config import load_recipe
from shardtune.errors import ParallelError, ShardtuneError
from shardtune.run.preflight import (
    Inventory,
    check_same_rows,
    compare,
    read_together,
    refuse_full,
    short_of_space,
    take_inventory,
)
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.ranks import run_ranks
from tests.support.tiny_run import Tiny, make_tiny, rows, write_rows

FIRST = Inventory(
    "one", "one/0", {"torch": "2.13.0"}, {"actor.optim.lr": "0.001"}, {"/a.py": ("plugins", "12")}, None, None
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("preflight"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"versions": {"torch": "2.12.0"}}, "torch is 2.12.0 for rank 3 on two, 2.13.0 for rank 0 on one"),
        ({"versions": {}}, "torch is missing for rank 3 on two"),
        ({"recipe": {"actor.optim.lr": "0.1"}}, "actor.optim.lr is 0.1 for rank 3 on two, 0.001 for rank 0 on one"),
        ({"files": {"/a.py": ("plugins", "missing")}}, "/a.py (plugins) is missing for rank 3 on two, 12 for rank 0"),
        ({"error": "there is no file"}, "rank 3 on two cannot use the recipe: there is no file"),
    ],
)
def test_a_difference_names_rank_and_host(change: dict[str, Any], says: str) -> None:
    mine = replace(FIRST, host="two", **change)
    assert compare(FIRST, replace(FIRST, host="two"), 3) == []
    (problem,) = compare(FIRST, mine, 3)
    assert says in problem


def test_one_mistake_that_all_make_is_no_difference() -> None:
    wrong = replace(FIRST, error="lr: 'x' is not allowed")
    assert compare(wrong, wrong, 1) == []


def test_a_run_directory_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "SEEN_SECONDS", 0.3)
    (problem,) = compare(replace(FIRST, mark=str(tmp_path / "mark")), FIRST, 1)
    assert "rank 1 on one does not see the run directory of rank 0 on one" in problem
    (tmp_path / "mark").touch()
    assert compare(replace(FIRST, mark=str(tmp_path / "mark")), FIRST, 1) == []


def test_a_full_disk(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(tiny.recipe())
    assert short_of_space(recipe) == {}
    refuse_full({"on two, ": {}})
    monkeypatch.setattr(preflight, "LEAST_FREE_BYTES", 2**60)
    full = short_of_space(recipe)
    with pytest.raises(ParallelError) as refused:
        refuse_full({"on two, ": full})
    assert f"on two, {tiny.folder} has " in str(refused.value)
    assert refused.value.remedy is not None
    assert "make room, or set data.cache_dir and runner.logger.log_path" in refused.value.remedy


def test_a_place_that_is_only_read_needs_no_room(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(tiny.recipe())
    monkeypatch.setattr(preflight, "LEAST_FREE_BYTES", 2**60)
    cache = recipe.data.cache_dir
    assert cache is not None
    Path(cache).mkdir(exist_ok=True)
    monkeypatch.setattr(os, "access", lambda place, mode: place != Path(cache))  # as on a read-only file system
    assert short_of_space(recipe).keys() == {"runner.logger.log_path"}


def test_a_full_disk_is_found_before_ranks_start(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "LEAST_FREE_BYTES", 2**60)
    monkeypatch.setattr(api, "train_on_this_machine", lambda *given: pytest.fail("ranks were started"))
    with pytest.raises(ParallelError, match="several ranks need"):
        api.train(tiny.recipe("full", runner__nproc_per_node=2))
    assert not tiny.run("full").exists()


def test_a_full_disk_of_a_rank(tiny: Tiny) -> None:
    first, second = run_ranks(_meet_full, 2, str(tiny.folder))
    assert first == second
    assert first.startswith("several ranks need ")
    assert first.count("runner.logger.log_path") == 3, "one host, not each of its ranks"


def test_the_inventory_knows_what_the_recipe_names(tiny: Tiny) -> None:
    made = take_inventory(load_recipe(tiny.recipe()))
    assert made.files[str(tiny.folder / "train.jsonl")][0] == "data.train_data_paths"
    assert made.files[str(tiny.folder / "model")][0] == "actor.model.model_path"
    assert "actor.optim.lr" in made.recipe
    assert "data.cache_dir" not in made.recipe, "hosts may have caches of their own"
    assert {"python", "torch", "shardtune", "shardtune's sources"} <= made.versions.keys()


def _meet(folder: str, lr_of_rank_1: float, broken: bool) -> str:
    """What a rank is told."""
    rank = int(os.environ["RANK"])
    tiny = Tiny(Path(folder))
    changes: dict[str, Any] = {"actor__optim__lr": lr_of_rank_1} if rank else {}
    if broken and rank:
        changes["actor__model__model_path"] = "/nowhere/model"
    try:
        recipe, peers = read_together(lambda: load_recipe(tiny.recipe("met", **changes)))
        return f"lr {recipe.actor.optim.lr}, {'watched' if peers else 'one host'}"
    except ShardtuneError as error:
        return str(error)


def _meet_full(folder: str) -> str:
    """What a rank is told whose host has no room."""
    with patch.object(preflight, "LEAST_FREE_BYTES", 2**60):
        return _error(lambda: read_together(lambda: load_recipe(Tiny(Path(folder)).recipe("full"))))


def test_ranks_that_agree_go_on(tiny: Tiny) -> None:
    assert run_ranks(_meet, 2, str(tiny.folder), 1e-3, False) == ["lr 0.001, one host"] * 2
    assert not list(tiny.folder.glob(".shardtune-*")), "the mark is gone"


def test_ranks_that_differ_end_with_the_same_message(tiny: Tiny) -> None:
    first, second = run_ranks(_meet, 2, str(tiny.folder), 1e-1, False)
    assert first == second
    assert "the ranks cannot train together" in first
    assert f"actor.optim.lr is 0.1 for rank 1 on {socket.gethostname()}, 0.001 for rank 0 on" in first


def test_a_recipe_that_only_one_rank_can_read(tiny: Tiny) -> None:
    first, second = run_ranks(_meet, 2, str(tiny.folder), 1e-3, True)
    assert f"rank 1 on {socket.gethostname()} cannot use the recipe: actor.model.model_path: there is no /now" in first
    assert "/nowhere/model" in second


DIFFERENCES: dict[str, Callable[[Path], object]] = {
    "rows/part.jsonl": lambda host: _reverse(host / "rows/part.jsonl"),
    "train.jsonl": lambda host: _reverse(host / "train.jsonl"),
    "model/model.safetensors": lambda host: _negate(host / "model/model.safetensors"),
}
HOST = "/proc/self/cwd"
"""A path under which each process has files of its own, as each host has."""


def _reverse(file: Path) -> None:
    file.write_text("".join(f"{line}\n" for line in file.read_text().splitlines()[::-1]))


def _negate(file: Path) -> None:
    save_file({name: -tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def _on_hosts(folder: str) -> list[str]:
    """What a rank is told where rank 1 has other files, of the same number and sizes, before training and while the
    worker is made."""
    rank = int(os.environ["RANK"])
    host = Path(folder) / f"host{rank}"
    here = Path.cwd()
    os.chdir(host)
    told = []
    try:
        for file, differ in DIFFERENCES.items():
            kept = (host / file).read_bytes()
            if rank:
                differ(host)
            assert (host / file).stat().st_size == len(kept)
            recipe = Tiny(Path(folder)).recipe(
                "hosts",
                actor__model__model_path=f"{HOST}/model",
                data__train_data_paths=[f"{HOST}/rows", f"{HOST}/train.jsonl"],
                data__cache_dir=str(host / "cache"),
                runner__device="cpu",
            )
            told += [_error(lambda r=recipe: read_together(lambda: load_recipe(r)))]
            worker = SFTWorker(load_recipe(recipe), report=lambda text: None)
            told += [_error(lambda w=worker: check_same_rows(w))]
            told += [_error(worker.setup) if file.startswith("model") else ""]
            (host / file).write_bytes(kept)
    finally:
        os.chdir(here)
    return told


def _error(action: Callable[[], object]) -> str:
    try:
        action()
        return ""
    except ShardtuneError as error:
        return str(error)


def test_hosts_are_compared_by_the_content_of_their_files(tmp_path: Path) -> None:
    for rank in range(2):
        host = tmp_path / f"host{rank}"
        make_tiny(host)
        (host / "rows").mkdir()
        write_rows(host / "rows/part.jsonl", rows(9, start=50))
    first, second = run_ranks(_on_hosts, 2, str(tmp_path))
    assert first == second
    for number, (file, name) in enumerate(
        zip(DIFFERENCES, ("data.train_data_paths",) * 2 + ("actor.model.model_path",), strict=True)
    ):
        before, rows_apart, weights_apart = first[3 * number : 3 * number + 3]
        assert f"{HOST}/{file} ({name}) is " in before
        assert before.count(" for rank 1 on") == 1
        if name == "data.train_data_paths":
            assert "the training rows: 30 with fingerprint " in rows_apart
        else:
            assert rows_apart == ""
            assert f"the weights differ between hosts: {HOST}/{file} is " in weights_apart


def test_under_torchrun_a_difference_ends_all_ranks_before_anything_is_written(tiny: Tiny) -> None:
    """Each rank's own plugin file differs, as it would where hosts have other checkouts."""
    script = tiny.folder / "start.py"
    script.write_text(
        "import os, sys\n"
        "import shardtune\n"
        "sys.argv[1:] = ['train', sys.argv[1], f\"runner.seed={os.environ['RANK']}\"]\n"
        "from shardtune.cli.commands import main\n"
        "main()\n"
    )
    recipe = tiny.folder / "differs.yaml"
    recipe.write_text(yaml.safe_dump(tiny.recipe("differs")))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    ended = subprocess.run(
        [*torchrun, str(script), str(recipe)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    # Both say so, but torchrun ends the other one when the first has.
    assert re.search(r"rank [01]: error: the ranks cannot train together", ended.stderr)
    assert "runner.seed is 1 for rank 1 on" in ended.stderr
    assert not tiny.run("differs").exists()


@pytest.mark.lengthy
def test_the_first_rank_does_not_wait_for_ever(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(preflight, "MEET_SECONDS", 1.0)
    with pytest.raises(ParallelError, match=r"not all 2 ranks joined(?s:.*)waited for 1 s"):
        read_together(lambda: load_recipe(tiny.recipe()))


def test_hosts_that_start_again_in_the_store_of_the_ended_ranks_are_told(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = {"RANK": "0", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    started = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**where, **started}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ParallelError, match=rf"ranks of 2 hosts again(?s:.*){preflight.OWN_STORE}=1"):
        read_together(lambda: load_recipe(tiny.recipe()))


@pytest.mark.parametrize(
    ("said", "kind"),
    [("gloo/transport/tcp/pair.cc: Connection closed by peer", RuntimeError), ("timed out", ParallelError)],
)
def test_a_rank_that_has_ended_is_not_one_that_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, said: str, kind: type[Exception]
) -> None:
    """The first is a consequence of that rank's end, and the second a mistake in the network."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(said)

    for name, value in (("get_rank", lambda: 0), ("get_world_size", lambda: 2), ("all_reduce", fail)):
        monkeypatch.setattr(dist, name, value)
    with pytest.raises(kind) as caught:
        preflight.try_collective(torch.device("cpu"))
    assert type(caught.value) is kind
