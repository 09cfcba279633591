"""Layers left out at random: refused where ranks would leave out others of those that are sharded."""

from __future__ import annotations

from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    BartConfig,
    HubertConfig,
    M2M100Config,
    PreTrainedConfig,
)

from shardtune.config.rank_layout import Layout
from shardtune.errors import ModelError
from shardtune.parallel.layer_drop import check_layer_drop
from shardtune.parallel.shard_units import choose_units
from shardtune.run.dry_run import dry_run
from tests.support.tiny_tasks import rows, save_tokenizer, write

SIZES: dict[str, Any] = {
    "vocab_size": 32, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 16,
}  # fmt: skip
TWO = Layout(shard=2)


class Deep(nn.Module):
    """Leaves out layers, without a config."""

    def __init__(self, layerdrop: float) -> None:
        super().__init__()
        self.layerdrop = layerdrop
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not self.training or float(torch.rand([])) >= self.layerdrop:
                values = layer(values)
        return values


def empty(config: PreTrainedConfig) -> nn.Module:
    with torch.device("meta"):
        return AutoModel.from_config(config)


@pytest.mark.parametrize(
    ("model", "message", "remedy"),
    [
        (empty(M2M100Config(**SIZES)), r"encoder \(M2M100Encoder\) .* share of 0.05", "encoder_layerdrop: 0.0, decod"),
        (empty(BartConfig(**SIZES, decoder_layerdrop=0.2)), r"^decoder \(BartDecoder\)", "set decoder_layerdrop: 0.0,"),
        (Deep(0.5), r"the model \(Deep\) .* share of 0.5", "set layerdrop: 0.0,"),
    ],
    ids=["m2m100", "bart", "plain"],
)
def test_layers_that_each_rank_would_leave_out_are_refused(model: nn.Module, message: str, remedy: str):
    units = choose_units(model, ("Linear",) if isinstance(model, Deep) else (), None)[0]
    with pytest.raises(ModelError, match=message) as refused:
        check_layer_drop(model, units, TWO)
    assert remedy in (refused.value.remedy or "")
    check_layer_drop(model, units, Layout())  # one rank
    check_layer_drop(model, units, Layout(tensor=2))  # that draw alike
    check_layer_drop(model, [model], TWO)  # all layers are gathered as one


def test_layers_that_are_computed_all_the_same_are_not_refused():
    """Hubert computes a layer that it leaves out where it is sharded; the others leave out none."""
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    hubert = HubertConfig(layerdrop=0.1, conv_dim=(4,), conv_stride=(2,), conv_kernel=(2,), num_feat_extract_layers=1,
        num_conv_pos_embeddings=2, num_conv_pos_embedding_groups=2, **sizes)  # fmt: skip
    for config in (hubert, BartConfig(**SIZES), M2M100Config(**SIZES, encoder_layerdrop=0, decoder_layerdrop=0)):
        model = empty(config)
        check_layer_drop(model, choose_units(model, (), None)[0], TWO)
    check_layer_drop(Deep(0.0), [], TWO)


def test_a_forward_without_code_of_its_own_and_another_attribute_of_the_name_are_passed_over():
    class Called(Deep):
        forward = partialmethod(Deep.forward)

    check_layer_drop(Called(0.5), choose_units(Called(0.5), ("Linear",), None)[0], TWO)
    named = Deep(0.0)
    vars(named)["layerdrop"] = "none"
    check_layer_drop(named, choose_units(named, ("Linear",), None)[0], TWO)


def test_it_is_said_before_ranks_start(tmp_path: Path):
    save_tokenizer(tmp_path, pair=False)
    M2M100Config(**SIZES, pad_token_id=0, eos_token_id=3, decoder_start_token_id=3).save_pretrained(tmp_path)
    values = {
        "model": {"model_type": "seq2seq", "model_path": str(tmp_path), "from_scratch": True},
        "data": {
            "train_data_paths": write(tmp_path / "rows.jsonl", rows("seq2seq", 4)),
            "cache_dir": str(tmp_path / "cache"),
            "max_length": 16,
        },
        "runner": {"nproc_per_node": 2, "device": "cpu", "logger": {"log_path": str(tmp_path / "runs")}},
    }
    with pytest.raises(ModelError, match="leaves out layers at random in training"):
        dry_run(values)
    assert not (tmp_path / "runs").exists()
