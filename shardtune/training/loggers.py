"""Backends for metrics: metrics.jsonl, TensorBoard, timings, Prometheus, services. Only rank 0 has them."""

from __future__ import annotations

import html
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from shardtune.config.schema.runner import LoggerConfig
from shardtune.config.secrets import without_secrets
from shardtune.config.yaml_text import yaml_text
from shardtune.data.durable import Lines, sync_folder
from shardtune.errors import CheckpointError, ConfigError, ShardtuneError, disk_error
from shardtune.launch.events import restart_count
from shardtune.training.experiment.background import Background
from shardtune.training.experiment.checks import check_services
from shardtune.training.experiment.run import LoggedRun
from shardtune.training.experiment.services import SERVICES
from shardtune.training.experiment.user_class import KEY, UserLogger, load_class
from shardtune.training.prometheus import Prometheus, check_port
from shardtune.training.timings import Timings

METRICS_FILE = "metrics.jsonl"
SAMPLES = "samples"
SHOWN_ANSWERS = 20
"""How many answers of an evaluation set loggers show; `samples/` has all."""
NOTHING: Mapping[str, float] = MappingProxyType({})


class Backend(Protocol):
    """A destination of metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def samples(self, step: int, name: str, answers: Sequence[Mapping[str, object]]) -> None: ...
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
        self._path = run_dir / METRICS_FILE
        try:
            self._lines = Lines(self._path)
            sync_folder(run_dir)
        except OSError as error:
            raise self._unwritable(error) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            self._lines.add(json.dumps({"step": step, **as_json_numbers(metrics)}))
        except OSError as error:
            raise self._unwritable(error) from error

    def sync(self) -> None:
        try:
            self._lines.sync()
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        try:
            self._lines.close()
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"the metrics cannot be written: {error.strerror or error}",
            where=str(self._path),
            remedy="make room on the disk; the same command continues from the last checkpoint",
        )


class TensorBoard:
    """Event files under `tensorboard/`, with the recipe and answers as text; readers purge events past step `done`."""

    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        folder, done = run.run_dir / "tensorboard", run.done
        _silence_writers()
        if not run.resumed:
            shutil.rmtree(folder, ignore_errors=True)
        self._writer = SummaryWriter(str(folder), purge_step=done + 1 if run.resumed else None)
        text = yaml_text(dict(run.recipe))
        self._writer.add_text("recipe", f"```yaml\n{text}```", max(done, 0))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def samples(self, step: int, name: str, answers: Sequence[Mapping[str, object]]) -> None:
        columns = list(answers[0])
        rows = [[_cell(row.get(column)) for column in columns] for row in answers]
        lines = [columns, ["---"] * len(columns), *rows]
        self._writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in lines), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@cache
def _silence_writers() -> None:
    """Print no traceback of what ends a thread of tensorboard: the next write into its file raises the same."""
    others = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if not type(failed.thread).__module__.startswith("tensorboard."):
            others(failed)

    threading.excepthook = hook


def _cell(value: object) -> str:
    """Text for a cell of a Markdown table."""
    return html.escape(str(value)).replace("|", "&#124;").replace("\n", "<br>")


def check_logger(logger: LoggerConfig) -> None:
    """Refuse, before training, backends that cannot be opened on this host.

    Raises:
        ConfigError: a package or a key is missing, a server cannot be reached, or a class cannot be used.
        ParallelError: the port for Prometheus is in use.
    """
    check_services(logger.logger_backends)
    if "prometheus" in logger.logger_backends:
        check_port(logger.prometheus)


class Tracker:
    """Writes to all chosen backends. One that fails is reported once and left out from then on.

    Args:
        record: `metrics.jsonl`, the record of the run: its failure is one of the run.
        backends: the others, by name.
        timed: likewise, those that get the seconds of each step's parts.
        samples: the directory of the answers of evaluations.
        report: receives a line about a backend that failed.
    """

    def __init__(
        self,
        record: JsonLines | None = None,
        backends: Mapping[str, Backend] = MappingProxyType({}),
        timed: Mapping[str, TimedBackend] = MappingProxyType({}),
        *,
        samples: Path | None = None,
        report: Callable[[str], None] = print,
    ) -> None:
        self._record, self._samples, self._report = record, samples, report
        self._backends, self._timed = dict(backends), dict(timed)

    def log(self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float] = NOTHING) -> None:
        if self._record is not None:
            self._record.log(step, metrics)
        for name, backend in list(self._backends.items()):
            try:
                backend.log(step, metrics)
            except Exception as error:  # of any kind: it is the logger's, not the run's
                self._leave_out(name, error)
        for name, timed in list(self._timed.items()):
            try:
                timed.log(step, metrics, seconds)
            except Exception as error:
                self._leave_out(name, error)

    def samples(self, step: int) -> None:
        """Show some answers of the evaluations after a step, from their files."""
        if not self._backends or self._samples is None:
            return
        for file in sorted(self._samples.glob(f"step_{step}*.jsonl")):
            found = re.fullmatch(rf"step_{step}(?:_(.+))?", file.stem)
            if found is None:
                continue
            with open(file, encoding="utf-8") as lines:
                answers = [json.loads(line) for line in islice(lines, SHOWN_ANSWERS)]
            name = f"{SAMPLES}/{found[1]}" if found[1] else SAMPLES
            for backend, shown in list(self._backends.items()) if answers else ():
                try:
                    shown.samples(step, name, answers)
                except Exception as error:
                    self._leave_out(backend, error)

    def sync(self) -> None:
        """Bring what is logged to the disk."""
        if self._record is not None:
            self._record.sync()

    def close(self) -> None:
        if self._record is not None:
            self._record.close()
        for name, backend in {**self._backends, **self._timed}.items():
            try:
                backend.close()
            except Exception as error:
                self._report(f"{name}: not everything may be logged: {_described(error)}")

    def _leave_out(self, name: str, error: Exception) -> None:
        left_out = self._backends.pop(name, None) or self._timed.pop(name)
        with suppress(Exception):  # it has failed before
            left_out.close()
        kept = f"; {METRICS_FILE} has the metrics" if self._record is not None else ""
        self._report(f"{name} failed and logs nothing more; training goes on{kept}: {_described(error)}")


def _described(error: Exception) -> str:
    text = str(error).strip()
    return without_secrets(f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__)


def open_tracker(
    run_dir: Path,
    logger: LoggerConfig,
    *,
    config: Mapping[str, object],
    done: int,
    ranks: int = 1,
    report: Callable[[str], None] = print,
) -> Tracker:
    """Open the backends of `runner.logger.logger_backends` and truncate their logs.

    Args:
        run_dir: the run directory.
        logger: the recipe's settings.
        config: the recipe, for those that show it.
        done: the last step whose line is kept; -1: the run starts.
        ranks: of the run.
        report: receives a line about a backend that fails in the run.

    Raises:
        ParallelError: the port for Prometheus is in use.
        ConfigError: a service or a class cannot be started, and the run begins; a run that continues does without it.
    """
    cut_back(run_dir / METRICS_FILE, done)
    cut_samples(run_dir / SAMPLES, done)
    restart = restart_count(run_dir)
    run = LoggedRun(logger.project_name, str(logger.experiment_name), run_dir, config, done)
    backends: dict[str, Backend] = {}
    timed: dict[str, TimedBackend] = {}
    record = JsonLines(run_dir) if "jsonl" in logger.logger_backends else None
    try:
        for name in logger.logger_backends:
            if name == "timings":
                timed[name] = Timings(run_dir, restart=restart, ranks=ranks)
            elif name == "prometheus":
                timed[name] = Prometheus(logger.prometheus, run=run.name, restart=restart)
            elif name != "jsonl":
                started = _start(name, run, report)
                backends |= {name: started} if started is not None else {}
    except ShardtuneError:
        Tracker(record, backends, timed, report=report).close()
        raise
    return Tracker(record, backends, timed, samples=run_dir / SAMPLES, report=report)


def _start(name: str, run: LoggedRun, report: Callable[[str], None]) -> Backend | None:
    """A backend; None, reported, if it cannot be started and the run continues."""
    try:
        if name == "tensorboard":
            return TensorBoard(run)
        if name in SERVICES:
            return Background(name, partial(SERVICES[name], run))
        return UserLogger(load_class(name), run)
    except ConfigError:
        raise
    except Exception as error:  # of any kind: each package has its own
        if not run.resumed:
            raise (disk_error(error) or _not_started(name, error)) from error
        report(f"{name} could not be started and logs nothing; training goes on: {_described(error)}")
        return None


def _not_started(name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{name} cannot be started: {_described(error)}",
        where=KEY,
        remedy="check its settings and the network, or leave it out; nothing has been trained yet",
    )


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


def as_json_numbers(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Metrics as JSON has them: null for what is not finite, which strict parsers refuse."""
    return {key: None if value is None or not math.isfinite(value) else value for key, value in metrics.items()}


def as_numbers(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Metrics that were read from JSON: NaN for null."""
    return {key: math.nan if value is None else value for key, value in metrics.items()}


def metric_lines(run_dir: Path) -> Iterator[dict[str, float | None]]:
    """The lines of a run's metrics, one after another; the torn last one of a run that is being written is left out.

    Raises:
        CheckpointError: another line is damaged.
    """
    file = run_dir / METRICS_FILE
    if not file.exists():
        return
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.endswith("\n"):
                yield _parsed(line, file, number)


def _parsed(line: str, file: Path, number: int) -> dict[str, float | None]:
    try:
        return json.loads(line)
    except ValueError as error:
        raise CheckpointError(
            f"line {number:,} of {METRICS_FILE} is no JSON: {error}",
            where=f"{file}:{number}",
            remedy="remove the line; the metrics of its step are lost",
        ) from error


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """All lines of a run's metrics."""
    file = run_dir / METRICS_FILE
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
