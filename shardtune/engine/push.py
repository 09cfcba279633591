"""Weights from one engine to another: a stream of named whole tensors, of which each rank keeps its part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch

from shardtune.checkpoint.base_weights import fill_base
from shardtune.checkpoint.hf_save import gather_full
from shardtune.checkpoint.module_weights import Supply, check_names
from shardtune.checkpoint.peft_directory import merging
from shardtune.engine.full_state import full_state, has_output_hook
from shardtune.engine.initial_weights import overrides_input_hook
from shardtune.engine.nn import BaseTrainModule, LoraTrainModule
from shardtune.errors import ModelError
from shardtune.models.lora.attach import BaseTensor, base_tensors, is_adapted
from shardtune.parallel.weights import Weights

WHERE = "push_weights(…)"
Names = Literal["own", "adapted", "exported"]
Form = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class Facts:
    """What decides how weights go from or to a module.

    Attributes:
        adapted: whether it has a low-rank adapter.
        exports: whether its class changes names or values of exports.
        imports: whether its class changes those of what it loads.
    """

    adapted: bool
    exports: bool
    imports: bool


def facts_of(module: BaseTrainModule) -> Facts:
    own_output = type(module).postprocess_output_named_parameters is not (
        LoraTrainModule.postprocess_output_named_parameters
    )
    return Facts(is_adapted(module), has_output_hook(module) and own_output, overrides_input_hook(module))


def names_between(source: Facts, target: Facts) -> Names:
    """Under which names weights go from one module to another: their own, those of an adapted one, or of exports.

    Raises:
        ModelError: the target's adapter would be added to weights that it does not belong to.
    """
    if target.adapted and not source.adapted:
        raise ModelError(
            "the other engine's module has a low-rank adapter, which would be added to these weights",
            where=WHERE,
            remedy="push to a module without one, or give both the same adapter",
        )
    if target.adapted:
        return "adapted"
    return "exported" if source.exports or target.imports else "own"


def forms_of(module: BaseTrainModule, weights: Weights, names: Names) -> dict[str, Form] | None:
    """Shapes and dtypes of what `stream` gives; None: a class's hook gives them."""
    if names == "exported":
        return None
    if names == "own" and is_adapted(module):
        found = {target.name: (target.shape, target.tensor.dtype) for target in base_tensors(module)}
        return {name: found[name] for name in merging(module, torch.float32).tensors}
    tensors = {**weights.own_parts()}
    return {name: (tuple(weights.shapes.get(name, part.shape)), part.dtype) for name, part in tensors.items()}


@torch.no_grad()
def stream(
    module: BaseTrainModule, weights: Weights, prefix: str, names: Names, dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a module, whole, one at a time; all ranks iterate together.

    Args:
        prefix: of the names that the class sees.
        dtype: to which floating tensors are rounded; None: as they are.
    """
    if names == "exported":
        yield from full_state(module, weights, prefix, dtype)
        return
    with weights.in_rows():
        tensors: Mapping[str, torch.Tensor] = weights.tensors()
        gather = gather_full
        if names == "own" and is_adapted(module):
            wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors.values()) else torch.float32
            tensors, gather, _ = merging(module, wide)
        for name, tensor in tensors.items():
            whole = gather(name, tensor).detach()
            yield name, whole.to(dtype) if dtype is not None and whole.is_floating_point() else whole


class Receiver:
    """Fills a module from named whole tensors; every rank of its engine calls it alike.

    Args:
        module: in memory.
        prefix: of the names that its class sees.
        weights: of it.
        names: under which the tensors come.
        forms: of all tensors that come; None: not known beforehand.

    Raises:
        ModelError: they do not fit, and nothing has changed.
    """

    def __init__(
        self, module: BaseTrainModule, prefix: str, weights: Weights, names: Names, forms: Mapping[str, Form] | None
    ) -> None:
        self._module, self._prefix, self._weights = module, prefix, weights
        self._names, self._forms = names, forms
        self._filled: dict[int, str] = {}
        self._rows = ExitStack()
        with ExitStack() as rows:
            rows.enter_context(weights.in_rows())
            self._check()
            if names == "adapted":
                self._targets = {name: BaseTensor(name, name, tensor) for name, tensor in weights.tensors().items()}
            else:
                self._targets = {target.name: target for target in base_tensors(module)}
            self._rows = rows.pop_all()

    def _check(self) -> None:
        """Compare names and shapes with the module's, before anything is changed."""
        if self._forms is None:
            return
        if self._names == "adapted":
            self._check_adapted(self._forms)
        else:
            supplies = {name: Supply(_unread, form) for name, form in self._forms.items()}
            check_names(self._module, supplies, where=WHERE, remedy="push to an engine of the same model")

    def _check_adapted(self, forms: Mapping[str, Form]) -> None:
        own = forms_of(self._module, self._weights, "adapted") or {}
        differs = [name for name in {**own, **forms} if own.get(name, ((),))[0] != forms.get(name, ((),))[0]]
        if differs:
            raise ModelError(
                f"the two modules have different adapters: {', '.join(differs[:3])}",
                where=WHERE,
                remedy="give both the same adapter, or push to a module without one",
            )

    @torch.no_grad()
    def put(self, name: str, whole: torch.Tensor) -> None:
        """Keep this rank's part of a tensor."""
        if self._names == "exported":
            name, whole = self._module.preprocess_input_named_parameters(name, whole)
            name = name.removeprefix(self._prefix)
        target = self._targets.get(name)
        if target is None or tuple(whole.shape) != target.shape:
            shape = "no such tensor" if target is None else f"the shape {list(target.shape)}"
            raise ModelError(
                f"{name} comes with the shape {list(whole.shape)}, and the other engine's module has {shape}",
                where=WHERE,
                remedy="push to an engine of the same model, or let its preprocess_input_named_parameters rename it",
            )
        first = self._filled.setdefault(id(target.tensor), name)
        if first == name:
            fill_base(target, whole)

    def close(self, *, complete: bool) -> None:
        """Let the module compute with what came.

        Args:
            complete: nothing failed before.

        Raises:
            ModelError: tensors of the module did not come.
        """
        missing = [name for name, target in self._targets.items() if id(target.tensor) not in self._filled]
        tensors = self._weights.tensors()
        self._rows.close()
        self._weights.take(tensors)
        if missing and complete:
            raise ModelError(
                f"{len(missing)} tensors did not come: {', '.join(missing[:4])}",
                where=WHERE,
                remedy="push to an engine of the same model; the other weights have been replaced",
            )


def _unread() -> torch.Tensor:
    raise AssertionError("only the form is known")


@torch.no_grad()
def copy_parts(source: Weights, target: Weights, dtype: torch.dtype | None) -> bool:
    """Copy each rank's own parts, where they are the same ones; returns whether they are."""
    mine, others = source.own_parts(), target.own_parts()
    same = {name: part.shape for name, part in mine.items()} == {name: part.shape for name, part in others.items()}
    if type(source) is not Weights or type(target) is not Weights or source.shapes != target.shapes or not same:
        return False
    for name, part in mine.items():
        others[name].copy_(part.to(dtype) if dtype is not None and part.is_floating_point() else part)
    target.copy_masters_to_model()
    return True
