"""Checkpoint folders: atomic, complete or ignored, few, and found by name."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from shardtune.checkpoint import atomic, state_file
from shardtune.checkpoint import store as store_module
from shardtune.checkpoint.checksums import add_checksums
from shardtune.checkpoint.state_file import read_state
from shardtune.checkpoint.store import CheckpointStore, open_checkpoint
from shardtune.checkpoint.verified import damage
from shardtune.data.checksum import file_parts
from shardtune.errors import CheckpointError
from tests.support.full_disk import Disk, filling


def save(store: CheckpointStore, step: int, *, best: bool = False) -> Path:
    folder = store.begin(step)
    (folder / "model").mkdir()
    (folder / "model" / "weights.bin").write_bytes(bytes([step % 256]) * 100)
    return store.commit(folder, step, {"step": step, "rows": step * 3}, best=best)


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_committed_checkpoint_is_found_with_its_state(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.latest() is None
    assert store.steps() == []
    made = save(store, 10)
    assert store.latest() == made == store.path(10)
    assert read_state(made) == {"step": 10, "rows": 30}
    assert entries(store.folder) == {"global_step_10", "latest", "run_id"}


def test_state_floats_come_back_bitwise(tmp_path: Path) -> None:
    value = 0.1 + 0.2
    atomic.write_json(tmp_path / "x.json", {"a": [value, 1e-310, float("inf")]})
    assert atomic.read_json(tmp_path / "x.json") == {"a": [value, 1e-310, float("inf")]}


def test_retention_keeps_the_last_the_multiples_the_latest_and_the_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_every=40)
    for step in range(10, 110, 10):
        save(store, step, best=step == 30)
    assert store.steps() == [30, 40, 80, 90, 100]
    store.mark_best(100)
    save(store, 110)
    assert store.steps() == [40, 80, 100, 110]
    assert store.best() == store.path(100)
    save(store, 120)
    assert store.steps() == [40, 80, 100, 110, 120]
    store.update(120, {}, best=True)  # by the evaluation after it
    assert store.steps() == [40, 80, 110, 120]


def test_going_back_gives_up_the_later_checkpoints_with_the_next_save(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (10, 20, 50):
        save(store, step, best=step == 50)
    store.keep_last = 3
    store.go_back_to(20)
    assert store.latest() == store.path(20)
    assert store.best() is None, "the best of a course that is given up is not the best of this one"
    assert store.steps() == [20, 50], "until something new is saved one may still go on there"
    save(store, 30)
    assert store.latest() == store.path(30)
    assert store.steps() == [20, 30]


def test_what_a_checkpoint_says_of_the_run_is_replaced_and_its_tensors_are_not(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    before = (store.path(1) / "model" / "weights.bin").read_bytes()
    store.update(1, {"line": {}}, best=True)
    assert read_state(store.path(1)) == {"line": {}}
    assert store.best() == store.path(1)
    assert (store.path(1) / "model" / "weights.bin").read_bytes() == before
    assert store.steps() == [1]


def test_torn_checkpoints_are_named_with_what_they_lack(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    (store.path(2) / "model" / "weights.bin").write_bytes(b"")
    assert list(store.faults()) == ["global_step_2"]
    assert "torn" in store.faults()["global_step_2"]


def test_files_of_ranks_are_looked_at_once_and_synced_by_those_who_wrote_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint has as many files as ranks, and rank 0 commits it: it reads and syncs none of theirs."""
    store = CheckpointStore(tmp_path, keep_last=2)
    looked: list[str] = []
    synced: list[str] = []
    fault, sync = state_file.size_fault, atomic.sync_file
    monkeypatch.setattr(state_file, "size_fault", lambda path, parts: looked.append(path.name) or fault(path, parts))
    monkeypatch.setattr(atomic, "sync_file", lambda path: synced.append(path.name) or sync(path))
    for step in (1, 2, 3):
        looked.clear()
        synced.clear()
        folder = store.begin(step)
        for rank in range(5):
            (folder / f"shard-{rank}").write_bytes(b"tensors")
        (folder / "worker.json").write_text("{}")
        add_checksums(folder, {f"shard-{rank}": file_parts(folder / f"shard-{rank}") for rank in range(5)})
        store.commit(folder, step, {})
        assert set(synced) == {"worker.json", "state.json"}
        assert looked.count("shard-0") == min(step, 3), "once in each checkpoint that was there"
    assert store.steps() == [2, 3]
    (store.path(2) / "shard-4").unlink()
    assert store.steps() == [3]
    assert CheckpointStore(tmp_path, sizes=False).steps() == [2, 3]
    assert damage(store.path(2), 0, 5) | damage(store.path(2), 1, 5) == {}
    found = [damage(store.path(2), rank, 5) for rank in range(5)]
    assert [each for each in found if each] == [{"shard-4": "is missing"}], "by the rank that verifies it"


