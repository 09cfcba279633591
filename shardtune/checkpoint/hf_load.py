"""Loads the weights of a Hugging Face directory into a sharded model: each rank reads its own rows."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from shardtune.checkpoint.hf_conversion import Assignment, assign, write_converted
from shardtune.checkpoint.hf_save import save_pretrained
from shardtune.checkpoint.quantized.bitsandbytes import FourBitTensor
from shardtune.checkpoint.quantized.read import check_is_plain, dequantized_weights, described
from shardtune.checkpoint.random_init import initialise_some, initialise_weights
from shardtune.checkpoint.rounded_weights import rounding_notes
from shardtune.checkpoint.weight_files import WeightTensor, has_weights
from shardtune.errors import ModelError
from shardtune.models.lora.attach import BaseTensor, base_tensors
from shardtune.models.lora.nf4 import BLOCK, encode
from shardtune.models.new_tokens import growing
from shardtune.models.pretrained import forget_quantization
from shardtune.parallel.meta_init import (
    init_empty_weights,
    materialise,
    named_tensors,
    shard_of,
)

__all__ = [
    "LoadReport",
    "check_weights",
    "init_empty_weights",
    "initialise_weights",
    "lacking_weights",
    "load_weights",
    "named_tensors",
    "save_pretrained",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of loading a model directory.

    Attributes:
        loaded: how many tensors of the model were filled.
        unexpected: names on disk that the model has no place for (they were not read).
        missing: names in the model that are not on disk, and have no values yet.
        notes: for the user, on what was dequantised or rounded.
    """

    loaded: int
    unexpected: tuple[str, ...]
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


MayLack = Callable[[Sequence[str]], Collection[str]]
"""Which of some names, that are not on disk, a directory may lack."""


@torch.no_grad()
def load_weights(
    model: PreTrainedModel,
    model_path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    root: nn.Module | None = None,
    frozen: torch.dtype | None = None,
    grow: bool = False,
    may_lack: MayLack | None = None,
) -> LoadReport:
    """Fills a model made inside `init_empty_weights()` from a directory; sharded before or not at all.

    Memory: a rank's own shards, a read buffer, and for fused experts the part of one fused tensor that it holds.
    Quantised weights are dequantised in that buffer, and the model's config no longer calls them quantised.

    Args:
        model: parameters on meta (plain, or DTensors after `fully_shard`) or real (overwritten), buffers real.
        model_path: a directory with safetensors (one file, or several with their index), or `.bin` files.
        dtype: of the floating parameters in memory, whatever is on disk.
        root: the outermost sharded module, where that is not `model` itself.
        frozen: the dtype of parameters that are not trained, if it is another.
        grow: whether embeddings and head may have more rows than on disk; these become the mean of the others.
        may_lack: which names may have no weights on disk; they are left to the caller. None: none may.

    Raises:
        ModelError: weights missing, torn, of another shape, or quantised as cannot be read; tied weights that differ.
    """
    widest = dtype if frozen is None else torch.promote_types(dtype, frozen)
    assignments, unexpected, notes = _matched(model, model_path, grow=grow, may_lack=may_lack, dtype=widest)
    materialise(root if root is not None else model, dtype=dtype, device=torch.device(device), frozen=frozen)
    targets = _targets(model)
    missing = _missing(model, targets, assignments)
    loaded = _fill_all(model, assignments, targets)
    if computed := [name for name in _unfilled(targets, assignments) if _is_computed(model, name)]:
        initialise_some(model, computed, seed=0)
    _check_tied(model, targets)
    _load_generation_config(model, Path(model_path))
    forget_quantization(model.config)
    if unexpected:
        logger.warning(
            "%s holds %d tensors that %s has no place for, left out: %s",
            model_path,
            len(unexpected),
            type(model).__name__.removeprefix("FSDP"),
            _few(unexpected),
        )
    if dtype.itemsize < 4:
        notes += rounding_notes(_read_pairs(assignments, targets), model_path)
    return LoadReport(loaded, tuple(unexpected), tuple(missing), (*notes, *_nf4_notes(assignments, targets)))


