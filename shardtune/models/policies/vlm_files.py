"""Files of the vision-language models on which policies stand: configs, weights, tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase

from shardtune.errors import ModelError
from shardtune.models.options import KEY


def read_config(path: str, where: str, kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    """The config of a vision-language model.

    Args:
        path: a directory or Hub name.
        where: the key that names it.
        kind: the class that it has to have.

    Raises:
        ModelError: there is none, or it is of another class.
    """
    try:
        found = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} holds no config.json that can be read: {next(iter(str(error).splitlines()), '')}",
            where=where,
            remedy="give the directory or Hub name of a vision-language model",
        ) from error
    if not isinstance(found, kind):
        raise ModelError(
            f"{path} holds a {type(found).__name__}, the policy takes a {kind.__name__}",
            where=where,
            remedy="give the directory or Hub name of such a model",
        )
    return found


def tensors_in(directory: Path) -> dict[str, Callable[[], torch.Tensor]]:
    """Functions that read the tensors of a directory's safetensors files, by name."""

    def read(file: Path, name: str) -> torch.Tensor:
        with safe_open(file, "pt") as opened:
            return opened.get_tensor(name)

    found: dict[str, Callable[[], torch.Tensor]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: partial(read, file, name) for name in opened.keys()}  # noqa: SIM118 (no dict)
    if not found:
        raise ModelError(
            f"{directory} holds no weights (*.safetensors)",
            where=f"{KEY}.load_vlm_weights",
            remedy="set it to false to start from random weights",
        )
    return found


def tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """What `save_pretrained` writes, by name."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}
