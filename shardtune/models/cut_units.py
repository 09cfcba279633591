"""Compares what tensor ranks compute with their parts of a unit with what the whole unit computes of the same inputs.

A plan that cuts a layer's output features is right only where what follows works on single features. A norm, a softmax
or a top-k over the features of a rank has the same wrong result on all of them or another one on each, and training
goes on with it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from shardtune.errors import ParallelError
from shardtune.parallel.fp32_compute import in_fp32, may_be_the_models
from shardtune.parallel.full_precision import full_precision_parameters
from shardtune.parallel.half_products import HALF
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.torch_private.operations import tree_iter, tree_map, without_torch_function

AGREEMENT = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference of a unit's outputs, relative to the largest of them."""
REMEDY = (
    "between a colwise layer and its rowwise one only operations on single features are the same on a part of them: "
    "where what follows needs all features (a norm, softmax, top-k), give the layer the style colwise_gather_output, "
    "or leave it out of the plan"
)


class CutUnits:
    """The units of a model as they are before tensor ranks cut them, without memory.

    Args:
        model: on the meta device, before it is cut.
        units: those of its modules that are compared; one inside another is compared with it.
        cut: names of the modules and parameters that will be cut. If one is outside of all units, the model is compared
            as well, with the outputs that its units had.
    """

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], cut: Sequence[str]) -> None:
        names = {module: name for name, module in model.named_modules()}
        units_names = sorted(names[unit] for unit in units if unit is not model)
        inner = [name for name in units_names if not any(name.startswith(f"{other}.") for other in units_names)]
        with_parts = [unit for unit in inner if any(name.startswith(f"{unit}.") for name in cut)]
        outside = any(not any(f"{name}.".startswith(f"{unit}.") for unit in inner) for name in cut)
        self._names = [*with_parts, *([""] if outside else [])]
        self._reason = ""
        try:
            whole = copy.deepcopy(model)
        except Exception as error:  # modules of a user's may hold anything
            self._names, self._inner, self._reason = [], {}, _in_words(error)
            return
        self._inner = {name: whole.get_submodule(name) for name in inner} if outside else {}
        self._whole = {name: whole.get_submodule(name) for name in self._names}

    def compare(
        self, model: nn.Module, root: nn.Module, batch: object, ranks: Ranks, dtype: torch.dtype, where: str
    ) -> list[str]:
        """Compute a batch, and each unit that it calls whole, too; every rank calls it with the same batch.

        Args:
            model: cut, sharded, with its weights.
            root: what computes a batch with it.
            batch: its argument.
            ranks: of the run.
            dtype: in which it computes.
            where: of the plan, for a message.

        Returns:
            A sentence for what could not be compared.

        Raises:
            ParallelError: a unit has other outputs.
        """
        used = dtype

        def compute() -> dict[str, tuple[float, str]]:
            found: dict[str, tuple[float, str]] = {}
            with self._watched(model, ranks.device, dtype, found), torch.no_grad():
                root(batch)
            return found

        was_training, reason = root.training, self._reason
        root.eval()
        try:
            with _keeping_buffers(model):
                if dtype in HALF:
                    with torch.no_grad():
                        root(batch)  # what FSDP2 prepares in the first forward has to be prepared for this dtype
                found, used = in_fp32(compute, dtype)
        except Exception as error:  # such as of a loss that needs gradients
            if not may_be_the_models(error):
                raise
            found, reason = {}, _in_words(error)
        finally:
            root.train(was_training)
        everywhere = ranks.gather(found)
        for name in self._names:
            parts = [of.get(name, (0.0, reason or "the first rows do not call it")) for of in everywhere]
            away = max(part[0] for part in parts)
            if away > AGREEMENT[used]:
                raise ParallelError(
                    f"{name or type(model).__name__}: {ranks.layout.tensor} tensor ranks with parts of it compute what "
                    f"differs from what the whole one does, by {away:.2g} of the largest value",
                    where=where,
                    remedy=REMEDY,
                )
            why = next((part[1] for part in parts if part[1]), "")
            if why:
                return [f"tensor ranks: {name or 'the model'} was not compared with the whole one: {why}"]
        return [f"tensor ranks: the model was not compared with the whole one: {reason}"] if self._reason else []

    @contextmanager
    def _watched(
        self, model: nn.Module, device: torch.device, dtype: torch.dtype, found: dict[str, tuple[float, str]]
    ) -> Iterator[None]:
        """Inside, each call of a unit is computed by the whole one, too."""
        seen = {name: _Seen() for name in self._inner}
        kept = full_precision_parameters(model, dtype)
        full = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter in kept}
        handles = []
        for name, calls in seen.items():
            unit = model.get_submodule(name)
            handles.append(unit.register_forward_pre_hook(calls.begin, prepend=True, with_kwargs=True))
            handles.append(unit.register_forward_hook(calls.end))
        for name in self._names:
            known = {} if name else {self._inner[unit]: calls for unit, calls in seen.items()}
            inside = () if name else tuple(self._inner)
            call = _Call(self._whole[name], name, device, dtype, full, found, inside, known)
            unit = model.get_submodule(name)
            # Around hooks of the unit's own, which the whole one has, too.
            handles.append(unit.register_forward_pre_hook(call.begin, prepend=True, with_kwargs=True))
            handles.append(unit.register_forward_hook(call.end))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Call:
    """The calls of a unit: the whole one gets its inputs, buffers and draws.

    Args:
        whole: the unit before it was cut.
        name: of it.
        device: where it is computed.
        dtype: in which.
        full: names of the model's parameters that are not converted to it.
        found: gets the largest difference, and why there is none.
        inside: names of units in it that are not computed again.
        known: these units, and their calls since the last one.
    """

    def __init__(
        self,
        whole: nn.Module,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        full: Collection[str],
        found: dict[str, tuple[float, str]],
        inside: Sequence[str],
        known: Mapping[nn.Module, _Seen],
    ) -> None:
        self._whole, self._name, self._found, self._known = whole.eval(), name, found, known
        self._device, self._dtype, self._full = device, dtype, full
        self._inside = tuple(f"{unit}." for unit in inside)

    def begin(self, unit: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs = tree_map(_copied, (args, kwargs))
        self._buffers = {name: _copied(buffer) for name, buffer in unit.named_buffers()}
        self._draws = torch.get_rng_state()

    def end(self, unit: nn.Module, _inputs: object, output: object) -> None:
        named = unit.named_parameters(remove_duplicate=False)
        prefix = f"{self._name}." if self._name else ""
        values = {
            name: _gathered(each, self._device, each.dtype if f"{prefix}{name}" in self._full else self._dtype)
            for name, each in named
            if not name.startswith(self._inside)
        }
        (args, kwargs), away, reason = self._inputs, 0.0, ""
        try:
            with torch.random.fork_rng(devices=[]), _answering(self._known):
                torch.set_rng_state(self._draws)
                expected = functional_call(self._whole, values | self._buffers, args, kwargs)
            away = max([_apart(output, expected), *(calls.apart for calls in self._known.values())])
        except Exception as error:  # a unit is code of a user's
            if not may_be_the_models(error):
                raise
            reason = _in_words(error)
        before = self._found.get(self._name, (0.0, ""))
        self._found[self._name] = (max(before[0], away), before[1] or reason)


class _Seen:
    """What a unit was given and has returned at each call, for the model around it.

    Attributes:
        apart: the largest difference of what it is given when it answers.
    """

    def __init__(self) -> None:
        self._given: list[Any] = []
        self._returned: list[Any] = []
        self.apart = 0.0

    def begin(self, _unit: nn.Module, args: Any, kwargs: Any) -> None:
        self._given.append(tree_map(_copied, (args, kwargs)))

    def end(self, _unit: nn.Module, _inputs: object, output: object) -> None:
        self._returned.append(tree_map(_copied, output))

    def answer(self, *args: Any, **kwargs: Any) -> Any:
        """What the unit has returned at its next call."""
        self.apart = max(self.apart, _apart(self._given.pop(0), (args, kwargs)))
        return self._returned.pop(0)


@contextmanager
def _answering(known: Mapping[nn.Module, _Seen]) -> Iterator[None]:
    """Inside, each of these modules answers instead of computing."""
    for module, calls in known.items():
        vars(module)["forward"] = calls.answer
    try:
        yield
    finally:
        for module in known:
            del vars(module)["forward"]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _gathered(parameter: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """All of it, as it is computed with; every rank calls this."""
    here = parameter.detach().to(device)
    here = here.full_tensor() if isinstance(here, DTensor) else here
    with without_torch_function():  # fp32 stands for half precision inside of `in_fp32`
        return here.to(dtype) if here.is_floating_point() else here


@contextmanager
def _keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Inside, forwards may change buffers, which are afterwards as they were."""
    before = [
        (module, key, buffer, buffer.clone())
        for module in model.modules()
        for key, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for module, key, buffer, value in before:
            setattr(module, key, buffer.copy_(value))


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _apart(output: object, expected: object) -> float:
    """The largest difference of tensors of floats, relative to the largest value of each."""
    pairs = zip(tree_iter(output), tree_iter(expected), strict=True)
    found = [
        float((one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-30))
        for one, other in pairs
        if isinstance(other, torch.Tensor) and other.is_floating_point() and other.numel()
    ]
    return max(found, default=0.0)
