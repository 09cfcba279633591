"""Which way ranks share the attention of a language model's sequences, and what is refused before they start."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from shardtune.config.rank_layout import Layout
from shardtune.errors import ParallelError
from shardtune.models.causal_lm import CausalLM


def adapter(heads: int, key_value_heads: int, attention: str = "auto", dropout: float = 0.0) -> CausalLM:
    config = LlamaConfig(
        hidden_size=8 * heads,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        attention_dropout=dropout,
    )
    return CausalLM(config, attn_implementation=attention)


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "layout", "ring"),
    [
        (4, 2, Layout(), False),
        (4, 2, Layout(sequence=2), False),
        (4, 2, Layout(sequence=4), False),
        (4, 2, Layout(sequence=8), True),
        (3, 1, Layout(sequence=2), True),
        (6, 3, Layout(sequence=2), True),
        (4, 2, Layout(sequence=2, tensor=2), False),
        (4, 2, Layout(sequence=4, tensor=2), True),
        (4, 2, Layout(sequence=2, sequence_method="ring"), True),
    ],
)
def test_ranks_that_do_not_divide_heads_form_a_ring(
    heads: int, key_value_heads: int, layout: Layout, ring: bool
) -> None:
    made = adapter(heads, key_value_heads)
    made.check_layout(layout)
    assert made.rings(layout) == ring


@pytest.mark.parametrize(
    ("made", "layout", "message"),
    [
        (adapter(3, 1), Layout(sequence=2, sequence_method="ulysses"), "3 heads of queries and 1 of keys"),
        (adapter(3, 1), Layout(sequence=2, sequence_method="ulysses"), "parallel.sequence_method: auto"),
        (adapter(3, 1), Layout(sequence=2, tensor=2), "nearest that fits is tensor 1"),
        (adapter(3, 1, dropout=0.1), Layout(sequence=2), "attention_dropout is 0.1"),
        (adapter(4, 2, "sdpa"), Layout(sequence=2), "attn_implementation sdpa cannot share sequences"),
    ],
)
def test_what_a_layout_cannot_do_is_refused(made: CausalLM, layout: Layout, message: str) -> None:
    with pytest.raises(ParallelError) as refused:
        made.check_layout(layout)
    assert message in str(refused.value)


def test_dropout_on_attention_is_left_to_heads() -> None:
    adapter(4, 2, dropout=0.1).check_layout(Layout(sequence=2))
