"""Switches dropout off: what it drops depends on the cut of a step into micro-batches, other numbers do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shardtune.models.adapter import Adapter
from shardtune.models.causal_lm import CausalLM
from shardtune.parallel.torch_private.modules import DropoutBase

RANDOM = ("drop", "jitter")
"""Parts of the names of settings of transformers' configs that make a forward random in training."""
PLUGIN = "shardtune.verify.claims.no_dropout"
"""A recipe's plugin that switches it off in a whole process."""


def drops(model: nn.Module) -> bool:
    """Whether a model has layers that drop."""
    return any(isinstance(module, DropoutBase) and module.p for module in model.modules())


def random_settings(adapter: Adapter | None) -> dict[str, object]:
    """The settings of a language model's config that draw in training, set to 0."""
    if not isinstance(adapter, CausalLM):
        return {}
    values = adapter.config.get_text_config().to_dict()
    return {
        name: 0.0
        for name, value in values.items()
        if any(part in name for part in RANDOM) and isinstance(value, float) and value
    }


def parts_drop(adapter: Adapter | None) -> bool:
    """Whether a part of a language model beside its text (a vision tower) has a setting that drops in training.

    Its attention passes the number to a function, so no layer shows it.
    """
    if not isinstance(adapter, CausalLM):
        return False
    return any(isinstance(part, dict) and _has_dropout(part) for part in adapter.config.to_dict().values())


def _has_dropout(settings: Mapping[object, object]) -> bool:
    nested = any(_has_dropout(value) for value in settings.values() if isinstance(value, dict))
    return nested or any(
        "drop" in str(name) and isinstance(value, float) and value > 0 for name, value in settings.items()
    )


def switch_off() -> None:
    """From now on torch's dropout passes its input on, and its attention drops nothing."""
    attention = F.scaled_dot_product_attention

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **settings: Any,
    ) -> Tensor:
        return attention(query, key, value, attn_mask, 0.0, is_causal, **settings)

    F.dropout, F.scaled_dot_product_attention = _passed_on, attend


@contextmanager
def without_dropout() -> Iterator[None]:
    """Inside, it is switched off."""
    dropout, attention = F.dropout, F.scaled_dot_product_attention
    switch_off()
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention = dropout, attention


def _passed_on(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return input
