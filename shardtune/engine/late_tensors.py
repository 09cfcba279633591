"""Parameters, buffers and hooks on gradients that a module gets after it was built, on one rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from shardtune.engine.nn import BaseTrainModule
from shardtune.engine.offload import optimizers_of
from shardtune.errors import ModelError
from shardtune.parallel.gradient_hooks import uncalled_hook
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.torch_private.tensors import num_gradient_hooks, num_value_hooks
from shardtune.parallel.weights import Weights


class LateTensors:
    """What methods of a module have made of its parameters and buffers; every method is called on all ranks alike.

    Args:
        module: on its ranks.
        weights: of it.
        name: of the user's class.
        ranks: of the engine.
    """

    def __init__(self, module: BaseTrainModule, weights: Weights, name: str, ranks: Ranks) -> None:
        self._module, self._weights, self._name = module, weights, name
        self._made: dict[str, str] = {}
        self._divided = ranks.mesh is not None
        # FSDP2 calls those that take the parameter, once its gradient is summed.
        self._num_hooks = num_gradient_hooks if ranks.layout.flat else num_value_hooks
        self._hooks: dict[str, int] = {}
        self._is_hooked = False

    def note_hooks(self) -> None:
        """Note the hooks on gradients before a method of the user's, which are not the user's."""
        if self._divided and not self._is_hooked:
            self._hooks = {name: self._num_hooks(parameter) for name, parameter in self._weights.parameters.items()}

    def check_hooks(self) -> None:
        """Refuse hooks on gradients that a method has registered and nothing calls: ranks have parts of gradients."""
        for name, before in self._hooks.items():
            if self._num_hooks(self._weights.parameters[name]) > before:
                self._is_hooked = True
                raise uncalled_hook(
                    name,
                    "the parameter is held in parts",
                    ""
                    if self._num_hooks is num_gradient_hooks
                    else "; a register_post_accumulate_grad_hook is called, too",
                )

    def adopt(self, ranks: Ranks) -> list[str]:
        """Let parameters that `on_weights_materialized` has made be synchronised and saved as the others are.

        Returns:
            Notes for the user.

        Raises:
            ModelError: ranks have made different ones.
        """
        added = self._weights.added()
        if ranks.layout.flat and any(_is_copy(p, self._weights.parameters.values()) for p in added.values()):
            raise _copied()  # fsdp1 gives what is copied this rank's part of it
        made = ranks.gather({name: (tuple(p.shape), str(p.dtype)) for name, p in added.items()})
        if any(other != made[0] for other in made):
            rank = next(rank for rank, other in enumerate(made) if other != made[0])
            raise ModelError(
                f"rank 0 makes the parameters {made[0]}, rank {rank} {made[rank]}",
                where="on_weights_materialized",
                remedy="make the same ones on every rank",
            )
        self._weights.adopt(added)
        if not added or ranks.world_size == 1:
            return []
        return [
            f"{len(added)} parameters made in on_weights_materialized are whole on every rank, with rank 0's "
            f"values: {_few(added)}; made in __init__ they would be sharded"
        ]

    def check_none(self, method: str, *, ran: bool = True) -> None:
        """Refuse parameters and buffers that a method has made: no other rank has the same values, and nothing saves
        them.

        Args:
            method: of the user's, that has run; or of the engine's, that is to run.
            ran: which of both.
        """
        added, buffers = self._weights.added(), self._weights.added_buffers()
        self._made = {name: self._made.get(name, method if ran else "a method") for name in (*added, *buffers)}
        if added or buffers:
            made = f"parameters {_few(added)}" if added else f"buffers {_few(buffers)}"
            by = next(iter(self._made.values()))
            again = "" if by == method else ", and the module still has them"
            raise ModelError(
                f"{by} has made the {made} after the module was built: they are neither synchronised nor saved{again}",
                where=f"{self._name}.{method}",
                remedy="make them in on_weights_materialized, or in __init__"
                + (f"; del self.{next(iter(self._made))} in a method removes it" if again else ""),
            )

    def check_optimizers(self, method: str) -> None:
        """Refuse optimizers of the module with tensors that are not its parameters: their gradients are not summed over
        ranks.

        Args:
            method: of the user's, that has run.
        """
        own = {id(parameter) for parameter in self._weights.parameters.values()}
        for name, optimizer in optimizers_of(self._module).items():
            for tensor in (tensor for group in optimizer.param_groups for tensor in group["params"]):
                if id(tensor) not in own:
                    raise ModelError(
                        f"self.{name} trains a tensor {list(tensor.shape)} that is no parameter of the module: its "
                        "gradient would be that of each rank's own rows, and nothing saves it",
                        where=f"{self._name}.{method}",
                        remedy="make it one in __init__ or on_weights_materialized: self.log_alpha = "
                        "torch.nn.Parameter(…), self.critics = torch.nn.ModuleList([…])",
                    )


@contextmanager
def refusing_copies() -> Iterator[None]:
    """Inside, a `deepcopy` of what is sharded, which torch refuses, is refused with what to do instead.

    Raises:
        ModelError: in place of torch's error.
    """
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        if "FSDP does not support deepcopy" in str(error) or "support the deepcopy protocol" in str(error):
            raise _copied() from error
        raise


def _is_copy(made: torch.nn.Parameter, own: Collection[torch.nn.Parameter]) -> bool:
    """Whether a parameter has the numbers of this rank's part of another; ones and zeros are no copy of others."""
    if made.ndim != 1 or bool((made == made[:1]).all()):
        return False
    return any(torch.equal(made, p) for p in own if p.shape == made.shape)


def _copied() -> ModelError:
    return ModelError(
        "on several ranks a module is copied before its weights are divided",
        where="copy.deepcopy(…)",
        remedy="make the copy in __init__ (self.ema = copy.deepcopy(self.net)), and where weights are loaded from "
        "elsewhere give it theirs in on_weights_materialized (fsdp2, ddp), under torch.no_grad(): for mine, other in "
        "zip(self.ema.parameters(), self.net.parameters()): mine.copy_(other)",
    )


def _few(names: Collection[str]) -> str:
    return f"{', '.join([*names][:3])}{', …' if len(names) > 3 else ''}"
