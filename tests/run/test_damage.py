"""Files that are flipped, emptied, lost or exchanged: noticed, named, and the run goes on from what is sound."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardtune
from shardtune.checkpoint.verified import damage
from shardtune.config import load_recipe
from shardtune.errors import CheckpointError, Interrupted
from shardtune.run import exporting as exporting_module
from shardtune.run import run as run_module
from shardtune.run.directory import plan_run
from shardtune.run.exporting import exporting
from shardtune.training.runner import SFTRunner
from tests.support.tiny_run import Tiny, assert_same_tensors, flip_bit, lines, make_tiny, signal_after
from tests.support.workspace import run_cli

LAST = "checkpoints/global_step_4"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """`runs/whole` of four steps, and `runs/stopped`, which was stopped after the third."""
    tiny = make_tiny(tmp_path_factory.mktemp("damage"), dropout=0.2)
    shardtune.train(recipe(tiny, "whole"))
    with signal_after(3), pytest.raises(Interrupted):
        shardtune.train(recipe(tiny, "stopped"))
    return tiny


def recipe(tiny: Tiny, name: str, **changes: object) -> dict:
    return tiny.recipe(name, **{"runner__max_epochs": 1, "actor__model__is_lora": True, **changes})


@pytest.fixture
def stopped(made: Tiny) -> Iterator[Path]:
    """`runs/stopped`, as it was before afterwards."""
    run = made.run("stopped")
    shutil.copytree(run, made.runs / "kept", symlinks=True)
    yield run
    shutil.rmtree(run, ignore_errors=True)
    (made.runs / "kept").rename(run)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_goes_on(tiny: Tiny, name: str = "stopped", **changes: object) -> None:
    """The same command ends as the run that was left alone, bit for bit."""
    shardtune.train(recipe(tiny, name, **changes))
    assert_same_tensors(tiny.run(name) / LAST, tiny.run("whole") / LAST)
    assert lines(tiny.run(name)) == lines(tiny.run("whole"))


@pytest.mark.lengthy
def test_every_file_of_a_checkpoint_flipped_emptied_removed_or_exchanged_is_found(made: Tiny, tmp_path: Path) -> None:
    sound, before = made.run("stopped") / "checkpoints/global_step_3", made.run("stopped") / "checkpoints/global_step_2"
    of_another_run = made.run("whole") / "checkpoints/global_step_3"
    names = sorted(tree(sound))
    assert {name.partition("/")[0] for name in names} == {"model", "optimizer", "run", "state.json", "worker.json"}
    assert damage(sound) == {}
    for name in names:
        for how in ("first bit", "middle bit", "last bit", "emptied", "removed", "other step", "other run"):
            spoilt = tmp_path / "global_step_3"
            shutil.copytree(sound, spoilt)
            file = spoilt / name
            if how.endswith("bit"):
                flip_bit(file, {"first": 0.0, "middle": 0.5, "last": 1.0}[how.split()[0]], bit=3)
            elif how == "emptied":
                file.write_bytes(b"")
            elif how == "removed":
                file.unlink()
            else:
                shutil.copyfile((before if how == "other step" else of_another_run) / name, file)
            same = file.exists() and file.read_bytes() == (sound / name).read_bytes()
            assert bool(damage(spoilt)) != same, f"{name} {how}"
            shutil.rmtree(spoilt)


def test_a_run_that_lost_its_records_and_its_newest_checkpoint_goes_on_bitwise(
    made: Tiny, stopped: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not record the run's id stays where it is, whatever retention is set to."""
    (stopped / "manifest.json").unlink()
    (stopped / "config.yaml").write_text("runner: {")
    flip_bit(next((stopped / "checkpoints/global_step_3/optimizer").iterdir()))
    (stopped / "checkpoints/global_step_1/state.json").unlink()
    (stopped / "checkpoints/global_step_9").mkdir()
    shutil.copytree(made.run("whole") / LAST, stopped / LAST)
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    capsys.readouterr()
    assert_goes_on(made, runner__keep_last=1)
    told = capsys.readouterr().err
    for line in (
        "config.yaml is damaged: its copy in global_step_3 is used",
        "manifest.json is gone: its copy in global_step_3 is used",
        "passed over the checkpoint global_step_3: optimizer/",
        "its checksum differs",
        "continuing after step 2",
        "global_step_4: it was written by another run",
    ):
        assert line in told, line
    left = {path.name for path in (stopped / "checkpoints").glob("global_step_*")}
    kept = next(name for name in left if ".kept-" in name)
    assert left == {"global_step_1", "global_step_4", "global_step_9", kept}
    assert tree(stopped / "checkpoints" / kept) == tree(made.run("whole") / LAST)
    assert synced.count("metrics.jsonl") >= 2, "the log is on the disk when a checkpoint is"
    outcome = run_cli("verify", "checkpoint", str(stopped))
    assert (outcome.code, outcome.out.count("BAD")) == (1, 2), outcome.out


