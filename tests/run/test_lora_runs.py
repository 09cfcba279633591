"""Adapters through a whole run: trained, resumed, evaluated, asked, handed on and merged."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import shardtune
from shardtune.errors import CheckpointError, ConfigError
from shardtune.run.run import Run
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.chosen import slow_except
from tests.support.tiny_run import Tiny, assert_same_tensors, lines, make_tiny, rows, tensors, train_on_ranks

pytestmark = pytest.mark.lengthy

LORA: dict[str, Any] = {
    "actor__model__is_lora": True,
    "actor__model__lora__r": 4,
    "actor__model__lora__alpha": 6.0,
    "actor__model__lora__dropout": 0.2,
    "actor__model__lora__rank_pattern": {"k_proj": 2, r"layers\.1\..*\.down_proj": 6},
    "actor__model__lora__alpha_pattern": {"down_proj": 3.0},
    "actor__model__lora__exclude_modules": ["1.mlp.up_proj"],
    "actor__model__lora__layers_to_transform": [0, 1],
    "actor__optim__lr": 1e-2,
    "actor__optim__lr_scheduler": "constant",
    "runner__max_epochs": -1,
    "runner__max_steps": 4,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"), save_interval=-1)


@pytest.fixture(scope="module")
def run(tiny: Tiny) -> Run:
    data = {"data__eval_data_paths": str(tiny.folder / "eval.jsonl"), "runner__eval_before_training": True}
    return shardtune.train(tiny.recipe("whole", **LORA, **data))


@pytest.mark.parametrize(("began", "now"), [("true", "pissa"), pytest.param("pissa", "true", marks=pytest.mark.slow)])
def test_a_run_does_not_go_on_with_another_beginning_of_its_adapter(tiny: Tiny, began: str, now: str) -> None:
    """PiSSA and OLoRA subtract it from the base weights, on which the adapter is trained."""
    name, changed = f"began by {began}", {"runner__allow_changes": ["actor.model.lora"], "runner__max_steps": 4}
    shardtune.train(tiny.recipe(name, **LORA), f"model.lora.init={began}", "runner.max_steps=2")
    with pytest.raises(CheckpointError, match=r"model\.lora\.init was .* which changes the base weights"):
        shardtune.train(tiny.recipe(name, **{**LORA, **changed}), f"model.lora.init={now}")
    shardtune.train(tiny.recipe(name, **{**LORA, **changed}), f"model.lora.init={began}")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_does_not_go_on_with_other_base_weights_of_its_first_adapter(tiny: Tiny, tmp_path: Path) -> None:
    """PEFT saves an embedding beside an adapter, with which it is trained; checkpoints are without it."""
    given = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny.folder / "model"), given)
    keys = {"actor__model__is_lora": True, "actor__model__lora__load_from": str(tmp_path), "runner__max_epochs": -1}
    for steps, factor in ((1, 1.5), (2, 1.0)):
        with torch.no_grad():
            made.get_input_embeddings().weight.mul_(factor)
        made.save_pretrained(str(tmp_path), save_embedding_layers=True)
        shardtune.train(tiny.recipe("with embedding", **keys, runner__max_steps=steps))
    with torch.no_grad():
        made.get_input_embeddings().weight.mul_(1.5)
    made.save_pretrained(str(tmp_path), save_embedding_layers=True)
    with pytest.raises(CheckpointError, match=r"came with the adapter of .*load_from.* are not those of training"):
        shardtune.train(tiny.recipe("with embedding", **keys, runner__max_steps=3))


def test_a_rank_that_a_layer_cannot_have_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"has the rank 999, and its weight .* parts at most"):
        shardtune.train(tiny.recipe("rank", **LORA), "model.lora.init=pissa", "model.lora.r=999")


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    model.set_attn_implementation("eager")
    return model.eval()(input_ids=(torch.arange(30) * 7 % 260)[None]).logits


def test_overrides_that_an_exported_model_replaces_are_refused(run: Run) -> None:
    """`final/` has its own settings and tokenizer; a checkpoint is built by the recipe."""
    for word in ("model.lora.alpha=1", "actor.tokenizer.tokenizer_model=other", "actor.optim.ema_decay=0.3"):
        key = word.partition("=")[0].removeprefix("actor.")
        with pytest.raises(ConfigError, match=f"{key} has no effect on .*final"):
            run.evaluate("final", word)
    same = run.evaluate("final", "eval.generate=false", "model.lora.alpha=6.0")
    assert same == run.evaluate("final")


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
    assert manifest["trainable_patterns"][0] == {
        "name": "model.layers.*.self_attn.q_proj.lora_A.default.weight", "tensors": 2, "parameters": 128,
    }  # fmt: skip


def test_the_final_directory_is_one_of_peft(tiny: Tiny, run: Run) -> None:
    final = run.dir / "final"
    config = json.loads((final / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 6, "CAUSAL_LM")
    assert config["rank_pattern"] == LORA["actor__model__lora__rank_pattern"]
    assert (config["alpha_pattern"], config["exclude_modules"]) == ({"down_proj": 3}, ["1.mlp.up_proj"])
    assert config["layers_to_transform"] == [0, 1]
    assert config["base_model_name_or_path"] == str(tiny.folder / "model")
    assert not (final / "config.json").exists()
    assert AutoTokenizer.from_pretrained(final).chat_template
    base = AutoModelForCausalLM.from_pretrained(tiny.folder / "model")
    before = logits(base)
    loaded = peft.PeftModel.from_pretrained(base, str(final)).get_base_model()
    assert float((logits(loaded) - before).abs().max()) > 1e-3
    worker = run.worker()
    assert float((logits(worker.inner_model) - logits(loaded)).abs().max()) < 1e-5


def test_it_evaluates_and_answers_without_merging(run: Run) -> None:
    assert run.metrics["eval/loss"] < lines(run.dir)[0]["eval/loss"]
    assert run.evaluate()["eval/loss"] == pytest.approx(run.metrics["eval/loss"], rel=1e-6)
    assert run.evaluate("latest")["eval/loss"] == pytest.approx(run.metrics["eval/loss"], rel=1e-6)
    assert isinstance(run.generate("say 3")[0], str)


def test_merged_it_computes_the_same(tiny: Tiny, run: Run, tmp_path: Path) -> None:
    told: list[str] = []
    run.export(tmp_path / "adapter", check=False)
    run.export(tmp_path / "merged", merge=True, report=told.append)
    assert len(told) == 1
    base = AutoModelForCausalLM.from_pretrained(tiny.folder / "model")
    adapted = logits(peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).get_base_model())
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert float((adapted - merged).abs().max()) < 1e-5
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys() == (
        load_file(run.dir / "final" / "adapter_model.safetensors").keys()
    )


def test_a_worker_merges_what_it_holds_in_full_precision(tiny: Tiny, tmp_path: Path) -> None:
    worker = SFTWorker(tiny.recipe("half", **LORA, actor__model__precision="bf16"))
    worker.setup()
    worker.run_training()
    worker.export(tmp_path / "adapter", "fp64")
    worker.export(tmp_path / "merged", "fp64", merge=True)
    base = AutoModelForCausalLM.from_pretrained(tiny.folder / "model", dtype=torch.float64)
    wanted = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload().state_dict()
    for name, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-7)
    assert worker.weights.unlike_masters() == []
    assert math.isfinite(worker.run_training()["train/loss"])
    worker.release()


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


def test_a_model_in_memory_is_returned_with_its_adapter(tiny: Tiny, run: Run) -> None:
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
    **LORA,
    "actor__model__lora__base_dtype": "nf4",
    "actor__model__lora__dropout": 0.0,
    "actor__model__lora__modules_to_save": ["lm_head"],
    "actor__model__precision": "fp64",
    "data__eval_split": 0.2,
}
"""A base in NF4, and a head that is trained in full."""
NEW_TOKENS = ["please", *(f"<token {number}>" for number in range(14))]
"""One that the rows hold, and so many that 272 embeddings are too few: the tokenizer has 259."""
WORDS: dict[str, Any] = {
    **LORA,
    "actor__tokenizer__new_tokens": NEW_TOKENS,
    "actor__model__precision": "fp64",
    "actor__model__lora__dropout": 0.0,
}


@pytest.mark.parametrize("in_parts", slow_except([False, True], False))
def test_four_bits_on_two_ranks_resume_and_equal_one(tiny: Tiny, in_parts: bool) -> None:
    """A run over a base in NF4: two ranks do what one does, also when they stop in between."""
    runs = [tiny.recipe("on 2", **QLORA)]
    if in_parts:
        runs += [tiny.recipe("on 2, in parts", **{**QLORA, **steps}) for steps in ({"runner__max_steps": 2}, {})]
    train_on_ranks(2, runs, timeout=240)
    if in_parts:
        straight, stopped = (tiny.run(name) / "checkpoints" / "global_step_4" for name in ("on 2", "on 2, in parts"))
        assert_same_tensors(straight, stopped)
    alone = shardtune.train(tiny.recipe("alone", **QLORA))
    whole = shardtune.train(tiny.recipe("not in four bits", **{**QLORA, "actor__model__lora__base_dtype": "auto"}))
    losses = [[line["train/loss"] for line in lines(tiny.run(name))] for name in ("on 2", "alone", "not in four bits")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert losses[1] != pytest.approx(losses[2], rel=1e-4), "four bits are not the whole weights"
    first = load_file(tiny.run("on 2") / "final" / "adapter_model.safetensors")
    second = load_file(alone.dir / "final" / "adapter_model.safetensors")
    assert "base_model.model.lm_head.weight" in first
    for name, tensor in first.items():
        assert torch.allclose(tensor, second[name], rtol=1e-8, atol=1e-8), name
    assert whole.metrics["eval/loss"] != alone.metrics["eval/loss"]


def merged_and_adapted(tiny: Tiny, made: Run, to: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The logits of the merged export and of PEFT over the base model, and the merged embedding."""
    made.export(to, merge=True, check=False)
    merged = AutoModelForCausalLM.from_pretrained(to)
    base = AutoModelForCausalLM.from_pretrained(tiny.folder / "model")
    base.resize_token_embeddings(merged.config.vocab_size)
    adapted = peft.PeftModel.from_pretrained(base, str(made.dir / "final")).get_base_model()
    return logits(merged), logits(adapted), merged.get_input_embeddings().weight.detach()


