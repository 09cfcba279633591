"""Compares an exported directory, loaded in a fresh process by transformers and PEFT alone, with the trained model."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardtune.checkpoint.export_check_process import (
    ADAPTED_LOGITS,
    FILES,
    LOGITS,
    MODEL,
    digest,
    logits_on_probe,
    num_embeddings,
    plain_experts,
)
from shardtune.checkpoint.peft_directory import WEIGHTS, adapter_tensors, merging
from shardtune.checkpoint.quantized.scheme import quantization_of
from shardtune.checkpoint.safetensors_file import read_header
from shardtune.errors import CheckpointError
from shardtune.launch.module_process import module_command, module_environment
from shardtune.models.lora.attach import is_adapted
from shardtune.models.lora.config import CONFIG_FILE
from shardtune.models.lora.init import changes_base
from shardtune.models.lora.nf4 import NF4Linear
from shardtune.models.pretrained import settings_directory
from shardtune.parallel.meta_init import named_tensors

TOLERANCE = 1e-6
"""Of the largest logit: both sides do the same arithmetic on the same weights."""
REORDERED = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
"""The same where an adapter is added to the base weights on one side only, and rounded with them to this dtype."""


@torch.no_grad()
def check_reload(model: nn.Module, directory: Path) -> str:
    """Load a directory in a fresh process and compare it with a model: logits of causal language models, else tensors.

    Args:
        model: on one rank, in full precision; a model that is compared by logits is left rounded to the dtype on disk.

    Returns:
        What was compared, as the end of a sentence about the directory.

    Raises:
        CheckpointError: it cannot be loaded, or is another model.
    """
    way = way_of(model, directory)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found"
        command = module_command("shardtune.checkpoint.export_check_process", way, str(directory), str(file))
        done = subprocess.run(command, capture_output=True, text=True, env=module_environment())
        if done.returncode:
            raise CheckpointError(
                f"the exported model cannot be loaded:\n{done.stderr.strip()[-2000:]}", where=str(directory)
            )
        if isinstance(model, PreTrainedModel) and way in (LOGITS, ADAPTED_LOGITS):
            return _compare_logits(model, load_file(file)["logits"], directory, added=is_adapted(model))
        found = {name: (kind, bits) for name, (kind, bits) in json.loads(file.read_text()).items()}
    own = to_compare(model, directory)
    if not own:
        return "was not compared: an adapter that began as a part of the base weights is saved in another form"
    _compare_tensors(own, found, directory)
    if way == MODEL:
        return f"loaded afresh as {_class_name(model)} by transformers, has the same {len(found)} tensors, bit by bit"
    return f"read afresh, has the same {len(found)} tensors, bit by bit"


def way_of(model: nn.Module, directory: Path) -> str:
    """What of a directory a fresh process gives, to be compared with a model: a name of `export_check_process`."""
    is_own = isinstance(model, PreTrainedModel) and type(model).__module__.startswith("transformers.")
    is_causal = _class_name(model) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    in_four_bits = any(isinstance(module, NF4Linear) for module in model.modules())
    if (directory / CONFIG_FILE).is_file():
        base = json.loads((directory / CONFIG_FILE).read_text()).get("base_model_name_or_path")
        # Transformers computes with quantised weights as they are where it has the kernels for them.
        folder = settings_directory(base or None)
        has_base = bool(base) and (folder is None or quantization_of(folder) is None)
        return ADAPTED_LOGITS if is_own and is_causal and has_base and not in_four_bits else FILES
    if isinstance(model, PreTrainedModel) and model.get_output_embeddings() is not None:
        # A class of the user's is unknown to the fresh process, unless its files are those of an architecture it knows.
        by_files = not is_own and model.config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if is_causal or by_files:
            return LOGITS
    return MODEL if is_own else FILES


def _compare_logits(model: PreTrainedModel, fresh: torch.Tensor, directory: Path, *, added: bool) -> str:
    model.cpu().eval()
    tolerance = REORDERED[fresh.dtype] if added else TOLERANCE
    if (directory / CONFIG_FILE).is_file():
        tolerance = max(tolerance, round_adapter(model, directory))
    if not added:
        for parameter in model.parameters():  # buffers keep their dtype, as they do in from_pretrained
            parameter.data = parameter.data.to(fresh.dtype)
    model.set_attn_implementation("eager")
    plain_experts(model)
    own = logits_on_probe(model, num_embeddings(model))
    difference = float((own.double() - fresh.double()).abs().max())
    if not difference <= tolerance * max(1.0, float(fresh.abs().max())):
        raise CheckpointError(
            f"the exported model gives other logits than the trained one: they differ by {difference:.3g}",
            where=str(directory),
            remedy="please report this with the output of shardtune env",
        )
    return f"loaded afresh, gives the same logits{f' (within {difference:.2g})' if added and difference else ''}"


def round_adapter(model: nn.Module, directory: Path) -> float:
    """Bring a model's adapter to the dtype that it is stored in; returns what of the logits that may still change."""
    stored, _ = read_header(directory / WEIGHTS)
    named = dict(model.named_parameters())
    if changes_base(model):  # in the file are other tensors, of which each is rounded by itself
        return max(REORDERED[tensor.dtype] for tensor in stored.values())
    for key, name in adapter_tensors(model).items():
        named[name].data = named[name].data.to(stored[key].dtype).to(named[name].dtype)
    return 0.0


def to_compare(model: nn.Module, directory: Path) -> dict[str, torch.Tensor]:
    """What the directory holds, by the names in it, as it is in memory."""
    own = named_tensors(model)
    if (directory / CONFIG_FILE).is_file():
        return {} if changes_base(model) else {key: own[name] for key, name in adapter_tensors(model).items()}
    if not is_adapted(model):
        return own
    in_fp64 = any(tensor.dtype == torch.float64 for tensor in own.values())
    whole = merging(model, torch.float64 if in_fp64 else torch.float32)
    return {name: whole.gather(name, tensor) for name, tensor in whole.tensors.items()}


def _compare_tensors(own: Mapping[str, torch.Tensor], found: Mapping[str, tuple[str, str]], directory: Path) -> None:
    """Tensors in memory, brought to the dtype on disk, against what the fresh process read."""
    differing = sorted(own.keys() ^ found.keys())
    for name in own.keys() & found.keys():
        kind, bits = found[name]
        if digest(own[name].detach().to("cpu", getattr(torch, kind))) != bits:
            differing.append(name)
    if differing:
        raise CheckpointError(
            f"the exported model is not the trained one: {len(differing)} tensors differ, {', '.join(differing[:3])}",
            where=str(directory),
            remedy="please report this with the output of shardtune env",
        )


def _class_name(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")
