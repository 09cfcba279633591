"""SIGTERM and SIGINT at any moment of the real command: it saves what there is, ends with 75, and goes on later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

import shardtune
from shardtune.cli.exit import end as end_command
from shardtune.errors import Interrupted, ShardtuneError
from shardtune.launch.local import RankFailed, ReportedError
from shardtune.launch.signals import LAUNCHER_PID, SIGNALS, StopSignal, listening
from tests.support import fork_server
from tests.support.chosen import slow_except
from tests.support.tiny_run import Tiny, assert_same_tensors, free_ports, lines, make_tiny, signal_after

Process = subprocess.Popen[str]
EXIT_STOPPED = 75


@pytest.fixture(scope="module", autouse=True)
def hangup() -> Iterator[None]:
    """SIGHUP ends a process, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    fork_server.start_server()  # now: a test counts this process's children
    made = make_tiny(tmp_path_factory.mktemp("interrupt"), dropout=0.2)
    shardtune.train(made.recipe("whole"))
    return made


PLUGIN = """
import os, time
import shardtune.launch.watchdog.watchdog as watchdog
from shardtune.training.worker.base import FSDPSftWorker

original, original_peers = FSDPSftWorker.run_training, watchdog.ended_peers

def run_training(self):
    time.sleep(float(os.environ.get("TEST_SECONDS", "0")))
    if self.ranks.rank == 1 and self.step == 2 and "TEST_ERROR" in os.environ:
        raise ValueError("on purpose")
    if self.ranks.rank == 1 and self.step == 2 and "TEST_KILL" in os.environ:
        os.kill(os.getpid(), 9)
    return original(self)

def ended_peers():
    time.sleep(float(os.environ.get("TEST_SLOW_END", "0")))
    return original_peers()

FSDPSftWorker.run_training = run_training
watchdog.ended_peers = ended_peers
"""
"""A plugin, which every rank imports: makes a step last, one of rank 1's its last, or the others slow to notice."""