def test_new_tokens_get_embeddings_of_which_they_alone_are_trained(tiny: Tiny, tmp_path: Path) -> None:
    """Also on two ranks that share matrices, stopped and gone on with."""
    shared = {**WORDS, "actor__parallel__tensor": 2}
    begun = tiny.recipe("words on 2", **{**shared, "runner__max_steps": 2})
    train_on_ranks(2, [begun, tiny.recipe("words on 2", **shared)], timeout=240)
    made = shardtune.train(tiny.recipe("words", **WORDS, data__eval_data_paths=str(tiny.folder / "eval.jsonl")))
    tokenizer = AutoTokenizer.from_pretrained(made.dir / "final")
    (please,) = tokenizer.encode("please")
    assert please == tokenizer.convert_tokens_to_ids("please")
    for line, other in zip(lines(tiny.run("words on 2")), lines(made.dir), strict=True):
        assert line["train/loss"] == pytest.approx(other["train/loss"], rel=1e-9)
    shared = load_file(tiny.run("words on 2") / "final" / "adapter_model.safetensors")
    for name, tensor in load_file(made.dir / "final" / "adapter_model.safetensors").items():
        assert torch.allclose(shared[name], tensor, rtol=1e-8, atol=1e-8), name
    merged, adapted, embedding = merged_and_adapted(tiny, made, tmp_path / "merged")
    assert float((merged - adapted).abs().max()) < 1e-5
    before = AutoModelForCausalLM.from_pretrained(tiny.folder / "model").get_input_embeddings().weight.detach()
    assert len(embedding) == len(tokenizer) > len(before)
    assert torch.equal(embedding[:259], before[:259])
    assert not torch.allclose(embedding[please], before[please], atol=1e-3), "it was trained"
    assert torch.allclose(embedding[-1], before.mean(0), atol=0.05)
    assert made.evaluate()["eval/loss"] == pytest.approx(made.metrics["eval/loss"], rel=1e-6)


