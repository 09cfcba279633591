"""Muon beside AdamW: torch's own numbers on one rank, the same on two, and runs that go on bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import BertConfig, BertForSequenceClassification

import shardtune
from shardtune.config import OptimConfig, load_recipe
from shardtune.errors import ConfigError
from shardtune.optim.build import build_optimizer
from shardtune.training.worker.model_state import outer_parameters
from tests.support.tiny_run import assert_same_tensors, make_tiny


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    sizes = {
        "embed.weight": (5, 4),
        "wide.weight": (3, 7),
        "tall.weight": (7, 3),
        "norm.weight": (4,),
        "experts": (2, 3, 4),
    }
    return {name: nn.Parameter(torch.randn(size, generator=generator)) for name, size in sizes.items()}


@pytest.mark.parametrize("args", [{}, {"momentum": 0.8, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}])
def test_matrices_are_muons_and_the_rest_adamws(args: dict[str, Any]) -> None:
    config = OptimConfig.model_validate(
        {"name": "Muon", "lr": 0.02, "adam_beta2": 0.95, "weight_decay": 0.1, "args": args}
    )
    given, plain = parameters(), parameters()
    optimizer = build_optimizer(given, config, outer={"embed.weight"})
    hidden = [plain["wide.weight"], plain["tall.weight"]]
    rest = [
        {"params": [plain["embed.weight"], plain["experts"]]},
        {"params": [plain["norm.weight"]], "weight_decay": 0.0},
    ]
    theirs = [
        torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1, **args),
        torch.optim.AdamW(rest, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1),
    ]
    seen: list[object] = []
    handle = register_optimizer_step_pre_hook(lambda one, *_: seen.append(one))
    for step in range(3):
        for ours, other in zip(given.values(), plain.values(), strict=True):
            other.grad = torch.randn(other.shape, generator=torch.Generator().manual_seed(step))
            ours.grad = other.grad.clone()
        for one in (optimizer, *theirs):
            one.step()
    handle.remove()
    assert seen == [optimizer, *theirs] * 3  # what steps inside is no optimizer of its own to others
    for name, parameter in given.items():
        torch.testing.assert_close(parameter, plain[name], rtol=0, atol=1e-6, msg=name)
    assert set(optimizer.state[given["wide.weight"]]) == {"momentum_buffer"}
    assert "exp_avg" in optimizer.state[given["embed.weight"]]


def test_the_head_of_a_classifier_is_adamws() -> None:
    sizes = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    with torch.device("meta"):
        outer = outer_parameters(BertForSequenceClassification(BertConfig(**sizes)))
    assert {name for name in outer if "embeddings" not in name} == {"classifier.weight", "classifier.bias"}
    assert "bert.embeddings.word_embeddings.weight" in outer


def test_without_a_matrix_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="Muon trains the matrices of hidden layers, and none is trained"):
        build_optimizer({"norm.weight": nn.Parameter(torch.ones(3))}, OptimConfig(name="Muon"))


def test_flat_shards_are_refused() -> None:
    given = {"actor": {"model": {"model_path": "a/b"}, "optim": {"name": "Muon"}}, "data": {"train_data_paths": "a/b"}}
    with pytest.raises(ConfigError, match=r"Muon does not work with actor.training_backend: fsdp1"):
        load_recipe(given, ["actor.training_backend=fsdp1"])


@pytest.mark.parametrize("args", [{}, {"adjust_lr_fn": "match_rms_adamw"}])
def test_fp64_is_torchs_but_for_the_rounding_of_the_iteration(args: dict[str, Any]) -> None:
    config = OptimConfig.model_validate({"name": "Muon", "lr": 0.02, "weight_decay": 0.1, "args": args})
    for size in ((3, 7), (7, 3)):
        ours, theirs = (nn.Parameter(torch.ones(size, dtype=torch.float64)) for _ in range(2))
        ours.grad = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        theirs.grad = ours.grad.clone()
        build_optimizer({"weight": ours}, config).step()
        torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, **args).step()
        assert 0 < (ours - theirs).abs().max() < 1e-3


def test_a_run_resumes_bitwise(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path)
    keys = {"actor__optim__name": "Muon"}
    shardtune.train(tiny.recipe("one", **keys))
    checkpoints = tiny.run("one") / "checkpoints"
    shardtune.train(tiny.recipe("again", runner__resume_dir=str(checkpoints / "global_step_3"), **keys))
    assert_same_tensors(checkpoints / "global_step_8", tiny.run("again") / "checkpoints" / "global_step_8")
    kept = {"actor__optim__state_dtype": "int8", "runner__max_steps": 1}
    run = shardtune.train(tiny.recipe("int8", **kept))
    assert json.loads((run.dir / "manifest.json").read_text())["dtypes"]["optimizer"] == "int8"
