"""The attention heads of a config of transformers, and the layouts that they allow."""

from __future__ import annotations

from transformers import PreTrainedConfig

from shardtune.config.rank_layout import Layout
from shardtune.errors import ParallelError
from shardtune.models.packed_attention import check_no_dropout
from shardtune.parallel.tensor_parallel import Heads, check_heads


def heads_of(config: PreTrainedConfig) -> Heads | None:
    """The heads of a model's text part, by the names that all configs share; None for a model without."""
    text = config.get_text_config()
    values, names = text.to_dict(), text.attribute_map

    def number(name: str) -> int | None:
        return values.get(names.get(name, name))

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    if heads is None or hidden is None:
        return None
    return Heads(heads, number("num_key_value_heads") or heads, number("head_dim") or hidden // heads)


def shared_heads(config: PreTrainedConfig) -> Heads:
    """The heads that ranks are to share.

    Raises:
        ParallelError: there are none.
    """
    heads = heads_of(config)
    if heads is None:
        raise ParallelError(
            f"a {config.get_text_config().model_type} has no attention heads (num_attention_heads), which ranks could "
            "share",
            where="actor.parallel",
            remedy="leave tensor and sequence out: ranks share the rows then, and the weights",
        )
    return heads


def forms_ring(config: PreTrainedConfig, layout: Layout) -> bool:
    """Whether ranks that share sequences send each other keys and values instead of heads."""
    if layout.sequence == 1:
        return False
    heads = shared_heads(config)
    return layout.rings(heads.query, heads.key_value)


def check_heads_of(config: PreTrainedConfig, layout: Layout) -> None:
    """Refuse a layout whose ranks cannot share the heads, or that forms a ring where attention has dropout."""
    if layout.tensor == layout.sequence == 1:
        return
    heads = shared_heads(config)
    if forms_ring(config, layout):
        check_heads(heads, layout.tensor, 1)
        values = config.get_text_config().to_dict()
        where = "actor.parallel.sequence_method"
        check_no_dropout(values, where, lambda name: f"set actor.model.config_overrides: {{{name}: 0.0}}")
    else:
        ring = ", or set actor.parallel.sequence_method: auto" if layout.sequence > 1 else ""
        check_heads(heads, layout.tensor, layout.sequence, ring)
