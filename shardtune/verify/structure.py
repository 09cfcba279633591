"""Checks of a model's parameters and buffers, built twice, and of the gradient of its loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

import torch
from torch import nn

from shardtune.batch import Batch, LossSum
from shardtune.errors import counted
from shardtune.models.adapter import Adapter
from shardtune.models.whole_step_adapter import WholeStepAdapter
from shardtune.parallel.buffers import same_values
from shardtune.parallel.meta_init import named_tensors, persistent_buffers
from shardtune.training.build.model import build_empty, seeded
from shardtune.verify.case import STEPS
from shardtune.verify.kit import PARITY, Kit
from shardtune.verify.result import Failed
from shardtune.verify.trial import copies, run

BUILD = "build()"


def check_build(kit: Kit) -> str:
    """The model that is built without memory is the one that is built for real."""
    seed = kit.case.recipe.runner.seed
    empty, notes = build_empty(kit.adapter().build, seed)
    with seeded(seed):
        real = kit.adapter().build()
    _same_parameters(empty, real)
    _check_shared_memory(real)
    _check_plain_tensors(empty)
    _same_ties(empty, real)
    _same_buffers(empty, real, kit.adapter(), seed)
    _same_values(kit, real)
    parameters, tied = dict(empty.named_parameters()), ties(empty)
    buffers = counted(sum(1 for _ in empty.buffers()), "buffer")
    result = f"{counted(len(parameters), 'parameter')}, {buffers}, {len(tied)} tied"
    return "; ".join([result, *notes])


def ties(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(group for group in names.values() if len(group) > 1)


def _same_parameters(empty: nn.Module, real: nn.Module) -> None:
    one, other = (dict(m.named_parameters(remove_duplicate=False)) for m in (empty, real))
    missing = sorted(one.keys() ^ other.keys())
    if missing:
        raise Failed(
            f"built without memory the model has {len(one)} parameters, built for real {len(other)}; {missing[0]} is "
            "only in one of them",
            where=f"{BUILD}: {missing[0]}",
            remedy="let the constructor make the same parameters each time, whatever their values",
        )
    for name, parameter in one.items():
        mine, its = (parameter.shape, parameter.dtype), (other[name].shape, other[name].dtype)
        if mine != its:
            raise Failed(
                f"built without memory {name} is {list(mine[0])} {mine[1]}, built for real {list(its[0])} {its[1]}",
                where=f"{BUILD}: {name}",
                remedy="let its shape and dtype depend on the options alone, not on values",
            )
        if parameter.requires_grad != other[name].requires_grad:
            raise Failed(
                f"built without memory {name} is {'' if parameter.requires_grad else 'not '}trained, built for real "
                "it is the other way",
                where=f"{BUILD}: {name}",
                remedy="set requires_grad in the constructor, or freeze by actor.model.freeze",
            )


def _check_shared_memory(real: nn.Module) -> None:
    """Refuse two parameters over the same memory: they are tied in one process only, and sharded separately."""
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in real.named_parameters():
        if parameter.is_meta or not parameter.numel():
            continue
        other = first.setdefault(parameter.untyped_storage().data_ptr(), (name, parameter))
        if other[1] is not parameter:
            raise Failed(
                f"{other[0]} and {name} are two parameters over the same memory, which is lost when the model is built "
                "without memory or sharded: they would be trained apart",
                where=f"{BUILD}: {name}",
                remedy=f"assign the parameter itself, not its data: model.{name} = model.{other[0]}",
            )


def _check_plain_tensors(empty: nn.Module) -> None:
    """Refuse tensors that are neither parameter nor buffer: they are not initialised, moved or saved."""
    known = {id(tensor) for tensor in (*empty.parameters(), *empty.buffers())}
    for prefix, module in empty.named_modules():
        if type(module).__module__.startswith(("torch.", "transformers.")):
            continue  # these manage their own tensors
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and id(value) not in known:
                name = f"{prefix}.{key}" if prefix else key
                how = "has no values, as it is computed from parameters" if value.is_meta else "is moved to no device"
                raise Failed(
                    f"{name} is a tensor of shape {list(value.shape)} that is neither parameter nor buffer: it {how}, "
                    "and no checkpoint holds it",
                    where=f"{BUILD}: {name}",
                    remedy=f"self.register_buffer({key!r}, …), with persistent=False where it follows from the options"
                    + ("; compute what depends on parameters in forward" if value.is_meta else ""),
                )


def _same_ties(empty: nn.Module, real: nn.Module) -> None:
    if ties(empty) != ties(real):
        lost = next((group for group in ties(real) if group not in ties(empty)), None) or ties(empty)[0]
        raise Failed(
            f"{' and '.join(lost)} are one parameter in only one of two builds (without memory, for real)",
            where=f"{BUILD}: {lost[-1]}",
            remedy="tie in the constructor, by assigning the parameter: self.head.weight = self.embed.weight",
        )


def _same_buffers(empty: nn.Module, real: nn.Module, adapter: Adapter, seed: int) -> None:
    one, other = dict(empty.named_buffers()), dict(real.named_buffers())
    kept_one, kept_other = persistent_buffers(empty).keys(), persistent_buffers(real).keys()
    odd = sorted((one.keys() ^ other.keys()) | (kept_one ^ kept_other))
    if odd:
        raise Failed(
            f"the buffer {odd[0]} is there, or is saved, in only one of two builds (without memory, for real)",
            where=f"{BUILD}: {odd[0]}",
            remedy="register the same buffers each time",
        )
    stranded = [name for name, buffer in one.items() if buffer.is_meta and not other[name].is_meta]
    if stranded:
        raise Failed(
            f"the buffer {stranded[0]} is computed from parameters, which have no values yet while the model is built",
            where=f"{BUILD}: {stranded[0]}",
            remedy="compute it in forward, or from the options alone",
        )
    # Saved buffers take the values of the build for real, as parameters do.
    differing = [name for name, buffer in one.items() if name not in kept_one and not _equal(buffer, other[name])]
    if not differing:
        return
    name = differing[0]
    with seeded(seed + 1):
        drawn = not _equal(dict(adapter.build().named_buffers())[name], other[name])
    raise Failed(
        f"the buffer {name} comes out differently when the model is built without memory"
        + (": it is drawn at random" if drawn else ""),
        where=f"{BUILD}: {name}",
        remedy="draw it from a separate torch.Generator with a fixed seed, or register it with persistent=True"
        if drawn
        else "compute it from the options alone, in the constructor",
    )


def _same_values(kit: Kit, real: nn.Module) -> None:
    """Training starts from what `build` makes, unless `initial_weights` gives other values."""
    adapter = kit.adapter()
    if adapter.builds_by_class or kit.trial.worker.task.initial_weights() is not None:
        return
    made, first = dict(real.named_parameters()), dict(kit.trial.worker.inner_model.named_parameters())
    differing = [name for name, parameter in first.items() if not torch.equal(parameter, made[name].to(parameter))]
    if differing:
        raise Failed(
            f"{len(differing)} of {len(first)} parameters do not start with the values that build gives them: "
            f"{_few(differing)}",
            where=f"{BUILD}: {differing[0]}",
            remedy="make the values in build or return them from initial_weights, and draw them with torch, numpy or "
            "Python's random, which are seeded before build",
        )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_meta or other.is_meta:
        return one.shape == other.shape and one.dtype == other.dtype
    return one.dtype == other.dtype and same_values(one, other)


def check_gradient(kit: Kit) -> str:
    """The loss has a graph, and it reaches every parameter that is trained."""
    trial = kit.trial
    adapter = type(trial.adapter).__name__
    batches = [trial.batch(rows) for rows in trial.forwards(range(trial.num_rows))]
    before = _tensors(trial.batch(trial.forwards(range(trial.num_rows))[0]))
    losses = trial.losses(batches[0])
    _check_unchanged(before, _tensors(batches[0]), adapter)
    for term, loss in losses.items():
        total = loss.total
        if not isinstance(total, torch.Tensor) or total.ndim:
            kind = f"a tensor of shape {list(total.shape)}" if isinstance(total, torch.Tensor) else type(total).__name__
            raise Failed(
                f"the total of the term {term!r} is {kind}, not a scalar tensor",
                where=f"{adapter}.loss",
                remedy="sum it: LossSum(losses.sum(), weight)",
            )
        if not total.requires_grad and not _only_measures(trial.adapter, losses):
            raise Failed(
                f"the term {term!r} ({total.item():.6g}) has no graph, so nothing would be learned from it",
                where=f"{adapter}.loss",
                remedy="leave out detach(), item(), numpy() and torch.no_grad() between the model and the loss",
            )
        if not torch.isfinite(total):
            raise Failed(
                f"the term {term!r} is {total.item()} on the first {counted(trial.num_rows, 'row')}",
                where=f"{adapter}.loss",
                remedy="look at the rows (shardtune data preview) and at divisions and logarithms in the loss",
            )
    measured = trial.measure(batches)
    trained = trial.worker.weights.trainable()
    idle = trial.adapter.may_be_idle
    unreached = [name for name in trained if name not in measured.gradients and not idle(name)]
    if unreached:
        raise Failed(
            f"the loss of these {trial.num_rows} rows does not reach {len(unreached)} of {len(trained)} trained "
            f"parameters: {_few(unreached)}",
            where=f"{adapter}.loss, {BUILD}",
            remedy="use them in the forward, or do not build them (add_pooling_layer=False, say), or freeze them: by "
            "requires_grad_(False) in build, or in actor.model.freeze; where other rows use them (an expert that these "
            "do not choose), let examples() return such rows too, begin the file with some, or let "
            f"{adapter}.may_be_idle(name) return True for them",
        )
    infinite = [name for name, gradient in measured.gradients.items() if not torch.isfinite(gradient).all()]
    if infinite:
        raise Failed(
            f"the gradient of {_few(infinite)} is not finite",
            where=f"{adapter}.loss",
            remedy="look for square roots, norms and logarithms at 0, and for masks by multiplication with infinities",
        )
    return f"{shown_losses(measured.totals, measured.weights)}; reaches {counted(len(trained), 'parameter')}"


def _only_measures(adapter: Adapter, losses: Mapping[str, LossSum]) -> bool:
    """Whether a term without a graph is a metric, which a loss of all rows of a step may have."""
    return isinstance(adapter, WholeStepAdapter) and any(
        isinstance(loss.total, torch.Tensor) and loss.total.requires_grad for loss in losses.values()
    )


def _tensors(batch: Batch) -> dict[str, torch.Tensor]:
    """The tensors of a micro-batch, by name."""
    own = {part.name: getattr(batch, part.name) for part in fields(batch)}
    return {**{name: value for name, value in own.items() if isinstance(value, torch.Tensor)}, **batch.fields}


def _check_unchanged(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], adapter: str) -> None:
    for name, tensor in before.items():
        if not _equal(tensor, after[name]):
            raise Failed(
                f"loss changes the batch it is given: {int((tensor != after[name]).sum())} of the {tensor.numel()} "
                f"values of {name}",
                where=f"{adapter}.loss: {name}",
                remedy="work on a copy, without functions that write in place (add_, clamp_, masked_fill_, x[…] = …): "
                "one batch goes to loss, metrics and predictions, and again to loss where fp16 overflows",
            )


def shown_losses(totals: Mapping[str, float], weights: Mapping[str, float]) -> str:
    return ", ".join(f"{term} {total:.4g} over {weights[term]:g}" for term, total in totals.items())


def _few(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def check_ties(kit: Kit) -> str:
    """Shared parameters stay shared and buffers keep what they hold, from build to a loaded checkpoint."""
    worker = kit.worker(PARITY)
    model = worker.inner_model
    built = ties(build_empty(kit.adapter().build, kit.case.recipe.runner.seed)[0])
    _still_tied(built, model, "once it has its weights")
    before = copies(dict(model.named_buffers()))
    run(worker, STEPS)
    _still_tied(built, model, "after training")
    check_buffer_forms(model, before)
    _check_unsaved(model, before)
    folder = kit.case.folder / "ties"
    worker.save_checkpoint(folder, STEPS)
    other = kit.worker(PARITY)
    other.load_checkpoint(folder)
    loaded = other.inner_model
    _still_tied(built, loaded, "after loading a checkpoint")
    for name, tensor in _changed(named_tensors(model), named_tensors(loaded)):
        raise Failed(
            f"{name} is not what was saved once the checkpoint is loaded ({tensor})",
            where=f"{BUILD}: {name}",
            remedy="keep all state in parameters and registered buffers, and none of it computed while the model loads",
        )
    return f"{len(built)} tied, {len(before)} buffers, as they were after saving and loading"


def _still_tied(built: list[list[str]], model: nn.Module, when: str) -> None:
    now = {frozenset(group) for group in ties(model)}
    for group in built:
        if frozenset(group) not in now:
            raise Failed(
                f"{' and '.join(group)} are one parameter when built, and no longer {when}",
                where=f"{BUILD}: {group[-1]}",
                remedy="tie in the constructor, and let nothing assign a new parameter afterwards",
            )


def check_buffer_forms(model: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    """A buffer that training turns into one of another dtype or shape cannot be loaded again."""
    for name, buffer in model.named_buffers():
        one, other = (buffer.dtype, buffer.shape), (before[name].dtype, before[name].shape)
        if one != other:
            raise Failed(
                f"the buffer {name} is {list(other[1])} of {other[0]} when built, {list(one[1])} of {one[0]} after "
                "training, so a checkpoint does not fit",
                where=f"{BUILD}: {name}",
                remedy="write to it in place (copy_, mul_, add_), which keeps its shape and dtype",
            )


def _check_unsaved(model: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    saved = persistent_buffers(model)
    for name, buffer in model.named_buffers():
        if name not in saved and not _equal(buffer, before[name]):
            raise Failed(
                f"the buffer {name} changes in training and is not saved, so a resumed run continues without it",
                where=f"{BUILD}: {name}",
                remedy="register it with persistent=True",
            )


def _changed(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    for name, tensor in one.items():
        if name not in other:
            yield name, "it is not there"
        elif not _equal(tensor.detach(), other[name].detach()):
            yield name, f"{float((tensor.detach().double() - other[name].detach().double()).abs().max()):.3g} apart"