def test_new_tokens_of_a_whole_model_are_trained_with_it(tiny: Tiny) -> None:
    changes = {"runner__max_epochs": -1, "runner__max_steps": 2, "actor__tokenizer__new_tokens": NEW_TOKENS}
    made = shardtune.train(tiny.recipe("whole words", **changes))
    final = AutoModelForCausalLM.from_pretrained(made.dir / "final")
    tokenizer = AutoTokenizer.from_pretrained(made.dir / "final")
    assert final.config.vocab_size == final.get_output_embeddings().weight.shape[0] == len(tokenizer) > 272
    assert len(tokenizer.encode("please")) == 1


@pytest.mark.slow
def test_frozen_weights_come_from_where_training_starts(tiny: Tiny) -> None:
    """Checkpoints leave them out; in half precision nothing of them is lost."""
    changes = {"actor__model__freeze": ["embed_tokens", "mlp"], "actor__model__precision": "bf16"}
    changes |= {"runner__max_epochs": -1, "data__eval_data_paths": str(tiny.folder / "eval.jsonl")}
    shardtune.train(tiny.recipe("frozen, in parts", **changes, runner__max_steps=1))
    parts = shardtune.train(tiny.recipe("frozen, in parts", **changes, runner__max_steps=2))
    whole = shardtune.train(tiny.recipe("frozen", **changes, runner__max_steps=2))
    held = tensors(whole.dir / "checkpoints" / "global_step_2")
    assert not any("embed_tokens" in name or "mlp" in name for name in held)
    assert any("q_proj" in name for name in held)
    final, base = (load_file(path / "model.safetensors") for path in (whole.dir / "final", tiny.folder / "model"))
    assert torch.equal(final["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    again = load_file(parts.dir / "final" / "model.safetensors")
    assert all(torch.equal(final[name], again[name]) for name in final)
    assert not torch.equal(final["lm_head.weight"], base["lm_head.weight"])
    assert whole.evaluate("latest")["eval/loss"] == pytest.approx(whole.metrics["eval/loss"], rel=1e-3)


def peft_adapter(tiny: Tiny, to: Path, init: str) -> torch.Tensor:
    """PEFT's own, moved from where it began and saved as it is; the logits of base and adapter."""
    base = AutoModelForCausalLM.from_pretrained(tiny.folder / "model")
    settings = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": init}
    made = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=6, **settings))  # pyright: ignore[reportArgumentType]
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    made.save_pretrained(str(to))
    return logits(made.get_base_model())


