"""The same script, unguarded, in process, with ranks of this machine, under torchrun and on Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardtune.engine.rank_process import Request
from shardtune.engine.ranks_ray import LARGE_BYTES, _warn_if_large
from tests.support.doc_blocks import ROOT

SCRIPT = Path(__file__).parents[1] / "support" / "engine_script.py"
LAUNCHES = {
    "in process": ("auto", 1),
    "ranks of this machine": ("local", 2),
    "torchrun": ("auto", 2),
    "ray": ("ray", 2),
}


def run(launch: str, model: Path, out: Path) -> dict:
    backend, ranks = LAUNCHES[launch]
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    command = [sys.executable, *(torchrun if launch == "torchrun" else []), str(SCRIPT)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = [str(model), str(out), backend, str(ranks)]
    outcome = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env=environment, timeout=240, check=False
    )
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    return run("in process", model, tmp_path_factory.mktemp("alone") / "out.pt")


@pytest.mark.parametrize("launch", [launch for launch in LAUNCHES if launch != "in process"])
def test_every_backend_gives_the_same_numbers(launch: str, model: Path, alone: dict, tmp_path: Path):
    if launch == "ray":
        pytest.importorskip("ray")
    found = run(launch, model, tmp_path / "out.pt")
    assert found["told"] == "on purpose"
    assert found["pushed"]
    assert [len(values) for values in found["losses"]] == [LAUNCHES[launch][1]] * 2
    assert torch.allclose(torch.tensor(found["losses"]), torch.tensor(found["again"]), atol=1e-12)
    shares = torch.tensor([2 / 5, 3 / 5], dtype=torch.float64)
    mean = (torch.tensor(found["losses"], dtype=torch.float64) * shares).sum(1)
    assert torch.allclose(mean, torch.tensor(alone["losses"], dtype=torch.float64)[:, 0], atol=1e-12)
    for name, tensor in alone["state"].items():
        assert float((tensor - found["state"][name]).abs().max()) < 1e-12
    if launch == "ray":
        ended, losses, stuck = found["stopped"]
        assert ended == "interrupted"
        assert max(losses) < min(found["losses"][-1])  # the engine trains on
        assert "in the call of unequal: rank 0 has returned" in stuck
        assert "rank 1 waits in the collective" in stuck


def test_large_calls_through_ray_are_told_with_their_size(caplog: pytest.LogCaptureFixture):
    request = Request("engine", "call", ("train_step",))
    _warn_if_large(LARGE_BYTES, "sends", request)
    _warn_if_large(2 * LARGE_BYTES, "sends", Request("engine", "build"))
    assert not caplog.records
    _warn_if_large(LARGE_BYTES + 1, "sends", request)
    assert "train_step sends 64 MB through Ray" in caplog.text
