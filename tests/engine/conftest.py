"""A model on disk, and engines on ranks of this machine's."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardtune
from tests.support.engine_modules import save_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("engine") / "model")


@pytest.fixture(autouse=True, scope="session")
def _session() -> None:
    shardtune.init("local", device="cpu")
