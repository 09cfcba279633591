"""Where metrics go, and how logs are cut back."""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardtune.config.schema.runner import LoggerConfig, PrometheusConfig
from shardtune.errors import CheckpointError, ParallelError
from shardtune.launch.events import write_event
from shardtune.training import loggers
from shardtune.training.loggers import JsonLines, check_logger, cut_back, open_tracker, read_metrics
from tests.support.tiny_run import free_ports


def tracker(run_dir: Path, *names: str, done: int = -1) -> Any:
    logger = LoggerConfig(logger_backends=list(names), project_name="p", experiment_name="n")  # pyright: ignore
    return open_tracker(run_dir, logger, config={"a": 1}, done=done)


def write_steps(run_dir: Path, steps: range, *names: str, done: int = -1) -> None:
    opened = tracker(run_dir, *names, done=done)
    for step in steps:
        opened.log(step, {"train/loss": 1.0 / (step + 1)})
    opened.close()


def test_a_line_per_step_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    opened = tracker(tmp_path, "jsonl")
    opened.log(1, {"train/loss": float("nan"), "train/tokens": 3.0})
    opened.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "train/loss": null, "train/tokens": 3.0}\n'


def test_a_full_disk_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    record = JsonLines(tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)metrics cannot be written: No space.*metrics\.jsonl.*make room"):
        record.log(1, {"train/loss": 1.0})
    record.close()  # nothing is left that would be tried once more


@pytest.mark.parametrize("done", [-1, 0, 3, 5, 9])
def test_lines_past_the_checkpoint_and_a_torn_one_go(tmp_path: Path, done: int) -> None:
    write_steps(tmp_path, range(6), "jsonl")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "train/l')
    cut_back(tmp_path / "metrics.jsonl", done, block=16)
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(min(done, 5) + 1))