def test_without_any_record_nothing_begins_and_nothing_is_removed(made: Tiny, stopped: Path) -> None:
    (stopped / "manifest.json").unlink()
    for folder in (stopped / "checkpoints").glob("global_step_*/run"):
        shutil.rmtree(folder)
    before = tree(stopped)
    with pytest.raises(CheckpointError, match=r"steps 1, 2, 3, but manifest.json of the run(?s:.*)experiment_name"):
        shardtune.train(recipe(made, "stopped"))
    assert tree(stopped) == before


def test_a_run_that_is_lost_without_a_checkpoint_is_noticed(made: Tiny, stopped: Path) -> None:
    shutil.rmtree(stopped / "checkpoints")
    (stopped / "manifest.json").unlink()
    (note,) = plan_run(load_recipe(recipe(made, "stopped"))).notes
    assert f"{stopped / 'manifest.json'} cannot be read, and it has no checkpoint: it begins again" in note
    (stopped / "metrics.jsonl").write_text("")
    assert plan_run(load_recipe(recipe(made, "stopped"))).notes == ()


def test_with_no_sound_checkpoint_the_run_does_not_begin_again(made: Tiny, stopped: Path) -> None:
    for step in (1, 2, 3):
        flip_bit(next((stopped / f"checkpoints/global_step_{step}/model").iterdir()))
    with pytest.raises(CheckpointError, match=r"no checkpoint of the run can be loaded(?s:.*)global_step_1: model/"):
        shardtune.train(recipe(made, "stopped"))
    assert len(list((stopped / "checkpoints").glob("global_step_*"))) == 3


def test_a_changed_final_is_written_again_also_without_links_and_without_durable_folders(
    made: Tiny, stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fsync = os.fsync

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "symlink", refused)
    monkeypatch.setattr(os, "link", refused)
    monkeypatch.setattr(os, "fsync", files_only)
    best = {"runner__best": {"monitor": "train/learning_rate", "mode": "max"}, "runner__allow_changes": ["runner.best"]}
    assert_goes_on(made, **best)
    assert not (stopped / "FINAL").exists()
    assert (stopped / "checkpoints/best").read_text() == "global_step_4\n"
    assert run_cli("verify", "checkpoint", str(stopped)).code == 0
    written = tree(stopped / "final")
    flip_bit(stopped / "final/adapter_model.safetensors")
    assert run_cli("verify", "checkpoint", str(stopped)).code == 1
    for damaged in ("final", "3"):
        if damaged == "3":
            flip_bit(next((stopped / "checkpoints/global_step_3/model").iterdir()))
        outcome = run_cli("eval", str(stopped), "--checkpoint", damaged)
        assert (outcome.code, "is damaged: " in outcome.err) == (2, True), outcome.err
    capsys.readouterr()
    shardtune.train(recipe(made, "stopped", **best))
    told = capsys.readouterr().err
    assert "final is not what was written: adapter_model.safetensors has another content" in told
    assert "written again from global_step_4" in told
    assert tree(stopped / "final") == written
    assert len(list(stopped.glob("final.kept-*"))) == 1, "what somebody may have changed on purpose is kept"
    for file in (stopped / "final").rglob("*"):
        if file.is_file():
            file.unlink()
    shutil.rmtree(stopped / "checkpoints")
    with pytest.raises(CheckpointError, match=r"final is empty, and no checkpoint is left"):
        shardtune.train(recipe(made, "stopped", **best))


