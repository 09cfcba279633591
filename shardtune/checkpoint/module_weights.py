"""Weights of any module by its own names: loaded from tensors, functions or files into shards, saved to a directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardtune.checkpoint.base_weights import part_of
from shardtune.checkpoint.hf_save import disk_dtype, gather_full, save_error, write_weights
from shardtune.checkpoint.safetensors_file import read_header
from shardtune.checkpoint.weight_files import WeightTensor, find_weights
from shardtune.errors import ModelError
from shardtune.models.lora.attach import BaseTensor, base_tensors
from shardtune.parallel.meta_init import named_tensors, shard_of

PICKLED = (".bin", ".pt", ".pth", ".ckpt")
FILES = (".safetensors", *PICKLED)


@dataclass(frozen=True, slots=True)
class Supply:
    """Where one tensor comes from.

    Attributes:
        full: gives the whole tensor; every rank calls it, once, in the order of the model's names.
        form: its shape and dtype, if they are known in advance.
        stored: the tensor on disk, where it is there: then each rank reads its part of it.
    """

    full: Callable[[], torch.Tensor]
    form: tuple[tuple[int, ...], torch.dtype] | None = None
    stored: WeightTensor | None = None


def in_files(path: Path) -> dict[str, Supply]:
    """The tensors of a weight file, or of all that belong together in a directory.

    Files other than safetensors are read with `weights_only=True`, which cannot execute code, with a warning.

    Raises:
        ModelError: nothing there can be read.
    """
    return {
        name: Supply(tensor.read, (tuple(tensor.shape), tensor.dtype), tensor) for name, tensor in _stored(path).items()
    }


def _stored(path: Path) -> Mapping[str, WeightTensor]:
    if not path.exists() or (path.is_file() and path.suffix not in FILES):
        raise ModelError(
            f"{path} {'is no weight file' if path.exists() else 'does not exist'}",
            where="initial weights",
            remedy=f"give a file ({', '.join(FILES)}) or a directory of safetensors files",
        )
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if len(files) < 2 or (path / "model.safetensors").exists() or list(path.glob("*.index.json")):
        return find_weights(path)
    tensors: dict[str, WeightTensor] = {}
    for file in files:
        found = read_header(file)[0]
        twice = sorted(tensors.keys() & found.keys())
        if twice:
            raise ModelError(
                f"'{twice[0]}' is in both {tensors[twice[0]].file.name} and {file.name}",
                where=str(path),
                remedy="name the file that is meant",
            )
        tensors.update(found)
    return tensors


@torch.no_grad()
def load_plain(
    model: nn.Module,
    supplies: Mapping[str, Supply],
    *,
    where: str,
    remedy: str,
    done: Sequence[str] = (),
) -> None:
    """Fills a module from named tensors, one at a time: all its parameters and persistent buffers, and nothing else.

    Args:
        model: in memory (not meta), sharded or not, with or without an adapter; its names are those without.
        supplies: by name; of names that are one parameter, one is enough.
        where: the tensors come from, for messages.
        remedy: what to do about names that do not fit.
        done: names of submodules that are filled already, but for what `supplies` has of them.

    Raises:
        ModelError: names or shapes do not fit.
    """
    targets = {
        target.name: target
        for target in base_tensors(model)
        if target.name in supplies or not _inside(target.name, done)
    }
    check_names(model, supplies, where=where, remedy=remedy, done=done)
    filled: dict[int, str] = {}
    for name, target in targets.items():
        if name not in supplies:
            continue
        first = filled.setdefault(id(target.tensor), name)
        _fill(target, supplies[name], where, twin=first if first != name else None)


def check_names(
    model: nn.Module, supplies: Mapping[str, Supply], *, where: str, remedy: str, done: Sequence[str] = ()
) -> None:
    """Refuse tensors whose names or shapes are not the model's, as far as these are known before they are read."""
    targets = {
        target.name: target
        for target in base_tensors(model)
        if target.name in supplies or not _inside(target.name, done)
    }
    given = {id(target.tensor) for name, target in targets.items() if name in supplies}
    missing = [name for name, target in targets.items() if id(target.tensor) not in given]
    unexpected = [name for name in supplies if name not in targets]
    complaints = [
        f"{len(names)} {what}: {', '.join(names[:4])}{', …' if len(names) > 4 else ''}"
        for what, names in (("missing", missing), ("without a place in the model", unexpected))
        if names
    ]
    if complaints:
        prefix = _prefix(missing, unexpected)
        if prefix:
            remedy = f"the names begin with '{prefix}': give them without it"
        raise ModelError(
            f"the weights do not fit {_kind(model)}, which has {len(targets)} tensors: {'; '.join(complaints)}",
            where=where,
            remedy=remedy,
        )
    for name, supply in supplies.items():
        if supply.form is not None:
            _check_form(targets[name], *supply.form, where)


