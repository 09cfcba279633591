"""Several processes of another program that train by themselves are told so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from shardtune import train
from shardtune.run.lone_process import alone_of_several
from tests.support.tiny_run import make_tiny


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun has started 2 processes (OMPI_COMM_WORLD_SIZE)"),
        ({"PMI_SIZE": "4"}, "mpirun has started 4"),
        ({"SLURM_STEP_NUM_TASKS": "8", "PMI_SIZE": "8"}, "srun has started 8"),
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}, "accelerate launch has started one process"),
    ],
)
def test_several_were_asked_for_and_one_trains(environment: Mapping[str, str], says: str) -> None:
    (note,) = alone_of_several(environment)
    assert says in note
    assert "runner.nproc_per_node" in note
    assert alone_of_several({**environment, "WORLD_SIZE": "2"}) == [], "a launcher has started ranks"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"},
        {"MASTER_ADDR": "a"},
        {"ACCELERATE_MIXED_PRECISION": "no"},
    ],
)
def test_one_was_asked_for(environment: Mapping[str, str]) -> None:
    assert alone_of_several(environment) == []


def test_it_is_on_the_first_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    train(make_tiny(tmp_path).recipe("alone", runner__max_steps=1))
    assert "mpirun has started 2 processes" in " ".join(capsys.readouterr().err.split())