def test_the_best_is_found_while_a_run_exchanges_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1, best=True)
    pointed_to = store_module.pointed_to

    def exchanging(pointer: Path) -> Path | None:
        found = pointed_to(pointer)
        if pointer.name == "best" and found == store.path(1):  # the run goes on after its name was read
            monkeypatch.setattr(store_module, "pointed_to", pointed_to)
            save(store, 2, best=True)
            store.prune()
        return found

    monkeypatch.setattr(store_module, "pointed_to", exchanging)
    assert store.best() == store.path(2)


def test_best_is_swapped_and_never_written_in_place(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, best=True)
    save(store, 2)
    before = (tmp_path / "best" / "model" / "weights.bin").read_bytes()
    assert before == b"\x01" * 100
    store.mark_best(2)
    assert store.resolve("best") == store.path(2)
    assert (store.path(1) / "model" / "weights.bin").read_bytes() == before
    with pytest.raises(CheckpointError):
        store.mark_best(3)
    assert store.resolve("best") == store.path(2)


def test_a_name_of_a_checkpoint_that_is_gone_is_lost(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.lost() == {}
    save(store, 1, best=True)
    save(store, 2)
    assert store.lost() == {}
    shutil.rmtree(store.path(1))
    assert store.lost() == {"best": "global_step_1"}
    shutil.rmtree(store.path(2))
    assert store.lost() == {"best": "global_step_1", "latest": "global_step_2"}


@pytest.mark.parametrize("which", ["latest", "2", 2, "global_step_2", "latest/", "{folder}/global_step_2/", "{folder}"])
def test_resolve(tmp_path: Path, which: str | int) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    save(store, 1)
    save(store, 2)
    asked = which.format(folder=store.folder) if isinstance(which, str) else which
    assert store.resolve(asked) == store.path(2)
    assert open_checkpoint(f"{tmp_path}/run/") == store.path(2)


@pytest.mark.parametrize("which", ["best", "7", "nowhere/at/all", "global_step_9"])
def test_resolve_lists_what_there_is(tmp_path: Path, which: str) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 3)
    save(store, 4)
    with pytest.raises(CheckpointError) as caught:
        store.resolve(which)
    assert which in str(caught.value)
    assert "3, 4" in str(caught.value)
    assert caught.value.remedy


def test_a_truncated_file_makes_a_checkpoint_torn(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    os.truncate(store.path(2) / "model" / "weights.bin", 60)
    assert store.steps() == [1]
    assert store.latest() == store.path(1)
    with pytest.raises(CheckpointError, match=r"weights\.bin has 60 bytes instead of 100: it is torn"):
        store.resolve(2)
    save(store, 3)
    assert entries(tmp_path) == {"global_step_1", "global_step_3", "latest", "run_id"}


@pytest.mark.parametrize("damage", ["state.json", "model/weights.bin"])
def test_a_missing_file_makes_a_checkpoint_torn(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (store.path(1) / damage).unlink()
    assert store.latest() is None
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert "complete" in str(caught.value)
    with pytest.raises(CheckpointError, match=Path(damage).name):
        open_checkpoint(store.path(1))


def test_temporary_folders_are_ignored_and_removed_by_the_next_save(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    CheckpointStore(tmp_path).begin(2)
    assert store.steps() == [1]
    save(store, 3)
    assert entries(tmp_path) == {"global_step_1", "global_step_3", "latest", "run_id"}


def test_two_saves_of_one_store_may_overlap(tmp_path: Path) -> None:
    """An asynchronous save is still being written while the next begins."""
    store = CheckpointStore(tmp_path)
    first = store.begin(1)
    second = store.begin(2)
    (first / "a").write_text("1")
    store.commit(first, 1, {})
    store.abandon(second)
    assert store.steps() == [1]
    assert entries(tmp_path) == {"global_step_1", "latest", "run_id"}


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    folder = store.begin(1)
    (folder / "new").write_text("new")
    store.commit(folder, 1, {"again": True})
    assert read_state(store.path(1)) == {"again": True}
    assert entries(store.path(1)) == {"new", "state.json"}
    assert entries(tmp_path) == {"global_step_1", "latest", "run_id"}


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "not" / "there")
    with pytest.raises(CheckpointError, match=r"1000 TB needed, .* free") as raised:
        store.begin(1, needed_bytes=10**15)
    assert "keep_last" not in str(raised.value)  # there is none that fewer would remove
    assert not (tmp_path / "not").exists()


def test_a_lower_keep_last_makes_room_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        save(store, step)
    usage = atomic.shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"lower runner\.keep_last"):
        store.begin(4, needed_bytes=200)
    fewer = CheckpointStore(tmp_path, keep_last=1)
    fewer.require_space(200)
    assert fewer.steps() == [1, 2, 3]
    fewer.begin(4, needed_bytes=200)
    assert fewer.steps() == [3]


@pytest.mark.parametrize(
    ("saves", "best", "free", "number"),
    [
        (1, False, 1000, 0),  # one is checked before training
        (2, False, 2999, 2),  # and the model in the end, of 1000
        (2, False, 3000, 0),
        (3, True, 3999, 3),
        (4, False, 3999, 4),  # three are kept while the fourth is written
        (4, False, 4000, 0),
        (9, True, 4999, 5),
        (9, True, 5000, 0),
    ],
)
def test_too_little_room_for_all_checkpoints_has_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: int, best: bool, free: int, number: int
) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=3)
    usage = atomic.shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: usage)
    note = store.note_on_space(1000, 1000, saves, 100, best=best)
    assert note.startswith(f"disk: {number} checkpoints of about 1 kB (" if number else "")
    assert bool(note) == bool(number)


