"""Models (RWKV) that change their weights to evaluate, and change them back to train."""

from __future__ import annotations

from copy import copy
from typing import Any

from transformers import PreTrainedModel


def keep_weights(model: PreTrainedModel) -> None:
    """Switch off that a model changes its weights to evaluate: a checkpoint after an evaluation would be wrong.

    Its config stays as it is, for `final/`; without the change the same logits are computed, in fp32 and bf16.
    """
    if not _rescales(model):
        return
    inner: Any = model.base_model
    if inner.layers_are_rescaled:
        inner.train()
        inner._rescale_layers()
    inner.config = copy(model.config)
    inner.config.rescale_every = 0


def restore_rescaling(model: PreTrainedModel) -> None:
    """Let a model do so again, which `keep_weights` has switched off."""
    if _rescales(model):
        inner: Any = model.base_model
        inner.config = model.config


def _rescales(model: PreTrainedModel) -> bool:
    """Whether a model (RWKV) halves weights of its later layers in place to evaluate, and doubles them to train."""
    return "rescale_every" in model.config.to_dict()
