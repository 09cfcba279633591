"""How the weights of a directory are quantised, by its config.json, and what to do with those that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from transformers import PreTrainedConfig

from shardtune.errors import ModelError

KEYS = ("quantization_config", "compression_config")
FP8, MXFP4, BITSANDBYTES, COMPRESSED = "fp8", "mxfp4", "bitsandbytes", "compressed-tensors"
METHODS: Mapping[str, str] = MappingProxyType(
    {FP8: FP8, "mxfp8": FP8, MXFP4: MXFP4, BITSANDBYTES: BITSANDBYTES, COMPRESSED: COMPRESSED}
)
"""The format that is read for a `quant_method`."""

_DENSE = "compressed_tensors.entrypoints.convert.convert_checkpoint with CompressedTensorsDequantizer"
CONVERTERS: Mapping[str, str] = MappingProxyType(
    {
        "gptq": "GPTQModel (load it with backend=BACKEND.TORCH, then dequantize_model from "
        "gptqmodel.nn_modules.qlinear.torch, and save_pretrained)",
        "awq": f"compressed-tensors (convert_checkpoint with AutoAWQConverter, then {_DENSE})",
        COMPRESSED: f"compressed-tensors ({_DENSE})",
        "modelopt": f"compressed-tensors (convert_checkpoint with ModelOptNvfp4Converter, then {_DENSE})",
        "torchao": "torchao (load it with transformers, replace each weight by its dequantize(), and save_pretrained)",
        "hqq": "hqq (load it, replace each layer's weight by its dequantize(), and save_pretrained)",
        "quanto": "optimum-quanto (load it, replace each weight by its dequantize(), and save_pretrained)",
        "auto-round": "auto-round, which made it (export it in another format), or GPTQModel",
        "higgs": "transformers (from_pretrained, model.dequantize(), save_pretrained)",
        "metal": "transformers (from_pretrained with MetalConfig(dequantize=True), save_pretrained)",
    }
)
"""What writes plain weights from those of a method."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a config.json says of the weights beside it.

    Attributes:
        method: its `quant_method`.
        settings: the whole `quantization_config`.
        where: the file and key, for messages.
    """

    method: str
    settings: Mapping[str, object]
    where: str

    @property
    def format(self) -> str:
        """The format in which the tensors are stored.

        Raises:
            ModelError: it is none that is read here.
        """
        if self.method in METHODS:
            return METHODS[self.method]
        raise self.refusal()

    def refusal(self, how: str = "") -> ModelError:
        """The error for weights that are not read.

        Args:
            how: they are quantised, where it is not the method alone.
        """
        tool = CONVERTERS.get(self.method)
        named = " ".join(filter(None, (self.method or "a method without a name", how)))
        return ModelError(
            f"the weights are quantised by {named}, whose values are not read here",
            where=f"{self.where}: quant_method",
            remedy="fine-tune the unquantised model, or convert it to plain weights once"
            + (f": {tool}" if tool else ", with the tool that quantised it")
            + f"; read as they are: {', '.join(METHODS)}",
        )


def quantization_of(model_path: str | Path, config: PreTrainedConfig | None = None) -> Quantization | None:
    """The quantisation of a directory's weights by its config.json, or by that of the model; None: they are plain.

    Args:
        model_path: a directory, or a file of weights, which has no config.json.
        config: the model's, which counts where the directory has none.

    Raises:
        ModelError: config.json cannot be read, or has two different ones.
    """
    file = Path(model_path) / "config.json"
    try:
        stated = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (OSError, ValueError) as problem:
        raise ModelError(
            f"config.json cannot be read: {problem}", where=str(file), remedy="download or copy it again"
        ) from problem
    if stated is None and config is not None:
        stated = config.to_dict()
    found = list(_found(stated)) if isinstance(stated, Mapping) else []
    if not found:
        return None
    (key, settings), *others = found
    where = f"{file}: {key}"
    if not isinstance(settings, Mapping) or any(other != settings for _, other in others):
        raise ModelError(
            "config.json describes no one way in which the weights are quantised",
            where=where,
            remedy="give the config.json that came with the weights",
        )
    return Quantization(_method(settings, key), settings, where)


def _found(config: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Each quantisation of a config and of the configs in it."""
    for key, value in config.items():
        if key in KEYS:
            if value:
                yield key, value
        elif isinstance(value, Mapping):
            yield from _found(value)


def _method(settings: Mapping[str, object], key: str) -> str:
    """Its name; early ones of bitsandbytes and compressed-tensors lack it."""
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return BITSANDBYTES
    default = "compressed-tensors" if key == "compression_config" else ""
    return str(settings.get("quant_method") or default).lower()
