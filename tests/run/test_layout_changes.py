"""The command as a user types it, on ranks of this machine, with another layout at each continuation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import shardtune
from tests.support.dist.parity import EXACT
from tests.support.dist.training import recipe, save_model, save_rows
from tests.support.doc_blocks import ROOT

STEPS = 2
"""Of each segment."""
ROUNDED = 1e-6


@dataclass(frozen=True)
class Segment:
    """Some steps in one layout.

    Attributes:
        ranks: processes; 1: this one's child alone.
        sizes: of `actor.parallel`; those not named are their defaults.
        keys: further ones, as they are typed.
    """

    ranks: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    keys: Sequence[str] = ()

    def typed(self) -> list[str]:
        sizes = {"data_replicate": 1, "tensor": 1, "sequence": 1, "expert": 1, **self.sizes}
        axes = [f"actor.parallel.{axis}={size}" for axis, size in sizes.items()]
        return [*([f"runner.nproc_per_node={self.ranks}"] if self.ranks > 1 else []), *axes, *self.keys]


@dataclass(frozen=True)
class Job:
    """A recipe in a folder, for several runs of the same model and rows."""

    folder: Path
    values: dict[str, Any]

    @classmethod
    def make(cls, folder: Path, kind: str, precision: str = "fp64", **changes: Any) -> Job:
        logger = {"log_path": str(folder / "runs"), "logger_backends": ["jsonl"]}
        values = recipe(
            save_model(kind, folder / "model", torch.float64),
            save_rows(folder / "rows.jsonl"),
            runner__logger=logger,
            runner__save_interval=STEPS,
            runner__val_check_interval=STEPS,
            actor__micro_batch_size=2,
            actor__model__precision=precision,
            actor__optim__lr_scheduler="constant",
            data__eval_data_paths=str(save_rows(folder / "evaluated.jsonl", 13, seed=7)),
            **changes,
        )
        (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
        return cls(folder, values)

    def train(self, name: str, steps: int, segment: Segment) -> subprocess.CompletedProcess[str]:
        """Type the command."""
        keys = [f"runner.max_steps={steps}", f"runner.logger.experiment_name={name}", *segment.typed()]
        command = [sys.executable, "-m", "shardtune", "train", "recipe.yaml", *keys]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def uninterrupted(self, steps: int) -> Path:
        """The same steps at a stretch in this process."""
        shardtune.train(self.values, f"runner.max_steps={steps}", "runner.logger.experiment_name=whole")
        return self.run("whole")

    def check(self, name: str, segments: Sequence[Segment]) -> None:
        """Train segment after segment; what comes out is what one process makes at a stretch."""
        for number, segment in enumerate(segments, 1):
            ended = self.train(name, number * STEPS, segment)
            assert ended.returncode == 0, f"{segment}\n{ended.stdout[-1000:]}\n{ended.stderr[-3000:]}"
            assert number == 1 or f"continuing after step {(number - 1) * STEPS}" in ended.stderr
        compare(self.run(name), self.uninterrupted(STEPS * len(segments)))


def compare(found: Path, wanted: Path) -> None:
    """Two runs: the weights of the last checkpoint, `final/`, and each logged step with its evaluation."""
    assert apart(weights(found), weights(wanted)) < EXACT
    (here,), (there,) = ([load_file(file) for file in run.glob("final/*.safetensors")] for run in (found, wanted))
    assert apart(here, there) < ROUNDED  # in fp32
    assert scores(found / "final/metrics.json") == pytest.approx(scores(wanted / "final/metrics.json"), rel=ROUNDED)
    ours, others = logged(found), logged(wanted)
    assert list(ours) == list(others)
    for step, line in ours.items():
        assert line == pytest.approx(others[step], rel=EXACT), f"step {step}"
    assert sum("eval/loss" in line for line in ours.values()) == len(ours) // STEPS


def weights(run: Path) -> dict[str, torch.Tensor]:
    worker = shardtune.load_run(run).worker("latest")
    found = {name: tensor.detach().clone() for name, tensor in worker.weights.tensors().items()}
    worker.release()
    assert {tensor.dtype for tensor in found.values()} == {torch.float64}
    return found


def apart(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def scores(file: Path) -> dict[str, float]:
    return {name: value for name, value in json.loads(file.read_text()).items() if name.startswith("eval/")}


def logged(run: Path) -> dict[int, dict[str, float]]:
    """What of each step does not depend on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: {key: value for key, value in line.items() if "perf/" not in key} for line in lines}


