"""Other methods of PEFT than LoRA: trained as in a plain loop, saved, loaded by PEFT, merged; or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from shardtune.checkpoint.peft_directory import load_adapter, merging, save_adapter
from shardtune.config import LoraConfig
from shardtune.errors import ConfigError
from shardtune.models.lora.attach import attach_adapter
from shardtune.models.lora.methods import TRAINED
from tests.support.adapted import adapted, all_ids, loss, train, whole
from tests.support.dist.ranks import run_ranks
from tests.support.tiny_checkpoint import config, empty, saved

TARGETS = ["q_proj", "v_proj", "down_proj"]
SETTINGS: dict[str, dict[str, Any]] = {
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 4},
    "FOURIERFT": {"n_frequency": 20},
    "GRALORA": {"r": 4, "gralora_k": 2},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "LOHA": {"r": 3, "alpha": 6},
    "LOKR": {"r": 2, "alpha": 6},
    "MISS": {"r": 4},
    "OFT": {"oft_block_size": 4, "r": 0},
    "ROAD": {"group_size": 8},
    "WAVEFT": {"n_frequency": 20},
}
"""Where PEFT's defaults do not suit a tiny model."""
IN_FP32 = ("C3A", "FOURIERFT", "WAVEFT")
"""What PEFT computes in fp32, whatever the model's dtype."""
STEPS = 3


def settings(method: str) -> LoraConfig:
    return LoraConfig(target_modules=TARGETS, peft={"peft_type": method, **SETTINGS.get(method, {})})


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=all_ids()).logits


def peft_loop(base: Path, begun: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    made = peft.PeftModel.from_pretrained(model, str(begun), is_trainable=True, autocast_adapter_dtype=False).train()
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.01)
    losses = []
    for _ in range(STEPS):
        total = loss(made, all_ids()) / 36
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses, {name: p.detach() for name, p in made.get_base_model().named_parameters() if p.requires_grad}


def our_loop(base: Path, folder: Path, methods: list[str]) -> dict[str, tuple[list[float], dict[str, torch.Tensor]]]:
    """Each begun, saved, trained, saved and merged."""
    told = {}
    for method in methods:
        model, weights, ranks = adapted(base, settings(method), "fp64")
        save_adapter(model, folder / method / "begun", base=str(base))
        losses = train(model, weights, ranks, STEPS)
        save_adapter(model, folder / method / "final", base=str(base))
        made = merging(model, torch.float64)
        merged = {name: made.gather(name, tensor).detach().clone() for name, tensor in made.tensors.items()}
        if ranks.rank == 0:
            torch.save(merged, folder / method / "merged.pt")
        told[method] = losses, {name: whole(p) for name, p in weights.trainable().items()}
    return told


def check(tmp_path: Path, base: Path, told: dict[str, tuple[list[float], dict[str, torch.Tensor]]]) -> None:
    for method, (losses, adapter) in told.items():
        near = 1e-6 if method in IN_FP32 else 1e-10
        wanted, last = peft_loop(base, tmp_path / method / "begun")
        assert losses[0] != losses[-1]
        assert losses == pytest.approx(wanted, rel=near, abs=near), method
        assert adapter.keys() == last.keys()
        for name, tensor in adapter.items():
            assert float((tensor - last[name]).abs().max()) < near, (method, name)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
        before = logits(model)
        final = str(tmp_path / method / "final")
        found = logits(peft.PeftModel.from_pretrained(model, final, autocast_adapter_dtype=False))
        assert float((found - before).abs().max()) > 1e-4
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
        plain.load_state_dict(torch.load(tmp_path / method / "merged.pt"), strict=False)
        assert float((logits(plain) - found).abs().max()) < max(near, 1e-9), method


@pytest.fixture
def base(tmp_path: Path) -> Path:
    saved("qwen2_tied", tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.lengthy
def test_steps_equal_peft_in_a_plain_loop(tmp_path: Path, base: Path) -> None:
    check(tmp_path, base, our_loop(base, tmp_path, ["IA3", "OFT"]))


@pytest.mark.slow
def test_every_method_equals_peft_on_one_and_two_ranks(tmp_path: Path, base: Path) -> None:
    (tmp_path / "two").mkdir()
    check(tmp_path, base, our_loop(base, tmp_path, list(TRAINED)))
    check(tmp_path / "two", base, run_ranks(our_loop, 2, base, tmp_path / "two", list(TRAINED))[0])


def test_it_begins_as_peft_begins_it_and_goes_on_from_a_directory(tmp_path: Path, base: Path) -> None:
    model = empty(config("qwen2_tied"))
    attach_adapter(model, settings("LOHA"), seed=5)
    ours = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(5)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    made = peft.get_peft_model(plain, peft.LoHaConfig(r=3, alpha=6, target_modules=TARGETS))
    theirs = {name: p.detach() for name, p in made.get_base_model().named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys()
    assert any(float(tensor.abs().max()) > 0 for tensor in ours.values())
    made.save_pretrained(str(tmp_path / "stored"))
    again, *_ = adapted(base, LoraConfig(load_from=str(tmp_path / "stored")), adapter=tmp_path / "stored")
    load_adapter(again, tmp_path / "stored")
    values = {name: p for name, p in again.named_parameters() if p.requires_grad}
    assert all(torch.equal(values[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"peft_type": "ADALORA"}, "changes ranks between steps"),
        ({"peft_type": "VERA"}, "tensors that several layers share"),
        ({"peft_type": "PREFIX_TUNING"}, "changes the model's inputs"),
        ({"peft_type": "LOHAS"}, "methods are LOHA"),
        ({"peft_type": "LOHA", "rr": 3}, "LoHaConfig has no key rr"),
        ({"peft_type": "LOHA", "target_modules": ["q_proj"]}, "give it as actor.model.lora.target_modules"),
        ({"peft_type": "OFT", "r": 5, "oft_block_size": 4}, "oft_block_size"),
    ],
)
def test_what_is_not_trained_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attach_adapter(empty(config("qwen2_tied")), LoraConfig(target_modules=TARGETS, peft=given))
