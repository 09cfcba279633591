"""What a fresh process finds in an exported directory, by others' code alone: logits, or the tensors' bits.

Run as a program: `python -m shardtune.checkpoint.export_check_process WAY DIRECTORY FILE`. What only some
ways need is imported there.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS, ADAPTED_LOGITS, MODEL, FILES = "logits", "adapted-logits", "model", "files"
"""Logits of a causal language model, without an adapter or with one; tensors, of a model that is built or of files."""
PROBE_TOKENS = 32


def logits_on_probe(model: PreTrainedModel) -> torch.Tensor:
    """[1, PROBE_TOKENS, vocabulary], on token ids spread over the vocabulary."""
    rows = next(model.get_input_embeddings().parameters()).shape[0]
    return model(input_ids=(torch.arange(PROBE_TOKENS) * 7919 % rows)[None], use_cache=False).logits


def digest(tensor: torch.Tensor) -> str:
    """A hash of a tensor's bits."""
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


@torch.no_grad()
def logits_of(directory: Path) -> torch.Tensor:
    """The logits of a directory's model, by transformers alone."""
    from transformers import AutoModelForCausalLM

    return logits_on_probe(AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval())


@torch.no_grad()
def adapted_logits_of(directory: Path) -> torch.Tensor:
    """The logits of an adapter's directory over its base model, by transformers and PEFT alone, in fp32."""
    import peft
    from transformers import AutoModelForCausalLM

    config = peft.LoraConfig.from_pretrained(str(directory))
    assert isinstance(config, peft.LoraConfig)
    base = config.base_model_name_or_path
    assert base is not None
    model: Any = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32)
    by_module = config.trainable_token_indices
    rows = 1 + max((row for ids in by_module.values() for row in ids), default=0) if isinstance(by_module, dict) else 0
    if rows > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows, mean_resizing=False)
    adapted: Any = peft.PeftModel.from_pretrained(model, str(directory)).eval()
    return logits_on_probe(adapted)


def tensors_of_model(directory: Path) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of a directory's model, built by the class that its config names.

    What that class has and the directory does not (a pooler that was built without) is no part of the saved model.
    """
    import transformers

    name = json.loads((directory / "config.json").read_text())["architectures"][0]
    model, told = getattr(transformers, name).from_pretrained(directory, output_loading_info=True)
    missing = set(told["missing_keys"])
    state = {key: tensor for key, tensor in model.state_dict(keep_vars=True).items() if key not in missing}
    once = {id(tensor): key for key, tensor in reversed(state.items())}
    return {key: tensor.detach() for key, tensor in state.items() if once[id(tensor)] == key}


def tensors_in_files(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors in a directory's safetensors files."""
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def _describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, str]]:
    return {name: (str(tensor.dtype).removeprefix("torch."), digest(tensor)) for name, tensor in tensors.items()}


def main(way: str, directory: Path, file: Path) -> None:
    """Write what is found into a file: logits as safetensors, or as JSON name -> (dtype, hash)."""
    logits: dict[str, Callable[[Path], torch.Tensor]] = {LOGITS: logits_of, ADAPTED_LOGITS: adapted_logits_of}
    if way in logits:
        save_file({"logits": logits[way](directory).contiguous()}, file)
    else:
        read = tensors_of_model if way == MODEL else tensors_in_files
        file.write_text(json.dumps(_describe(read(directory))))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
