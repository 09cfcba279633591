"""`generate` in methods: transformers' own loop, without what methods need for a user's code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

from shardtune.engine.cuda_alias import PrintedDevice
from shardtune.engine.methods import HOOKS
from shardtune.engine.nn import BaseTrainModule
from shardtune.parallel.direct_use import FOREIGN
from shardtune.parallel.torch_private.modules import forward_hooks
from shardtune.parallel.torch_private.operations import without_modes

VALUES = (bool, int, float, str, type(None), torch.Tensor, np.ndarray, torch.dtype, torch.device)

CODE = (FunctionType, property, classmethod, staticmethod)


def let_generate(module: Any, context: Callable[[], AbstractContextManager[object]]) -> None:
    """Let a module's `generate` run in a context, and without a printed "cuda" where no code of a user's can print it.

    The mode that gives "cuda" its meaning costs a call of Python for each operation, of which a token has hundreds.
    """
    plain = module.generate
    own = has_own_code(module)

    @wraps(plain)
    def generate(*args: Any, **kwargs: Any) -> Any:
        keeps = own or not all(_is_foreign(value) for value in (*args, *kwargs.values())) or has_own_hooks(module)
        with context(), nullcontext() if keeps else without_modes(PrintedDevice):
            return plain(*args, **kwargs)

    vars(module)["generate"] = generate


def has_own_code(module: BaseTrainModule) -> bool:
    """Whether generating with a module may run methods of a user's: ones in place of the model's, or other modules'."""
    bases = type(module).__mro__
    own = [base for base in bases if not _is_library(base)]
    code = {name for kind in own for name, value in vars(kind).items() if isinstance(value, CODE)}
    names = {name for name in code if not name.startswith("__") or name == "__call__"} - HOOKS
    replaced = any(name in vars(base) for base in bases if base not in own for name in names)
    inside = (type(each) for each in module.modules() if each is not module)
    return replaced or any(not _is_library(base) for kind in inside for base in kind.__mro__)


def has_own_hooks(module: nn.Module) -> bool:
    """Whether a user has registered forward hooks in a module."""
    return any(str(hook.__module__).partition(".")[0] not in FOREIGN for hook in forward_hooks(module))


def _is_library(kind: type) -> bool:
    package = kind.__module__.partition(".")[0]
    return package in FOREIGN or package in sys.stdlib_module_names


def _is_foreign(value: object) -> bool:
    """Whether a value runs no code but that of torch and transformers."""
    if isinstance(value, VALUES):
        return True
    if isinstance(value, Mapping):
        return all(_is_foreign(item) for item in value.values())
    if isinstance(value, list | tuple | set):
        return all(_is_foreign(item) for item in value)
    return type(value).__module__.partition(".")[0] in FOREIGN
