"""An optimizer's class by name: of `torch.optim`, of an installed package, or of a file; and how it steps parts."""

from __future__ import annotations

import importlib
import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import nn

from shardtune.config.user_code import load_function, named_errors
from shardtune.errors import ConfigError
from shardtune.optim.low_bit import ParamGroup

KEY = "actor.optim.name"
REFUSED = {
    "LBFGS": "it evaluates the loss several times per step",
    "SparseAdam": "it takes sparse gradients only",
}
WHOLE, PLAIN = ("Adafactor",), ("Rprop",)
"""Optimizers of torch that cannot step a `DTensor`: they get whole parameters, or parts as plain tensors."""
Way = Literal["parts", "whole", "together"]
"""How an optimizer can step parameters of which ranks have parts: each part by itself, whole parameters one by one, or
only all of them together."""
STEPS, RATE = 12, 1e-3
"""Steps of the trial, as some optimizers begin with another rule, and its learning rate."""
SIZE = (256, 160)
"""Of the trial's matrix; some optimizers treat a smaller dimension than 128 differently."""


def is_of_torch(name: str) -> bool:
    """Whether a recipe's value names a class of `torch.optim`."""
    return ":" not in name


def same_states(one: str, other: str) -> bool:
    """Whether two recipes' values name classes with the same states; a file may have been moved."""
    classes = {name.rpartition(":")[2] for name in (one, other)}
    return len(classes) == 1 or classes == {"Adam", "AdamW"}


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class that a recipe names.

    Args:
        name: of a class in `torch.optim`, package.module:Class, or file.py:Class.

    Raises:
        ConfigError: there is none, or it is no optimizer.
    """
    if not is_of_torch(name):
        return _class_of_others(name)
    known = {
        key: value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and key not in ("Optimizer", *REFUSED)
    }
    if name in REFUSED:
        raise ConfigError(f"actor.optim.name = {name} cannot be used: {REFUSED[name]}", where=KEY, remedy="use AdamW")
    if name not in known:
        raise ConfigError(
            f"actor.optim.name = {name} is not an optimizer of torch.optim",
            where=KEY,
            remedy=f"use one of {', '.join(sorted(known))}; or package.module:Class, or file.py:Class",
        )
    return known[name]


def _class_of_others(spec: str) -> type[torch.optim.Optimizer]:
    module, _, name = spec.rpartition(":")
    if module.endswith(".py"):
        found = load_function(spec, KEY)
    else:
        try:
            found = vars(importlib.import_module(module)).get(name)
        except ImportError as error:
            raise ConfigError(
                f"{module} cannot be imported: {error}", where=f"{KEY}: {spec}", remedy="install it, or use AdamW"
            ) from error
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
        what = "has no such class" if found is None else "is no subclass of torch.optim.Optimizer"
        raise ConfigError(
            f"{spec} {what}", where=f"{KEY}: {spec}", remedy="name an optimizer's class, or use one of torch.optim"
        )
    if modes := [f"{mode}()" for mode in ("train", "eval") if callable(getattr(found, mode, None))]:
        raise ConfigError(
            f"{spec} has {' and '.join(modes)}: its weights in training and in evaluation differ, and nothing would "
            "change them from one to the other",
            where=f"{KEY}: {spec}",
            remedy="use a class without these methods; actor.optim.ema_decay evaluates and exports an average of the "
            "weights with any optimizer",
        )
    return found


_tried: dict[tuple[type, str], Way] = {}


def way_of(name: str, arguments: ParamGroup) -> Way:
    """How a class can step parameters of which ranks have parts; tried once in a process.

    Raises:
        ConfigError: it cannot step at all, or it keeps numbers where no checkpoint has them.
    """
    if is_of_torch(name):
        return "whole" if name in WHOLE else "parts"
    kind = optimizer_class(name)
    key = (kind, repr(sorted(arguments.items())))
    if key not in _tried:
        with named_errors(name, KEY, "step"):
            _tried[key] = _try(name, lambda groups: kind(groups, **arguments))
    return _tried[key]


def _try(name: str, make: Callable[[list[ParamGroup]], torch.optim.Optimizer]) -> Way:
    """Step small parameters: a matrix and a vector together, each half of them as a rank has it, and each alone."""
    rows = SIZE[0] // 2
    matrix, vector = _draw(*SIZE), _draw(SIZE[0])

    def stepped(*chosen: tuple[torch.Tensor, slice]) -> list[torch.Tensor]:
        parameters = [nn.Parameter(values[rows].clone()) for values, rows in chosen]
        optimizer = make([{"params": parameters, "lr": RATE}])
        before = _own_numbers(optimizer)
        for step in range(STEPS):
            for parameter, (values, rows) in zip(parameters, chosen, strict=True):
                parameter.grad = _draw(*values.shape, seed=step)[rows]
            optimizer.step()
        _check_own_numbers(name, before, _own_numbers(optimizer))
        if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
            _check_zero_grad(name, optimizer, parameters)
        return [parameter.detach() for parameter in parameters]

    every, upper, lower = slice(None), slice(0, rows), slice(rows, None)
    whole = stepped((matrix, every), (vector, every))
    of_ranks = [stepped((matrix, part), (vector, part)) for part in (upper, lower)]
    if _same(whole, [torch.cat(parts) for parts in zip(*of_ranks, strict=True)]):
        return "parts"
    alone = [*stepped((matrix, every)), *stepped((vector, every))]
    return "whole" if _same(whole, alone) else "together"


def _draw(*shape: int, seed: int = STEPS) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.allclose(one, other, rtol=1e-9, atol=1e-12) for one, other in zip(some, others, strict=True))


def _own_numbers(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """The numbers that are attributes of the object itself, beside its states and groups."""
    return {
        key: value.tolist() if isinstance(value, torch.Tensor) else value
        for key, value in vars(optimizer).items()
        if not key.startswith("_") and isinstance(value, bool | int | float | torch.Tensor)
    }


def _check_own_numbers(name: str, before: dict[str, object], after: dict[str, object]) -> None:
    changed = sorted(key for key, value in after.items() if key not in before or before[key] != value)
    if changed:
        raise ConfigError(
            f"{name} keeps {', '.join(changed)} outside of `state` and `param_groups`, so checkpoints would lose it",
            where=f"{KEY}: {name}",
            remedy="keep it in self.state[parameter] or in a group, or use another optimizer",
        )


def _check_zero_grad(name: str, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse a `zero_grad` that does anything else than clear gradients: they are cleared without it."""
    before = _leaves([vars(optimizer), parameters])
    with named_errors(name, KEY, "zero_grad"):
        optimizer.zero_grad()
    after = _leaves([vars(optimizer), parameters])
    unchanged = len(before) == len(after) and all(map(_is_same, before, after))
    if not unchanged or any(parameter.grad is not None and parameter.grad.any() for parameter in parameters):
        raise ConfigError(
            f"{name}.zero_grad does something else than clear gradients, and is never called: they are cleared without "
            "it",
            where=f"{KEY}: {name}",
            remedy="do that in its step(), or use another optimizer",
        )


def _leaves(value: object) -> list[object]:
    """The numbers, texts and copies of tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    if isinstance(value, Mapping):
        return [leaf for key, each in value.items() for leaf in (*_leaves(each), key if isinstance(key, str) else None)]
    if isinstance(value, list | tuple | set | deque):
        return [len(value), *(leaf for each in value for leaf in _leaves(each))]
    return [value] if isinstance(value, bool | int | float | str) else []


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and one == other