def start(tiny: Tiny, name: str, *launcher: str, environment: dict[str, str] | None = None, **changes: Any) -> Process:
    """The real command, slowed down or broken as `environment` says."""
    plugin = tiny.folder / "plugin.py"
    plugin.write_text(PLUGIN)
    recipe = tiny.folder / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump(tiny.recipe(name, plugins=[str(plugin)], **changes)))
    return subprocess.Popen(
        [*(launcher or (sys.executable,)), "-m", "shardtune", "train", str(recipe)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(environment or {})},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


SLOW = {"TEST_SECONDS": "0.3"}


def wait_until(condition: Callable[[], bool], process: Process, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.01)


def end(process: Process, seconds: float = 60.0) -> tuple[int, str]:
    _, told = process.communicate(timeout=seconds)
    return process.returncode, told


def children(pid: int) -> list[int]:
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return fork_server.without_servers(found)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def has_logged(tiny: Tiny, name: str, number: int) -> Callable[[], bool]:
    file = tiny.run(name) / "metrics.jsonl"
    return lambda: file.exists() and len(file.read_text().splitlines()) >= number


@pytest.mark.lengthy
def test_two_ranks_are_stopped_killed_and_continued(tiny: Tiny) -> None:
    """SIGTERM saves on both ranks; kill -9 of the launcher ends them without saving; then the run goes on."""
    shape = {"runner__nproc_per_node": 2, "runner__save_interval": 3}
    process = start(tiny, "two", environment=SLOW, **shape)
    wait_until(has_logged(tiny, "two", 2), process)
    process.terminate()
    code, told = end(process)
    assert code == EXIT_STOPPED, told
    assert "Traceback" not in told
    stopped_at = len(lines(tiny.run("two")))
    assert (tiny.run("two") / "checkpoints/latest").read_text() == f"global_step_{stopped_at}\n"

    process = start(tiny, "two", environment=SLOW, **shape)
    wait_until(has_logged(tiny, "two", stopped_at + 1), process)
    ranks = children(process.pid)
    assert len(ranks) == 2
    process.kill()
    process.wait()
    until = time.monotonic() + 5
    while any(alive(rank) for rank in ranks) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(alive(rank) for rank in ranks), "ranks live on without their launcher"
    saved = sorted(path.name for path in (tiny.run("two") / "checkpoints").iterdir())
    time.sleep(0.5)
    assert sorted(path.name for path in (tiny.run("two") / "checkpoints").iterdir()) == saved

    shardtune.train(tiny.folder / "two.yaml")
    assert [line["step"] for line in lines(tiny.run("two"))] == list(range(1, 9))


@pytest.mark.parametrize("how", slow_except(["killed", "error"], "error"))
def test_when_a_rank_dies_the_others_end_and_its_error_is_shown(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    plugin = tiny.folder / "plugin.py"
    plugin.write_text(PLUGIN)
    monkeypatch.setenv("TEST_KILL" if how == "killed" else "TEST_ERROR", "1")
    recipe = tiny.recipe(how, plugins=[str(plugin)], runner__nproc_per_node=2, runner__save_interval=-1)
    before = children(os.getpid())
    with pytest.raises((RankFailed, ReportedError)) as failed:
        shardtune.train(recipe)
    # Rank 1 may end before rank 0 has written of the first step.
    written = max(path.stat().st_mtime for path in (tiny.run(how), *tiny.run(how).rglob("*")))
    assert time.time() - written < 15, "since rank 1 ended"
    told = str(failed.value)
    assert told.startswith("rank 1 was ended by SIGKILL" if how == "killed" else "ValueError: on purpose")
    assert (f"{plugin}:11, in run_training, on rank 1" in told) == (how == "error")
    assert "rank 0" not in told, "what followed from the error is not the error"
    assert children(os.getpid()) == before


def test_under_torchrun_the_rank_that_failed_says_why(tiny: Tiny) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    began = time.monotonic()
    # torchrun's SIGTERM comes to rank 0 while that is about to print its error.
    slow = {"TEST_ERROR": "1", "TEST_SLOW_END": "1"}
    exit_code, told = end(start(tiny, "torchrun", *torchrun, environment=slow))
    assert exit_code == 1
    assert "rank 1: error: " in told
    assert "ValueError: on purpose" in told
    assert "rank 0: error: rank 1 has ended" in told
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("how", slow_except(["the agent", "all", "killed"], "the agent"))
def test_torchrun_with_one_rank_is_signalled(tiny: Tiny, how: str) -> None:
    """SIGUSR1 to our agent, or to all processes of torchrun's own, saves; a rank whose agent was killed just ends."""
    name = f"signalled-{how.replace(' ', '-')}"
    module = "shardtune.launch.torchrun" if how == "the agent" else "torch.distributed.run"
    launcher = (sys.executable, "-m", module, "--standalone", "--nproc-per-node", "1")
    process = start(tiny, name, *launcher, environment=SLOW, runner__save_interval=-1)
    wait_until(has_logged(tiny, name, 2), process)
    (rank,) = children(process.pid)
    process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGUSR1)
    if how == "all":
        os.kill(rank, signal.SIGUSR1)
    exit_code, told = end(process)
    until = time.monotonic() + 20
    while alive(rank) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(rank), "the rank lives on without its launcher"
    saved, latest = len(lines(tiny.run(name))), tiny.run(name) / "checkpoints/latest"
    assert saved < 8, "it was trained to the end"
    if how == "killed":
        assert not latest.exists()
        return
    assert latest.read_text() == f"global_step_{saved}\n"
    if how == "the agent":
        assert exit_code == EXIT_STOPPED
        last = [line for line in told.splitlines() if not line.startswith("step ")][-2:]
        assert last == [
            "stopping: saving a checkpoint first",
            f"rank 0: stopped after step {saved}; the same command continues",
        ]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_for_another_one_is_stopped(tiny: Tiny, rank: int) -> None:
    """It waits in code of torch, for a rank that never comes, and Python runs no handler until that returns."""
    (port,) = free_ports(1)
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = start(tiny, f"waiting-{rank}", environment=place)
    handled = 1 << (signal.SIGUSR1 - 1)
    status = Path(f"/proc/{process.pid}/status")
    wait_until(lambda: int(status.read_text().split("SigCgt:")[1].split()[0], 16) & handled != 0, process)
    time.sleep(1.5)  # it is at the meeting by then; earlier it would end as well
    process.terminate()
    began = time.monotonic()
    exit_code, told = end(process)
    assert exit_code == EXIT_STOPPED, told
    assert time.monotonic() - began < 40
    assert not tiny.run(f"waiting-{rank}").exists()


def test_a_terminal_that_is_gone_does_not_keep_a_run_from_saving(tiny: Tiny) -> None:
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        pytest.skip("these tests run under nohup, and so does what they start")
    process = start(tiny, "hangup", environment=SLOW, runner__save_interval=-1, runner__max_epochs=20)
    wait_until(has_logged(tiny, "hangup", 2), process)
    assert process.stderr is not None
    process.stderr.close()
    time.sleep(0.5)  # a step is printed meanwhile
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == EXIT_STOPPED
    saved = len(lines(tiny.run("hangup")))
    assert (tiny.run("hangup") / "checkpoints/latest").read_text() == f"global_step_{saved}\n"


@pytest.mark.slow
@pytest.mark.own_start
def test_a_signal_while_torch_is_imported(tiny: Tiny) -> None:
    """From a few tenths of a second on, long before there is anything to save."""
    process = start(tiny, "importing")
    wait_until(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text(), process)
    process.send_signal(signal.SIGINT)
    exit_code, told = end(process)
    assert exit_code == EXIT_STOPPED, told
    assert "Traceback" not in told
    assert not tiny.run("importing").exists()


# What follows needs no process of its own.

FIRST = "before the first step, so nothing is saved"


def stopped_in(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, owner: object, method: str, name: str, message: str, **keys: object
) -> None:
    """Train with a SIGTERM in the middle of a method, then again to the end; the message says what is saved."""
    original = getattr(owner, method)

    def signalled(*given: object, **known: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*given, **known)

    recipe = tiny.recipe(name, **keys)
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, signalled)
        with pytest.raises(Interrupted, match=message):
            shardtune.train(recipe)
    shardtune.train(recipe)
    assert [line["step"] for line in lines(tiny.run(name))] == list(range(1, 9))
    assert_same_tensors(tiny.run("whole") / "checkpoints/global_step_8", tiny.run(name) / "checkpoints/global_step_8")


