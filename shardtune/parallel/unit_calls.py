"""Whether ranks gather the same units' weights, and sum the same gradients, in the same order.

A gathering is told from another by its place in the order alone. If rank 0 calls unit A where rank 1 calls unit B, each
gives its part of another weight; where sizes agree nothing fails, and both compute with a mixture. So do gradients of
parameters that are used on some ranks alone. What each rank did in a step is reduced to one number, which is compared
in the reduction that ends the step anyway.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardtune.errors import ModelError
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.second_derivatives import refuse_second_derivatives
from shardtune.parallel.torch_private.fsdp2 import Filling, SecondDerivatives, note_collectives, watch_backward

MOST = 2**18
"""Collectives that are kept, the last ones: a step has some thousands, evaluations and generation have no end."""
CALL_ALL = (
    "call every unit once in every forward, whatever its rows (multiply unneeded results by 0); with "
    "actor.training_backend: fsdp1 what only some forwards call may be outside of all units instead (unit_classes, "
    "actor.fsdp_config.wrap)"
)
"""How to mend forwards that call different units."""
USE_ALL = (
    "use every parameter in every forward, whatever its rows (multiply unneeded results by 0), or set "
    "actor.training_backend: fsdp1"
)


class UnitCalls:
    """What a rank does with the others in a step, of a sharded model.

    Args:
        ranks: of the run.

    Attributes:
        made: for each collective the place of its unit among the names, in order.
        used: of which parameters there were gradients, at each `mark`.
        second: keeps weights gathered for passes through gradients' own graphs.
        filling: if it is on, unused parameters get zeros, and `settle` has to be called after the sums of a step.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._units: list[str] = []
        self._summed: dict[str, nn.Parameter] = {}
        self.made: deque[int] = deque(maxlen=MOST)
        self.used: list[bytes] = []
        self.filling = Filling()
        sizes = {"parallel.tensor": ranks.layout.tensor, "parallel.expert": ranks.layout.expert}
        shares = [key for key, size in sizes.items() if size > 1]
        what = f"a layer that several ranks compute ({', '.join(shares)})"
        refuse = partial(refuse_second_derivatives, what, f"{shares[0]}: 1") if shares else None
        self.second = SecondDerivatives(refuse)

    def watch(self, name: str, unit: FSDPModule, parameters: Mapping[int, str]) -> None:
        """Note what FSDP2 does with a unit, if it involves other ranks.

        Args:
            name: of the unit.
            unit: sharded.
            parameters: the names of the model's parameters by `id`.
        """
        own = note_collectives(unit, self.noting(name))
        watch_backward(unit, self.filling, self.second)
        self._summed |= {parameters[id(each)]: each for each in own if each.numel() and id(each) in parameters}

    def noting(self, name: str) -> Callable[[], object]:
        """What notes a collective of a unit when it is called."""
        self._units.append(name)
        return partial(self.made.append, len(self._units) - 1)

    def mark(self) -> float:
        """A whole number below 2 ** 32 that, all but surely, differs between ranks that have not done the same.

        It notes of which parameters there are gradients, so it is called when FSDP2 has summed them over ranks. Where
        that is after each micro-batch, what a step uses for the first time is compared.
        """
        filling = self.filling
        now = bytes(
            [
                id(each) in filling.used or (each.grad is not None and id(each) not in filling.filled)
                for each in self._summed.values()
            ]
        )
        self.used = [now] if filling.on else [*self.used, now]
        return float(zlib.crc32(b"".join(self.used), zlib.crc32(array("I", self.made).tobytes())))

    def called(self) -> int:
        """A whole number that, all but surely, differs between ranks that have called other units since `clear`."""
        return zlib.crc32(array("I", self.made).tobytes())

    def settle(self, agreed: bool) -> None:
        """Take away the gradients of what no rank has used, or refuse that ranks have called different units.

        Args:
            agreed: whether the last marks of all ranks were equal; then nothing is sent. Every rank has the same.

        Raises:
            ModelError: ranks have called different units, or, where nothing is filled, used different parameters.
        """
        filling, used = self.filling, self.used[-1]
        if not agreed:
            used, alike = self._of_any(used)
            if not (alike and filling.on):
                self.refuse()
        for is_used, parameter in zip(used, self._summed.values(), strict=True):
            if not is_used and id(parameter) in filling.filled:
                parameter.grad = None

    def _of_any(self, used: bytes) -> tuple[bytes, bool]:
        """Of which parameters any rank has a gradient, and whether all ranks have called the same units."""
        made = self.called()
        halves = [float(made >> 16), float(made & 0xFFFF)]  # whole numbers that fp32 holds
        sent = torch.tensor([*map(float, used), *halves, *(-half for half in halves)])
        *found, high, low, other_high, other_low = self._ranks.largest_of(sent.to(self._ranks.device)).tolist()
        return bytes(map(bool, found)), (high, low) == (-other_high, -other_low)

    def agree(self) -> None:
        """Compare what ranks have done for an update of a user's, and settle its gradients; every rank calls it.

        Raises:
            ModelError: ranks have called different units.
        """
        mark = self.mark()
        self.settle(self._ranks.sum((), [mark])[0] == mark * self._ranks.world_size)
        self.clear()

    def begin_pass(self) -> None:
        """Begin backward passes of a user's, which `end_pass` or `agree` ends; gradients that there are stay."""
        self.filling.on = bool(self._summed)
        self.filling.used.update(id(each) for each in self._summed.values() if each.grad is not None)

    @contextmanager
    def for_inputs(self) -> Iterator[None]:
        """Inside, backward passes give no parameter a gradient, zeros included."""
        before, self.filling.on = self.filling.on, False
        try:
            yield
        finally:
            self.filling.on = before

    def end_pass(self) -> None:
        """Compare what ranks have done since the last comparison, and settle the gradients.

        Every rank calls it, unless the pass went through no unit of the module.

        Raises:
            ModelError: ranks have called different units.
        """
        if self.made and self.filling.on:
            self.mark()
            self.settle(agreed=False)
        elif self.made:  # FSDP1, which sums what it has joined
            self.compare()
        self.clear()

    def clear(self) -> None:
        """Forget what was done so far."""
        self.made.clear()
        self.used.clear()
        self.filling.clear()

    def compare(self) -> None:
        """Compare what ranks have done since `clear`, where no step does, and forget it; every rank calls it.

        Raises:
            ModelError: ranks have called different units.
        """
        mark = self.mark()
        if self._ranks.sum((), [mark])[0] != mark * self._ranks.world_size:
            self.refuse()
        self.clear()

    def refuse(self) -> NoReturn:
        """Refuse what ranks have done differently, by its name; every rank calls it.

        Raises:
            ModelError: always.
        """
        made, used = zip(*self._ranks.gather(([*self.made], b"".join(self.used))), strict=True)
        for rank, (its, gradients) in enumerate(zip(made, used, strict=True)):
            if its != made[0]:
                one, other = next(pair for pair in zip_longest(made[0], its) if pair[0] != pair[1])
                raise _other_unit(rank, *(None if place is None else self._units[place] for place in (one, other)))
            if gradients != used[0]:
                place = next(n for n, (one, other) in enumerate(zip(used[0], gradients, strict=True)) if one != other)
                users = (0, rank) if used[0][place] else (rank, 0)
                raise _other_parameter([*self._summed][place % len(self._summed)], *users)
        raise _other_unit(0, None, None)


def _other_unit(rank: int, of_first: str | None, of_rank: str | None) -> ModelError:
    names = ["none" if name is None else name or "the whole model" for name in (of_first, of_rank)]
    return ModelError(
        f"ranks called units of the model in different order: where rank 0 used {names[0]}, rank {rank} used "
        f"{names[1]}, and weights and gradients of one were taken for the other's",
        where=names[of_first is None],
        remedy=CALL_ALL,
    )


def _other_parameter(name: str, user: int, other: int) -> ModelError:
    return ModelError(
        f"forwards of rank {user} used {name} and those of rank {other} did not, so that gradients of different "
        "parameters were added up over ranks",
        where=name,
        remedy=USE_ALL,
    )
