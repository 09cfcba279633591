"""The tensors of a model directory by name, quantised ones as the values that they stand for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from shardtune.checkpoint.quantized.bitsandbytes import EightBitTensor, FourBitTensor, bitsandbytes_weights
from shardtune.checkpoint.quantized.compressed import CompressedTensor, compressed_weights
from shardtune.checkpoint.quantized.fp8 import PACKED, Fp8Tensor, fp8_weights
from shardtune.checkpoint.quantized.mxfp4 import Mxfp4Tensor, mxfp4_weights
from shardtune.checkpoint.quantized.scheme import COMPRESSED, FP8, MXFP4, Quantization, quantization_of
from shardtune.checkpoint.quantized.tensor import DequantizedTensor
from shardtune.checkpoint.weight_files import FLOATS, WeightTensor, find_weights
from shardtune.errors import ModelError


def dequantized_weights(
    model_path: str | Path, config: PreTrainedConfig, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, WeightTensor], Quantization | None]:
    """The tensors of a directory by their name on disk, as values; and how they are quantised, if they are.

    Headers alone are read, and the sizes that bitsandbytes keeps in small tensors.

    Args:
        model_path: as for `find_weights`.
        config: the model's, for a file of weights alone.
        dtype: in which dequantised values are given; they are computed in fp32 and rounded once.

    Raises:
        ModelError: as `find_weights`; or the weights are quantised in a way that is not read, or incompletely.
    """
    quantization = quantization_of(model_path, config)
    form = None if quantization is None else quantization.format
    stored = find_weights(model_path)
    if quantization is None:
        return stored, None
    if form == FP8:
        return fp8_weights(stored, quantization.settings, dtype), quantization
    if form == MXFP4:
        return mxfp4_weights(stored, dtype), quantization
    if form == COMPRESSED:
        return compressed_weights(stored, quantization, dtype), quantization
    return bitsandbytes_weights(stored, dtype), quantization


def holds_only(path: Path, dtype: torch.dtype) -> bool:
    """Whether all numbers of the safetensors files of a directory, or of one file, are of a floating dtype.

    Counters of norms may be beside them. MXFP4, four bits and an exponent of two, is held by bf16 without rounding.
    """
    if not (path.suffix == ".safetensors" or any(path.glob("*.safetensors"))):
        return False
    try:
        stored = {tensor.dtype for tensor in find_weights(path).values()}
        quantization = quantization_of(path)
    except ModelError:
        return False
    beside = {torch.int64, torch.bool}
    if quantization is not None:
        if quantization.format != MXFP4 or dtype != torch.bfloat16:
            return False
        beside.add(torch.uint8)
    return dtype in stored and stored <= {dtype, *beside}


def check_is_plain(source: WeightTensor, target: str) -> None:
    """Refuse a tensor of codes, without the rule by which they become values, for a weight.

    Args:
        source: the tensor on disk.
        target: the weight's name in the model.
    """
    if isinstance(source, DequantizedTensor) or source.dtype in FLOATS.values():
        return
    raise ModelError(
        f"'{source.name}' is stored as {str(source.dtype).removeprefix('torch.')}, and nothing beside it gives the "
        f"values of '{target}'",
        where=f"{source.file}; quantization_config in config.json",
        remedy="give the config.json that came with the weights and all of their tensors, or unquantised weights",
    )


def described(stored: Mapping[str, WeightTensor], quantization: Quantization | None, path: str | Path) -> list[str]:
    """A sentence for the first lines of a run on what is dequantised; none for plain weights."""
    if quantization is None:
        return []
    forms = Counter(form(tensor) for tensor in stored.values() if isinstance(tensor, DequantizedTensor))
    if not forms:
        return [
            f"{path} is described as quantised ({quantization.method}), but all of its tensors are plain: they are "
            "read as they are"
        ]
    listed = ", ".join(f"{count} in {name}" for name, count in forms.items())
    return [f"{path} is quantised: {listed} of {len(stored)} tensors are dequantised while they are read"]


def form(tensor: DequantizedTensor) -> str:
    """How a tensor is stored, in words."""
    match tensor:
        case Fp8Tensor(block=block, data=data):
            return f"{'FP4' if data.dtype == PACKED else 'FP8'} with blocks of {block[0]} x {block[1]}"
        case Mxfp4Tensor():
            return "MXFP4"
        case FourBitTensor(kind=kind, nested=nested):
            return f"{kind.upper()} of bitsandbytes{' with double quantisation' if nested is not None else ''}"
        case CompressedTensor(bits=bits, data=data):
            kind = f"packed {bits} bits" if bits else str(data.dtype).removeprefix("torch.")
            return f"{kind} of compressed-tensors"
        case EightBitTensor():
            return "8 bits of bitsandbytes"
    raise TypeError(type(tensor))
