"""Sources of a module's initial weights: files, tensors, functions, or the module's constructor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from shardtune.batch.seeds import derive_seed, seeded
from shardtune.checkpoint.module_weights import Supply
from shardtune.data.sources.fingerprint import contents
from shardtune.errors import ModelError, counted
from shardtune.models.adapter import WeightSource
from shardtune.models.lora.attach import base_tensors
from shardtune.models.pretrained import model_directory
from shardtune.parallel.buffers import same_values
from shardtune.parallel.meta_init import persistent_buffers
from shardtune.parallel.ranks import Ranks
from shardtune.training.build.unwritten import check_written, unwritten_is_nan

T = TypeVar("T")
Build = Callable[[], nn.Module]
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
"""Extensions of weight files, which distinguish them from names on the Hub."""


def split_source(source: WeightSource, ranks: Ranks, seed: int) -> tuple[dict[str, Path | None], dict[str, Supply]]:
    """Split a source into entries for whole submodules ("": the model) and for single tensors."""
    if source is not None and not isinstance(source, Mapping | str | Path):
        raise ModelError(
            f"initial_weights returned a {type(source).__name__}, which holds no weights",
            where="initial_weights()",
            remedy="return a path, a state dict, {name: function that makes it}, {submodule: path or None}, or None",
        )
    if not isinstance(source, Mapping):
        whole = None if source is None else directory_of(source)
        check_same_files([] if whole is None else [whole], ranks)
        return {"": whole}, {}
    parts: dict[str, Path | None] = {}
    tensors: dict[str, torch.Tensor] = {}
    supplies: dict[str, Supply] = {}
    for name, value in source.items():
        if value is None or isinstance(value, str | Path):
            parts[name] = None if value is None else directory_of(value)
        elif isinstance(value, torch.Tensor):
            tensors[name] = value
        elif callable(value):
            supplies[name] = Supply(_making(name, value, derive_seed(seed, name, "weights")))
        else:
            raise ModelError(
                f"initial_weights gives a {type(value).__name__} for {name!r}",
                where="initial_weights()",
                remedy="give a tensor, a function that makes it, or for a submodule's name a path or None",
            )
    check_same_files([path for path in parts.values() if path is not None], ranks)
    if ranks.broadcast(bool(tensors)):
        supplies |= _broadcast_tensors(tensors, ranks)
    return parts, supplies


def check_same_files(paths: Sequence[Path], ranks: Ranks) -> None:
    """Refuse weights whose files differ between ranks, each of which reads its part from those on its own host.

    Small files are compared whole, others by size, header and samples.
    """
    if ranks.mesh is None:
        return
    first, *others = ranks.gather(
        {str(path / name): content for path in paths for name, content in contents(path).items()}
    )
    for rank, mine in enumerate(others, 1):
        for file in sorted(first.keys() | mine.keys()):
            one, other = first.get(file, "missing"), mine.get(file, "missing")
            if one != other:
                raise ModelError(
                    f"the weights differ between hosts: {file} is {other} for rank {rank}, {one} for rank 0",
                    where="actor.model.model_path, initial_weights()",
                    remedy="give all hosts the same files: copy them again, or name a directory that all of them share",
                )


def _making(name: str, make: Callable[[], object], seed: int) -> Callable[[], torch.Tensor]:
    """A user's function, with draws that depend on the name and the seed alone."""

    def full() -> torch.Tensor:
        with seeded(seed):
            made = make()
        if not isinstance(made, torch.Tensor):
            raise ModelError(
                f"the function for {name!r} returned a {type(made).__name__}, not a tensor", where="initial_weights()"
            )
        return made

    return full


