"""`generate` of transformers on several ranks: answers of different length, with equally many forwards on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import Cache

MASKS = ("attention_mask", "decoder_attention_mask")
CACHES = ("cache", "past_key_values")
"""The argument with a model's cache: from transformers 5.24 on, and before."""
ALONE = "_shardtune_alone"
"""Marks a model whose weights are gathered: each rank's answers end by themselves."""


def keep_step(model: Any) -> None:
    """Let `generate` run forwards until the answers of all ranks have ended; what it computes after its own is dropped.

    For those forwards transformers lengthens the mask, but not the tokens. A model without a cache, which gets all
    tokens each time, would get a mask that is longer than they are.

    Args:
        model: a `GenerationMixin`, sharded; its `generate` has to be called by all ranks.
    """
    vars(model)["_is_fsdp_managed_module"] = True  # what transformers looks for
    prepare, has_unfinished = model.prepare_inputs_for_generation, model._has_unfinished_sequences
    more = dict.fromkeys(MASKS, 0)  # by how many columns a mask is longer than the tokens at first

    @wraps(prepare)
    def inputs(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        for name in MASKS:
            mask = kwargs.get(name)
            if mask is None or mask.ndim != 2:
                continue
            if kwargs.get("is_first_iteration"):
                more[name] = mask.shape[1] - input_ids.shape[1]
            elif not any(_is_filled(kwargs.get(cache)) for cache in CACHES):
                kwargs[name] = mask[:, : input_ids.shape[1] + more[name]]
        return prepare(input_ids, *args, **kwargs)

    @wraps(has_unfinished)
    def unfinished(ended: bool, synced_gpus: bool, *args: Any, **kwargs: Any) -> bool:
        return has_unfinished(ended, synced_gpus and not vars(model).get(ALONE, False), *args, **kwargs)

    vars(model)["prepare_inputs_for_generation"] = inputs
    vars(model)["_has_unfinished_sequences"] = unfinished


@contextmanager
def alone(models: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, the forwards of `generate` involve no other rank, and end with this one's answers."""
    for model in models:
        vars(model)[ALONE] = True
    try:
        yield
    finally:
        for model in models:
            del vars(model)[ALONE]


def _is_filled(cache: object) -> bool:
    """Whether the model keeps tokens in a cache, which such a forward adds to."""
    return cache.get_seq_length() > 0 if isinstance(cache, Cache) else cache is not None
