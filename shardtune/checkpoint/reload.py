"""Does an exported directory, loaded by plain transformers in a fresh process, give the same logits?"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from shardtune.errors import CheckpointError

PROBE_TOKENS = 32
TOLERANCE = 1e-6
"""Of the largest logit: both sides do the same arithmetic on the same weights."""


def probe_ids(vocabulary: int) -> torch.Tensor:
    """Token ids spread over the vocabulary, int64 [1, PROBE_TOKENS]."""
    return (torch.arange(PROBE_TOKENS) * 7919 % vocabulary)[None]


@torch.no_grad()
def logits_of(directory: Path) -> torch.Tensor:
    """The logits of a directory's model on the probe, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    rows = next(model.get_input_embeddings().parameters()).shape[0]
    return model(input_ids=probe_ids(rows), use_cache=False).logits


@torch.no_grad()
def check_reload(model: PreTrainedModel, directory: Path) -> float:
    """Load `directory` in a fresh process and compare its logits with those of `model`, brought to the saved dtype.

    Args:
        model: on one rank; its weights are rounded to the dtype on disk for the comparison and left so.

    Returns:
        The largest difference.

    Raises:
        CheckpointError: the logits differ.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "logits.safetensors"
        command = [sys.executable, "-m", "shardtune.checkpoint.reload", str(directory), str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CheckpointError(
                f"the exported model cannot be loaded:\n{done.stderr.strip()[-2000:]}", where=str(directory)
            )
        fresh = load_file(file)["logits"]
    model.cpu().eval()
    for parameter in model.parameters():  # buffers keep their dtype, as they do in from_pretrained
        parameter.data = parameter.data.to(fresh.dtype)
    model.set_attn_implementation("eager")
    own = model(input_ids=probe_ids(fresh.shape[-1]), use_cache=False).logits
    difference = float((own.double() - fresh.double()).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(fresh.abs().max())):
        raise CheckpointError(
            f"the exported model gives other logits than the trained one: they differ by {difference:.3g}",
            where=str(directory),
            remedy="please report this with the output of shardtune env",
        )
    return difference


if __name__ == "__main__":
    save_file({"logits": logits_of(Path(sys.argv[1])).contiguous()}, sys.argv[2])
