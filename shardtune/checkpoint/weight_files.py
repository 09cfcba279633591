"""The weights of a Hugging Face model directory: which files, which tensors, without reading their data."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from shardtune.checkpoint.safetensors_file import read_header
from shardtune.errors import ModelError

logger = logging.getLogger(__name__)

FLOATS = {
    str(kind).removeprefix("torch."): kind for kind in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
_SAFETENSORS = "model.safetensors"
_PICKLED = "pytorch_model.bin"


class WeightTensor(Protocol):
    """One tensor on disk that can be read in parts."""

    @property
    def name(self) -> str: ...
    @property
    def file(self) -> Path: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self) -> torch.Tensor: ...
    def read_slice(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor: ...
    def read_into(self, target: torch.Tensor, offsets: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor of a `.bin` file, memory-mapped."""

    name: str
    file: Path
    data: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def read(self) -> torch.Tensor:
        """The whole tensor, still mapped."""
        return self.data

    def read_slice(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """The block of shape `sizes` whose first element is at `offsets`, still mapped."""
        return self.data[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]

    def read_into(self, target: torch.Tensor, offsets: Sequence[int]) -> None:
        """Fills `target` with the block of its shape that begins at `offsets`."""
        target.copy_(self.read_slice(offsets, target.shape))


def stored_dtype(directory: Path) -> torch.dtype | None:
    """The dtype in which transformers loads a model's directory with `dtype="auto"`.

    It is that of its config.json, otherwise that of the first floating tensor (bf16 where the weights are quantised);
    None for a directory without either.
    """
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    named = config.get("dtype") or config.get("torch_dtype")
    if isinstance(named, str) and named.removeprefix("torch.") in FLOATS:
        return FLOATS[named.removeprefix("torch.")]
    if config.get("quantization_config"):
        return torch.bfloat16
    try:
        stored = find_weights(directory)
    except ModelError:
        return None
    return next((tensor.dtype for tensor in stored.values() if tensor.dtype.is_floating_point), None)


def has_weights(directory: Path) -> bool:
    """Whether a directory holds files of weights."""
    named = (directory / each for name in (_SAFETENSORS, _PICKLED) for each in (name, f"{name}.index.json"))
    return any(file.is_file() for file in named) or any(directory.glob("*.safetensors"))


def find_weights(model_path: str | Path) -> dict[str, WeightTensor]:
    """The tensors of a model directory (or of one weight file) by their name on disk.

    Safetensors are preferred. `.bin` files are read with `weights_only=True`, which cannot execute code, with a
    warning.

    Raises:
        ModelError: no weights there, a file of the index is missing, or a file is torn or damaged.
    """
    path = Path(model_path)
    if path.is_file():
        return _read_files([path])
    if not path.is_dir():
        raise ModelError(
            f"there is no model at '{path}'",
            where="actor.model.model_path",
            remedy="give a directory with config.json and *.safetensors",
        )
    for name in (_SAFETENSORS, _PICKLED):
        if (path / name).is_file():
            return _read_files([path / name])
        index = path / f"{name}.index.json"
        if index.is_file():
            return _read_index(index)
    indexes, files = list(path.glob("*.safetensors.index.json")), sorted(path.glob("*.safetensors"))
    if len(indexes) == 1:  # of another name than transformers': diffusion_pytorch_model
        return _read_index(indexes[0])
    if len(files) == 1:
        return _read_files(files)
    found = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    raise ModelError(
        f"'{path}' has no weights: neither {_SAFETENSORS} nor {_SAFETENSORS}.index.json, nor their .bin forms",
        where=f"the directory holds: {found}",
        remedy="download the model completely, or set actor.model.from_scratch=true to start from random weights",
    )


def _read_index(index: Path) -> dict[str, WeightTensor]:
    try:
        weight_map = dict(json.loads(index.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ModelError(
            f"{index.name} is damaged: {problem}", where=str(index), remedy="download or copy it again"
        ) from problem
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    gone = [file.name for file in files if not file.is_file()]
    if gone:
        raise ModelError(
            f"{len(gone)} of {len(files)} weight files named by {index.name} are missing: {', '.join(gone[:5])}",
            where=str(index.parent),
            remedy="download the model completely",
        )
    tensors = _read_files(files)
    absent = sorted(name for name in weight_map if name not in tensors)
    if absent:
        raise ModelError(
            f"{index.name} names {len(absent)} tensors that are in no file: {', '.join(absent[:5])}",
            where=str(index),
            remedy="the index and the files belong to different downloads: fetch them again",
        )
    return tensors


def _read_files(files: Sequence[Path]) -> dict[str, WeightTensor]:
    tensors: dict[str, WeightTensor] = {}
    for file in files:
        if file.suffix == ".safetensors":
            tensors.update(read_header(file)[0])
        else:
            tensors.update(_read_pickled(file))
    return tensors


def _read_pickled(file: Path) -> Mapping[str, WeightTensor]:
    logger.warning("%s is a pickle: read with weights_only=True; safetensors files load faster", file)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as problem:
        raise ModelError(
            f"{file.name} cannot be read safely: {str(problem).splitlines()[0]}",
            where=str(file),
            remedy="it is torn, in torch's format of before 1.6, or holds more than tensors: convert it to safetensors",
        ) from problem
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ModelError(
            f"{file.name} does not contain named tensors", where=str(file), remedy="convert it to safetensors"
        )
    return {name: PickledTensor(name, file, value) for name, value in state.items()}
