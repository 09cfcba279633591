"""Backends for metrics: metrics.jsonl, TensorBoard, Weights & Biases, timings, Prometheus. Only rank 0 has them."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from shardtune.config.schema.runner import LoggerConfig
from shardtune.data.durable import sync_folder
from shardtune.errors import ConfigError
from shardtune.launch.events import restart_count
from shardtune.training.prometheus import Prometheus, check_port
from shardtune.training.timings import Timings

METRICS_FILE = "metrics.jsonl"
SAMPLES = "samples"
EXTRAS = {"wandb": "wandb", "prometheus": "prometheus_client"}
"""The extra of a backend that needs one, by the name of both, and the package it installs."""
NOTHING: Mapping[str, float] = MappingProxyType({})


class Backend(Protocol):
    """A destination of metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class TimedBackend(Protocol):
    """A destination of metrics and of the seconds that the parts of a step took."""

    def log(self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """`metrics.jsonl`: a line per logged step, flushed at once; non-finite numbers become null.

    `sync` brings the lines to the disk, so that a power cut loses none of before the last checkpoint.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = open(run_dir / METRICS_FILE, "a", encoding="utf-8")  # noqa: SIM115 (open as long as the run)
        sync_folder(run_dir)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files under `tensorboard/`; readers purge events past step `done`."""

    def __init__(self, run_dir: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        folder = run_dir / "tensorboard"
        if done < 0:
            shutil.rmtree(folder, ignore_errors=True)
        self._writer = SummaryWriter(str(folder), purge_step=done + 1 if done >= 0 else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def sync(self) -> None:
        """Nothing: readers skip what is torn."""

    def close(self) -> None:
        self._writer.close()


def check_backends(names: Sequence[str]) -> None:
    """Refuse a backend whose package is not installed."""
    for name in names:
        if name in EXTRAS and find_spec(EXTRAS[name]) is None:
            raise ConfigError(
                f"runner.logger.logger_backends names {name}, but {EXTRAS[name]} is not installed",
                where="runner.logger.logger_backends",
                remedy=f"pip install 'shardtune[{name}]', or leave it out",
            )


def check_logger(logger: LoggerConfig) -> None:
    """Refuse, before training, backends that cannot be opened on this host.

    Raises:
        ConfigError: a package is not installed.
        ParallelError: the port for Prometheus is in use.
    """
    check_backends(logger.logger_backends)
    if "prometheus" in logger.logger_backends:
        check_port(logger.prometheus)


class WeightsAndBiases:
    """A Weights & Biases run; its id is kept in the run directory, so that a resumed run continues under it."""

    def __init__(self, run_dir: Path, project: str, name: str, config: Mapping[str, object], resumed: bool) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        id_file = run_dir / "wandb_id"
        known = id_file.read_text().strip() if resumed and id_file.exists() else None
        self._run = wandb.init(
            project=project,
            name=name,
            id=known,
            resume="allow" if known else None,
            config=dict(config),
            dir=str(run_dir),
        )
        id_file.write_text(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def sync(self) -> None:
        """Nothing: the service has the lines."""

    def close(self) -> None:
        self._run.finish()


class Tracker:
    """Writes to all chosen backends."""

    def __init__(self, backends: Sequence[Backend], timed: Sequence[TimedBackend] = ()) -> None:
        self._backends = list(backends)
        self._timed = list(timed)

    def log(self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float] = NOTHING) -> None:
        for backend in self._backends:
            backend.log(step, metrics)
        for backend in self._timed:
            backend.log(step, metrics, seconds)

    def sync(self) -> None:
        """Bring what is logged to the disk."""
        for backend in self._backends:
            backend.sync()

    def close(self) -> None:
        for backend in (*self._backends, *self._timed):
            backend.close()


def open_tracker(
    run_dir: Path, logger: LoggerConfig, *, config: Mapping[str, object], done: int, ranks: int = 1
) -> Tracker:
    """Open the backends of `runner.logger.logger_backends` and truncate their logs.

    Args:
        run_dir: the run directory.
        logger: the recipe's settings.
        config: the recipe, for Weights & Biases.
        done: the last step whose line is kept; -1: the run starts.
        ranks: of the run.

    Raises:
        ParallelError: the port for Prometheus is in use.
    """
    cut_back(run_dir / METRICS_FILE, done)
    cut_samples(run_dir / SAMPLES, done)
    name, restart = str(logger.experiment_name), restart_count(run_dir)
    backends: list[Backend] = []
    timed: list[TimedBackend] = []
    for backend in logger.logger_backends:
        if backend == "jsonl":
            backends.append(JsonLines(run_dir))
        elif backend == "tensorboard":
            backends.append(TensorBoard(run_dir, done))
        elif backend == "timings":
            timed.append(Timings(run_dir, restart=restart, ranks=ranks))
        elif backend == "prometheus":
            timed.append(Prometheus(logger.prometheus, run=name, restart=restart))
        else:
            backends.append(WeightsAndBiases(run_dir, logger.project_name, name, config, resumed=done >= 0))
    return Tracker(backends, timed)


def cut_samples(folder: Path, done: int) -> None:
    """Remove the answers of evaluations past step `done`."""
    for file in folder.glob("step_*.jsonl"):
        found = re.match(r"step_(\d+)", file.name)
        if found and int(found[1]) > done:
            file.unlink()


def cut_back(file: Path, step: int, block: int = 1 << 16) -> None:
    """Remove the lines past `step` (and a torn last line), reading from the end: the cost is proportional to these."""
    if not file.exists():
        return
    with open(file, "r+b") as lines:
        end = lines.seek(0, os.SEEK_END)
        keep = end
        while keep:
            start = max(0, keep - block)
            lines.seek(start)
            chunk = lines.read(keep - start)
            newline = chunk.rstrip(b"\n").rfind(b"\n")
            if newline < 0 and start:
                block *= 2  # a line longer than a block
                continue
            line = chunk[newline + 1 :]
            if line.endswith(b"\n") and _step_of(line) <= step:
                break
            keep = start + newline + 1
        lines.truncate(keep)


def _step_of(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # torn or foreign: removed


def first_metrics(run_dir: Path) -> dict[str, float]:
    """The first line of a run's metrics."""
    file = run_dir / METRICS_FILE
    if not file.exists():
        return {}
    with open(file, encoding="utf-8") as lines:
        return json.loads(next(lines, "{}"))


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """All lines of a run's metrics."""
    file = run_dir / METRICS_FILE
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
