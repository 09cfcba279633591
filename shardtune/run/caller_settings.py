"""A run's numbers are those of its recipe, whatever settings of torch the calling script has."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import TypeVar

import torch

from shardtune.config.checks.context import enumerated
from shardtune.parallel.torch_settings import DTYPE, FP32, SETTINGS, exact_fp32

_OWN: Mapping[str, Callable[[object], object]] = {DTYPE: lambda _: torch.float32, FP32: exact_fp32}
"""What a run has in place of a setting of the script."""
_DEVICE = "default device"
_set_by_code: dict[str, object] = {}
"""What a recipe's own code has set in this process: its files are imported once."""

Item = TypeVar("Item")


class _OfProcess:
    """The settings that all threads share: the first call of those in progress replaces them, the last one ends that.

    Attributes:
        lock: held while they are read and set.
        calls: in progress, of all threads.
        replaced: the script's values, by name, of those that are replaced.
        during: what the first call began with.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.calls = 0
        self.replaced: dict[str, object] = {}
        self.during: dict[str, object] = {}

    def begin(self) -> Mapping[str, object]:
        """Count a call; returns the script's values that are replaced for it."""
        with self.lock:
            self.calls += 1
            if self.calls > 1:
                return {}
            before = _read()
            own = {name: own(before[name]) for name, own in _OWN.items() if before[name] != _set_by_code.get(name)}
            self.replaced = {name: before[name] for name, value in own.items() if value != before[name]}
            for name in self.replaced:
                SETTINGS[name][1](own[name])
            self.during = _read() if self.replaced else before
            return self.replaced

    def end(self) -> None:
        with self.lock:
            self.calls -= 1
            if self.calls:
                return
            for name, now in _read().items():
                if now != self.during[name]:
                    _set_by_code[name] = now
                elif name in self.replaced:
                    SETTINGS[name][1](self.replaced[name])


_OF_PROCESS = _OfProcess()


@contextmanager
def recipe_settings() -> Iterator[None]:
    """Have torch's own default dtype and device, fp32 products as they are, no autocast and gradients inside.

    A warning names what of the script has no effect. What code of the recipe sets stays.
    """
    replaced = _OF_PROCESS.begin()
    try:
        _warn(replaced)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            for device in _autocasts():
                stack.enter_context(torch.autocast(device, enabled=False))
            if _has_default_device():
                stack.enter_context(torch.device("cpu"))
            yield
            if _has_default_device():
                _set_by_code[_DEVICE] = torch.get_default_device()
    finally:
        _OF_PROCESS.end()


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
    device = torch.get_default_device()
    return device.type != "cpu" and device != _set_by_code.get(_DEVICE)


def _warn(replaced: Mapping[str, object]) -> None:
    """Name the settings of the script that have no effect, `replaced` by name among them."""
    unused, instead = list[str](), list[str]()
    if DTYPE in replaced:
        unused.append(f"the default dtype {replaced[DTYPE]}")
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
