"""A run's numbers are those of its recipe, whatever settings of torch the calling script has."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from shardtune.config.checks.context import enumerated

_set_by_code: torch.dtype | None = None
"""The default dtype that a recipe's own code has set in this process: its files are imported once."""


@contextmanager
def recipe_settings() -> Iterator[None]:
    """Have torch's own default dtype, no autocast and gradients inside, as the command has; a warning names the rest.

    A default dtype that code of the recipe sets stays.
    """
    global _set_by_code
    before, unused = torch.get_default_dtype(), _unused()
    if unused:
        warnings.warn(
            f"{enumerated(unused)} of this process {'has' if len(unused) == 1 else 'have'} no effect on the run, whose "
            "numbers are those of its recipe on any number of ranks: set model.precision there, or make what depends "
            "on it in the adapter, with a dtype of its own",
            stacklevel=4,
        )
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if _replaces(before):
            torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            now = torch.get_default_dtype()
            if now != torch.float32:
                _set_by_code = now
            elif _replaces(before):
                torch.set_default_dtype(before)


def _replaces(dtype: torch.dtype) -> bool:
    return dtype not in (torch.float32, _set_by_code)


def _unused() -> list[str]:
    dtype = torch.get_default_dtype()
    found = [f"the default dtype {dtype}"] if _replaces(dtype) else []
    if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        found.append("torch.autocast")
    return found
