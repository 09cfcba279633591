"""Prepares a model for training: building, freezing parameters, loading the initial weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict

import torch
from torch import nn
from transformers import PreTrainedModel

from shardtune.checkpoint.hf_load import initialise_weights, load_weights
from shardtune.checkpoint.module_weights import Supply, check_names, in_files, load_plain
from shardtune.checkpoint.random_init import initialise_some
from shardtune.checkpoint.rounded_weights import rounding_notes
from shardtune.checkpoint.weight_files import WeightTensor
from shardtune.config.parameter_patterns import matching, remedy_of
from shardtune.config.shown import as_written
from shardtune.errors import ConfigError, ModelError, ShardtuneError
from shardtune.models.adapter import WeightSource
from shardtune.models.lora.attach import base_tensors, is_adapted
from shardtune.parallel.buffers import same_values, statistical_norms
from shardtune.parallel.meta_init import init_empty_weights, materialise, persistent_buffers, read_parameters
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.torch_private.modules import BatchNormBase, set_parameter
from shardtune.parallel.unfit_parameters import check_shapes
from shardtune.training.build.initial_weights import (
    Build,
    check_same_files,
    constructed,
    directory_of,
    own_buffers,
    seeded,
    split_source,
)

CONSTRUCTOR = "the module's own constructor"


def build_empty(build: Build, seed: int) -> tuple[nn.Module, list[str]]:
    """A model whose parameters have no memory, and notes on how it was built; the same on every rank.

    A constructor that reads the values of its parameters fails on the meta device. Then it runs for real, and the
    values are discarded. So it does where it makes a buffer on the device of its parameters that no checkpoint has.

    Raises:
        ModelError: the model has parameters without a shape.
    """
    notes: list[str] = []
    reason = ""
    try:
        with seeded(seed), init_empty_weights():
            model = build()
    except ShardtuneError:
        raise
    except Exception as problem:
        with seeded(seed):
            model = build()  # raises the constructor's error, if the meta device is not the cause
        reason = str(problem).strip().partition("\n")[0] or type(problem).__name__
    else:
        if isinstance(model, nn.Module) and (lacking := _unfilled(model)) and _same_in_each(build, lacking):
            with seeded(seed):
                model = build()
            reason = f"its buffer {lacking[0]} has no values then, and is not saved"
    if reason:
        notes = [f"{_kind(model)} cannot be built without memory, so every rank first builds it whole ({reason})"]
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"build returned a {type(model).__name__}, not a torch.nn.Module",
            where="build()",
            remedy="return the model",
        )
    check_shapes(model)
    empty: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if notes or (parameter.is_meta and not parameter.is_contiguous()):  # FSDP2 requires contiguous parameters
            owner, _, key = name.rpartition(".")
            set_parameter(model.get_submodule(owner), key, empty.setdefault(parameter, _empty(parameter)))
    return model, notes


def _unfilled(model: nn.Module) -> list[str]:
    """The buffers without values that no checkpoint has either."""
    saved = {id(buffer) for buffer in persistent_buffers(model).values()}
    return [name for name, buffer in model.named_buffers() if buffer.is_meta and id(buffer) not in saved]


def _same_in_each(build: Build, names: Sequence[str]) -> bool:
    """Whether buffers have the same values whatever the weights are, so that they are not computed from these."""
    found = []
    for seed in (0, 1):
        with seeded(seed):
            buffers = dict(build().named_buffers())
        found.append([buffers[name] for name in names])
    return all(not one.is_meta and same_values(one, other) for one, other in zip(*found, strict=True))


def _empty(parameter: nn.Parameter) -> nn.Parameter:
    meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(meta, requires_grad=parameter.requires_grad)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Stop training the parameters whose names match one of the patterns."""
    for pattern in patterns:
        # Of a shared parameter every name counts.
        names = dict(model.named_parameters(remove_duplicate=False))
        matched = [names[name] for name in matching(pattern, names)]
        if not matched:
            raise ConfigError(
                f"actor.model.freeze: the pattern {as_written(pattern)} matches no parameter",
                where="actor.model.freeze",
                remedy=remedy_of(pattern, list(names)),
            )
        for parameter in matched:
            parameter.requires_grad_(False)
    if any(parameter.requires_grad for parameter in model.parameters()):
        return
    if patterns:
        raise ConfigError(
            f"actor.model.freeze: {list(patterns)} leaves nothing to train",
            where="actor.model.freeze",
            remedy="freeze less",
        )
    raise ModelError(
        f"{_kind(model)} has no parameter that is trained",
        where="build()",
        remedy="register its weights as nn.Parameter, with requires_grad",
    )


