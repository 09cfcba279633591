"""Heads are read by the names that all configs share, and layouts that they do not allow are refused."""

from __future__ import annotations

import pytest
from transformers import GPT2Config, LlavaConfig, MambaConfig, Qwen2Config

from shardtune.config.rank_layout import Layout
from shardtune.errors import ParallelError
from shardtune.models.attention_heads import check_heads_of, forms_ring, heads_of
from shardtune.parallel.tensor_parallel import Heads

QWEN = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}


def test_heads_have_other_names_in_some_configs() -> None:
    assert heads_of(GPT2Config(n_head=6, n_embd=48)) == Heads(6, 6, 8)
    assert heads_of(Qwen2Config(**QWEN, head_dim=16)) == Heads(6, 2, 16)
    assert heads_of(LlavaConfig(text_config={"model_type": "qwen2", **QWEN})) == Heads(6, 2, 8)
    assert heads_of(MambaConfig()) is None


def test_layouts_that_the_heads_do_not_allow_are_refused() -> None:
    check_heads_of(MambaConfig(), Layout(shard=4))
    with pytest.raises(ParallelError, match="a mamba has no attention heads"):
        check_heads_of(MambaConfig(), Layout(tensor=2))
    check_heads_of(GPT2Config(n_head=6, n_embd=48, attn_pdrop=0.1), Layout(tensor=3))
    with pytest.raises(ParallelError, match="4 ranks cannot share 6 heads"):
        check_heads_of(GPT2Config(n_head=6, n_embd=48), Layout(tensor=4))
    ring = Layout(sequence=4, sequence_method="ring")
    assert forms_ring(GPT2Config(n_head=6, n_embd=48), ring)
    with pytest.raises(ParallelError, match=r"ring attention has no dropout .*attn_pdrop is 0.1"):
        check_heads_of(GPT2Config(n_head=6, n_embd=48, attn_pdrop=0.1), ring)