@pytest.mark.slow  # resumes on other ranks and layouts: test_resume, test_fsdp1
def test_the_layout_may_change_between_two_commands(tmp_path: Path) -> None:
    Job.make(tmp_path, "dense").check("changed", [Segment(2, {"tensor": 2}), Segment(2)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "segments"),
    [
        pytest.param(
            "dense",
            [
                Segment(4),
                Segment(4, {"tensor": 2}),
                Segment(4, {"data_replicate": 2}),
                Segment(4, {"sequence": 2}),
                Segment(1),
            ],
            id="dense",
        ),
        pytest.param(
            "mixtral",
            [
                Segment(4, {"expert": 4}),
                Segment(4, {"expert": 2, "tensor": 2}),
                Segment(4, {"expert": 2, "data_replicate": 2}),
                Segment(2, {"sequence": 2}),
                Segment(1),
            ],
            id="experts",
        ),
        pytest.param(
            "three_heads",
            [
                Segment(2, {"sequence": 2}),
                Segment(3, {"sequence": 3}),
                Segment(3, {"sequence": 3}, ["actor.parallel.sequence_method=ring"]),
                Segment(1),
            ],
            id="ring",
        ),
    ],
)
def test_the_layout_may_change_at_every_command(tmp_path: Path, kind: str, segments: list[Segment]) -> None:
    Job.make(tmp_path, kind).check("changed", segments)


@pytest.mark.slow
def test_the_layout_of_an_adapter_may_change(tmp_path: Path) -> None:
    """With dropout, which is drawn alike as long as the same ranks have the same rows."""
    lora = {"actor__model__is_lora": True, "actor__model__lora__r": 3}
    experts = {**lora, "actor__model__lora__target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    segments = [Segment(2, {"tensor": 2}), Segment(2, {"expert": 2}), Segment(1)]
    Job.make(tmp_path / "experts", "mixtral", **experts).check("changed", segments)
    job = Job.make(tmp_path / "dense", "dense", **lora, actor__model__lora__dropout=0.2)
    job.check("changed", [Segment(2, {"tensor": 2}), Segment(1)])
    for name, stops in (("stretch", [2 * STEPS]), ("parts", [STEPS, 2 * STEPS])):
        for steps in stops:
            ended = job.train(name, steps, Segment(2, {"tensor": 2}))
            assert ended.returncode == 0, ended.stderr[-3000:]
    parts, stretch = weights(job.run("parts")), weights(job.run("stretch"))
    assert all(torch.equal(parts[name], tensor) for name, tensor in stretch.items())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_compiled_layers_share_sequences(tmp_path: Path, method: str) -> None:
    """To fp32's rounding, as a compiler fuses operations."""
    job = Job.make(tmp_path, "dense", precision="fp32")
    keys = ["actor.model.compile=true", f"actor.parallel.sequence_method={method}"]
    ended = job.train("compiled", STEPS, Segment(2, {"sequence": 2}, keys))
    assert ended.returncode == 0, ended.stderr[-3000:]
    ours, others = logged(job.run("compiled")), logged(job.uninterrupted(STEPS))
    assert ours.keys() == others.keys()
    for step, line in ours.items():
        assert line == pytest.approx(others[step], rel=ROUNDED), f"step {step}"
