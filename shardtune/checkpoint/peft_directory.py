"""An adapter as a directory that PEFT loads, read and written shard by shard, and its merging into the base model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from shardtune.checkpoint.checksums import add_checksums
from shardtune.checkpoint.hf_save import gather_full, save_error
from shardtune.checkpoint.safetensors_file import SafetensorsWriter, TensorPlan
from shardtune.checkpoint.weight_files import WeightTensor, find_weights
from shardtune.config.hub_name import split_revision
from shardtune.errors import ModelError
from shardtune.models.lora.attach import (
    ADAPTER,
    BaseTensor,
    adapter_config,
    base_tensors,
    lora_layers,
    saved_whole,
    token_rows,
)
from shardtune.models.lora.config import MICA, PICKLED, PREFIX, WEIGHTS
from shardtune.models.lora.init import INITIAL, merged, with_rows
from shardtune.parallel import peft_names as peft
from shardtune.parallel.meta_init import shard_of

KEY = "actor.model.lora.load_from"

BASE = "base_of_adapter"
"""The attribute of a model with the frozen weights of the base that its adapter's directory had, too."""

Gather = Callable[[str, torch.Tensor], torch.Tensor]


def adapter_tensors(model: nn.Module) -> dict[str, str]:
    """PEFT's name on disk -> the name in the model, of all that an adapter's directory holds.

    That is the adapter, the modules that are trained in full, and frozen weights of the base that came with it.
    """
    # PEFT selects by name alone, so meta tensors are passed in place of the model's.
    stand_ins = {name: torch.empty(0, device="meta") for name, _ in model.named_parameters()}
    chosen = peft.get_peft_model_state_dict(
        model, state_dict=stand_ins, adapter_name=ADAPTER, save_embedding_layers=False
    )
    names = {id(tensor): name for name, tensor in stand_ins.items()}
    found = {PREFIX + key: names[id(tensor)] for key, tensor in chosen.items()}
    in_full = saved_whole(adapter_config(model))
    first: dict[int, str] = {}  # a shared parameter is listed under its first name
    for target in base_tensors(model):
        own_name = first.setdefault(id(target.tensor), target.own_name)
        if any(target.name.startswith(f"{name}.") for name in in_full):
            found[PREFIX + target.name] = own_name
    return {**found, **base_of_adapter(model)}


def base_of_adapter(model: nn.Module) -> Mapping[str, str]:
    """PEFT's name on disk -> the name in the model, of frozen weights of the base that a loaded adapter came with."""
    return vars(model).get(BASE, {})


@torch.no_grad()
def load_adapter(model: nn.Module, directory: str | Path) -> None:
    """Load a model's adapter, and the modules trained in full, from a directory; each rank reads its own rows.

    Args:
        model: adapted by the directory's config, in memory, sharded or not.
        directory: as PEFT saves it.

    Raises:
        ModelError: tensors missing, without a place, or of another shape; two for weights that are one here.
    """
    read: dict[int, WeightTensor] = {}
    targets = check_adapter(model, directory)
    vars(model)[BASE] = _base_places(model, {source.name for _, source in targets})
    for target, source in targets:
        shard = shard_of(target)
        first = read.setdefault(id(target), source)
        if first is not source and shard.local.numel():
            parts = [each.read_slice(shard.offsets, shard.local.shape) for each in (first, source)]
            if not torch.equal(*parts):
                raise _apart([first.name, source.name], "the adapter has weights of its own for each", source.file)
        source.read_into(shard.local, shard.offsets)


def check_adapter(model: nn.Module, directory: str | Path) -> list[tuple[torch.Tensor, WeightTensor]]:
    """The place in an adapted model (on the meta device or not) of each tensor of a directory; reads no weights.

    Raises:
        ModelError: tensors missing, without a place, or of another shape.
    """
    path = Path(directory)
    file = path / WEIGHTS if (path / WEIGHTS).is_file() or not (path / PICKLED).is_file() else path / PICKLED
    if not file.is_file():
        raise ModelError(f"{path} holds no {WEIGHTS}", where=KEY, remedy="give a directory as PEFT saves it")
    stored = _in_use(find_weights(file))
    own = _named(model)
    places = {**adapter_tensors(model), **_base_places(model, stored.keys())}
    places |= {key: places[name] for key, name in _again(model, stored.keys()).items() if name in places}
    lacking = [key for key in places if key not in stored]
    for key in lacking:
        of_one = [other for other in places if places[other] == places[key]]
        if kept := [other for other in of_one if other in stored]:
            raise _apart([*kept, key], f"the adapter has {kept[0].removeprefix(PREFIX)} alone", file)
    complaints = [
        f"{len(names)} {what}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
        for what, names in (
            ("not in it", lacking),
            ("without a place in the model", [key for key in stored if key not in places]),
        )
        if names
    ]
    for key, name in places.items() if not complaints else ():
        if tuple(stored[key].shape) != tuple(own[name].shape):
            complaints.append(f"'{key}' has shape {list(stored[key].shape)}, the model {list(own[name].shape)}")
    if complaints:
        raise ModelError(
            f"the adapter does not fit the model: {'; '.join(complaints)}",
            where=str(file),
            remedy="give the base model that it was trained with as actor.model.model_path",
        )
    return [(own[name], stored[key]) for key, name in places.items()]


