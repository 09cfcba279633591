"""What LoRA leaves out of the linear layers of transformers' models, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from shardtune.config import LoraConfig, load_recipe
from shardtune.errors import ConfigError, ModelError
from shardtune.models.lora.attach import attach_adapter, lora_layers
from shardtune.parallel.meta_init import init_empty_weights
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.training import quiet
from tests.support.tiny_architectures import DECODERS, tiny_config
from tests.support.zoo import changed, decoder


def empty(family: str) -> Any:
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(tiny_config(family, DECODERS.get(family, {})))


@pytest.mark.parametrize(
    ("family", "without", "note"),
    [
        ("llama4_text", "router", "a Llama4Router, which computes more than a linear layer"),
        ("laguna", "shared_experts", "whose names PEFT takes for others'"),
        ("mamba", "dt_proj", "part of a MambaMixer, which uses its weight without calling it"),
        ("nemotron_h", "out_proj", "part of a NemotronHMamba2Mixer, which uses its weight without calling it"),
    ],
)
def test_all_linear_means_what_can_be_adapted_and_loaded_again(family: str, without: str, note: str) -> None:
    model = empty(family)
    notes = attach_adapter(model, LoraConfig(r=2))
    assert any(note in one for one in notes), notes
    names = [name for name, _ in lora_layers(model)]
    assert names
    assert not [name for name in names if without in name.split(".")]


@pytest.mark.parametrize(("family", "target"), [("llama4_text", "router"), ("mamba", "x_proj")])
def test_naming_it_is_refused(family: str, target: str) -> None:
    with pytest.raises(ConfigError, match="cannot be adapted"):
        attach_adapter(empty(family), LoraConfig(r=2, target_modules=[target]))


@pytest.mark.lengthy
def test_a_loss_without_a_graph_is_refused_at_the_first_step(tmp_path: Path) -> None:
    """Reformer's reversible layers compute no gradients where their inputs need none."""
    values = changed(decoder("reformer", tmp_path, "fp64").values, actor={"model": {"is_lora": True}})
    worker = SFTWorker(load_recipe(values), report=quiet)
    worker.setup()
    with pytest.raises(ModelError, match="has no graph"):
        worker.run_training()
    worker.release()
