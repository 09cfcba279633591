"""Saves a trained model as a Hugging Face directory, one tensor at a time, with the names and layout of its class."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from shardtune.checkpoint.checksums import CHECKSUMS, add_checksums
from shardtune.checkpoint.hf_conversion import disk_groups, to_disk
from shardtune.checkpoint.safetensors_file import SafetensorsWriter, TensorPlan
from shardtune.errors import CheckpointError
from shardtune.models.action.policy import SETTINGS, ActionSettings
from shardtune.parallel.full_precision import kept_in_fp32
from shardtune.parallel.meta_init import named_tensors

_FILE = "model.safetensors"
DiskDtype = Callable[[str, torch.Tensor], torch.dtype]
"""The name of a tensor, and the tensor as it is in the model, to its dtype on disk."""


class Processor(Protocol):
    """What prepares a model's inputs beside its tokenizer: a processor, an image processor, a feature extractor."""

    def save_pretrained(self, save_directory: str | Path) -> object:
        """Write its settings."""
        ...


def gather_full(_name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor; all ranks of its mesh call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def save_pretrained(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None = None,
    chat_template: str | None = None,
    end_of_turn_ids: Sequence[int] = (),
    processor: Processor | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    gather: Callable[[str, torch.Tensor], torch.Tensor] = gather_full,
    settings: Mapping[str, object] = MappingProxyType({}),
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Writes weights, configuration, tokenizer and generation settings that `from_pretrained` loads as they are.

    Every rank calls it; rank 0 writes. Each tensor is gathered on its own, so no rank ever holds more than one whole
    tensor (fused experts: one layer's, and its parts while they are written) beside its shards.

    Args:
        dtype: of the floating parameters on disk; those that transformers keeps in fp32 stay so (see `disk_dtype`).
            Buffers keep theirs.
        tokenizer: saved beside the weights, with `chat_template` where that is given.
        end_of_turn_ids: token ids the model was trained to end its turn with; generation stops at each of them.
        processor: of images and text, saved in place of its tokenizer.
        tensors: what to save, by its names in `model`, in the same order on all ranks; None: `named_tensors(model)`.
        gather: makes one of `tensors` whole. All ranks call it in the same order.
        settings: of config.json that differ from those in memory.
        max_shard_bytes: a weight file is not made larger, unless one tensor is.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    path = Path(directory)
    writes = not dist.is_initialized() or dist.get_rank() == 0
    if tensors is None:
        tensors = named_tensors(model)
    skipped = model._keys_to_ignore_on_save or ()
    tensors = {name: tensor for name, tensor in tensors.items() if name not in skipped}
    try:
        if writes:
            path.mkdir(parents=True, exist_ok=True)
            save_config(model, path, dtype, settings)
            save_text_settings(model, path, tokenizer, chat_template, end_of_turn_ids, processor)
        _save_weights(model, path, tensors, dtype, gather, max_shard_bytes if writes else None)
    except OSError as problem:
        raise save_error(path, problem) from problem


def save_error(path: Path, problem: OSError) -> CheckpointError:
    """The error for a directory that cannot be written."""
    return CheckpointError(
        f"the model cannot be saved: {problem.strerror or problem}",
        where=str(problem.filename or path),
        remedy="make room on the disk, or choose a directory that can be written (of a run: runner.logger.log_path)",
    )


def disk_dtype(model: nn.Module, dtype: torch.dtype | None) -> DiskDtype:
    """The dtype on disk of each tensor of a model that is written in a dtype; None: as in memory.

    Buffers keep theirs, and so do whole numbers. What transformers keeps in fp32 where it loads the model in half
    precision (`_keep_in_fp32_modules`, `_keep_in_fp32_modules_strict`) is written in fp32.
    """
    is_kept = kept_in_fp32(model, dtype) if isinstance(model, PreTrainedModel) and dtype is not None else None

    def of(name: str, tensor: torch.Tensor) -> torch.dtype:
        if dtype is None or not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
            return tensor.dtype
        return torch.float32 if is_kept is not None and is_kept(name) else dtype

    return of


def _save_weights(
    model: PreTrainedModel,
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    gather: Callable[[str, torch.Tensor], torch.Tensor],
    max_shard_bytes: int | None,
) -> None:
    """Writes the weights in the names and layout that transformers has for this model."""

    def convert(cast: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return to_disk(model, cast)

    groups = disk_groups(model, list(tensors))
    on_disk = disk_dtype(model, dtype)
    write_weights(path, tensors, groups, convert, dtype=on_disk, gather=gather, max_shard_bytes=max_shard_bytes)


def write_weights(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    groups: Sequence[Sequence[str]],
    convert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    *,
    dtype: DiskDtype,
    gather: Callable[[str, torch.Tensor], torch.Tensor],
    max_shard_bytes: int | None,
) -> None:
    """Gathers group after group; every rank calls it, and the one with `max_shard_bytes` writes the files.

    Their checksums are written beside them.

    Args:
        path: a directory; weights in it are replaced.
        tensors: by name.
        groups: the names, in groups that are converted together.
        convert: one group to the names and layout on disk; called with tensors on the meta device as well.
        dtype: of each tensor on disk.
        gather: makes a tensor whole.
        max_shard_bytes: of one file; None: another rank writes.
    """
    writers: list[SafetensorsWriter] = []
    place: dict[str, SafetensorsWriter] = {}
    if max_shard_bytes is not None:
        _remove_weights(path)
        writers, place = _open_files(path, _plan(tensors, groups, convert, dtype), max_shard_bytes)
    for names in groups:
        whole = {name: gather(name, tensors[name]).detach() for name in names}
        if max_shard_bytes is None:
            continue
        cast = {name: tensor.to(dtype(name, tensors[name])) for name, tensor in whole.items()}
        for name, tensor in convert(cast).items():
            place[name].write(name, tensor)
    if writers:
        add_checksums(path, {writer.file.name: writer.close() for writer in writers})


def _plan(
    tensors: Mapping[str, torch.Tensor],
    groups: Sequence[Sequence[str]],
    convert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    dtype: DiskDtype,
) -> list[TensorPlan]:
    """Names, shapes and dtypes on disk, found by converting tensors without memory."""
    plan: list[TensorPlan] = []
    for names in groups:
        empty = {n: torch.empty(tensors[n].shape, dtype=dtype(n, tensors[n]), device="meta") for n in names}
        plan += [TensorPlan(n, tuple(t.shape), t.dtype) for n, t in convert(empty).items()]
    return plan


def _open_files(
    path: Path, plan: Sequence[TensorPlan], max_shard_bytes: int
) -> tuple[list[SafetensorsWriter], dict[str, SafetensorsWriter]]:
    """Distributes the tensors over files in order; several files get an index."""
    shards: list[list[TensorPlan]] = [[]]
    size = 0
    for tensor in plan:
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    names = [_FILE]
    if len(shards) > 1:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": sum(t.nbytes for t in plan)}, "weight_map": weight_map}
        (path / f"{_FILE}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    writers = [SafetensorsWriter(path / name, shard) for name, shard in zip(names, shards, strict=True)]
    place = {tensor.name: writer for writer, shard in zip(writers, shards, strict=True) for tensor in shard}
    return writers, place


def _remove_weights(path: Path) -> None:
    """Remove the weights of an earlier save, which would be loaded beside or instead of the new ones."""
    for file in [*path.glob("model*.safetensors"), path / f"{_FILE}.index.json", path / CHECKSUMS]:
        file.unlink(missing_ok=True)


def save_config(
    model: PreTrainedModel, path: Path, dtype: torch.dtype, settings: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Writes config.json: that of the model, with a dtype and other settings than those in memory."""
    config = deepcopy(model.config)
    config.dtype = dtype
    for key in config.sub_configs:  # as from_pretrained does
        if isinstance(part := getattr(config, key), PreTrainedConfig):
            part.dtype = dtype
    for key, value in settings.items():
        setattr(config, key, value)
    # fully_shard gives the object a class of its own.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    for key in config._get_generation_parameters():
        # Old configurations mix these in; transformers refuses to write them there.
        delattr(config, key)
    config.save_pretrained(path)


def save_text_settings(
    model: nn.Module,
    path: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    chat_template: str | None,
    end_of_turn_ids: Sequence[int],
    processor: Processor | None = None,
) -> None:
    """Writes the files of a text model besides its weights: tokenizer or processor, generation settings, and for an
    action model the statistics of actions."""
    if isinstance(model, PreTrainedModel) and model.config.to_dict().get(SETTINGS) is not None:
        ActionSettings.of(model.config).save_statistics(path)
    if isinstance(model, PreTrainedModel) and model.can_generate():
        generation = deepcopy(model.generation_config)
        for key, value in model.config._get_generation_parameters().items():
            setattr(generation, key, value)
        _set_stop_tokens(generation, tokenizer, end_of_turn_ids)
        # Without transformers' strict validation: published settings that it calls inconsistent stay as they are.
        generation.to_json_file(path / "generation_config.json", keys_to_pop=["compile_config", "_from_model_config"])
    if processor is not None:
        _save_reader(processor, path, chat_template)
    if tokenizer is not None and not isinstance(processor, ProcessorMixin):  # such a one holds the tokenizer
        _save_reader(tokenizer, path, chat_template)


def stop_tokens(
    own: int | Sequence[int] | None, tokenizer: PreTrainedTokenizerBase | None, end_of_turn_ids: Sequence[int]
) -> list[int]:
    """The tokens at which the written model stops: those that end its turn, its own, and the tokenizer's."""
    known = [] if own is None else [own] if isinstance(own, int) else [*own]
    if tokenizer is not None and isinstance(tokenizer.eos_token_id, int):
        known.append(tokenizer.eos_token_id)
    return list(dict.fromkeys([*end_of_turn_ids, *known]))


def _set_stop_tokens(
    generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase | None, end_of_turn_ids: Sequence[int]
) -> None:
    stops = stop_tokens(generation.eos_token_id, tokenizer, end_of_turn_ids)
    if stops:
        generation.eos_token_id = stops
    if tokenizer is not None and tokenizer.pad_token_id is not None:
        generation.pad_token_id = tokenizer.pad_token_id
    elif generation.pad_token_id is None and stops:
        generation.pad_token_id = stops[0]


def _save_reader(reader: PreTrainedTokenizerBase | Processor, path: Path, chat_template: str | None) -> None:
    copy = deepcopy(reader)
    if chat_template is not None and isinstance(copy, PreTrainedTokenizerBase | ProcessorMixin):
        copy.chat_template = chat_template
    copy.save_pretrained(path)