def check_read_values(
    model: nn.Module, source: WeightSource, *, by_class: bool, from_scratch: bool = False
) -> list[str]:
    """Refuse a model without memory that read weights while it was built, where training would start from others.

    Args:
        model: as it was built, before it is adapted or sharded.
        source: of the initial weights.
        by_class: as for `load_initial_weights`.
        from_scratch: whether the recipe has `actor.model.from_scratch`.

    Returns:
        A note where training starts from the values that were read.
    """
    read = read_parameters(model)
    if not read or isinstance(source, Mapping):
        return []
    origin = model.name_or_path if isinstance(model, PreTrainedModel) else ""
    if from_scratch and isinstance(model, PreTrainedModel):
        raise ModelError(
            f"the model is built with the weights in {origin}, and the recipe is to begin from scratch",
            where="actor.model.from_scratch: true, build()",
            remedy="leave from_scratch out, or let build() make the model from its config alone",
        )
    if source is None and not by_class:
        place = f" from {origin}" if origin else ""
        return [
            f"training starts from the {len(read)} tensors that from_pretrained reads{place} while the model is built"
        ]
    if source is None:
        raise ModelError(
            f"{_kind(model)} is built without memory, so the weights that from_pretrained reads from {origin} are lost",
            where="init_empty_weights()",
            remedy="call from_pretrained outside of init_empty_weights(), or build the model from its config and give "
            "the directory as actor.model.model_path",
        )
    if (
        origin
        and isinstance(model, PreTrainedModel)
        and directory_of(origin).resolve() != directory_of(source).resolve()
    ):
        raise ModelError(
            f"the model is built with the weights in {origin}, and the initial weights are those in {source}",
            where="build(), initial_weights()",
            remedy="give one of them: let initial_weights() return None for what build() makes, or let build() make "
            "the model from its config alone",
        )
    return []


def share_values(model: nn.Module, ranks: Ranks) -> None:
    """Broadcast rank 0's values of all real tensors of a model, before it is sharded; all ranks call it.

    Random constructors may differ between ranks, and shards of different models do not form a model.
    """
    if ranks.mesh is not None:
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                ranks.share(tensor)


