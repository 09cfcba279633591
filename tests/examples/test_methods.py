"""DPO, GRPO, a reward model and distillation by the engine: the numbers of plain PyTorch on one rank and on two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import shardtune
from shardtune import TrainEngine
from tests.support.methods import FOLDER, METHODS, Course, Models, builder, example, make_models

pytestmark = pytest.mark.lengthy


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    shardtune.init("local", device="cpu")
    return make_models(tmp_path_factory.mktemp("methods"))


@pytest.fixture(scope="module")
def two(models: Models) -> Iterator[TrainEngine]:
    """Whose ranks the engines of two ranks share: starting some takes longest."""
    with builder(2)(example("distillation").Teacher, models.blank) as engine:
        yield engine


@pytest.mark.parametrize("name", METHODS)
def test_the_numbers_are_those_of_plain_pytorch(name: str, models: Models, two: TrainEngine):
    by_engine, in_plain = METHODS[name]
    plain: Course = in_plain(models)
    for build in (builder(1), builder(2, two)):
        numbers, weights = by_engine(models, build).apart(plain)
        assert numbers < 1e-12
        assert weights < 1e-10


def test_the_examples_are_short():
    for script in ("dpo.py", "grpo.py", "reward_model.py"):
        assert len(Path(FOLDER, script).read_text().splitlines()) <= 120, script
