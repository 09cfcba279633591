"""Heads and declared units of a module, before anything is divided among ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import shardtune
from shardtune import nn
from shardtune.config.rank_layout import Layout
from shardtune.engine.module_layout import gathered_units, share_matrices
from shardtune.errors import ModelError, ParallelError
from shardtune.parallel.ranks import Ranks


def language_model(heads: int, key_value: int) -> Qwen2ForCausalLM:
    sizes = {"hidden_size": 8 * heads, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32}
    with shardtune.init_empty_weights():
        return Qwen2ForCausalLM(Qwen2Config(num_attention_heads=heads, num_key_value_heads=key_value, **sizes))


class Pair(nn.Fsdp2TrainModule):
    """Two models, whose layers may be declared as units."""

    def __init__(self, *models: Qwen2ForCausalLM) -> None:
        super().__init__()
        self.models = torch.nn.ModuleList(models)


def ranks(**layout: Any) -> Ranks:
    return Ranks(0, 4, torch.device("cpu"), layout=Layout(**layout))


def test_models_of_different_heads_share_matrices_only_where_all_have_enough() -> None:
    pair = Pair(language_model(8, 2), language_model(4, 4))
    with pytest.raises(ParallelError, match=r"one has 2 of keys and values, fewer than 4 tensor ranks") as error:
        share_matrices(pair, ranks(tensor=4))
    assert error.value.remedy == "use tensor_parallel_size=2"


def test_sequences_are_exchanged_by_heads_unless_ranks_send_keys_around() -> None:
    few = Pair(language_model(2, 1))
    assert not share_matrices(few, ranks(sequence=4)).partial  # ring attention, as there are fewer heads than ranks
    with pytest.raises(ParallelError, match="heads"):
        share_matrices(few, ranks(sequence=4, sequence_method="ulysses"))


def test_declared_units_that_a_module_lacks_are_refused() -> None:
    pair = Pair(language_model(4, 4))
    assert len(gathered_units(pair)) >= 2
    Pair.non_split_modules = (torch.nn.LSTM,)
    try:
        with pytest.raises(ModelError, match=r"no module of Pair is a LSTM") as error:
            gathered_units(pair)
    finally:
        del Pair.non_split_modules
    assert "Qwen2DecoderLayer" in (error.value.remedy or "")
