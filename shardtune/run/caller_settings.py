"""A run's numbers are those of its recipe, whatever settings of torch the calling script has."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch

from shardtune.config.checks.context import enumerated
from shardtune.parallel.torch_settings import DTYPE, FP32, SETTINGS, exact_fp32

_OWN: Mapping[str, Callable[[object], object]] = {DTYPE: lambda _: torch.float32, FP32: exact_fp32}
"""What a run has in place of a setting of the script."""
_set_by_code: dict[str, object] = {}
"""What a recipe's own code has set in this process: its files are imported once."""

Item = TypeVar("Item")


@contextmanager
def recipe_settings() -> Iterator[None]:
    """Have torch's own default dtype and device, fp32 products as they are, no autocast and gradients inside.

    A warning names what of the script has no effect. What code of the recipe sets stays.
    """
    before = _read()
    replaced = {name: own(before[name]) for name, own in _OWN.items() if before[name] != _set_by_code.get(name)}
    replaced = {name: value for name, value in replaced.items() if value != before[name]}
    _warn(before, replaced)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in _autocasts():
            stack.enter_context(torch.autocast(device, enabled=False))
        if _has_default_device():
            stack.enter_context(torch.device("cpu"))
        for name, value in replaced.items():
            SETTINGS[name][1](value)
        during = _read()
        try:
            yield
        finally:
            for name, now in _read().items():
                if now != during[name]:
                    _set_by_code[name] = now
                elif name in replaced:
                    SETTINGS[name][1](before[name])


def in_recipe_settings(items: Iterator[Item]) -> Iterator[Item]:
    """Items, each of which is computed with `recipe_settings`."""
    while True:
        with recipe_settings():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def _read() -> dict[str, object]:
    return {name: SETTINGS[name][0]() for name in _OWN}


def _autocasts() -> list[str]:
    return [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]


def _has_default_device() -> bool:
    return torch.get_default_device().type != "cpu"


def _warn(before: Mapping[str, object], replaced: Mapping[str, object]) -> None:
    """Name the settings of the script that have no effect."""
    unused, instead = list[str](), list[str]()
    if DTYPE in replaced:
        unused.append(f"the default dtype {before[DTYPE]}")
    if _autocasts():
        unused.append("torch.autocast")
    if unused:
        instead.append(
            "set model.precision there, or make what depends on it in the adapter, with a dtype of its own",
        )
    if FP32 in replaced:
        unused.append("the lower precision of fp32 products (TF32, bf16)")
        instead.append("model.precision: bf16 is the fast way, and a file of plugins may set torch's own flags")
    if _has_default_device():
        unused.append(f"the default device {torch.get_default_device()}")
        instead.append("runner.device chooses the run's")
    if unused:
        warnings.warn(
            f"{enumerated(unused)} of this process {'has' if len(unused) == 1 else 'have'} no effect on the run, whose "
            f"numbers are those of its recipe on any number of ranks: {'; '.join(instead)}",
            stacklevel=5,
        )
