"""How rows share a forward: what is prepared, what can be switched off, and the arguments of a forward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from shardtune.batch import Sample
from shardtune.data.loader.packing import pack
from shardtune.errors import ModelError
from shardtune.models.attention_implementation import attention_name
from shardtune.models.packed_attention import DOCUMENTS
from shardtune.models.packing_limit import PackingLimit
from shardtune.models.row_sharing import RowSharing

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def packed(*lengths: int):
    samples = [Sample(np.arange(length, dtype=np.int32), np.ones(length, np.float32)) for length in lengths]
    return pack(samples, range(len(samples)), {"ce": 1.0})


def test_rows_are_packed_with_our_attention_until_that_is_switched_off() -> None:
    model, sharing = llama(), RowSharing("auto", None)
    own = attention_name(model)
    sharing.prepare(model)
    assert (sharing.packs, sharing.attention, attention_name(model)) == (True, DOCUMENTS, DOCUMENTS)
    batch = packed(3, 2)
    arguments = sharing.arguments(batch, batch.position_ids)
    assert arguments.keys() == {"position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    places = arguments["position_ids"]
    assert isinstance(places, torch.Tensor)
    assert places.tolist() == [[0, 1, 2, 0, 1]]
    assert not sharing.share_by_length(True), "packed rows need no common length"
    sharing.one_row_per_forward(model)
    assert (sharing.packs, attention_name(model)) == (False, own)
    assert sharing.arguments(batch, batch.position_ids) == {}


def test_rows_of_one_length_are_a_batch_where_an_adapter_allows_it() -> None:
    sharing = RowSharing("eager", None)
    assert sharing.share_by_length(True)
    assert [sharing.sequences(packed(*lengths)) for lengths in ((7, 7, 7), (7, 7, 6), (7,))] == [3, 1, 1]
    assert not sharing.share_by_length(False)
    sharing.batches = False
    assert not sharing.share_by_length(True)


def test_an_attention_that_a_recipe_names_is_left() -> None:
    model, sharing = llama(), RowSharing("eager", None)
    model.set_attn_implementation("eager")
    sharing.prepare(model)
    assert sharing.attention == attention_name(model) == "eager"


def test_rows_that_are_packed_for_good_have_a_longest() -> None:
    sharing = RowSharing("auto", PackingLimit(8, "attention is within chunks"))
    sharing.prepare(llama())
    sharing.check_longest(8, str)
    assert sharing.too_long == ""
    sharing.prove()
    with pytest.raises(ModelError, match="attention is within chunks, and a row has 9 tokens, more than 8") as error:
        sharing.check_longest(9, lambda: "rows.jsonl:7")
    assert error.value.where == "rows.jsonl:7"
    assert "data.max_length to 8" in str(error.value)


def test_the_longest_of_several_sets_counts() -> None:
    sharing = RowSharing("auto", PackingLimit(8, "attention is within chunks"))
    for tokens in (9, 3):
        sharing.check_longest(tokens, str)
    assert "a row has 9 tokens" in sharing.too_long


def test_what_is_switched_off_for_a_while_is_on_again() -> None:
    model, sharing = state_model(), RowSharing("auto", None)
    sharing.prepare(model)
    sharing.mix_row_by_row()
    attention, forward = sharing.attention, model.model.layers[0].linear_attn.forward
    with sharing.kept(model):
        sharing.one_row_per_forward(model)
        sharing.share_by_length(True)
        assert (sharing.packs, sharing.by_length) == (False, True)
        assert model.model.layers[0].linear_attn.forward is not forward
    assert (sharing.packs, sharing.by_length, sharing.attention) == (True, False, attention)
    assert attention_name(model) == attention
    assert "forward" in vars(model.model.layers[0].linear_attn), "each row runs through it by itself"


def state_model() -> Qwen3_5ForCausalLM:
    config = Qwen3_5TextConfig(
        **{**SIZES, "num_hidden_layers": 2}, head_dim=8, num_key_value_heads=1, linear_num_key_heads=2,
        layer_types=["linear_attention", "full_attention"], linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(config).double()


def test_within_a_block_sequences_are_whole_and_attention_another() -> None:
    model, sharing = state_model(), RowSharing("auto", None)
    sharing.prepare(model)
    assert sharing.mix_row_by_row()
    tokens = torch.arange(5)[None]
    with torch.no_grad(), sharing.unpacked(model, "eager"):
        whole = model(input_ids=tokens, use_cache=False).logits
    sharing.arguments(packed(3, 2), torch.zeros(5, dtype=torch.int64))  # a forward of two rows follows
    with torch.no_grad(), sharing.unpacked(model, "eager"):
        assert attention_name(model) == "eager"
        torch.testing.assert_close(model(input_ids=tokens, use_cache=False).logits, whole, rtol=0, atol=1e-12)
    assert attention_name(model) == sharing.attention