FROM_PEFT: dict[str, Any] = {key: value for key, value in LORA.items() if "lora__" not in key} | {
    "actor__optim__lr": 1e-12, "runner__max_steps": 1,
}  # fmt: skip


@pytest.mark.parametrize("init", slow_except(["gaussian", "pissa", "olora"], "pissa"))
def test_an_adapter_of_peft_is_taken_over_as_peft_loads_it(tiny: Tiny, tmp_path: Path, init: str) -> None:
    """What PiSSA and OLoRA took out of the base when they began is taken out again, as PEFT does."""
    wanted = peft_adapter(tiny, tmp_path / "adapter", init)
    changes = {**FROM_PEFT, "actor__model__lora__adapter_path": str(tmp_path / "adapter")}
    made = shardtune.train(tiny.recipe(f"from {init}", **changes))
    worker = made.worker("latest")
    assert isinstance(worker, shardtune.SFTWorker)
    assert float((logits(worker.inner_model) - wanted).abs().max()) < 1e-5
    base = AutoModelForCausalLM.from_pretrained(tiny.folder / "model")
    assert float((logits(base) - wanted).abs().max()) > 1e-3
    final = peft.PeftModel.from_pretrained(base, str(made.dir / "final")).get_base_model()
    assert float((logits(final) - wanted).abs().max()) < 1e-5


def test_an_adapter_whose_beginning_cannot_be_repeated_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    peft_adapter(tiny, tmp_path / "adapter", "pissa_niter_4")
    changes = {**FROM_PEFT, "actor__model__lora__adapter_path": str(tmp_path / "adapter")}
    with pytest.raises(shardtune.errors.ConfigError, match="began as 'pissa_niter_4'"):
        shardtune.train(tiny.recipe("from niter", **changes))
    peft_adapter(tiny, tmp_path / "exact", "pissa")
    changes |= {"actor__model__lora__adapter_path": str(tmp_path / "exact"), "actor__model__lora__base_dtype": "nf4"}
    with pytest.raises(shardtune.errors.ConfigError, match="NF4 would round what is left once more"):
        shardtune.train(tiny.recipe("from pissa in four bits", **changes))


