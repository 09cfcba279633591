"""Experiments at services, each through its own package, offline; and that none of them can end a run."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardtune.config.schema.runner import LoggerConfig
from shardtune.errors import ConfigError
from shardtune.training.experiment import background, checks
from shardtune.training.experiment.services import SERVICES
from shardtune.training.loggers import Tracker, check_logger, open_tracker, read_metrics

RECIPE = {"actor": {"optim": {"lr": 0.25}}, "token": "${oc.env:SECRET}"}
ANSWERS = [{"prompt": "2+2", "answer": "4", "correct": True}]


def logger(*names: str, name: str = "my-run") -> LoggerConfig:
    return LoggerConfig(logger_backends=list(names), project_name="proj", experiment_name=name)


def tracked(run_dir: Path, *names: str, done: int = -1, told: list[str] | None = None) -> Tracker:
    report = (told if told is not None else []).append
    return open_tracker(run_dir, logger(*names), config=RECIPE, done=done, report=report)


def write(run_dir: Path, steps: range, *names: str, done: int = -1) -> None:
    told: list[str] = []
    handler = signal.getsignal(signal.SIGINT)
    opened = tracked(run_dir, *names, done=done, told=told)
    assert signal.getsignal(signal.SIGINT) is handler  # the run's own, which saves before it stops
    (run_dir / "samples").mkdir(exist_ok=True)
    for step in steps:
        opened.log(step, {"train/loss": 1 / step, "eval/loss": float("nan") if step == 2 else 2.5})
        (run_dir / f"samples/step_{step}.jsonl").write_text(json.dumps(ANSWERS[0]) + "\n")
        opened.samples(step)
    opened.close()
    assert not told


@pytest.mark.lengthy
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("wandb")
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_CONSOLE", "off")):
        monkeypatch.setenv(name, value)
    check_logger(logger("wandb"))
    write(tmp_path, range(1, 4), "wandb")
    printed = capfd.readouterr().err
    assert "wandb sync" in printed
    assert "Run history" not in printed
    (written,) = tmp_path.glob("wandb/offline-run*/*.wandb")
    texts = (b"proj", b"my-run", b'{"optim":{"lr":0.25}}', b"${oc.env:SECRET}", b"0.3333333333333333")
    until = time.monotonic() + 30  # a process of wandb's writes the file, at the latest when it ends
    while not all(text in written.read_bytes() for text in texts):
        assert time.monotonic() < until, [text for text in texts if text not in written.read_bytes()]
        time.sleep(0.05)
    assert (tmp_path / "wandb_id").read_text() in written.name
    tables = [json.loads(file.read_text()) for file in tmp_path.rglob("*.table.json")]
    assert [table["data"] for table in tables] == [[["2+2", "4", "True"]]] * 3


@pytest.mark.slow
def test_mlflow_with_a_file_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    check_logger(logger("mlflow"))
    write(tmp_path, range(1, 4), "mlflow")
    write(tmp_path, range(3, 5), "mlflow", done=2)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("proj")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == (tmp_path / "mlflow_id").read_text()
    assert (run.info.run_name, run.info.status) == ("my-run", "FINISHED")
    assert run.data.params == {"actor.optim.lr": "0.25", "token": "${oc.env:SECRET}"}
    losses = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "train/loss")}
    assert losses == {step: 1 / step for step in range(1, 5)}
    assert [point.step for point in client.get_metric_history(run.info.run_id, "eval/loss")][:2] == [1, 3]
    (answers,) = tmp_path.rglob("samples/step_4.json")
    assert json.loads(answers.read_text()) == {"answers": ANSWERS}


@pytest.mark.lengthy
def test_trackio_in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    monkeypatch.setenv("TRACKIO_AUTO_LOG_CPU", "false")
    write(tmp_path, range(1, 4), "trackio")
    write(tmp_path, range(4, 5), "trackio", done=3)
    lines = SQLiteStorage.get_logs("proj", "my-run")
    losses = {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
    assert losses == {step: 1 / step for step in range(1, 5)}
    assert SQLiteStorage.get_runs("proj") == ["my-run"]


@pytest.mark.lengthy
def test_swanlab_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    pytest.importorskip("swanlab")
    write(tmp_path, range(1, 4), "swanlab")
    (written,) = tmp_path.glob("swanlab/run-*/*.swanlab")
    assert (tmp_path / "swanlab_id").read_text() in written.name
    content = b"".join(file.read_bytes() for file in tmp_path.glob("swanlab/run-*/**/*") if file.is_file())
    assert b"train/loss" in content
    assert b"0.25" in content


class Service:
    """A service in memory, which may fail or hang."""

    def __init__(self, fails_at: int = 0, hold: threading.Event | None = None) -> None:
        self.fails_at, self.hold = fails_at, hold
        self.seen: list[object] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.hold is not None:
            self.hold.wait()
        if step == self.fails_at:
            raise ConnectionError(f"no route for key {'k3y' * 6}\nand more")
        self.seen.append((step, dict(metrics)))

    def samples(self, step: int, name: str, answers: Sequence[Mapping[str, object]]) -> None:
        self.seen.append((step, name, list(answers)))

    def close(self) -> None:
        self.seen.append("closed")


def started(monkeypatch: pytest.MonkeyPatch, service: Any) -> None:
    monkeypatch.setitem(SERVICES, "wandb", lambda run: service)


def test_a_service_that_fails_is_left_out_and_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, told = Service(fails_at=2), list[str]()
    started(monkeypatch, service)
    monkeypatch.setenv("SOME_API_KEY", "k3y" * 6)
    opened = tracked(tmp_path, "wandb", "jsonl", "tensorboard", told=told)
    writer: Any = opened._backends["tensorboard"]
    monkeypatch.setattr(writer, "log", lambda step, metrics: 1 / 0)
    for step in range(1, 5):
        opened.log(step, {"train/loss": 1.0})
        if step == 2:
            opened._backends["wandb"]._thread.join()  # pyright: ignore[reportAttributeAccessIssue]
    opened.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert service.seen == [(1, {"train/loss": 1.0}), "closed"]
    what = "logs nothing more; training goes on; metrics.jsonl has the metrics:"
    assert told == [
        f"tensorboard failed and {what} ZeroDivisionError: division by zero",
        f"wandb failed and {what} ConnectionError: no route for key ***",
    ]


def test_a_service_that_hangs_does_not_hold_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, told = Service(hold=threading.Event()), list[str]()
    started(monkeypatch, service)
    monkeypatch.setattr(background, "CLOSE_SECONDS", 0.05)
    opened = tracked(tmp_path, "wandb", "jsonl", told=told)
    for step in range(1, 4):
        opened.log(step, {"train/loss": 1.0})
    opened.close()
    assert len(read_metrics(tmp_path)) == 3
    assert len(told) == 1
    assert told[0].startswith("wandb: not everything may be logged: TimeoutError: ")
    assert service.hold is not None
    service.hold.set()


def test_a_service_that_cannot_be_started_ends_only_a_run_that_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem: BaseException = SystemExit(1)

    def start(run: object) -> Any:
        raise problem

    monkeypatch.setitem(SERVICES, "mlflow", start)
    with pytest.raises(ConfigError, match=r"mlflow cannot be started: RuntimeError: SystemExit\(1\)"):
        tracked(tmp_path, "mlflow", "jsonl")
    problem = OSError("no network")
    with pytest.raises(ConfigError, match=r"mlflow cannot be started: OSError: no network(?s:.*)nothing has been"):
        tracked(tmp_path, "mlflow", "jsonl")
    told: list[str] = []
    tracked(tmp_path, "mlflow", "jsonl", done=3, told=told).close()
    assert told == ["mlflow could not be started and logs nothing; training goes on: OSError: no network"]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio", "swanlab", "prometheus"])
def test_a_missing_package_is_one_message(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"not installed(?s:.*)pip install 'shardtune\[{name}\]'"):
        check_logger(logger("jsonl", name))
    check_logger(logger("jsonl", "tensorboard", "timings"))


@pytest.mark.lengthy
def test_wandb_without_a_key_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"has no API key(?s:.*)wandb login(?s:.*)WANDB_MODE=offline"):
        check_logger(logger("wandb"))
    host = wandb.Settings().base_url.partition("://")[2]
    (tmp_path / "netrc").write_text(f"machine {host}\n  login user\n  password {'a' * 40}\n")
    check_logger(logger("wandb"))
    (tmp_path / "netrc").unlink()
    (tmp_path / "settings").write_text("[default]\nmode = offline\n")
    check_logger(logger("wandb"))
    (tmp_path / "settings").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    check_logger(logger("wandb"))


@pytest.mark.lengthy
def test_an_mlflow_server_that_does_not_answer_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hidden@127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"tracking URI http://\*\*\*@127.0.0.1:9: (?s:.*)refused") as error:
        check_logger(logger("mlflow"))
    assert "hidden" not in str(error.value)