def overwrite_weights(model: PreTrainedModel, model_path: str | Path) -> None:
    """Replaces the weights of a model in memory, sharded or not, by those of a directory.

    Raises:
        ModelError: as `load_weights`.
    """
    assignments, _ = check_weights(model, model_path)
    targets = _targets(model)
    _fill_all(model, assignments, targets)
    _check_tied(model, targets)


def check_weights(
    model: PreTrainedModel, model_path: str | Path, *, grow: bool = False, may_lack: MayLack | None = None
) -> tuple[list[Assignment], list[str]]:
    """The assignment of a directory's tensors to the model's, and the names not in the model; reads headers only.

    Raises:
        ModelError: weights missing, torn, of another shape, or quantised as cannot be read.
    """
    assignments, unexpected, _ = _matched(model, model_path, grow=grow, may_lack=may_lack)
    return assignments, unexpected


def _matched(
    model: PreTrainedModel,
    model_path: str | Path,
    *,
    grow: bool,
    may_lack: MayLack | None,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[Assignment], list[str], list[str]]:
    """As `check_weights`, and notes on what is quantised; `dtype`: of dequantised parts of fused experts."""
    stored, quantization = dequantized_weights(model_path, model.config, dtype)
    targets = _targets(model)
    assignments, unexpected = assign(model, stored, targets)
    unexpected = _reportable(model, unexpected)
    _check_complete(model, targets, assignments, Path(model_path), may_lack)
    growable = {id(tensor): dim for tensor, dim in growing(model).items()} if grow else {}
    _check_shapes(assignments, targets, growable)
    return assignments, unexpected, described(stored, quantization, model_path)


def _read_pairs(
    assignments: Sequence[Assignment], targets: Mapping[str, BaseTensor]
) -> Iterator[tuple[WeightTensor, torch.Tensor]]:
    """The tensors on disk, each with the one that was made of it."""
    for made in assignments:
        for source in chain.from_iterable(made.sources.values()):
            yield source, targets[made.target].tensor


def _nf4_notes(assignments: Sequence[Assignment], targets: Mapping[str, BaseTensor]) -> list[str]:
    """A note on layers in NF4 whose weights are quantised on disk: whether their codes stay as they are."""
    layers = [made for made in assignments if made.converter is None and targets[made.target].layer is not None]
    kept = [made for made in layers if isinstance(made.single, FourBitTensor) and made.single.is_nf4_of(BLOCK)]
    return [f"{len(kept)} of {len(layers)} layers in NF4 keep the codes and scales of the checkpoint"] if kept else []


def lacking_weights(model: PreTrainedModel, model_path: str | Path, may_lack: MayLack) -> Collection[str]:
    """The names of the tensors that a directory lacks and may lack, all where it has no weights; reads headers only."""
    targets, path = _targets(model), Path(model_path)
    stored = dequantized_weights(path, model.config)[0] if path.is_file() or has_weights(path) else {}
    return may_lack(_missing(model, targets, assign(model, stored, targets)[0]))


def _targets(model: PreTrainedModel) -> dict[str, BaseTensor]:
    """All tensors that are stored on disk, shared parameters under each of their names; no adapter weights."""
    return {target.name: target for target in base_tensors(model)}


def _few(names: Sequence[str], count: int = 5) -> str:
    shown = ", ".join(names[:count])
    return shown if len(names) <= count else f"{shown} and {len(names) - count} more"


