"""AdamW, Adam and SGD whose states are stored in bf16 or in 8 bits, and whose weights may be stored in bf16.

The arithmetic is that of `torch.optim`, in fp32 or the precision of the weights if that is higher; only what is stored
between steps is rounded (`quantized_state.py`). A weight in bf16 is rounded at random as well: its steps are 2^-9 of it
or more, and to the nearest all smaller updates would be lost. A parameter is updated in chunks of rows, so that neither
it nor its states are in full precision as a whole.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from shardtune.batch.seeds import derive_seed
from shardtune.optim.fused_adam import MEAN, SQUARE, first_index, kernel, launch
from shardtune.optim.quantized_state import (
    SCALE,
    Moment,
    Place,
    StateDtype,
    chunks,
    full_dtype,
    local,
    noise,
    rows_of,
    scales_like,
    to_bf16,
)

SAME, APART = 1e-4, 1e-2
"""Numbers that differ by less than this part of themselves are the same; so many of all may not be."""
PARTS = "column_parts"
"""In the state of a parameter with blocks: the number of parts into which ranks cut its rows."""
Values = dict[str, torch.Tensor]
"""Moments by name."""
ParameterState = dict[str, torch.Tensor | int]
"""The state of one parameter: `step`, the moments, their scales, and `PARTS`."""
ParamGroup = dict[str, Any]
"""A parameter group of torch.optim: `params`, `names`, and the settings that its optimizer takes."""


class LowBitOptimizer(torch.optim.Optimizer):
    """An optimizer whose moments are stored in bf16 or int8, or whose weights are in bf16.

    Whether a number is rounded up or down depends on seed, step, the parameter's name and the index in the whole
    parameter: steps with the same gradients are bitwise the same on any layout whose ranks have whole rows (or equal
    blocks of them).

    Args:
        groups: parameter groups with `names`, those of their parameters.
        arguments: of the class of the same name in `torch.optim`.
        state_dtype: fp32 | bf16 | int8.
        seed: of the run.
        starts: by name, for parameters of which this rank has a range of the flattened numbers: its first index.

    Attributes:
        chunks: the row ranges of a rank's part that are updated at a time.
    """

    moments: ClassVar[tuple[Moment, ...]]
    chunks: Callable[[torch.Tensor], Iterable[tuple[int, int]]] = staticmethod(chunks)

    def __init__(
        self,
        groups: list[ParamGroup],
        arguments: ParamGroup,
        *,
        state_dtype: StateDtype,
        seed: int,
        starts: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__(groups, {**arguments, "state_dtype": state_dtype})
        self._seed = seed
        self._starts = starts

    @abstractmethod
    def _move(self, group: ParamGroup, number: int, weights: torch.Tensor, grad: torch.Tensor, values: Values) -> None:
        """Update some weights in place, and put the new moments into `values`.

        Args:
            number: of the step, from 1.
        """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if parameter.grad is not None:
                    self._step(group, name, parameter)
        return loss

    def _step(self, group: ParamGroup, name: str, parameter: torch.Tensor) -> None:
        place = Place.of(parameter, self._starts.get(name, 0))
        state = self.state[parameter]
        if not state:
            state.update(self._fresh(group, parameter, place))
        state["step"] += 1
        if not self._in_one_pass(group, name, parameter, place):
            self._in_chunks(group, name, parameter, place)

    def _in_one_pass(self, group: ParamGroup, name: str, parameter: torch.Tensor, place: Place) -> bool:
        """Whether a kernel has done the step, whose number is in the state already."""
        return False

    def _in_chunks(self, group: ParamGroup, name: str, parameter: torch.Tensor, place: Place) -> None:
        state = self.state[parameter]
        number = int(state["step"])
        key = derive_seed(self._seed, "moments", name, number)
        weights, grad = local(parameter), local(parameter.grad)  # pyright: ignore[reportArgumentType]
        dtype = full_dtype(weights)
        rounded = any(state[moment.name].dtype != dtype for moment in self.moments)
        for first, last in self.chunks(weights):
            stored = rows_of(weights, first, last)
            part = stored.to(dtype)
            values = {moment.name: moment.read(state, first, last).to(dtype) for moment in self.moments}
            self._move(group, number, part, rows_of(grad, first, last).to(dtype), values)
            bits = noise(place.numbers(first, part), key) if rounded else torch.zeros_like(part, dtype=torch.int64)
            # 32 random bits per number: moment 0 is rounded by the lower 16, moment 1 by the upper 16.
            for turn, moment in enumerate(self.moments):
                moment.write(state, first, last, values[moment.name], bits >> 16 * turn & 0xFFFF)
            if stored.dtype != dtype:
                own = derive_seed(self._seed, "weights", name, number)
                stored.copy_(to_bf16(part, noise(place.numbers(first, part), own) & 0xFFFF))

    def _fresh(self, group: ParamGroup, parameter: torch.Tensor, place: Place) -> ParameterState:
        state: ParameterState = {"step": torch.tensor(0.0)}
        for moment in self.moments:
            state |= moment.fresh(parameter, place, group["state_dtype"])
        return state | self._parts(state, place)

    def _parts(self, state: Mapping[str, object], place: Place) -> dict[str, int]:
        return {PARTS: place.column_parts} if any(key.endswith(SCALE) for key in state) else {}

    # Checkpoints.

    def scales(self, parameter: torch.Tensor, column_parts: int) -> Values:
        """Empty tensors for the scales in a checkpoint whose layout cut rows into `column_parts` parts."""
        scales = scales_like(parameter, Place.of(parameter), column_parts)
        return {moment.name + SCALE: torch.zeros_like(scales) for moment in self.moments}

    @torch.no_grad()
    def own_form(
        self, parameter: torch.Tensor, state: Mapping[str, torch.Tensor | int], kept: StateDtype
    ) -> ParameterState:
        """The state read from a checkpoint, in this layout's blocks."""
        place, cut = Place.of(parameter), int(state.get(PARTS, 1))
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        found: ParameterState = {"step": state["step"]}
        for moment in self.moments:
            found |= moment.moved(tensors, parameter, place, kept, cut)
        return found | self._parts(found, place)


