"""DPO, GRPO, a reward model and distillation by the engine: the numbers of plain PyTorch on one rank and on two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2ForCausalLM

import shardtune
from shardtune import NeedParallel, TrainEngine, init_empty_weights, nn
from tests.support.methods import FOLDER, METHODS, Course, Models, builder, example, make_models
from tests.support.peft_versions import adds_adapters

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


def moved(models: Models, course: Course) -> float:
    """The largest change of a weight, from whichever model it began with."""
    starts = [load_file(folder / "model.safetensors") for folder in (models.language, models.blank, models.judge)]
    (start,) = [
        start
        for start in starts
        if {n: t.shape for n, t in start.items()} == {n: t.shape for n, t in course.weights.items()}
    ]
    return max(float((course.weights[name] - tensor).abs().max()) for name, tensor in start.items())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "distillation" else name for name in METHODS]
)
def test_the_numbers_are_those_of_plain_pytorch(name: str, models: Models, two: TrainEngine):
    by_engine, in_plain = METHODS[name]
    plain: Course = in_plain(models)
    assert moved(models, plain) > 1e-4
    for build in (builder(1), builder(2, two)):
        numbers, weights = by_engine(models, build).apart(plain)
        assert numbers < 1e-12
        assert weights < 1e-10


class Adapted(nn.LoraTrainModule, Qwen2ForCausalLM):
    def on_weights_materialized(self) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.1)

    @torch.no_grad()
    def scores(self, rows: list[list[int]]) -> list[torch.Tensor]:
        """With the adapter, without it, and with it once more."""
        ids = torch.tensor(rows)
        found = [self(ids).logits]
        self.disable_adapters()
        found.append(self(ids).logits)
        self.enable_adapters()
        return [*found, self(ids).logits]


@adds_adapters
def test_the_reference_of_an_adapter_is_the_model_without_it(models: Models, two: TrainEngine):
    rows = [[1, 2, 3], [4, 5, 6]]
    with torch.no_grad():
        base = Qwen2ForCausalLM.from_pretrained(models.blank, dtype=torch.float64)(torch.tensor(rows)).logits
    for ranks in ({}, {"colocate_with": two, "take_turns": False}):
        with init_empty_weights():
            module = Adapted.from_pretrained(models.blank, dtype=torch.float64)
            module.add_adapter(peft.LoraConfig(r=2, target_modules="all-linear"))
        with TrainEngine(module).build(**ranks) as engine:
            parts = engine.scores(NeedParallel(rows))
        adapted, without, again = (torch.cat([part[place] for part in parts]) for place in range(3))
        assert (without - base).abs().max() < 1e-12
        assert torch.equal(adapted, again)
        assert (adapted - base).abs().max() > 1e-6


def test_the_examples_are_short():
    for script in ("dpo.py", "grpo.py", "reward_model.py"):
        assert len(Path(FOLDER, script).read_text().splitlines()) <= 120, script
