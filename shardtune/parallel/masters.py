"""Full-precision masters of parameters that compute in half precision, where FSDP2 does not hold them: on one process,
and of what a rank holds whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardtune.parallel.shown_gradients import Pair, ShownGradients
from shardtune.parallel.torch_private.tensors import version_of


class Masters:
    """The masters beside a model, which are updated, and the parameters that compute with copies of them.

    Args:
        compute: the dtype of the computation.

    Attributes:
        pairs: by name, the parameters that compute and their masters.
        is_watched: whether `note` is to be called after each update.
    """

    def __init__(self, compute: torch.dtype) -> None:
        self._compute = compute
        self.pairs: dict[str, Pair] = {}
        self._narrowed: list[nn.Parameter] = []
        self._noted: dict[str, int] = {}
        self.is_watched = False
        self._hooks: list[RemovableHandle] = []
        self._shown = ShownGradients()

    def keep(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """Turn a parameter to half precision in place; returns what is updated in its place.

        That is a master, to which a hook adds the parameter's gradients; or the parameter itself, if it is not trained
        and loses nothing in half precision.
        """
        if not parameter.requires_grad and _fits(parameter, self._compute):
            parameter.data = parameter.data.to(self._compute)
            self._narrowed.append(parameter)
            return parameter
        master = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        parameter.data = parameter.data.to(self._compute)
        if parameter.requires_grad:
            take = partial(self._shown.take, master)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(take))
        self.pairs[name] = parameter, master
        return master

    def keep_only(self, names: Collection[str]) -> dict[str, nn.Parameter]:
        """Forget the masters of parameters that the model no longer has; returns the others, by name."""
        self.pairs = {name: pair for name, pair in self.pairs.items() if name in names}
        return {name: master for name, (_, master) in self.pairs.items()}

    def restore(self, dtype: torch.dtype) -> None:
        """Give the model its parameters in full precision, and remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        for computed, master in self.pairs.values():
            computed.data = master.data
        for parameter in self._narrowed:
            parameter.data = parameter.data.to(dtype)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model's parameters have the masters' values, for what reads modules; nothing is copied."""
        halves = {name: computed.data for name, (computed, _) in self.pairs.items()}
        try:
            for computed, master in self.pairs.values():
                computed.data = master.data
            yield
        finally:
            for name, half in halves.items():
                self.pairs[name][0].data = half

    def note(self) -> None:
        """Note how often each parameter that computes has been changed in place, for `written`."""
        self._noted = {name: version_of(computed) for name, (computed, _) in self.pairs.items()}

    @torch.no_grad()
    def written(self) -> list[str]:
        """The names of those whose parameter that computes was changed since the last note, or has other values."""
        return [
            name
            for name, (computed, master) in self.pairs.items()
            if version_of(computed) != self._noted.get(name) or not torch.equal(computed, master.to(computed))
        ]

    def showing_gradients(self) -> AbstractContextManager[None]:
        """Inside, gradients stand at the parameters that compute, too, and what is done with them there counts."""
        return self._shown.showing([*self.pairs.values()])

    def settle_gradients(self) -> None:
        """Take over what was done with gradients at the parameters that compute."""
        self._shown.settle([*self.pairs.values()])


def _fits(parameter: nn.Parameter, dtype: torch.dtype) -> bool:
    """Whether another dtype holds the same values."""
    return bool((parameter.detach().to(dtype).to(parameter.dtype) == parameter).all())
