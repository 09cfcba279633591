"""Hooks on the gradient of a parameter, which a parameter in parts has no place for."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from shardtune.errors import ModelError
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.torch_private.tensors import num_gradient_hooks


def refuse_gradient_hooks(
    parameters: Iterable[tuple[str, torch.Tensor]], ranks: Ranks, *, own: Collection[str] = ()
) -> None:
    """Refuse hooks on gradients that would not be called.

    A parameter without values is replaced when it gets them. On several ranks its whole gradient never is that of a
    parameter: it is divided, and the parts are added to those of the other ranks.

    Args:
        parameters: with their names.
        ranks: that hold them.
        own: the names of those with a hook that is not a user's.

    Raises:
        ModelError: a parameter has such a hook.
    """
    for name, parameter in parameters:
        if num_gradient_hooks(parameter) > (name in own) and (parameter.is_meta or ranks.mesh is not None):
            raise uncalled_hook(
                name, "the model is built without values" if parameter.is_meta else "the parameter is held in parts"
            )


def uncalled_hook(name: str, why: str, also: str = "") -> ModelError:
    """The error for a hook on the gradient of a parameter.

    Args:
        name: of the parameter.
        why: nothing calls the hook.
        also: another remedy.
    """
    return ModelError(
        f"a hook on the gradient of {name} (register_hook, register_post_accumulate_grad_hook) is not called: {why}",
        where=name,
        remedy="scale the loss or the input of the module instead, or give the module a "
        f"register_full_backward_hook, which is called on any number of ranks{also}",
    )