def _in_use(stored: Mapping[str, WeightTensor]) -> dict[str, WeightTensor]:
    """Without the weights from before training, which PEFT saves of a grown embedding that is trained in full."""
    before = ".original_module."
    return {
        key: tensor for key, tensor in stored.items() if before not in key or key.replace(before, ".") not in stored
    }


def _again(model: nn.Module, stored: Collection[str]) -> dict[str, str]:
    """The first names of stored tensors that PEFT saves twice where embeddings have grown: of modules that are trained
    in full, and of the rows of new tokens under the name of a tied head, too."""
    found = {key: key.replace(".modules_to_save.", ".") for key in stored if ".modules_to_save." in key}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = PREFIX + name.removesuffix(f".{ADAPTER}")
        if first.setdefault(id(parameter), key) != key and key in stored and name.endswith(f".{ADAPTER}"):
            found[key] = first[id(parameter)]
    return found


def _base_places(model: nn.Module, stored: Collection[str]) -> dict[str, str]:
    """The places of frozen base weights among stored names; those of NF4 layers have none.

    Of an adapted embedding or head PEFT saves the base weight too, which may have grown or changed since the base was
    saved. An adapter that is continued keeps it, without which it would be on other weights than those it learned on.
    """
    trained, first, found = adapter_tensors(model), dict[int, str](), dict[str, str]()
    for base in base_tensors(model):
        own_name = first.setdefault(id(base.tensor), base.own_name)
        key = PREFIX + base.own_name
        if base.layer is None and key in stored and (key not in trained or key in base_of_adapter(model)):
            found[key] = own_name
    return found


def _apart(keys: list[str], what: str, file: Path) -> ModelError:
    """The error about an adapter beside which PEFT has trained one of several weights that are one in the base."""
    *others, last = [key.removeprefix(PREFIX) for key in keys]
    return ModelError(
        f"{', '.join(others)} and {last} share their weights in this base (tied embeddings), and here they stay one; "
        f"{what}: PEFT trained them apart (modules_to_save without ensure_weight_tying)",
        where=str(file),
        remedy="give a base without tied weights as actor.model.model_path: load it in transformers, set "
        "model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone()) and "
        "model.config.tie_word_embeddings = False, and save it; or train the adapter with ensure_weight_tying=True",
    )