def test_a_run_directory_that_is_deleted_ends_the_run_and_is_not_made_again(
    made: Tiny, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = SFTRunner._after_step

    def deleted(self: SFTRunner, **known: bool) -> None:
        shutil.rmtree(self.run_dir)
        time.sleep(1.3)
        del known

    monkeypatch.setattr(SFTRunner, "_after_step", deleted)
    with pytest.raises(CheckpointError, match="stopped is gone: it was deleted or moved during training"):
        shardtune.train(recipe(made, "stopped", runner__max_epochs=2))
    assert not stopped.exists()
    shutil.copytree(made.runs / "kept", stopped, symlinks=True)

    def deleted_before_a_save(self: SFTRunner, **known: bool) -> None:
        shutil.rmtree(self.run_dir)
        after(self, **known)

    monkeypatch.setattr(SFTRunner, "_after_step", deleted_before_a_save)
    with pytest.raises(CheckpointError, match="stopped is gone: it was deleted or moved during training"):
        shardtune.train(recipe(made, "stopped"))
    assert not stopped.exists()


def test_a_checkpoint_that_cannot_be_loaded_for_another_reason_is_passed_over(
    made: Tiny, stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from shardtune.training.worker.base import FSDPSftWorker

    load = FSDPSftWorker.load_checkpoint

    def fails_first(self: FSDPSftWorker, path: Path) -> int:
        if path.name == "global_step_3":
            load(self, path)
            raise KeyError("moments")
        return load(self, path)

    monkeypatch.setattr(FSDPSftWorker, "load_checkpoint", fails_first)
    assert_goes_on(made)
    assert "passed over the checkpoint global_step_3: KeyError: 'moments'" in capsys.readouterr().err


def test_what_killed_exports_left_is_removed_by_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".out.tmp-0123abcd").mkdir()
    (tmp_path / ".out.tmp-notes").mkdir()
    (tmp_path / ".other.tmp-0123abcd").mkdir()
    monkeypatch.setattr(exporting_module, "WAIT_SECONDS", 0.1)
    with exporting(tmp_path / "out") as temporary:
        temporary.mkdir()
        with pytest.raises(CheckpointError, match="is exporting to"), exporting(tmp_path / "out"):
            pass
        assert temporary.is_dir()
    assert {path.name for path in tmp_path.iterdir()} == {".out.tmp-notes", ".other.tmp-0123abcd"}


@pytest.mark.parametrize("after", ["make_worker", "damage_on_ranks"])
def test_a_checkpoint_that_a_run_removes_while_it_is_exported_is_not_said_to_be_damaged(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    found = getattr(run_module, after)

    def removing(*given: object, **named: object) -> object:
        value = found(*given, **named)
        shutil.rmtree(stopped / "checkpoints/global_step_2")
        return value

    monkeypatch.setattr(run_module, after, removing)
    with pytest.raises(CheckpointError, match=r"global_step_2 has been removed since(?s:.*)command again"):
        shardtune.load_run(stopped).export(tmp_path / "exported", checkpoint="2")
    assert not (tmp_path / "exported").exists()


def test_a_newest_checkpoint_that_is_gone_is_found(stopped: Path) -> None:
    shutil.rmtree(stopped / "checkpoints/global_step_3")
    outcome = run_cli("verify", "checkpoint", str(stopped))
    assert outcome.code == 1
    assert "BAD  checkpoints/latest  names global_step_3, which is gone" in outcome.out


def test_a_final_directory_that_is_not_what_was_written_is_found(made: Tiny, tmp_path: Path) -> None:
    def verified() -> list[str]:
        outcome = run_cli("verify", "checkpoint", str(run))
        bad = [line for line in outcome.out.splitlines() if line.startswith("BAD")]
        assert outcome.code == bool(bad), outcome.err
        return bad

    run = tmp_path / "run"
    shutil.copytree(made.run("whole"), run, symlinks=True)
    assert verified() == []
    (run / "final/checksums.json").unlink()
    assert ["final  is not what was written: its checksums.json is" in line for line in verified()] == [True]
    shutil.rmtree(run / "final")
    assert ["final  is gone; the command" in line for line in verified()] == [True]
    (run / "manifest.json").write_text("")
    assert ["manifest.json  cannot be read; global_step_" in line for line in verified()] == [True]


def test_verify_checkpoint_of_a_path_that_is_not_there(tmp_path: Path) -> None:
    outcome = run_cli("verify", "checkpoint", str(tmp_path / "misspelt"))
    assert (outcome.code, "misspelt does not exist" in outcome.err) == (2, True), outcome.err


def test_verify_checkpoint_of_what_is_no_run(tmp_path: Path) -> None:
    outcome = run_cli("verify", "checkpoint", str(tmp_path))
    assert outcome.code == 2
    assert "holds no checkpoints and no final/" in outcome.err


def test_what_lies_beside_the_files_of_a_run_or_is_gone_is_named(made: Tiny, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(made.run("whole"), run, symlinks=True)
    (run / "final/adapter.json").write_text("{}")
    (run / "checkpoints/latest").unlink()
    said = run_cli("verify", "checkpoint", str(run)).out
    assert "; beside them, not written by the run: adapter.json\n" in said
    assert said.count("beside them") == 1
    assert "checkpoints/latest  is gone or names none: global_step_4 is the newest" in said
    shutil.rmtree(run / "checkpoints")
    assert "ok   checkpoints  there are none\n" in run_cli("verify", "checkpoint", str(run)).out


def test_a_checkpoint_without_its_state_file_is_damaged(made: Tiny, tmp_path: Path) -> None:
    shutil.copytree(made.run("whole") / LAST, tmp_path / "global_step_4")
    (tmp_path / "global_step_4/state.json").unlink()
    outcome = run_cli("verify", "checkpoint", str(tmp_path / "global_step_4"))
    assert (outcome.code, "BAD  checkpoints/global_step_4  it has no valid state.json" in outcome.out) == (1, True)


def test_folders_that_cannot_be_read_have_a_message(
    made: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(made.run("whole"), run, symlinks=True)
    listed, closed = Path.iterdir, run / "final"

    def refused(folder: Path) -> Iterator[Path]:
        if folder == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", refused)
    outcome = run_cli("verify", "checkpoint", str(run))
    assert (outcome.code, "BAD  final  cannot be read: Permission denied" in outcome.out) == (1, True)
    closed = run / "checkpoints"
    outcome = run_cli("verify", "checkpoint", str(run))
    assert outcome.code == 2
    assert f"{closed} cannot be read: Permission denied" in outcome.err