def test_checkpoints_for_good_and_those_that_there_are_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_every=10)
    usage = atomic.shutil.disk_usage(tmp_path)._replace(free=10_500)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: usage)
    assert "11 checkpoints" in store.note_on_space(1000, 0, 20, 100, best=False)
    assert "6 checkpoints" in store.note_on_space(2000, 0, 5, 100, best=False)  # no more for good than are saved
    folder = store.begin(1)
    (folder / "weights").write_bytes(bytes(1000))
    store.commit(folder, 1, {})
    assert store.note_on_space(1000, 0, 20, 100, best=False) == ""


def test_a_folder_that_cannot_be_made_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as caught:
        CheckpointStore(tmp_path / "file" / "checkpoints").begin(1)
    assert str(tmp_path / "file") in str(caught.value)


# Commits steps 1 (twice) and 2 over older ones and dies at the n-th change to the file system.
CRASH = """
import os, signal, sys
sys.path[:0] = [{root!r}, {packages!r}]
from pathlib import Path
from shardtune.checkpoint.store import CheckpointStore
left = int(sys.argv[2])
def hook(event, args):
    global left
    if event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink") or (
        event == "open" and isinstance(args[1], str) and "w" in args[1]
    ):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
for step, best in ((1, True), (1, False), (2, True), (3, False)):
    store = CheckpointStore(sys.argv[1], keep_last=1)
    folder = store.begin(step)
    (folder / "data").write_text(str(step) * 50)
    store.commit(folder, step, {{"step": step}}, best=best)
    print(step, flush=True)
"""


def test_killed_at_any_change_to_the_disk_a_complete_checkpoint_remains(tmp_path: Path) -> None:
    script = CRASH.format(root=str(Path(__file__).parents[2]), packages=str(Path(xxhash.__file__).parents[1]))
    killed = 0
    for moment in range(1, 200):
        folder = tmp_path / str(moment)
        done = subprocess.run(
            [sys.executable, "-S", "-c", script, str(folder), str(moment)], capture_output=True, text=True, check=False
        )
        committed = len(done.stdout.split())
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        killed += 1
        check_survivor(folder, committed)
    assert done.returncode == 0
    assert killed > 30


def check_survivor(folder: Path, committed: int) -> None:
    """After a crash: what was committed is there, whole, and the next save leaves nothing else behind."""
    steps = [1, 1, 2, 3]
    store = CheckpointStore(folder, keep_last=1)
    store.clean()
    latest = store.latest()
    if committed:
        assert latest is not None
        state = json.loads((latest / "state.json").read_text())
        assert state["step"] in (steps[committed - 1], steps[min(committed, 3)])
        assert (latest / "data").read_text() == str(state["step"]) * 50
        assert store.best() is not None
    marked = store.best()
    save(store, 9)
    expected = {"global_step_9", "latest", "run_id"} | ({"best", marked.name} if marked is not None else set())
    assert entries(folder) == expected


@pytest.mark.parametrize("act", ["update", "mark_best", "go_back_to", "open"])
def test_a_full_disk_is_one_message_and_changes_nothing(tmp_path: Path, act: str) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 1)
    save(store, 2, best=True)
    if act == "open":
        (store.folder / "run_id").unlink()
    acts = {
        "update": lambda: store.update(2, {"step": 2, "rows": 7}),
        "mark_best": lambda: store.mark_best(1),
        "go_back_to": lambda: store.go_back_to(1),
        "open": store.open,
    }
    with (
        filling(Disk(tmp_path.resolve(), full_at=1)),
        pytest.raises(CheckpointError, match=r"(?s)checkpoint cannot be written: No space.*where.*make room"),
    ):
        acts[act]()
    assert store.latest() == store.path(2)
    assert store.best() == store.path(2)
    assert read_state(store.path(2)) == {"step": 2, "rows": 6}
    acts[act]()