@torch.no_grad()
def save_adapter(
    model: nn.Module,
    directory: str | Path,
    *,
    base: str | None,
    dtype: torch.dtype | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    gather: Gather = gather_full,
) -> None:
    """Write an adapter so that `PeftModel.from_pretrained(base, directory)` is the trained model; every rank calls it.

    An adapter that began as a part of the base weights (PiSSA, OLoRA) is written as what it has learned: with twice the
    rank, as the difference of two products, so that it fits the base model as that is on disk.

    Args:
        base: the base model's directory or Hub name, with its revision, where it has one.
        dtype: of the tensors; None: as they are.
        tensors: by the names in the model, in full precision; None: the model's own.
        gather: makes one of them whole; all ranks call it in the same order.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    path = Path(directory)
    source = _named(model) if tensors is None else tensors
    places = adapter_tensors(model)
    initial = {name: buffer for name, buffer in model.named_buffers() if name.endswith(f".{INITIAL}")}
    plan = [_planned(key, source[name], dtype, _initial(name) in initial) for key, name in places.items()]
    try:
        writer = None
        if not dist.is_initialized() or dist.get_rank() == 0:
            path.mkdir(parents=True, exist_ok=True)
            _stored_config(model, base, doubled=bool(initial)).save_pretrained(str(path))
            writer = SafetensorsWriter(path / WEIGHTS, plan)
        for key, name in places.items():
            whole = gather(name, source[name]).detach()
            if _initial(name) in initial:
                whole = _since(whole, gather_full(name, initial[_initial(name)]), key)
            if writer is not None:
                writer.write(key, whole)
        if writer is not None:
            add_checksums(path, {WEIGHTS: writer.close()})
    except OSError as problem:
        raise save_error(path, problem) from problem


def _planned(key: str, tensor: torch.Tensor, dtype: torch.dtype | None, doubled: bool) -> TensorPlan:
    shape = list(tensor.shape)
    if doubled:
        shape[_rank_dimension(key)] *= 2
    return TensorPlan(key, tuple(shape), dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)


def _since(factor: torch.Tensor, began: torch.Tensor, key: str) -> torch.Tensor:
    """A factor of the change since initialisation: B A - B0 A0 is the product of [B, -B0] and [A; A0]."""
    dimension = _rank_dimension(key)
    return torch.cat([factor, (-began if dimension else began).to(factor)], dim=dimension)


class Merging(NamedTuple):
    """A model without its adapter, which is merged into the weights: the content of an export.

    Attributes:
        tensors: by the names of the unadapted model, for their shapes and order.
        gather: makes one of them, merged and whole; all ranks call it in the same order.
        unties: whether weights that were one are several now, because an adapter moved one of them.
    """

    tensors: dict[str, torch.Tensor]
    gather: Gather
    unties: bool


def merging(model: nn.Module, dtype: torch.dtype) -> Merging:
    """How to save an adapted model with its adapter merged, one layer at a time; the model stays as it is.

    Args:
        dtype: of the arithmetic, fp32 or fp64; the result is cast when it is saved.
    """
    layers = dict(lora_layers(model))
    rows = {f"{name}.token_adapter.base_layer.weight": wrapper for name, wrapper in token_rows(model)}
    places = {target.name: _place(target, layers) for target in base_tensors(model)}
    names: dict[int, list[str]] = {}
    own: dict[str, BaseTensor] = {}
    for target in base_tensors(model):
        own[target.name] = target
        names.setdefault(id(target.tensor), []).append(target.name)
    parted = [group for group in names.values() if len(group) > 1 and any(places[name] for name in group)]
    kept = [name for group in names.values() for name in (group if group in parted else group[:1])]

    def gather(name: str, tensor: torch.Tensor) -> torch.Tensor:
        place = places[name]
        if own[name].own_name in rows:
            return with_rows(rows[own[name].own_name])
        if place is None:
            return gather_full(name, tensor)
        layer, key = place
        return dict(merged(layers[layer], dtype).state_dict(keep_vars=True))[key]

    return Merging({name: own[name].tensor for name in own if name in kept}, gather, bool(parted))


def _place(target: BaseTensor, layers: Mapping[str, nn.Module]) -> tuple[str, str] | None:
    """The adapted layer that a base tensor belongs to, and its name in the module below it."""
    for layer in layers:
        if target.own_name.startswith(f"{layer}.base_layer."):
            below = target.own_name.removeprefix(f"{layer}.")
            while below.startswith("base_layer."):
                below = below.removeprefix("base_layer.")
            return layer, below
    return None


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _initial(name: str) -> str:
    return f"{name.removesuffix('.weight')}.{INITIAL}"


def _rank_dimension(key: str) -> int:
    """Which dimension of a factor is the adapter's rank: of A the first, of B the second."""
    return 1 if key.endswith(".lora_B.weight") else 0


def _stored_config(model: nn.Module, base: str | None, *, doubled: bool) -> peft.PeftConfig:
    config = deepcopy(adapter_config(model))
    config.base_model_name_or_path, config.revision = (None, None) if base is None else split_revision(base)
    config.inference_mode = True
    if not isinstance(config, peft.LoraConfig):
        return config
    if config.init_lora_weights != MICA:  # the initialisation no longer matters, and PEFT would repeat it
        config.init_lora_weights = True
    if doubled:
        # The scale is alpha / r, or alpha / sqrt(r), and stays what it was.
        growth = math.sqrt(2) if config.use_rslora else 2
        config.r *= 2
        config.lora_alpha = config.lora_alpha * growth  # pyright: ignore[reportAttributeAccessIssue]
        config.rank_pattern = {name: 2 * rank for name, rank in (config.rank_pattern or {}).items()}
        config.alpha_pattern = {name: alpha * growth for name, alpha in (config.alpha_pattern or {}).items()}
    return config
