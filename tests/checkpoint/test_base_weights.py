"""The fingerprint of weights that checkpoints leave out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardtune.checkpoint.base_weights import fingerprint
from shardtune.config import LoraConfig
from shardtune.config.rank_layout import Layout
from shardtune.parallel.fsdp2 import shard
from shardtune.parallel.meta_init import shard_of
from shardtune.parallel.ranks import Ranks, lay_out
from shardtune.parallel.tensor_parallel import parallelise
from shardtune.training.build.lora import from_elsewhere
from tests.support.adapted import adapted
from tests.support.dist.ranks import run_ranks
from tests.support.tiny_checkpoint import saved

pytestmark = pytest.mark.lengthy


def fingerprints(base: Path) -> dict[str, str]:
    told = {}
    for dtype, precision in (("auto", "fp32"), ("auto", "fp64"), ("bf16", "bf16"), ("nf4", "bf16")):
        model, _, ranks = adapted(base, LoraConfig(r=2, base_dtype=dtype), precision)
        names = from_elsewhere(model)
        told[f"{dtype} {precision}"] = fingerprint(model, names, ranks)
        with torch.no_grad():
            shard_of(model.get_parameter("model.norm.weight")).local.mul_(1.0078125)
        told[f"{dtype} {precision}, another norm"] = fingerprint(model, names, ranks)
    return told


def in_layouts(base: Path) -> tuple[dict[str, str], list[str]]:
    """`fingerprints`, and those of a module of which ranks share a matrix, or have copies."""
    told = []
    for layout in (Layout(shard=2), Layout(replicate=2, shard=1), Layout(shard=1, tensor=2)):
        ranks = lay_out(layout, dist.get_rank(), torch.device("cpu"))
        model = some_module()
        if layout.tensor > 1:
            parallelise(model, {"0": "colwise_gather_output"}, ranks.tensor_mesh, None)
        shard(model, [], ranks, "fp32")
        told.append(fingerprint(model, dict(model.named_parameters()), ranks))
    return fingerprints(base), told


def some_module() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))


def test_it_is_of_the_values_and_not_of_ranks_or_the_dtype_that_holds_them(tmp_path: Path) -> None:
    saved("qwen2_tied", tmp_path, torch.bfloat16)
    alone = fingerprints(tmp_path)
    plain = some_module()
    plain = fingerprint(plain, dict(plain.named_parameters()), Ranks(0, 1, torch.device("cpu")))
    assert run_ranks(in_layouts, 2, tmp_path, fresh=True) == [(alone, [plain] * 3)] * 2
    assert alone["auto fp32"] == alone["auto fp64"] == alone["bf16 bf16"]
    assert len({value for key, value in alone.items() if key.startswith(("auto fp32", "nf4"))}) == 4


@pytest.mark.slow
def test_three_ranks_have_it_too(tmp_path: Path) -> None:
    """Whose shards are of different sizes."""
    saved("qwen2_tied", tmp_path, torch.bfloat16)
    assert run_ranks(fingerprints, 3, tmp_path) == [fingerprints(tmp_path)] * 3
