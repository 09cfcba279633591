"""Adapters through a whole run: trained, resumed, evaluated, asked, handed on and merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import shardtune
from shardtune.run import Run
from tests.tiny_run import Tiny, assert_same_tensors, lines, make_tiny, tensors, train_on_ranks

LORA: dict[str, Any] = {
    "actor__model__is_lora": True,
    "actor__model__lora__r": 4,
    "actor__model__lora__alpha": 6.0,
    "actor__model__lora__dropout": 0.2,
    "actor__optim__lr": 1e-2,
    "actor__optim__lr_scheduler": "constant",
    "runner__max_epochs": -1,
    "runner__max_steps": 4,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def run(tiny: Tiny) -> Run:
    data = {"data__eval_data_paths": str(tiny.folder / "eval.jsonl"), "runner__eval_before_training": True}
    return shardtune.train(tiny.recipe("whole", **LORA, **data))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    model.set_attn_implementation("eager")
    return model.eval()(input_ids=(torch.arange(30) * 7 % 260)[None]).logits


def test_an_interrupted_run_goes_on_bit_by_bit(tiny: Tiny, run: Run) -> None:
    shardtune.train(tiny.recipe("parts", **{**LORA, "runner__max_steps": 2}))
    shardtune.train(tiny.recipe("parts", **LORA))
    assert_same_tensors(
        tiny.run("whole") / "checkpoints" / "global_step_4", tiny.run("parts") / "checkpoints" / "global_step_4"
    )


def test_a_checkpoint_holds_the_adapter_and_its_optimizer_alone(tiny: Tiny, run: Run) -> None:
    held = tensors(run.dir / "checkpoints" / "global_step_4")
    names = {name.partition(":")[2].partition("::")[0] for name in held}
    assert names
    assert all(".lora_A.default." in name or ".lora_B.default." in name for name in names)
    manifest = json.loads((run.dir / "manifest.json").read_text())
    assert "lora_A" in json.dumps(manifest["trainable"])


def test_the_final_directory_is_one_of_peft(tiny: Tiny, run: Run) -> None:
    final = run.dir / "final"
    config = json.loads((final / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 6, "CAUSAL_LM")
    assert config["base_model_name_or_path"] == str(tiny.folder / "model")
    assert not (final / "config.json").exists()
    assert AutoTokenizer.from_pretrained(final).chat_template
    base = AutoModelForCausalLM.from_pretrained(tiny.folder / "model")
    before = logits(base)
    loaded = peft.PeftModel.from_pretrained(base, str(final)).get_base_model()
    assert float((logits(loaded) - before).abs().max()) > 1e-3
    worker = run.worker()
    assert float((logits(worker.inner_model()) - logits(loaded)).abs().max()) < 1e-5


def test_it_evaluates_and_answers_without_merging(run: Run) -> None:
    assert run.metrics["eval/loss"] < lines(run.dir)[0]["eval/loss"]
    assert run.evaluate()["eval/loss"] == pytest.approx(run.metrics["eval/loss"], rel=1e-6)
    assert run.evaluate("latest")["eval/loss"] == pytest.approx(run.metrics["eval/loss"], rel=1e-6)
    assert isinstance(run.generate("say 3")[0], str)


def test_merged_it_computes_the_same(tiny: Tiny, run: Run, tmp_path: Path) -> None:
    told: list[str] = []
    run.export(tmp_path / "adapter", check=False)
    run.export(tmp_path / "merged", merge=True, say=told.append)
    assert len(told) == 1
    base = AutoModelForCausalLM.from_pretrained(tiny.folder / "model")
    adapted = logits(peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).get_base_model())
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert float((adapted - merged).abs().max()) < 1e-5
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys() == (
        load_file(run.dir / "final" / "adapter_model.safetensors").keys()
    )


def test_another_run_starts_from_it(tiny: Tiny, run: Run) -> None:
    changes = {key: value for key, value in LORA.items() if "lora__" not in key}
    changes |= {"actor__model__lora__adapter_path": str(run.dir / "final"), "runner__max_steps": 1}
    again = shardtune.train(tiny.recipe("again", **changes))
    assert again.recipe.actor.model.lora.r == 4
    assert lines(again.dir)[0]["train/loss"] < lines(run.dir)[1]["train/loss"] * 0.98


def test_what_was_not_adapted_cannot_be_merged(tiny: Tiny, tmp_path: Path) -> None:
    plain = shardtune.train(tiny.recipe("plain", runner__max_epochs=-1, runner__max_steps=1))
    with pytest.raises(shardtune.errors.ConfigError, match="nothing to merge"):
        plain.export(tmp_path / "out", merge=True)


def test_a_model_in_memory_is_handed_back_with_its_adapter(tiny: Tiny, run: Run) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny.folder / "model")
    before = logits(model)
    data = {"data__eval_data_paths": str(tiny.folder / "eval.jsonl"), "actor__model__model_path": None}
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder / "model")
    made = shardtune.train(tiny.recipe("memory", **LORA, **data), model=model, tokenizer=tokenizer)
    assert made.metrics["eval/loss"] == pytest.approx(run.metrics["eval/loss"], rel=1e-6)
    base = AutoModelForCausalLM.from_pretrained(tiny.folder / "model")
    loaded = logits(peft.PeftModel.from_pretrained(base, str(made.dir / "final")).get_base_model())
    assert float((logits(model) - loaded).abs().max()) < 1e-5
    assert float((before - loaded).abs().max()) > 1e-3


QLORA: dict[str, Any] = {
    "actor__model__lora__base_dtype": "nf4",
    "actor__model__lora__dropout": 0.0,
    "actor__model__lora__modules_to_save": ["lm_head"],
    "actor__model__precision": "fp64",
    "data__eval_split": 0.2,
}


def test_four_bits_on_two_ranks_resume_and_equal_one(tiny: Tiny) -> None:
    """A run over a base in NF4: two ranks do what one does, also when they stop in between."""
    changes = {**LORA, **QLORA}
    parts = tiny.recipe("on 2, in parts", **{**changes, "runner__max_steps": 2})
    train_on_ranks(2, [tiny.recipe("on 2", **changes), parts, tiny.recipe("on 2, in parts", **changes)])
    assert_same_tensors(
        tiny.run("on 2") / "checkpoints" / "global_step_4", tiny.run("on 2, in parts") / "checkpoints" / "global_step_4"
    )
    alone = shardtune.train(tiny.recipe("alone", **changes))
    whole = shardtune.train(tiny.recipe("not in four bits", **{**changes, "actor__model__lora__base_dtype": "auto"}))
    losses = [[line["train/loss"] for line in lines(tiny.run(name))] for name in ("on 2", "alone", "not in four bits")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert losses[1] != pytest.approx(losses[2], rel=1e-4), "four bits are not the whole weights"
    first = load_file(tiny.run("on 2") / "final" / "adapter_model.safetensors")
    second = load_file(alone.dir / "final" / "adapter_model.safetensors")
    assert "base_model.model.lm_head.weight" in first
    for name, tensor in first.items():
        assert torch.allclose(tensor, second[name], rtol=1e-8, atol=1e-8), name
    assert whole.metrics["eval/loss"] != alone.metrics["eval/loss"]
