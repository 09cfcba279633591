"""The content of an exported directory, read in a fresh process by transformers and PEFT alone: logits, or tensors.

Run as a program: `python -m shardtune.checkpoint.export_check_process WAY DIRECTORY FILE`. Libraries that only some
ways need are imported in their functions.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS, ADAPTED_LOGITS, MODEL, FILES = "logits", "adapted-logits", "model", "files"
"""Logits of a causal language model, without an adapter or with one; tensors, of a model that is built or of files."""
PROBE_TOKENS = 32


def logits_on_probe(model: nn.Module, num_tokens: int) -> torch.Tensor:
    """Logits [1, PROBE_TOKENS, vocabulary] on token ids that are spread over the `num_tokens` of the vocabulary."""
    return model(input_ids=(torch.arange(PROBE_TOKENS) * 7919 % num_tokens)[None], use_cache=False).logits


def num_embeddings(model: PreTrainedModel) -> int:
    """The rows of a model's input embedding."""
    return next(model.get_input_embeddings().parameters()).shape[0]


def digest(tensor: torch.Tensor) -> str:
    """A hash of a tensor's bits."""
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def plain_experts(model: PreTrainedModel) -> None:
    """Compute a mixture of experts in fp64 one expert after the other: no grouped kernel takes fp64."""
    if model.dtype == torch.float64 and model.config._experts_implementation is not None:
        model.set_experts_implementation("eager")


@torch.no_grad()
def logits_of(directory: Path) -> torch.Tensor:
    """The logits of a directory's model, by transformers alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    plain_experts(model)
    return logits_on_probe(model, num_embeddings(model))


@torch.no_grad()
def adapted_logits_of(directory: Path) -> torch.Tensor:
    """The logits of an adapter's directory over its base model, by transformers and PEFT alone, in fp32."""
    import peft
    from transformers import AutoModelForCausalLM

    config = json.loads((directory / "adapter_config.json").read_text())
    base = config["base_model_name_or_path"]
    of_hub = {"revision": config["revision"]} if config.get("revision") else {}
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32, **of_hub)
    by_module = config.get("trainable_token_indices")
    rows = 1 + max((row for ids in by_module.values() for row in ids), default=0) if isinstance(by_module, dict) else 0
    if rows > num_embeddings(model):
        model.resize_token_embeddings(rows, mean_resizing=False)
    begun = config.get("init_lora_weights") == "mica"  # for which PEFT would decompose each matrix once more
    adapted = peft.PeftModel.from_pretrained(model, str(directory), low_cpu_mem_usage=begun).eval()
    return logits_on_probe(adapted, num_embeddings(model))


def tensors_of_model(directory: Path) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of a directory's model, built by the class that its config names.

    Weights that the class has and the directory lacks (such as a pooler that was not built) are left out.
    """
    import transformers

    name = json.loads((directory / "config.json").read_text())["architectures"][0]
    model, loading_info = getattr(transformers, name).from_pretrained(directory, output_loading_info=True)
    missing = set(loading_info["missing_keys"])
    state = {key: tensor for key, tensor in model.state_dict(keep_vars=True).items() if key not in missing}
    first_names = {id(tensor): key for key, tensor in reversed(state.items())}
    return {key: tensor.detach() for key, tensor in state.items() if first_names[id(tensor)] == key}


def tensors_in_files(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors in a directory's files of weights; other safetensors (a policy's statistics) are none of them."""
    index = directory / "model.safetensors.index.json"
    weights = [directory / name for name in ("adapter_model.safetensors", "model.safetensors")]
    if index.is_file():
        files = sorted({directory / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = [file for file in weights if file.is_file()][:1] or sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, str]]:
    return {name: (str(tensor.dtype).removeprefix("torch."), digest(tensor)) for name, tensor in tensors.items()}


def main(way: str, directory: Path, file: Path) -> None:
    """Write the result into a file: logits as safetensors, or tensors as JSON name -> (dtype, hash)."""
    logits: dict[str, Callable[[Path], torch.Tensor]] = {LOGITS: logits_of, ADAPTED_LOGITS: adapted_logits_of}
    if way in logits:
        save_file({"logits": logits[way](directory).contiguous()}, file)
    else:
        read = tensors_of_model if way == MODEL else tensors_in_files
        file.write_text(json.dumps(_describe(read(directory))))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