def _matches(patterns: Sequence[str] | set[str] | None, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def _reportable(model: PreTrainedModel, unexpected: Sequence[str]) -> list[str]:
    """Without names that the model declares harmless, and without the rotary frequencies of older checkpoints."""
    harmless = {*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
    return [name for name in unexpected if not _matches(harmless, name)]


def _is_computed(model: PreTrainedModel, name: str) -> bool:
    """Whether a model's class computes a parameter instead of reading it, and never writes it: a table of positions of
    Marian."""
    return name in (model._keys_to_ignore_on_save or ()) and _matches(model._keys_to_ignore_on_load_missing, name)


def _unfilled(targets: Mapping[str, BaseTensor], assignments: Sequence[Assignment]) -> list[str]:
    """The names of tensors that have no source under any of their names."""
    filled = {name for assignment in assignments for name in _names_made(assignment, targets)}
    by_identity = {id(targets[name].tensor) for name in filled}
    return [name for name, target in targets.items() if id(target.tensor) not in by_identity]


def _missing(model: PreTrainedModel, targets: Mapping[str, BaseTensor], assignments: Sequence[Assignment]) -> list[str]:
    """The names of tensors that have no source, and need one."""
    optional = model._keys_to_ignore_on_load_missing
    return [
        name
        for name in _unfilled(targets, assignments)
        if not _is_computed(model, name)
        and (isinstance(targets[name].tensor, nn.Parameter) or not _matches(optional, name))
    ]


def _new_head(model: PreTrainedModel, missing: Sequence[str], path: Path) -> str:
    """What an adapter returns where all that a directory lacks stands beside the base model, such as a new head."""
    base = model.base_model_prefix
    parts = sorted({name.partition(".")[0] for name in missing})
    if model.base_model is model or base in parts:
        return ""
    entries = ", ".join(f'"{part}": None' for part in parts)
    return f'; where an adapter of yours adds a new head, initial_weights returns {{"{base}": "{path}", {entries}}}'


def _check_complete(
    model: PreTrainedModel,
    targets: Mapping[str, BaseTensor],
    assignments: Sequence[Assignment],
    path: Path,
    may_lack: MayLack | None,
) -> None:
    """Refuse weights in which a parameter has no source under any of its names."""
    missing = _missing(model, targets, assignments)
    if missing and may_lack is not None:
        lacking = may_lack(missing)
        missing = [name for name in missing if name not in lacking]
    if missing:
        own = type(model).__module__.partition(".")[0] not in ("transformers", "shardtune")
        raise ModelError(
            f"{len(missing)} of {len(targets)} tensors of {type(model).__name__.removeprefix('FSDP')} "
            f"are not among the weights: {_few(missing)}",
            where=str(path),
            remedy="the weights belong to another model than config.json, or are incomplete"
            + _new_head(model, missing, path)
            + ("; what the class adds to them, give in a state dict (initial_weights, materialization_source)" * own),
        )


def _names_made(assignment: Assignment, targets: Mapping[str, BaseTensor]) -> list[str]:
    """The model's names that an assignment fills; a splitting rule fills one for each of its target patterns."""
    converter = assignment.converter
    if converter is None or len(converter.target_patterns) == 1:
        return [assignment.target]
    first = converter.target_patterns[0]
    names = [assignment.target.replace(first, pattern, 1) for pattern in converter.target_patterns]
    return [name for name in names if name in targets]


def _check_shapes(
    assignments: Sequence[Assignment], targets: Mapping[str, BaseTensor], growable: Mapping[int, int]
) -> None:
    """Refuse tensors that do not have the shape of their target, before any memory is allocated.

    Args:
        assignments: of stored tensors to the model's.
        targets: the model's, by name.
        growable: by the id of a tensor that may have more entries than are stored, the dimension of these.
    """
    for assignment in assignments:
        if _is_weight(targets[assignment.target]):
            for source in chain.from_iterable(assignment.sources.values()):
                check_is_plain(source, assignment.target)
        if assignment.converter is not None:
            continue
        source, target = assignment.single, targets[assignment.target]
        expected, dim = list(target.shape), growable.get(id(target.tensor))
        if dim is not None and len(source.shape) == len(expected):
            expected[dim] = min(expected[dim], source.shape[dim])
        if list(source.shape) != expected:
            raise ModelError(
                f"'{source.name}' has shape {list(source.shape)}, the model expects {list(target.shape)}",
                where=str(source.file),
                remedy="the weights belong to another model than config.json; check actor.model.config_overrides",
            )


def _is_weight(target: BaseTensor) -> bool:
    """Whether a tensor of the model is of floating point; a layer in NF4 stands for one that is."""
    return target.layer is not None or target.tensor.is_floating_point()


def _fill_all(model: PreTrainedModel, assignments: Sequence[Assignment], targets: Mapping[str, BaseTensor]) -> int:
    filled: dict[int, WeightTensor | None] = {}
    for assignment in assignments:
        converter = assignment.converter
        if converter is not None:
            for name in write_converted(assignment, converter, model, targets):
                if name in targets:
                    filled[id(targets[name].tensor)] = None
            continue
        source, target = assignment.single, targets[assignment.target]
        twin = filled.get(id(target.tensor))
        if twin is not None:
            _check_equal(twin, source, target)
            continue
        _read(source, target, shard_of(target.tensor).local)
        filled[id(target.tensor)] = source
    return len(filled)


def _read(source: WeightTensor, target: BaseTensor, into: torch.Tensor) -> None:
    """Reads this rank's part of a target from the disk into `into`."""
    offsets = shard_of(target.tensor).offsets
    if target.layer is None and target.shape and source.shape[0] < target.shape[0]:
        there = max(0, min(source.shape[0] - offsets[0], into.shape[0]))
        source.read_into(into[:there], offsets)
        if there < into.shape[0]:
            into[there:] = _mean_row(source).to(into)
    elif target.layer is None and tuple(source.shape) != tuple(target.shape):  # a bias per token, whole on each rank
        into.zero_()
        source.read_into(into[:, : source.shape[1]], offsets)
    elif target.layer is None:
        source.read_into(into, offsets)
    elif into.numel():
        rows = torch.empty(into.shape[0], target.shape[1], device=into.device)
        source = source.unrounded if isinstance(source, FourBitTensor) else source
        source.read_into(rows, (offsets[0], 0))
        into.copy_(encode(rows))


def _mean_row(source: WeightTensor, rows: int = 4096) -> torch.Tensor:
    """The mean of a tensor's rows, in fp64."""
    count, *inner = source.shape
    total = torch.zeros(inner, dtype=torch.float64)
    for start in range(0, count, rows):
        size = min(rows, count - start)
        total += source.read_slice((start, *(0 for _ in inner)), (size, *inner)).double().sum(0)
    return total / count


def _check_equal(first: WeightTensor, second: WeightTensor, target: BaseTensor) -> None:
    """Refuse two names on disk for one tied parameter if their values differ."""
    shard = shard_of(target.tensor)
    again = torch.empty_like(shard.local)
    _read(second, target, again)
    if not torch.equal(again, shard.local):
        raise ModelError(
            f"the configuration ties '{first.name}' and '{second.name}', but their weights differ",
            where=f"{first.file}, {second.file}",
            remedy="set actor.model.config_overrides={tie_word_embeddings: false}",
        )


def _check_tied(model: PreTrainedModel, targets: Mapping[str, BaseTensor]) -> None:
    """Refuse tied weights that are no longer one object: training must change both."""
    for target, source in model.all_tied_weights_keys.items():
        if targets[target].tensor is not targets[source].tensor:
            raise ModelError(
                f"'{target}' is declared to share its weights with '{source}', but does not",
                where=type(model).__name__,
                remedy="shard both in the same group, after the model is built",
            )


def _load_generation_config(model: PreTrainedModel, path: Path) -> None:
    """Loads the directory's generation settings, as `from_pretrained` does."""
    file = path / "generation_config.json"
    if not file.is_file():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(str(path))
    except (OSError, ValueError, TypeError) as problem:
        raise ModelError(
            f"{file.name} cannot be used: {str(problem).splitlines()[0]}", where=str(file), remedy="fix or remove it"
        ) from problem