class LowBitAdam(LowBitOptimizer):
    """`torch.optim.Adam`; arguments lr, betas, eps, weight_decay (added to the gradient), maximize.

    Attributes:
        one_pass: whether parameters on GPUs are updated in one pass; None: where that gives what chunks give.
    """

    moments = (Moment(MEAN, signed=True), Moment(SQUARE, signed=False))
    decoupled: ClassVar[bool] = False
    one_pass: bool | None = None

    def _in_one_pass(self, group: ParamGroup, name: str, parameter: torch.Tensor, place: Place) -> bool:
        if self.one_pass is False or not (self.one_pass or parameter.is_cuda) or kernel() is None:
            return False
        first = first_index(parameter, place, self.state[parameter])
        if first is None:
            return False
        if self.one_pass is None and not one_pass_agrees(
            type(self), parameter.device, parameter.dtype, group["state_dtype"]
        ):
            return False
        state, decoupled = self.state[parameter], self.decoupled
        launch(group, name, parameter, first, state, decoupled=decoupled, seed=self._seed)
        return True

    def _move(self, group: ParamGroup, number: int, weights: torch.Tensor, grad: torch.Tensor, values: Values) -> None:
        (beta1, beta2), rate, decay = group["betas"], group["lr"], group["weight_decay"]
        grad = -grad if group.get("maximize") else grad
        if self.decoupled:
            weights.mul_(1 - rate * decay)
        elif decay:
            grad = grad.add(weights, alpha=decay)
        mean = values["exp_avg"].lerp_(grad, 1 - beta1)
        square = values["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        scale = (square.sqrt() / math.sqrt(1 - beta2**number)).add_(group["eps"])
        weights.addcdiv_(mean, scale, value=-rate / (1 - beta1**number))


class LowBitAdamW(LowBitAdam):
    """`torch.optim.AdamW`; arguments as Adam's, with decoupled weight decay."""

    decoupled = True


@cache
def one_pass_agrees(kind: type[LowBitAdam], device: torch.device, dtype: torch.dtype, kept: StateDtype) -> bool:
    """Whether one pass over random weights gives what chunks give; False where its compiler fails.

    Args:
        kind: of the optimizer.
        device: of the weights.
        dtype: of the weights.
        kept: how moments are.
    """

    def stepped(one_pass: bool) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(64, 512, generator=draw).to(device, dtype))
        weight.grad_dtype = torch.float32
        group = {"params": [weight], "names": ["weight"]}
        settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
        optimizer = kind([group], settings, state_dtype=kept, seed=0)
        optimizer.one_pass = one_pass
        for _ in range(3):
            weight.grad = torch.randn(64, 512, generator=draw).to(device)
            optimizer.step()
        return [weight.detach(), *(optimizer.state[weight][moment.name] for moment in kind.moments)]

    try:
        pairs = zip(stepped(True), stepped(False), strict=True)
        # Where last digits differ, a few are rounded to another neighbour.
        apart = [((one.float() - two.float()).abs() > SAME * two.float().abs()).float().mean() for one, two in pairs]
        return max(map(float, apart)) < APART
    except Exception:
        return False


class LowBitSGD(LowBitOptimizer):
    """`torch.optim.SGD` with momentum; arguments lr, momentum, dampening, nesterov, weight_decay, maximize."""

    moments = (Moment("momentum_buffer", signed=True),)

    def _move(self, group: ParamGroup, number: int, weights: torch.Tensor, grad: torch.Tensor, values: Values) -> None:
        momentum, decay = group["momentum"], group["weight_decay"]
        grad = -grad if group.get("maximize") else grad
        grad = grad.add(weights, alpha=decay) if decay else grad
        buffer = values["momentum_buffer"]
        if number == 1:
            buffer.copy_(grad)
        else:
            buffer.mul_(momentum).add_(grad, alpha=1 - group.get("dampening", 0.0))
        weights.add_(grad.add(buffer, alpha=momentum) if group.get("nesterov") else buffer, alpha=-group["lr"])


class PlainSGD(LowBitOptimizer):
    """`torch.optim.SGD` without momentum, which keeps no state; arguments lr, weight_decay, maximize."""

    moments = ()

    def _move(self, group: ParamGroup, number: int, weights: torch.Tensor, grad: torch.Tensor, values: Values) -> None:
        grad = -grad if group.get("maximize") else grad
        grad = grad.add(weights, alpha=decay) if (decay := group["weight_decay"]) else grad
        weights.add_(grad, alpha=-group["lr"])


LOW_BIT: Mapping[str, type[LowBitOptimizer]] = {"AdamW": LowBitAdamW, "Adam": LowBitAdam, "SGD": LowBitSGD}
"""By the name of the same optimizer in `torch.optim`."""
