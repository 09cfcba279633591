"""A model on disk, and engines on ranks of this machine's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import shardtune
from shardtune import TrainEngine
from tests.support.engine_modules import make, save_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("engine") / "model")


@pytest.fixture(autouse=True, scope="session")
def _session() -> None:
    shardtune.init("local", device="cpu")


@pytest.fixture(scope="package")  # threads of groups that were closed in them use a little of a processor
def two_ranks(model: Path, _session: None) -> Iterator[TrainEngine]:
    """An engine for `colocate_with`: processes take some seconds to start."""
    with TrainEngine(make(model)).build(data_parallel_size=2) as engine:
        yield engine
