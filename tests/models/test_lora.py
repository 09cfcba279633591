"""Adapters: what is adapted, how it begins, and that it trains as PEFT in a plain loop does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from shardtune.config import LoraConfig
from tests.checkpoint.tiny import saved
from tests.dist.ranks import run_ranks
from tests.models.adapted import adapted, all_ids, loss, train, whole

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "alpha": 6.0},
    "rslora": {"r": 4, "alpha": 6.0, "use_rslora": True},
    "dora": {"r": 4, "alpha": 6.0, "use_dora": True},
}


def peft_loop(base: Path, directory: Path, changes: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """PEFT's own model in a plain loop: the losses of 20 steps and the adapter at the end; saves the one it began with."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    given = {"lora_alpha" if key == "alpha" else key: value for key, value in changes.items()}
    torch.manual_seed(11)
    made = peft.get_peft_model(
        model,
        peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM", **given),
        autocast_adapter_dtype=False,
    )
    made.save_pretrained(str(directory))
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.01)
    losses = []
    for _ in range(20):
        total = loss(made, all_ids()) / 36
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses, {name: p.detach() for name, p in made.base_model.model.named_parameters() if p.requires_grad}


def our_loop(base: Path, adapters: dict[str, Path]) -> dict[str, tuple[list[float], dict[str, torch.Tensor]]]:
    told = {}
    for kind, directory in adapters.items():
        config = LoraConfig(**{**KINDS[kind], "adapter_path": str(directory)})
        model, weights, ranks = adapted(base, config, "fp64", adapter=directory)
        losses = train(model, weights, ranks)
        told[kind] = losses, {name: whole(p) for name, p in weights.trainable().items()}
    return told


def test_twenty_steps_equal_peft_in_a_plain_loop(tmp_path: Path) -> None:
    base = tmp_path / "base"
    saved("qwen2_tied", base)
    wanted = {kind: peft_loop(base, tmp_path / kind, changes) for kind, changes in KINDS.items()}
    adapters = {kind: tmp_path / kind for kind in KINDS}
    for told in (our_loop(base, adapters), *run_ranks(our_loop, 2, base, adapters)):
        for kind, (losses, adapter) in told.items():
            assert losses[0] > losses[-1]
            assert losses == pytest.approx(wanted[kind][0], rel=1e-10, abs=1e-10), kind
            assert adapter.keys() == wanted[kind][1].keys()
            for name, tensor in adapter.items():
                assert float((tensor - wanted[kind][1][name]).abs().max()) < 1e-10, (kind, name)
