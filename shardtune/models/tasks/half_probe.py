"""Finds models whose code takes no half precision before they are trained in it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from shardtune.models.packing_probe import named_cause, takes_no_half
from shardtune.parallel.fp32_compute import computing_in_fp32, may_be_the_models


@torch.no_grad()
def check_half(model: nn.Module, compute: Callable[[], object], tokens: int) -> None:
    """Refuse half precision for a model that fails for a row in it, and computes the row in fp32.

    Args:
        model: of transformers, in half precision.
        compute: computes the row; all ranks call it.
        tokens: of the row.

    Raises:
        ModelError: the model's code takes no half precision.
    """
    problem = _problem(compute)
    if problem is None:
        return
    with computing_in_fp32():
        in_full = _problem(compute)
    if in_full is None:
        raise takes_no_half(model, tokens, named_cause(problem)) from problem


def _problem(compute: Callable[[], object]) -> Exception | None:
    try:
        compute()
    except Exception as error:  # a model's code is third-party and may raise anything
        if not may_be_the_models(error):
            raise
        return error
    return None
