"""All weights of a module as a stream of named whole tensors, one at a time."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardtune.checkpoint.hf_conversion import disk_groups, to_disk
from shardtune.checkpoint.hf_load import overwrite_weights
from shardtune.checkpoint.hf_save import disk_dtype, gather_full, save_pretrained
from shardtune.checkpoint.module_weights import in_files, load_plain, save_plain
from shardtune.checkpoint.peft_directory import WEIGHTS as ADAPTER_WEIGHTS
from shardtune.checkpoint.peft_directory import adapter_tensors, load_adapter, merging, save_adapter
from shardtune.engine.nn import BaseTrainModule
from shardtune.errors import CheckpointError, ModelError
from shardtune.models.lora.attach import base_tensors, is_adapted
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.weights import Weights
from shardtune.training.worker.finite_weights import FiniteWeights

logger = logging.getLogger(__name__)
POSTPROCESS = "postprocess_output_named_parameters"


class Whole(torch.Tensor):
    """A whole tensor on a single rank, with the interface of a sharded one."""

    def full_tensor(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


@torch.no_grad()
def full_state(
    module: BaseTrainModule, weights: Weights, prefix: str, dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor under its name in exports; all ranks iterate together, as gathering is collective.

    Names and values come from `postprocess_output_named_parameters` where the class overrides it; otherwise those of a
    model of transformers are as in its directory, with an adapter merged, and those of any other module unchanged.

    Args:
        prefix: of the names that the class sees.
        dtype: of floating tensors; None: full precision.
    """
    with weights.in_rows():
        found = _by_hook(module, weights, prefix) if has_output_hook(module) else _as_on_disk(module, weights)
        for name, tensor in found:
            whole = tensor.detach()
            yield name, whole.to(dtype) if dtype is not None and whole.is_floating_point() else whole


def has_output_hook(module: BaseTrainModule) -> bool:
    """Whether a class names the tensors of exports itself."""
    return getattr(type(module), POSTPROCESS) is not getattr(BaseTrainModule, POSTPROCESS)


def _by_hook(module: BaseTrainModule, weights: Weights, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    own = {f"{prefix}{name}": _sharded(tensor) for name, tensor in weights.tensors().items()}
    # An adapter's tensors have no names outside of it.
    base = {f"{prefix}{tensor.own_name}" for tensor in base_tensors(module)}
    for name, tensor in own.items():
        if name in base:
            given, whole = module.postprocess_output_named_parameters(name, tensor, own)
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            yield given, whole.as_subclass(torch.Tensor)


def _sharded(tensor: torch.Tensor) -> Any:
    return tensor if isinstance(tensor, DTensor) else tensor.detach().as_subclass(Whole)


def _as_on_disk(module: BaseTrainModule, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    tensors: Mapping[str, torch.Tensor] = weights.tensors()
    gather = gather_full
    if is_adapted(module):
        wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors.values()) else torch.float32
        tensors, gather, _ = merging(module, wide)
    if not isinstance(module, PreTrainedModel):
        for name, tensor in tensors.items():
            yield name, gather(name, tensor)
        return
    for names in disk_groups(module, list(tensors)):
        yield from to_disk(module, {name: gather(name, tensors[name]).detach() for name in names}).items()


@torch.no_grad()
def save_directory(
    module: BaseTrainModule, weights: Weights, directory: Path, dtype: torch.dtype | None, ranks: Ranks
) -> None:
    """Write a directory that `from_pretrained` loads; for an adapted model PEFT's; every rank calls it.

    Args:
        dtype: of the weights; None: that of the model's config.

    Raises:
        CheckpointError: trained weights are not finite, or would not be in this dtype.
    """
    if isinstance(module, PreTrainedModel) and not is_adapted(module):
        dtype = dtype or (module.config.dtype if isinstance(module.config.dtype, torch.dtype) else torch.float32)
    if trained := weights.trainable():
        FiniteWeights(weights, ranks, torch.float32).check_written(directory, disk_dtype(module, dtype), trained)
    with weights.in_rows():
        tensors = weights.tensors()
        if is_adapted(module):
            if not isinstance(module, PreTrainedModel):
                raise ModelError(
                    f"{type(module).__name__} is no model of transformers, over which PEFT could load an adapter",
                    where="engine.save_pretrained()",
                    remedy="use engine.save(), or take its tensors from engine.named_tensors()",
                )
            left = sorted(trained.keys() - set(adapter_tensors(module).values()))
            if left and ranks.is_main:
                logger.warning(
                    "%s leaves out %s: PEFT's directory has no place for what is trained beside the adapter; "
                    "engine.save() and engine.named_tensors() have it",
                    directory,
                    ", ".join(left[:5]),
                )
            save_adapter(module, directory, base=module.name_or_path or None, dtype=dtype, tensors=tensors)
        elif isinstance(module, PreTrainedModel):
            save_pretrained(module, directory, dtype=dtype or torch.float32, tensors=tensors)
            _name_the_model(module, directory)
        else:
            save_plain(module, directory, dtype=dtype, tensors=tensors)


def is_weight_directory(directory: Path) -> bool:
    """Whether a directory holds the weights of a model, or of an adapter."""
    return any(directory.glob("*.safetensors"))


@torch.no_grad()
def load_directory(module: BaseTrainModule, weights: Weights, directory: Path) -> None:
    """Load the weights of a directory as `save_directory` writes it; optimizers stay as they are; every rank calls it.

    Raises:
        CheckpointError: it is an adapter's and the module has none, or the other way round.
        ModelError: the weights are not the module's.
    """
    of_adapter = (directory / ADAPTER_WEIGHTS).is_file()
    if of_adapter != is_adapted(module):
        raise CheckpointError(
            "it holds an adapter, and the module has none" if of_adapter else "the module's adapter is not in it",
            where=str(directory),
            remedy="give an engine whose module has the adapter" if of_adapter else "give a directory of an adapter",
        )
    with weights.in_rows():
        if of_adapter:
            load_adapter(module, directory)
        elif isinstance(module, PreTrainedModel):
            overwrite_weights(module, directory)
        else:
            load_plain(module, in_files(directory), where=str(directory), remedy="give weights of this module")
        tensors = weights.tensors()
    weights.take(tensors)


def _name_the_model(module: PreTrainedModel, directory: Path) -> None:
    """Name transformers' class in the config: the user's cannot be imported where the directory is loaded."""
    known = [base.__name__ for base in type(module).__mro__ if base.__module__.startswith("transformers.models.")]
    if known and (not dist.is_initialized() or dist.get_rank() == 0):
        file = directory / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": known[:1]}, indent=2) + "\n")
