"""What tests of adapters share: the ranks of this process, whole tensors, an adapted model and its training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from shardtune.batch import LossSum
from shardtune.checkpoint.hf_load import load_weights
from shardtune.checkpoint.peft_directory import load_adapter
from shardtune.config import LoraConfig
from shardtune.config.rank_layout import Layout
from shardtune.models.lora.attach import attach_adapter, keep_in_nf4
from shardtune.models.lora.init import initialise_adapter
from shardtune.models.new_tokens import grow_embeddings
from shardtune.parallel.fsdp2 import shard
from shardtune.parallel.meta_init import init_empty_weights
from shardtune.parallel.precision import COMPUTE_DTYPE, MASTER_DTYPE
from shardtune.parallel.ranks import Ranks, lay_out
from shardtune.parallel.weights import Weights
from shardtune.training.step import optimizer_step


def group() -> Ranks:
    """The ranks of this process group, or this process alone."""
    if not dist.is_initialized():
        return Ranks(0, 1, torch.device("cpu"))
    return lay_out(Layout(shard=dist.get_world_size()), dist.get_rank(), torch.device("cpu"))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of it; a collective for a sharded tensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def adapted(
    directory: Path,
    config: LoraConfig,
    precision: str = "fp32",
    *,
    seed: int = 1,
    adapter: Path | None = None,
    new_ids: Sequence[int] = (),
) -> tuple[nn.Module, Weights, Ranks]:
    """The model in a directory with an adapter, sharded over all ranks, as a run builds it.

    Args:
        adapter: where the adapter's weights come from; None: they are drawn from `seed`.
        new_ids: of tokens whose embeddings are trained.
    """
    ranks = group()
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    grow_embeddings(model, new_ids)
    attach_adapter(model, config, new_ids, compute=COMPUTE_DTYPE[precision])
    if config.base_dtype == "nf4":
        keep_in_nf4(model, COMPUTE_DTYPE[precision])
    frozen = {"auto": None, "bf16": torch.bfloat16, "nf4": COMPUTE_DTYPE[precision]}[config.base_dtype]
    shard(model, model.model.layers, ranks, precision)
    load_weights(model, directory, dtype=MASTER_DTYPE[precision], frozen=frozen, grow=bool(new_ids))
    if adapter is None:
        initialise_adapter(model, seed)
    else:
        load_adapter(model, adapter)
    return model, Weights(model, model, precision, ranks), ranks


@dataclass
class Rows:
    """One micro-batch: a row, and what it weighs."""

    ids: torch.Tensor

    @property
    def weights(self) -> dict[str, float]:
        return {"ce": float(len(self.ids) * (self.ids.shape[1] - 1))}


def all_ids() -> torch.Tensor:
    return (torch.arange(40) * 7 % 67).view(4, 10)


def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The sum over all tokens."""
    logits = model(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def train(model: nn.Module, weights: Weights, ranks: Ranks, steps: int = 20) -> list[float]:
    """The losses of some steps of AdamW over four rows, dealt to the ranks."""
    optimizer = torch.optim.AdamW(weights.trainable().values(), lr=1e-2, weight_decay=0.01)
    mine = all_ids()[ranks.rank :: ranks.world_size]
    batches = [Rows(row[None]) for row in mine]
    losses = []
    for step in range(steps):
        result = optimizer_step(
            lambda batch: {"ce": LossSum(loss(model, batch.ids), batch.weights["ce"])},
            batches,
            {"ce": 36.0},
            weights,
            optimizer,
            ranks,
            draws=(0, step, ranks.rank),
            clip=None,
        )
        losses.append(result.loss)
    return losses