def test_while_tokenising_nothing_is_made(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import shardtune.data.cache.cache as cache

    stopped_in(tiny, monkeypatch, cache, "build_entry", "tokenising", FIRST, data__cache_dir=str(tmp_path))


@pytest.mark.slow
def test_while_the_model_is_loaded(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    import shardtune.training.build.model as construction

    stopped_in(tiny, monkeypatch, construction, "load_weights", "loading", FIRST)


def test_while_a_checkpoint_is_written(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    import shardtune.checkpoint.training_state as training

    stopped_in(tiny, monkeypatch, training, "save_tensors", "saving", "after step 3;", runner__save_interval=3)


def test_while_answers_are_generated(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardtune.evaluate.generate import Generator

    keys = {"data__eval_data_paths": str(tiny.folder / "eval.jsonl"), "eval__generate": True, "eval__max_new_tokens": 4}
    stopped_in(tiny, monkeypatch, Generator, "_answer", "generating", "step 4;", runner__val_check_interval=4, **keys)


def test_while_final_is_written(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    import shardtune.training.worker.model_export as exporting

    stopped_in(tiny, monkeypatch, exporting, "save_pretrained", "finishing", "after the last step; all")
    assert [path.name for path in tiny.run("finishing").glob(".final*")] == []


def test_the_second_sigint_ends_at_once(tiny: Tiny) -> None:
    with signal_after(3, signal.SIGINT, times=2), pytest.raises(KeyboardInterrupt):
        shardtune.train(tiny.recipe("twice", runner__save_interval=-1))
    assert not list((tiny.run("twice") / "checkpoints").glob("global_step_*"))


def test_a_sigint_that_the_launcher_passes_on_is_the_same_one(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the signals of a rank under a launcher; this process is none."""
    monkeypatch.setattr("shardtune.launch.signals.is_supervised", lambda: True)
    with signal_after(3, signal.SIGINT, times=2), pytest.raises(Interrupted, match="after step 3"):
        shardtune.train(tiny.recipe("passed-on", runner__save_interval=-1))


def test_every_ending_signal_saves_and_does_afterwards_what_it_did_before(tiny: Tiny) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    for step, number in enumerate(SIGNALS, start=1):
        with signal_after(step, number), pytest.raises(Interrupted, match=f"after step {step}"):
            shardtune.train(tiny.recipe("handlers", runner__save_interval=-1))
        assert [signal.getsignal(number) for number in SIGNALS] == before
    shardtune.train(tiny.recipe("handlers", runner__save_interval=-1))
    assert [signal.getsignal(number) for number in SIGNALS] == before
    last = "checkpoints/global_step_8"
    assert_same_tensors(tiny.run("whole") / last, tiny.run("handlers") / last)


def test_signals_that_a_program_ignores_or_handles_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, handler in ((signal.SIGHUP, signal.SIG_IGN), (signal.SIGUSR1, lambda *_: None)):
        before = signal.signal(number, handler)
        try:
            with listening() as stop:
                os.kill(os.getpid(), number)
                assert not stop.requested
                assert signal.getsignal(number) == handler
        finally:
            signal.signal(number, before)


def test_a_signal_is_seen_while_the_main_thread_cannot_handle_it() -> None:
    with listening() as stop, stop.deferred():
        seen = []
        watcher = threading.Thread(target=lambda: (time.sleep(0.1), seen.append(stop.arrived())))
        watcher.start()
        signal.raise_signal(signal.SIGUSR2)
        watcher.join()
        assert seen == [True]


def test_a_stop_that_somebody_swallowed_is_not_lost() -> None:
    with listening() as stop:
        with suppress(BaseException):  # as a library may do
            os.kill(os.getpid(), signal.SIGTERM)
        with listening() as inner:
            assert inner is stop
        with pytest.raises(Interrupted), stop.deferred():
            raise AssertionError("training began although a stop was asked for")


def test_a_stop_does_not_take_the_place_of_an_error() -> None:
    """As where a launcher sends SIGTERM to the ranks that are about to notice that another one has ended."""

    def fail(stop: StopSignal) -> None:
        try:
            with stop.deferred():
                raise RuntimeError("closed")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with listening() as stop, pytest.raises(RuntimeError, match="closed"):
        fail(stop)


def test_a_stop_does_not_hide_the_message_of_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    class Signalled(ShardtuneError):
        def __str__(self) -> str:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().__str__()

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        end_command(Signalled("broken"))
    assert capsys.readouterr().err == "error: broken\n"
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_deferred_signal_is_only_noted() -> None:
    with listening() as stop, stop.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    assert not StopSignal().requested


def test_a_signal_after_the_end_leaves_the_exit_code() -> None:
    """A stop that is sent twice, once all is saved: the interpreter takes a while to shut down."""
    code = (
        "import atexit, os, signal; from shardtune.cli.exit import leave; "
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM)); leave(75)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 75


def test_a_rank_whose_launcher_is_gone_removes_the_directory_of_its_reports(tmp_path: Path) -> None:
    reports, others = tmp_path / "shardtune-rank-x", tmp_path / "others"
    for folder in (reports, others):
        folder.mkdir()
        (folder / "recipe.yaml").touch()
        environment = {**os.environ, LAUNCHER_PID: "1", "SHARDTUNE_REPORT_DIR": str(folder)}
        code = "import time; from shardtune.launch.signals import end_with_parent; end_with_parent(); time.sleep(60)"
        assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == 1
    assert not reports.exists()
    assert (others / "recipe.yaml").exists()
