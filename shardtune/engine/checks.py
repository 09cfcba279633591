"""What a `TrainEngine` cannot be made of, and arguments of its methods that would do harm or nothing."""

from __future__ import annotations

from typing import get_args

import torch
from torch import nn

from shardtune.engine.rank_module import PRECISIONS
from shardtune.engine.requested_layout import Executor
from shardtune.engine.split_arguments import is_whole
from shardtune.errors import ModelError, ParallelError
from shardtune.parallel.gradient_hooks import uncalled_hook
from shardtune.parallel.meta_init import persistent_buffers
from shardtune.parallel.torch_private.tensors import num_gradient_hooks


def check_options(executor: object, precision: object, seed: object, gather_to_generate: object) -> None:
    """Refuse values of `TrainEngine(…)` that are not among those it has."""
    executors, precisions = get_args(Executor), [*PRECISIONS.values()]
    if executor not in executors:
        raise ParallelError(
            f"there is no executor {executor!r}",
            where="TrainEngine(executor=…)",
            remedy=f"use {', '.join(executors)}",
        )
    if precision is not None and precision not in precisions:
        raise ParallelError(
            f"there is no precision {precision!r}",
            where="TrainEngine(precision=…)",
            remedy=f"use {', '.join(precisions)}",
        )
    if not is_whole(seed, 0):
        raise ParallelError(f"the seed is {seed!r}", where="TrainEngine(seed=…)", remedy="use a whole number from 0 on")
    if gather_to_generate not in (None, True, False):
        raise ParallelError(
            f"gather_to_generate is {gather_to_generate!r}",
            where="TrainEngine(gather_to_generate=…)",
            remedy="use True, False or None",
        )


def check_buffers(module: nn.Module) -> None:
    """Refuse buffers without values that no source of weights holds."""
    kept = {id(buffer) for buffer in persistent_buffers(module).values()}
    for name, buffer in module.named_buffers():
        if buffer.is_meta and id(buffer) not in kept:
            raise ModelError(
                f"the buffer {name} of {type(module).__name__} has no values, and weights do not hold it",
                where="torch.device('meta')",
                remedy="make the module inside shardtune.init_empty_weights(), which keeps buffers; compute in forward "
                "what depends on parameters",
            )


def check_dtype(dtype: object, method: str) -> None:
    """Refuse what weights cannot be exported as: whole numbers would round them to 0 and 1."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ModelError(
            f"the dtype {dtype!r} is no floating dtype of torch",
            where=f"{method}(dtype=…)",
            remedy="give torch.bfloat16, torch.float16, torch.float32 or torch.float64",
        )


def no_engine(given: object, where: str) -> ParallelError:
    """The error of something else where a built engine is meant."""
    return ParallelError(
        f"a {type(given).__name__} is no engine", where=where, remedy="give a TrainEngine that is built"
    )


def check_hooks(module: nn.Module) -> None:
    """Refuse hooks on gradients, which torch leaves out of the copy that a rank gets."""
    for name, parameter in module.named_parameters():
        if num_gradient_hooks(parameter):
            raise uncalled_hook(
                name,
                "ranks work on copies of the module, which are made without it",
                "; on one rank register it in on_weights_materialized",
            )
