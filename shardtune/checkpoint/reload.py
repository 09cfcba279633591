"""Does an exported directory, loaded in a fresh process by others' code alone, hold the model that was trained?"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardtune.checkpoint.peft_directory import adapter_tensors, merging
from shardtune.errors import CheckpointError
from shardtune.models.lora import CONFIG_FILE, adapter_config, is_adapted
from shardtune.models.nf4 import NF4Linear
from shardtune.parallel.materialise import named_tensors

PROBE_TOKENS = 32
TOLERANCE = 1e-6
"""Of the largest logit: both sides do the same arithmetic on the same weights."""
REORDERED = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
"""The same where an adapter is added to the base weights on one side only, and rounded with them to this dtype."""
LOGITS, ADAPTED_LOGITS, MODEL, FILES = "logits", "adapted-logits", "model", "files"
"""What the fresh process does: logits, with an adapter or without, or tensors, of a model it builds or of the files."""


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
    way = _way(model, directory)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found"
        command = [sys.executable, "-m", "shardtune.checkpoint.reload", way, str(directory), str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CheckpointError(
                f"the exported model cannot be loaded:\n{done.stderr.strip()[-2000:]}", where=str(directory)
            )
        if way in (LOGITS, ADAPTED_LOGITS):
            assert isinstance(model, PreTrainedModel)
            return _compare_logits(model, load_file(file)["logits"], directory, added=is_adapted(model))
        found = {name: (kind, digest) for name, (kind, digest) in json.loads(file.read_text()).items()}
    own = _to_compare(model, directory)
    if not own:
        return "was not compared: an adapter that began as a part of the base weights is saved in another form"
    _compare_tensors(own, found, directory)
    if way == MODEL:
        return f"loaded afresh as {_class_name(model)} by transformers, has the same {len(found)} tensors, bit by bit"
    return f"read afresh, has the same {len(found)} tensors, bit by bit"


def _way(model: nn.Module, directory: Path) -> str:
    is_own = isinstance(model, PreTrainedModel) and type(model).__module__.startswith("transformers.")
    is_causal = _class_name(model) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    in_four_bits = any(isinstance(module, NF4Linear) for module in model.modules())
    if (directory / CONFIG_FILE).is_file():
        has_base = bool(json.loads((directory / CONFIG_FILE).read_text()).get("base_model_name_or_path"))
        return ADAPTED_LOGITS if is_own and is_causal and has_base and not in_four_bits else FILES
    if isinstance(model, PreTrainedModel) and (is_causal or not is_own) and model.get_output_embeddings() is not None:
        return LOGITS
    return MODEL if is_own else FILES


def probe_ids(vocabulary: int) -> torch.Tensor:
    """Token ids spread over the vocabulary, int64 [1, PROBE_TOKENS]."""
    return (torch.arange(PROBE_TOKENS) * 7919 % vocabulary)[None]


def _logits(model: nn.Module) -> torch.Tensor:
    assert isinstance(model, PreTrainedModel)
    rows = next(model.get_input_embeddings().parameters()).shape[0]
    return model(input_ids=probe_ids(rows), use_cache=False).logits


def _compare_logits(model: PreTrainedModel, fresh: torch.Tensor, directory: Path, *, added: bool) -> str:
    model.cpu().eval()
    if not added:
        for parameter in model.parameters():  # buffers keep their dtype, as they do in from_pretrained
            parameter.data = parameter.data.to(fresh.dtype)
    model.set_attn_implementation("eager")
    own = _logits(model)
    difference = float((own.double() - fresh.double()).abs().max())
    tolerance = REORDERED[fresh.dtype] if added else TOLERANCE
    if not difference <= tolerance * max(1.0, float(fresh.abs().max())):
        raise CheckpointError(
            f"the exported model gives other logits than the trained one: they differ by {difference:.3g}",
            where=str(directory),
            remedy="please report this with the output of shardtune env",
        )
    return f"loaded afresh, gives the same logits{f' (within {difference:.2g})' if added and difference else ''}"


def _to_compare(model: nn.Module, directory: Path) -> dict[str, torch.Tensor]:
    """What the directory holds, by the names in it, as it is in memory."""
    own = named_tensors(model)
    if (directory / CONFIG_FILE).is_file():
        began_in_base = str(adapter_config(model).init_lora_weights).startswith(("pissa", "olora"))
        return {} if began_in_base else {key: own[name] for key, name in adapter_tensors(model).items()}
    if not is_adapted(model):
        return own
    in_fp64 = any(tensor.dtype == torch.float64 for tensor in own.values())
    whole = merging(model, torch.float64 if in_fp64 else torch.float32)
    return {name: whole.gather(name, tensor) for name, tensor in whole.tensors.items()}


def _compare_tensors(own: Mapping[str, torch.Tensor], found: Mapping[str, tuple[str, str]], directory: Path) -> None:
    """Tensors in memory, brought to the dtype on disk, against what the fresh process read."""
    differing = sorted(own.keys() ^ found.keys())
    for name in own.keys() & found.keys():
        kind, digest = found[name]
        if _digest(own[name].detach().to("cpu", getattr(torch, kind))) != digest:
            differing.append(name)
    if differing:
        raise CheckpointError(
            f"the exported model is not the trained one: {len(differing)} tensors differ, {', '.join(differing[:3])}",
            where=str(directory),
            remedy="please report this with the output of shardtune env",
        )


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _class_name(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")


# In the fresh process.


@torch.no_grad()
def logits_of(directory: Path) -> torch.Tensor:
    """The logits of a directory's model on the probe, by transformers alone."""
    return _logits(AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval())


@torch.no_grad()
def adapted_logits_of(directory: Path) -> torch.Tensor:
    """The logits of an adapter's directory over its base model, by transformers and PEFT alone, in fp32."""
    base = peft.PeftConfig.from_pretrained(str(directory)).base_model_name_or_path
    assert base is not None
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(model, str(directory), is_trainable=False).eval()
    rows = next(model.get_input_embeddings().parameters()).shape[0]
    return adapted(input_ids=probe_ids(rows), use_cache=False).logits


def tensors_of_model(directory: Path) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of a directory's model, built by the class that its config names."""
    name = json.loads((directory / "config.json").read_text())["architectures"][0]
    return named_tensors(getattr(transformers, name).from_pretrained(directory))


def tensors_in_files(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors in a directory's safetensors files."""
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def _describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, str]]:
    return {
        name: (str(tensor.dtype).removeprefix("torch."), _digest(tensor.detach())) for name, tensor in tensors.items()
    }


def _main(way: str, directory: Path, file: Path) -> None:
    logits: dict[str, Callable[[Path], torch.Tensor]] = {LOGITS: logits_of, ADAPTED_LOGITS: adapted_logits_of}
    if way in logits:
        save_file({"logits": logits[way](directory).contiguous()}, file)
    else:
        read = tensors_of_model if way == MODEL else tensors_in_files
        file.write_text(json.dumps(_describe(read(directory))))


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
