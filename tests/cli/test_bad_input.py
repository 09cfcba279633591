"""Everything a user can get wrong, through the real command: exit code 2, one message that helps, nothing written.

The cases stand in `bad_input/`. Each says what the message must hold: the fault with its value, the place, the way on.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from shardtune.run.directory import RunLock
from tests.support.bad_input import data, images, model, recipe, run
from tests.support.bad_input.case import CONTINUE, TRAIN, Case, cut, going_on, with_keys
from tests.support.workspace import Outcome, make_workspace, run_cli

pytestmark = pytest.mark.lengthy

CASES = [
    *recipe.KEYS,
    *recipe.SIZES,
    *recipe.FEATURES,
    *data.DATA,
    *data.TEMPLATES,
    *images.IMAGES,
    *model.MODEL,
    *run.RUN,
    *run.COMMANDS,
]


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's directory with a finished run, runs/done, that kept two checkpoints."""
    work = make_workspace(tmp_path_factory.mktemp("user") / "work")
    with chdir(work):
        done = run_cli(*shlex.split(TRAIN), "runner.logger.experiment_name=done", "runner.save_interval=1")
    assert done.code == 0, done.err
    return work.rename(work.parent / "original")


@pytest.fixture
def work(original: Path) -> Iterator[Path]:
    """A copy of it to spoil, where it was made (a run knows where its data lies); the working directory of the test."""
    copy = original.parent / "work"
    shutil.copytree(original, copy, symlinks=True)
    with chdir(copy):
        yield copy
    shutil.rmtree(copy)


def words(case: Case) -> list[str]:
    """The command line after `shardtune`."""
    return [*shlex.split(case.command), *case.keys]


def tree(folder: Path) -> dict[str, str]:
    """Every file and folder with a hash of what it holds."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


def check(case: Case, work: Path, outcome: Outcome, before: dict[str, str]) -> None:
    shown = f"{case.name}: exit code {outcome.code}\n{outcome.out}{outcome.err}"
    assert outcome.code == 2, shown
    assert "Traceback" not in outcome.err + outcome.out, shown
    heads = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert len(heads) == 1, shown
    message = outcome.err.partition("error: ")[2]
    missing = [part for part in (*case.says.split(" | "), "\n  where:  ", "\n  remedy: ") if part not in message]
    assert not missing, f"the message lacks {missing}\n{shown}"
    after = tree(work)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert not changed, f"changed: {sorted(changed)}\n{shown}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_the_mistake_is_told(case: Case, work: Path) -> None:
    case.prepare(work)
    before = tree(work)
    check(case, work, run_cli(*words(case)), before)


def test_there_are_many() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 140


# -- what takes more than a command to arrange ---------------------------------------------------------------------


def check_that(work: Path, command: str, *, says: str) -> None:
    before = tree(work)
    check(Case(command, command, says=says), work, run_cli(*shlex.split(command)), before)


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))


def test_a_disk_too_small_for_the_checkpoint(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch)
    check_that(work, TRAIN, says="not enough room | 100 kB free | runs/demo | runner.logger.log_path")


def test_a_disk_too_small_to_go_on(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch)
    check_that(work, CONTINUE, says="not enough room | 100 kB free | runs/done | make room")


def test_a_read_only_directory(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != work / "runs" and allowed(path, mode))
    check_that(work, TRAIN, says="runs/demo cannot be written | read-only | runner.logger.log_path")
    check_that(work, "export runs/done --to runs/out", says="runs/out cannot be written | read-only | --to")


@pytest.mark.skipif(os.geteuid() == 0, reason="permission bits do not bind root")
def test_a_directory_without_write_permission(work: Path) -> None:
    (work / "locked").mkdir(mode=0o500)
    check_that(work, f"{TRAIN} runner.logger.log_path=locked", says="locked | read-only | runner.logger.log_path")


def test_a_port_in_use(work: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = f"{TRAIN} runner.nproc_per_node=2 runner.master_port={port}"
        check_that(work, command, says=f"port {port} | in use | runner.master_port | leave runner.master_port out")


def test_a_port_beyond_the_last(work: Path) -> None:
    check_that(work, f"{TRAIN} runner.master_port=70000", says="runner.master_port: 70000 | 65535 | override")


def test_more_ranks_than_gpus(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    command = f"{TRAIN} runner.device=cuda runner.nproc_per_node=8"
    check_that(work, command, says="torch sees 2 | runner.nproc_per_node | at most 2 ranks")


@pytest.mark.parametrize(("command", "name"), [(TRAIN, "demo"), (CONTINUE, "done")])
def test_two_runs_in_one_directory(work: Path, command: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunLock.acquire, "__defaults__", (0.1,))
    (work / "runs" / name).mkdir(exist_ok=True)
    with (work / "runs" / name / ".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        check_that(work, command, says=f"another process | runs/{name} | experiment_name")


RANK_ERRORS = [
    with_keys(
        "torn weights", says="bytes of data | model.safetensors | torn", prepare=cut("model/model.safetensors", 100)
    ),
    with_keys("an optimizer nobody knows", "actor.optim.name=AdamX", says="AdamX | actor.optim.name | AdamW"),
    with_keys("nothing to freeze", "actor.model.freeze=[visual]", says="pattern visual | actor.model.freeze"),
    with_keys("a metric nobody emits", "runner.best.monitor=eval/acuracy", says="eval/acuracy | eval/loss"),
    going_on("changed rows", says="train.jsonl | other content | runs/done", prepare=run.other_data),
]


@pytest.mark.parametrize("case", RANK_ERRORS, ids=lambda case: case.name.replace(" ", "-"))
def test_no_rank_is_started_for_a_mistake_that_shows_before(
    case: Case, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    case.prepare(work)
    before = tree(work)
    check(case, work, run_cli(*words(case), "runner.nproc_per_node=2"), before)


def shell(*argv: str) -> Outcome:
    """The command in a process of its own, as a user starts it."""
    done = subprocess.run([sys.executable, "-m", "shardtune", *argv], capture_output=True, text=True, timeout=120)
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_what_only_the_ranks_find_is_told_once(work: Path) -> None:
    """Two ranks meet the checkpoint of another model at the same time."""
    case = next(case for case in run.RUN if case.name == "the checkpoint of another model")
    case.prepare(work)
    before = tree(work)
    check(case, work, shell(*words(case), "runner.nproc_per_node=2"), before)


@pytest.mark.parametrize("name", [pytest.param("broken JSON at row 5,000", marks=pytest.mark.slow), "a changed key"])
def test_it_is_the_same_in_a_process_of_its_own(name: str, work: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    case.prepare(work)
    before = tree(work)
    check(case, work, shell(*words(case)), before)