def _broadcast_tensors(values: Mapping[str, torch.Tensor], ranks: Ranks) -> dict[str, Supply]:
    """Rank 0's tensors, each broadcast when it is needed and not kept afterwards."""
    left = dict(values)  # rank 0 frees each tensor once it is broadcast
    forms = ranks.broadcast([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in left.items()])

    def supplier(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        def full() -> torch.Tensor:
            tensor = left.pop(name).detach().cpu() if ranks.is_main else torch.empty(shape, dtype=dtype)
            ranks.share(tensor)
            return tensor

        return full

    return {name: Supply(supplier(name, shape, dtype), (shape, dtype)) for name, shape, dtype in forms}


def constructed(
    build: Build, seed: int, model: nn.Module, ranks: Ranks, counts: Callable[[str], bool]
) -> tuple[dict[str, Supply], list[str]]:
    """The constructor's values of parameters and persistent buffers, on rank 0; and notes.

    Args:
        build: makes the model anew.
        seed: of what is drawn.
        model: as it was built first.
        ranks: of the run.
        counts: whether the values of a tensor, by its name, are used; those must have been written.
    """

    def make() -> tuple[dict[str, torch.Tensor], list[str]]:
        with seeded(seed), unwritten_is_nan():
            fresh = build()
        check_written(fresh, counts)
        values = {**dict(fresh.named_parameters(remove_duplicate=False)), **persistent_buffers(fresh)}
        empty = [name for name, tensor in values.items() if tensor.is_meta]
        if empty:
            raise ModelError(
                f"build() gives {len(empty)} tensors without values, and initial_weights no others: {empty[0]}, …",
                where="build()",
                remedy="leave init_empty_weights() out of it, or return the weights from initial_weights",
            )
        return values, _unsaved(fresh, model)

    made = _on_main(make, ranks)
    values, unsaved = made if made is not None else ({}, [])
    notes = [
        f"the buffer {name} comes out differently each time the model is built, and is not saved with it; if that "
        "matters, register it with persistent=True"
        for name in ranks.broadcast(unsaved)[:1]
    ]
    return _broadcast_tensors(values, ranks), notes


def own_buffers(
    model: nn.Module, supplies: Mapping[str, Supply], done: Sequence[str] = ()
) -> tuple[dict[str, Supply], list[str]]:
    """Persistent buffers that a source lacks and the model has, with their values; and a note.

    Args:
        model: before its tensors are made: its buffers have the values that its constructor computed.
        supplies: the source's tensors.
        done: names of submodules whose weights come from elsewhere.
    """
    lacking = {
        base.name: base.tensor
        for base in base_tensors(model)
        if base.name not in supplies
        and not isinstance(base.tensor, nn.Parameter)
        and not base.tensor.is_meta
        and not any(base.name.startswith(f"{owner}.") for owner in done)
    }
    if not lacking:
        return {}, []
    found = {
        name: Supply(tensor.detach().clone, (tuple(tensor.shape), tensor.dtype)) for name, tensor in lacking.items()
    }
    names = f"{', '.join(list(lacking)[:3])}{', …' if len(lacking) > 3 else ''}"
    what = f"{counted(len(lacking), 'buffer')} of the model {'has' if len(lacking) == 1 else 'have'}"
    return found, [f"{what} no values among the weights, so the module's own stay: {names}"]


def _unsaved(fresh: nn.Module, model: nn.Module) -> list[str]:
    """Buffers outside the state dict that differ from those of the first build."""
    saved, before = persistent_buffers(fresh), dict(model.named_buffers())
    return [
        name
        for name, buffer in fresh.named_buffers()
        if name not in saved
        and name in before
        and not before[name].is_meta
        and not same_values(buffer.cpu(), before[name].cpu())
    ]


def _on_main(make: Callable[[], T], ranks: Ranks) -> T | None:
    """Run `make` on rank 0; None elsewhere. If it fails, every rank raises."""
    made, problem = None, None
    if ranks.is_main:
        try:
            made = make()
        except Exception as error:
            problem = error
    failure = ranks.broadcast(None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    if failure is not None:
        raise ModelError(f"rank 0 could not build the model: {failure}", where="build()")
    return made


def directory_of(source: str | Path) -> Path:
    """The file or directory of a source; a text that is neither is a name on the Hub."""
    path = Path(source).expanduser()
    meant = isinstance(source, Path) or path.is_file() or path.suffix in WEIGHT_FILES
    return path if meant else model_directory(str(source))