def test_an_adapter_that_trains_no_rows_of_new_tokens_is_refused(tiny: Tiny, run: Run) -> None:
    changes = {**FROM_PEFT, "actor__model__lora__adapter_path": str(run.dir / "final")}
    with pytest.raises(shardtune.errors.ConfigError, match="trains no embeddings of 1 of the new tokens"):
        shardtune.train(tiny.recipe("new tokens", **changes, actor__tokenizer__new_tokens=["please"]))


def test_an_adapter_that_trains_rows_of_tokens_that_are_not_there_is_refused(tiny: Tiny) -> None:
    changes = {"actor__model__is_lora": True, "runner__max_steps": 1}
    added = shardtune.train(tiny.recipe("two new tokens", **changes, actor__tokenizer__new_tokens=["<one>", "<two>"]))
    changes["actor__model__lora__load_from"] = str(added.dir / "final")
    with pytest.raises(
        shardtune.errors.ConfigError, match=r"trains embeddings of 2 tokens that the tokenizer does not"
    ):
        shardtune.train(tiny.recipe("on without them", **changes))
    with pytest.raises(shardtune.errors.ConfigError, match=r"trains embeddings of 1 token that the tokenizer does not"):
        shardtune.train(tiny.recipe("on with one", **changes, actor__tokenizer__new_tokens=["<one>"]))


@pytest.mark.parametrize("kind", slow_except(["adapter", "freeze"], "adapter"))
def test_a_run_does_not_go_on_over_another_base(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny.folder / "model", base)
    changes = {**LORA, "actor__model__model_path": str(base)}
    if kind == "freeze":
        changes = {key: value for key, value in changes.items() if "lora" not in key}
        changes |= {"actor__model__freeze": ["embed_tokens"]}
    name = f"moved base, {kind}"
    shardtune.train(tiny.recipe(name, **{**changes, "runner__max_steps": 1}))
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.get_input_embeddings().weight[7, 3] += 1e-3
    model.save_pretrained(base)
    with pytest.raises(shardtune.errors.CheckpointError, match="the frozen weights") as error:
        shardtune.train(tiny.recipe(name, **changes))
    assert str(base) in str(error.value)
    with pytest.raises(shardtune.errors.CheckpointError, match="the frozen weights"):
        shardtune.load_run(tiny.run(name)).worker("latest")
    allowed = {"runner__allow_changes": ["actor.model.model_path"]}
    assert lines(shardtune.train(tiny.recipe(name, **changes, **allowed)).dir)[-1]["step"] == 4


@pytest.mark.parametrize(
    ("merge", "dtype"),
    [
        (False, "fp16"),
        (True, "bf16"),
        pytest.param(False, "bf16", marks=pytest.mark.slow),
        pytest.param(True, "fp16", marks=pytest.mark.slow),
    ],
)
def test_an_export_in_half_precision_is_compared_with_what_was_rounded(
    run: Run, tmp_path: Path, dtype: str, merge: bool
) -> None:
    told: list[str] = []
    run.export(tmp_path / "out", dtype=dtype, merge=merge, report=told.append)
    assert "gives the same logits" in told[0]
    file = tmp_path / "out" / ("model.safetensors" if merge else "adapter_model.safetensors")
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert {tensor.dtype for tensor in load_file(file).values()} == {wanted}


def test_answers_of_an_adapter_on_another_base_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny.folder / "model", base)
    settings = {**LORA, "runner__max_steps": 1, "actor__model__model_path": str(base)}
    run = shardtune.train(tiny.recipe("moved", **settings))
    assert run.generate("say 1", max_new_tokens=2)
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    model.save_pretrained(base)
    uses = [
        lambda: run.generate("say 1"),
        lambda: run.evaluate(eval_data=rows(3)),
        lambda: run.export(tmp_path / "exported"),
    ]
    for use in uses:
        with pytest.raises(CheckpointError, match="are not those of training"):
            use()
