"""Lists of layers that repeat in a period, so that a model with fewer of them shows what each further period adds."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig

FEWEST = 3
"""Periods that a plan has to leave out at least for a stack to be cut."""
LEAST = 3
"""Layers that repeat, at least: those of ranks differ where the next one, or the one before it, is the last."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A list of layers of a model.

    Attributes:
        name: of the list, in the model.
        depth: layers.
        first: layers before the period begins.
        period: layers after which their kinds repeat, to the end.
    """

    name: str
    depth: int
    first: int
    period: int

    def shallow(self, more: int) -> int:
        """The fewest layers that are short of whole periods, have three that repeat, and `more` periods beyond."""
        least = self.first + max(self.period, LEAST) + more * self.period
        return self.depth - max(0, self.depth - least) // self.period * self.period


def stacks_of(model: nn.Module) -> list[Stack]:
    """The lists of layers in a model that repeat, outermost ones, with the most layers first.

    Layers are alike where their modules, parameters, settings and places in the lists of their model's configuration
    are: how they differ in what they compute, a model has to have written somewhere.
    """
    found: list[Stack] = []
    for name, module in model.named_modules():
        if (
            not isinstance(module, nn.ModuleList | nn.Sequential)
            or not len(module)
            or any(_is_in(name, stack.name) for stack in found)
        ):
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        marks = list(_marks(owner, len(module)))
        kinds = [(kind, *(mark[place] for mark in marks)) for place, kind in enumerate(_kinds(list(module)))]
        pattern = pattern_of(kinds)
        if pattern is not None:
            stack = Stack(name, len(kinds), *pattern)
            if stack.depth - stack.shallow(0) >= FEWEST * stack.period:
                found.append(stack)
    return sorted(found, key=lambda stack: -stack.depth)


def cut(model: nn.Module, depths: Mapping[str, int]) -> None:
    """Leave lists of layers their first ones only, by the lists' names."""
    for name, depth in depths.items():
        layers = model.get_submodule(name)
        assert isinstance(layers, nn.ModuleList | nn.Sequential)
        del layers[depth:]


def pattern_of(kinds: Sequence[Hashable]) -> tuple[int, int] | None:
    """The first place from which kinds repeat to the end, and their period; as few layers together as there can be."""
    depth = len(kinds)
    best: tuple[int, int] | None = None
    for period in range(1, depth // 2 + 1):
        first = depth - period
        while first > 0 and kinds[first - 1] == kinds[first - 1 + period]:
            first -= 1
        if first <= depth - 2 * period and (best is None or first + period < sum(best)):
            best = (first, period)
    return best


def _is_in(name: str, stack: str) -> bool:
    return name.startswith(f"{stack}.")


def _marks(owner: nn.Module, depth: int) -> Iterator[Sequence[Hashable]]:
    """What the lists of a module and of its configuration have for each of its layers: a value, or whether it is in."""
    for value in vars(owner).values():
        settings = value.to_dict().values() if isinstance(value, PreTrainedConfig) else [value]
        for each in settings:
            if not isinstance(each, list | tuple):
                continue
            if len(each) == depth:
                yield [repr(part) for part in each]
            elif all(type(part) is int and 0 <= part < depth for part in each):
                yield [place in each for place in range(depth)]


def _kinds(layers: Sequence[nn.Module]) -> list[Hashable]:
    """What each layer is made of, equal for layers that differ in their places and their weights alone."""
    settings = [dict(_settings(layer)) for layer in layers]
    places = {key for key in settings[0] if _counts([each.get(key) for each in settings])}
    return [
        (tuple(_tensors(layer)), *(pair for pair in each.items() if pair[0] not in places))
        for layer, each in zip(layers, settings, strict=True)
    ]


def _counts(values: Sequence[object]) -> bool:
    """Whether values are the places of layers, from some number on."""
    begin = values[0]
    return type(begin) is int and all(type(value) is int and value == begin + at for at, value in enumerate(values))


def _tensors(layer: nn.Module) -> Iterator[Hashable]:
    """The parameters and buffers of a layer."""
    for key, parameter in layer.named_parameters(remove_duplicate=False):
        yield key, tuple(parameter.shape), parameter.dtype, parameter.requires_grad
    for key, buffer in layer.named_buffers(remove_duplicate=False):
        yield key, tuple(buffer.shape), buffer.dtype


def _settings(layer: nn.Module) -> Iterator[tuple[tuple[str, str], Hashable]]:
    """The classes of a layer's modules, and their settings; of a fraction whether it is zero, as some grow from layer
    to layer."""
    for name, module in layer.named_modules():
        yield (name, ""), type(module)
        for key, value in vars(module).items():
            if isinstance(value, float):
                yield (name, key), bool(value)
            elif isinstance(value, int | str | None):
                yield (name, key), value