def test_a_resumed_run_hides_what_tensorboard_showed_past_the_checkpoint(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 7), "tensorboard")
    # Event files are read by name, in which a process's tenth of one second is before its ninth.
    time.sleep(1 - time.time() % 1)
    write_steps(tmp_path, range(4, 6), "tensorboard", done=3)
    shown = EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    assert [event.step for event in shown.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    write_steps(tmp_path, range(1, 3), "tensorboard")  # from the start
    shown = EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    assert [event.step for event in shown.Scalars("train/loss")] == [1, 2]


def test_tensorboard_shows_the_recipe_and_answers_as_text(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    opened = tracker(tmp_path, "tensorboard")
    for name, answer in (("step_3", "a|b <i>"), ("step_3_math", "4"), ("step_30", "no"), ("step_3_empty", None)):
        line = "" if answer is None else json.dumps({"prompt": "2+2", "answer": answer, "correct": True}) + "\n"
        (tmp_path / "samples" / f"{name}.jsonl").write_text(line)
    opened.samples(3)
    opened.close()
    shown = EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    texts = {
        tag.removesuffix("/text_summary"): [event.tensor_proto.string_val[0].decode() for event in shown.Tensors(tag)]
        for tag in shown.Tags()["tensors"]
    }
    assert texts["recipe"] == ["```yaml\na: 1\n```"]
    assert texts["samples"] == [
        "| prompt | answer | correct |\n| --- | --- | --- |\n| 2+2 | a&#124;b &lt;i&gt; | True |"
    ]
    assert "| 4 |" in texts["samples/math"][0]
    assert len(texts) == 3


def test_answers_of_later_evaluations_go(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    for name in ("step_2.jsonl", "step_4.jsonl", "step_4_math.jsonl", "step_12_math.jsonl"):
        (tmp_path / "samples" / name).write_text("{}\n")
    tracker(tmp_path, done=4).close()
    kept = sorted(file.name for file in (tmp_path / "samples").iterdir())
    assert kept == ["step_2.jsonl", "step_4.jsonl", "step_4_math.jsonl"]


class FakeWandb:
    """Records what a run is started with and what it is given."""

    Table = dict

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **known: Any) -> Any:
        self.started.append(known)

        def log(metrics: dict[str, float], step: int) -> None:
            self.logged.append((step, metrics))

        def finish() -> None:
            self.finished += 1

        return SimpleNamespace(id=known["id"] or f"run{len(self.started)}", log=log, finish=finish)


def test_a_resumed_run_keeps_its_wandb_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # pyright: ignore[reportArgumentType]
    write_steps(tmp_path, range(1, 3), "wandb", "jsonl")
    write_steps(tmp_path, range(2, 4), "wandb", "jsonl", done=1)
    write_steps(tmp_path, range(1, 2), "wandb", "jsonl")
    assert [(start["id"], start["resume"]) for start in fake.started] == [
        (None, None),
        ("run1", "allow"),
        (None, None),
    ]
    assert fake.started[0]["project"] == "p"
    assert fake.started[0]["name"] == "n"
    assert fake.started[0]["config"] == {"a": 1}
    assert [step for step, _ in fake.logged] == [1, 2, 2, 3, 1]
    assert fake.finished == 3


def test_timings_have_the_time_the_place_and_the_parts_and_are_never_cut_back(tmp_path: Path) -> None:
    write_event(tmp_path, "start", step=0)
    opened = tracker(tmp_path, "timings")
    metrics = {"train/loss": 1.0, "perf/tokens_per_second": 50.0, "perf/mfu": 0.4}
    opened.log(1, metrics, {"step": 2.0, "data": 0.5, "forward_backward": 1.0, "optimizer": 0.5, "save": 0.0})
    opened.close()
    write_event(tmp_path, "resume", step=0)
    write_steps(tmp_path, range(1, 2), "timings", done=0)
    first, second = [json.loads(line) for line in (tmp_path / "timings.jsonl").read_text().splitlines()]
    assert first.pop("time") <= second.pop("time")
    assert first.pop("host")
    assert first == {
        **{"step": 1, "restart": 0, "ranks": 1, "tokens_per_second": 50.0, "mfu": 0.4},
        "seconds": {"step": 2.0, "data": 0.5, "forward_backward": 1.0, "optimizer": 0.5, "save": 0.0},
    }
    assert (second["step"], second["restart"], second["mfu"]) == (1, 1, None)


def test_prometheus_reads_the_last_logged_step(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    port = free_ports(1)[0]
    chosen = PrometheusConfig(port=port)
    logger = LoggerConfig(logger_backends=["prometheus"], experiment_name="my-run", prometheus=chosen)
    opened = open_tracker(tmp_path, logger, config={}, done=-1)
    with pytest.raises(ParallelError, match=rf"127.0.0.1:{port}: Address already in use(?s:.*)prometheus.port"):
        check_logger(logger)
    for step, line in ((1, {"eval/a-b/loss": 2.0, "eval/a_b/loss": 3.0}), (2, {"train/loss": 0.5})):
        opened.log(step, line, {"step": 1.5, "save": 0.25})
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    opened.close()
    check_logger(logger)
    for line in (
        'shardtune_step{metric="step",run="my-run"} 2.0',
        'shardtune_restarts{metric="restarts",run="my-run"} 0.0',
        'shardtune_train_loss{metric="train/loss",run="my-run"} 0.5',
        'shardtune_eval_a_b_loss{metric="eval/a-b/loss",run="my-run"} 2.0',
        'shardtune_eval_a_b_loss{metric="eval/a_b/loss",run="my-run"} 3.0',
        'shardtune_seconds{part="save",run="my-run"} 0.25',
    ):
        assert line in text


def test_metrics_survive_a_round_trip(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4), "jsonl")
    assert read_metrics(tmp_path) == [{"step": step, "train/loss": 1.0 / (step + 1)} for step in range(1, 4)]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1


def test_tensorboard_on_a_full_disk_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    loggers._silence_writers.cache_clear()
    logger = LoggerConfig(logger_backends=["jsonl", "tensorboard"], project_name="p", experiment_name="n")  # pyright: ignore
    lines: list[str] = []
    opened = open_tracker(tmp_path, logger, config={"a": 1}, done=-1, report=lines.append)
    opened.log(1, {"train/loss": 1.0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = max(file.stat().st_size for file in tmp_path.rglob("*.tfevents*"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))  # metrics.jsonl is smaller
    try:
        for step in (2, 3, 4):
            opened.log(step, {"train/loss": 1.0})
        opened.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(read_metrics(tmp_path)) == 4
    assert len(lines) == 1
    assert "tensorboard failed and logs nothing more; training goes on" in lines[0]
    assert told == []