def without_values(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model whose parameters have no memory; buffers have their values."""
    empty = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, dict(empty))


@torch.no_grad()
def set_values(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Give a model without memory the values of its parameters and buffers, by name; shared parameters stay shared."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in [*model.named_parameters(remove_duplicate=False)]:
        made.setdefault(parameter, nn.Parameter(values[name], parameter.requires_grad))
        owner, _, key = name.rpartition(".")
        set_parameter(model.get_submodule(owner), key, made[parameter])
    for name, buffer in model.named_buffers():
        if name in values:
            buffer.copy_(values[name])


@torch.no_grad()
def load_initial_weights(
    source: WeightSource,
    model: nn.Module,
    root: nn.Module,
    *,
    build: Build,
    seed: int,
    dtype: torch.dtype,
    ranks: Ranks,
    device: torch.device,
    frozen: torch.dtype | None = None,
    grow: bool = False,
    by_class: bool = False,
    may_lack: Callable[[Path, Sequence[str]], Collection[str]] | None = None,
) -> list[str]:
    """Load the initial weights into a sharded model, in full precision; every rank calls it.

    Args:
        source: one of
            a file or directory (of transformers' layout for a model of transformers; else by the module's own names);
            tensors by name, of which rank 0's count, or functions that make them, called one at a time;
            None, for the values that `build()` makes, called once more, for real, on rank 0's CPU; or the values that
            the model has, if it is not on the meta device.
            In a mapping the name of a submodule may stand for all of its tensors, with a path or None.
        model: whose names are used; with an adapter those it had before.
        root: the module around it that is sharded.
        build: makes the model anew.
        seed: of what is drawn. In one process `torch.manual_seed(seed); build()` gives the same numbers.
        dtype: of floating parameters in memory.
        ranks: of the run.
        device: where the weights belong.
        frozen: the dtype of parameters that are not trained, if it is another.
        grow: whether embeddings may have more rows than a directory of transformers; they get the mean of its rows.
        by_class: whether `build()` makes a model of transformers from its config and does nothing else. Then None means
            the initialiser of its class, which runs module by module, so that no rank holds the whole model.
        may_lack: which of some names a directory of transformers may lack; those are initialised by the model's class.

    Returns:
        Notes for the user, a sentence each.

    Raises:
        ModelError: the weights are not those of the model, by name or shape; names the first few, and what to do.
    """
    notes = _norm_notes(model)
    form: _Form = {"dtype": dtype, "device": device, "frozen": frozen}
    if source is None and not any(base.tensor.is_meta for base in base_tensors(model)):
        materialise(root, **form)
    elif isinstance(model, PreTrainedModel) and source is None and by_class:
        unadapted = build_empty(build, seed)[0] if is_adapted(model) else None
        initialise_weights(model, seed, root=root, unadapted=unadapted, **form)
    elif isinstance(model, PreTrainedModel) and isinstance(source, str | Path):
        directory = directory_of(source)
        check_same_files([directory], ranks)
        lacking = partial(may_lack, directory) if may_lack is not None else None
        report = load_weights(model, directory, root=root, grow=grow, may_lack=lacking, **form)
        notes += report.notes
        if missing := report.missing:
            initialise_some(model, missing, seed, build_empty(build, seed)[0] if is_adapted(model) else None)
            notes.append(f"{', '.join(missing)} are not in {directory} and begin as the model's class initialises them")
    else:
        found = _gather(source, model, build, seed, ranks)
        materialise(root, **form)
        for name, path in found.whole.items():
            part = model.get_submodule(name)
            assert isinstance(part, PreTrainedModel)
            others = partial(found.from_others, name)
            notes += load_weights(part, path, root=root, may_lack=others, **form).notes
        load_plain(model, found.supplies, **found.name_check())
        notes += found.notes
        if dtype.itemsize < 4:
            notes += rounding_notes(found.pairs(model), ", ".join(found.origins))
    return notes


def may_lack(parts: Sequence[str]) -> Callable[[Path, Sequence[str]], set[str]] | None:
    """For `load_initial_weights`: a directory may lack all tensors of some submodules; None: of none."""
    if not parts:
        return None
    return lambda _, names: {name for name in names if _belongs(name, parts)}


class _Form(TypedDict):
    """The dtypes and devices of parameters."""

    dtype: torch.dtype
    device: torch.device
    frozen: torch.dtype | None


class NameCheck(TypedDict):
    """Where names come from, how to make them fit, and which are not looked for."""

    where: str
    remedy: str
    done: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Found:
    """A resolved source.

    Attributes:
        supplies: where each tensor comes from, by name.
        whole: submodules of transformers whose weights come from a directory of transformers.
        origins: where tensors come from, for messages.
        notes: for the user.
        parts: the source's entries for submodules and bare parameters; of several that hold a tensor the longest name
            decides.
    """

    supplies: dict[str, Supply]
    whole: dict[str, Path]
    origins: list[str]
    notes: list[str]
    parts: Mapping[str, Path | None]

    def from_others(self, part: str, names: Iterable[str]) -> set[str]:
        """Of the names in a submodule of transformers those whose values come from other entries."""
        return {name for name in names if _join(part, name) in self.supplies}

    def pairs(self, model: nn.Module) -> Iterator[tuple[WeightTensor, torch.Tensor]]:
        """The tensors on disk, each with the model's of its name."""
        for base in base_tensors(model):
            supply = self.supplies.get(base.name)
            if supply is not None and supply.stored is not None:
                yield supply.stored, base.tensor

    def name_check(self) -> NameCheck:
        """The arguments of messages about names that do not fit."""
        remedy = (
            "let build() make the same parameters each time it is called"
            if self.origins == [CONSTRUCTOR] and "" in self.parts
            else "give all tensors of the module's state_dict() and no others, or in initial_weights submodules, "
            "{'encoder': path, 'head': None} (None: as the constructor makes it; a parameter of the module itself by "
            "its own name)"
        )
        where = "initial_weights()" if self.origins == [CONSTRUCTOR] and self.whole else ", ".join(self.origins)
        return {"where": where, "remedy": remedy, "done": list(self.whole)}


def _gather(source: WeightSource, model: nn.Module, build: Build, seed: int, ranks: Ranks) -> _Found:
    """The source of each tensor of a model, after checking names and shapes."""
    parts, supplies = split_source(source, ranks, seed)
    found = _Found(supplies, {}, ["initial_weights()"] if supplies or not parts else [], [], parts)
    given = set(supplies)
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **persistent_buffers(model)}
    for name, path in parts.items():
        part = None if path is None and name in tensors else _part(model, name)
        if path is None:
            continue
        if isinstance(part, PreTrainedModel):
            found.whole[name] = path
        else:
            stored = {_join(name, key): supply for key, supply in in_files(path).items()}
            supplies |= {key: stored[key] for key in stored if key not in given and _owner(key, parts) == name}
            found.origins.append(str(path))
    drawn = [name for name, path in parts.items() if path is None]
    if drawn:

        def counts(name: str) -> bool:
            return name not in given and _owner(name, parts) in drawn

        fresh, notes = constructed(build, seed, model, ranks, counts)
        supplies |= {name: supply for name, supply in fresh.items() if counts(name)}
        found.origins.append(CONSTRUCTOR)
        found.notes.extend(notes)
    kept, notes = own_buffers(model, supplies, list(found.whole))
    supplies |= kept
    found.notes.extend(notes)
    check_names(model, supplies, **found.name_check())
    return found


def _norm_notes(model: nn.Module) -> list[str]:
    """Notes on batch norms: their results depend on how rows are split into micro-batches."""
    norms = [name for name, norm in statistical_norms(model).items() if isinstance(norm, BatchNormBase)]
    if not norms:
        return []
    return [
        f"{len(norms)} batch norms ({norms[0]}, …) normalise each micro-batch by itself: training depends on how rows "
        "are cut into micro-batches and dealt to ranks, whose running statistics are averaged; with nn.GroupNorm or "
        "nn.LayerNorm it does not"
    ]


def _part(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise ModelError(
            f"initial_weights gives a path or None for {name!r}, which is no submodule of {_kind(model)}",
            where="initial_weights()",
            remedy=f"it has {', '.join(child for child, _ in model.named_children())}",
        ) from error


def _belongs(name: str, owners: Iterable[str]) -> bool:
    return any(not owner or name == owner or name.startswith(f"{owner}.") for owner in owners)


def _owner(name: str, parts: Iterable[str]) -> str | None:
    """The entry of a source that decides about a tensor: the longest of those that hold it."""
    return max((part for part in parts if _belongs(name, [part])), key=len, default=None)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _kind(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")
