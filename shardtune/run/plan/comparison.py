"""Compares the peak of a run's memory after its second step with what `shardtune plan` computes for its recipe."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

from shardtune.config import Recipe
from shardtune.launch.module_process import module_command, module_environment
from shardtune.launch.signals import LAUNCHER_PID
from shardtune.parallel.weights import local
from shardtune.training.observer import Observer
from shardtune.training.resident_memory import mapped_files, resident, resident_peak, restart_peak
from shardtune.training.worker.adapter_task import AdapterTask
from shardtune.training.worker.base import FSDPSftWorker

LEAST = 2**24
"""Parameters from which on all is compared: with fewer, what Python imports meanwhile takes more than the model."""
STEPS = 2
"""The optimizer's states exist from the first step on, and the second is the first with all that a step holds."""
PATIENCE = 30.0
"""Seconds that the end of a short run waits for the plan."""
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
NICE = 10


class PeakComparison:
    """An observer that shows one more line after the second step: memory as measured, and as planned.

    The plan is computed by a process of its own, beside training: it needs the shapes of the model alone, and neither
    this process's memory nor its process group.

    Args:
        observer: receives all events, and the line.
        recipe: of the run.
        run_dir: of the run; its `config.yaml` is planned.
        worker: of this rank, before its model is built.
        in_files: whether the recipe names everything, so that another process can read it.
    """

    def __init__(
        self, observer: Observer, recipe: Recipe, run_dir: Path, worker: FSDPSftWorker, *, in_files: bool
    ) -> None:
        self._observer = observer
        self._file = run_dir / "config.yaml"
        self._worker = worker
        self._in_files = in_files
        now = resident()
        self._before = None if now is None else now - mapped_files()
        self._restarted = False
        self._step = self._updates = 0
        self._measured = ""
        self._peak = 0.0
        self._process: subprocess.Popen[str] | None = None

    def started(self, step: int, total_steps: int) -> None:
        """The run begins its steps: from now on the peak counts."""
        if self._worker.device.type == "cpu":
            self._restarted = restart_peak()
        self._step = step
        self._observer.started(step, total_steps)

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self._observer.stepped(step, metrics)
        self._updates += step != self._step  # one that changes nothing makes no states of the optimizer either
        if step != self._step and self._updates == STEPS:
            self._measure()
        self._step = step
        if self._process is not None and self._process.poll() is not None:
            self._show()

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._observer.evaluated(step, metrics)

    def saved(self, step: int, path: Path) -> None:
        self._observer.saved(step, path)

    def log(self, text: str) -> None:
        self._observer.log(text)

    def finished(self) -> None:
        self._observer.finished()

    def close(self) -> None:
        """The run has ended well: show what is not shown yet, unless that takes too long."""
        if self._process is None:
            return
        try:
            self._process.wait(PATIENCE)
            self._show()
        except subprocess.TimeoutExpired:
            self.abandon()

    def abandon(self) -> None:
        """End the process that computes the plan."""
        if self._process is None:
            return
        self._process.kill()
        self._process.communicate()
        self._process = None
        self._report("the run ended before its plan")

    def _measure(self) -> None:
        device = self._worker.device
        peak = resident_peak()
        if device.type == "cuda":
            self._peak = float(torch.cuda.max_memory_allocated(device))
            self._measured = f"{in_words(self._peak)} allocated at most"
        elif self._restarted and peak is not None and self._before is not None:
            self._peak = float(max(peak - mapped_files() - self._before, 0))
            self._measured = (
                f"{in_words(self._peak)} resident at most, beyond {in_words(self._before)} before the model and mapped "
                "files"
            )
        else:
            self._measured = "not measured, as this system counts no peak from a given moment on"
        why = self._not_planned()
        if why:
            lasting = in_words(lasting_bytes(self._worker))
            self._report(f"{lasting} planned for weights, gradients and optimizer states alone: {why}")
            return
        ranks = self._worker.ranks.world_size
        words = (str(self._file), "--ranks", str(ranks), "--json", f"runner.device={device.type}")
        environment = {key: value for key, value in module_environment().items() if key not in OF_RANKS}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", LAUNCHER_PID: str(os.getpid())}
        self._process = subprocess.Popen(
            module_command("shardtune", "plan", *words),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.setpriority(os.PRIO_PROCESS, self._process.pid, NICE)

    def _show(self) -> None:
        assert self._process is not None
        output, reports = self._process.communicate()
        found = json.loads(output) if self._process.returncode == 0 else {}
        self._process = None
        planned = found.get("peak")
        why = "".join(found.get("notes", [])) or reports.strip().rpartition("\n")[2]
        if planned is None:
            self._report(f"shardtune plan cannot compute it: {why}")
        else:
            difference = f" ({planned / self._peak - 1:+.0%})" if self._peak else ""
            self._report(f"{in_words(planned)} planned{difference}")

    def _not_planned(self) -> str:
        """Why no plan is compared; "" where one is."""
        if not isinstance(self._worker.task, AdapterTask):
            return "no plan has the sizes of the batches that this worker makes"
        if not self._in_files:
            return "a plan of the rest needs a recipe that names its files"
        if not is_large(self._worker):
            on_gpu = self._worker.device.type == "cuda"
            beside = "the workspaces of cuBLAS take more" if on_gpu else "Python itself moves by some 50 MB"
            return f"a whole plan is compared from 17M parameters on, as {beside}"
        return ""

    def _report(self, against: str) -> None:
        self._observer.log(f"memory of rank 0 after {STEPS} steps: {self._measured}; {against}")


def is_large(worker: FSDPSftWorker) -> bool:
    """Whether a model's tensors are large beside what Python takes."""
    return sum(worker.state.sizes().values()) >= LEAST


def lasting_bytes(worker: FSDPSftWorker) -> int:
    """Bytes of what this rank holds between steps, and of its gradients, by their shapes and dtypes."""
    weights = worker.state.weights
    states = [value for state in worker.state.optimizer.state.values() for value in state.values()]
    held = {id(each): each for each in (*weights.parameters.values(), *worker.state.inner.parameters(), *states)}
    tensors = [*held.values(), *weights.trainable().values()]  # a gradient is as large as what it is of
    return sum(local(each).nbytes for each in tensors if isinstance(each, torch.Tensor))


def in_words(size: float) -> str:
    """Bytes in GB, MB or kB."""
    if size >= 1e8:
        return f"{size / 1e9:,.2f} GB"
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"