def _prefix(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """The prefix ("module.", "_orig_mod.") without which the unexpected names are the missing ones; "" if none is."""
    if not missing or not unexpected:
        return ""
    prefix = unexpected[0].removesuffix(missing[0]) if unexpected[0].endswith(missing[0]) else ""
    return prefix if {prefix + name for name in missing} <= set(unexpected) else ""


def _check_form(target: BaseTensor, shape: tuple[int, ...], dtype: torch.dtype, where: str) -> None:
    is_floating = target.layer is not None or target.tensor.is_floating_point()
    if shape != target.shape:
        raise ModelError(
            f"'{target.name}' has shape {list(target.shape)} in the model, the weights give {list(shape)}",
            where=where,
            remedy="build the model with the sizes that the weights have, or give weights of its own",
        )
    if dtype.is_floating_point and dtype.itemsize == 1 and dtype != target.tensor.dtype:
        raise ModelError(
            f"'{target.name}' is given as {str(dtype).removeprefix('torch.')}, codes that are nothing without scales",
            where=where,
            remedy="convert the weights to bf16 with the tool that quantised them",
        )
    if dtype.is_floating_point != is_floating or dtype.is_complex != target.tensor.is_complex():
        here = "floating-point" if is_floating else str(target.tensor.dtype).removeprefix("torch.")
        raise ModelError(
            f"'{target.name}' is {here} in the model, the weights give {str(dtype).removeprefix('torch.')}",
            where=where,
            remedy="give it in the model's kind of numbers",
        )


def _fill(target: BaseTensor, supply: Supply, where: str, *, twin: str | None) -> None:
    """Copies this rank's part into the model; a second name of the same parameter must have equal values."""
    shard = shard_of(target.tensor)
    if supply.stored is not None and target.layer is None:
        part = torch.empty_like(shard.local)
        supply.stored.read_into(part, shard.offsets)
    else:
        full = supply.full()
        _check_form(target, tuple(full.shape), full.dtype, where)
        part = part_of(target, full)
    if twin is None:
        shard.local.copy_(part)
    elif not torch.equal(shard.local, part):
        raise ModelError(
            f"'{target.name}' is the same parameter as '{twin}' in the model, but the weights differ",
            where=where,
            remedy="give it under one of the names, or build a model that does not share it",
        )


def _inside(name: str, owners: Sequence[str]) -> bool:
    return any(name == owner or name.startswith(f"{owner}.") for owner in owners)


def _kind(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")


@torch.no_grad()
def save_plain(
    model: nn.Module,
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    gather: Callable[[str, torch.Tensor], torch.Tensor] = gather_full,
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Writes a module's parameters and persistent buffers as `model.safetensors`, under its own names.

    Every rank calls it; rank 0 writes, one tensor at a time. A parameter with several names is written under its first;
    `safetensors.torch.load_model(module, file)` reads it into all of them.

    Args:
        dtype: of floating parameters; None: as they are. Buffers keep theirs.
        tensors: what to save, by its names in `model`, in the same order on all ranks; None: `named_tensors(model)`.
        gather: makes one of `tensors` whole. All ranks call it in the same order.
        max_shard_bytes: a file is not made larger, unless one tensor is; several files get an index.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    path = Path(directory)
    writes = not dist.is_initialized() or dist.get_rank() == 0
    tensors = named_tensors(model) if tensors is None else tensors
    try:
        if writes:
            path.mkdir(parents=True, exist_ok=True)
        write_weights(
            path,
            tensors,
            [[name] for name in tensors],
            dict,
            dtype=disk_dtype(model, dtype),
            gather=gather,
            max_shard_bytes=max_shard_bytes if writes else None,
        )
    except OSError as problem:
        raise save_error(path, problem) from problem
