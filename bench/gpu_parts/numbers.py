"""Part a: the numerical core on the device, against the CPU in fp64."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, PreTrainedConfig

import shardtune
from gpu_parts.doubles import Doubles
from gpu_parts.records import FAIL, PASS, Check, Facts, Part, Setting, within
from shardtune.config import load_recipe
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.models.vision.test_vision_on_ranks import a_recipe
from tests.support.dist.parity import distance, error
from tests.support.dist.training import (
    SIZES,
    VOCABULARY,
    Trace,
    make_tokenizer,
    quiet,
    recipe,
    run_recipe,
    save_adapter,
    save_model,
    save_rows,
)
from tests.support.vision import save_image_rows, save_vision_model

EXACT = 1e-9
"""fp64, after 20 steps: losses and norms relative where above 1, gradients and weights absolute."""
SINGLE = 2e-4
"""fp32, of losses and norms."""
HALF = 1.5
"""bf16: the mean relative error of losses and norms, as a multiple of that on the CPU."""
KINDS = ("dense", "mistral", "gemma", "mixtral", "qwen3_moe", "gemma2", "gpt_oss")
STATES = ("mamba",)
"""Rows share no forward here without the kernels of mamba-ssm."""


def soft_config(kind: str) -> PreTrainedConfig:
    """A tiny Gemma 2, with soft caps on scores and logits, or gpt-oss, with sinks; both with windows."""
    layers = ["sliding_attention", "full_attention"]
    sizes: dict[str, Any] = {**SIZES, "vocab_size": VOCABULARY, "eos_token_id": 257, "layer_types": layers}
    sizes |= {"sliding_window": 8, "head_dim": 16, "tie_word_embeddings": False}
    if kind == "gemma2":
        caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}
        return Gemma2Config(**{**sizes, **caps, "pad_token_id": 0})
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return GptOssConfig(**{**sizes, **experts, "rope_parameters": rope})


def model_of(kind: str, folder: Path) -> Path:
    """A model's directory."""
    if (folder / "config.json").exists():
        return folder
    if kind not in ("gemma2", "gpt_oss"):
        return save_model(kind, folder)
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(soft_config(kind)).float()
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            parameter.data.normal_()
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def values(setting: Setting, kind: str, **changes: Any) -> dict[str, Any]:
    """A recipe of the tests for a tiny model; 20 steps."""
    work = setting.work("numbers")
    rows = work / "rows.jsonl"
    if not rows.exists():
        save_rows(rows)
    if setting.small:
        changes = {"runner__max_steps": 3, **changes}
    return recipe(model_of(kind, work / kind), rows, **changes)


def moved(trace: Trace) -> Trace:
    """With its tensors on the CPU."""
    weights = {name: tensor.cpu() for name, tensor in trace.weights.items()}
    gradients = [{name: tensor.cpu() for name, tensor in each.items()} for each in trace.gradients]
    return replace(trace, weights=weights, gradients=gradients)


def trained(setting: Setting, kind: str, device: str, **changes: Any) -> Trace:
    """A run of it, by default in fp64."""
    exact = changes.get("actor__model__precision", "fp64") == "fp64"
    with Doubles() if exact else nullcontext():
        return moved(run_recipe(values(setting, kind, **changes, runner__device=device)))


@cache
def truth(setting: Setting, kind: str) -> Trace:
    """On the CPU, in fp64."""
    return trained(setting, kind, "cpu")


def against(run: Trace, true: Trace, limit: float) -> Facts:
    found = distance(run, true)
    facts = {"loss": found.loss, "norm": found.norm, "gradient": found.gradient, "weights": found.weight}
    return {**within(max(facts.values()), limit), **facts}


def exact(setting: Setting, kind: str) -> Facts:
    return against(trained(setting, kind, setting.device), truth(setting, kind), EXACT)


def single(setting: Setting, kind: str) -> Facts:
    run, true = trained(setting, kind, setting.device, actor__model__precision="fp32"), truth(setting, kind)
    return within(max(distance(run, true).loss, distance(run, true).norm), SINGLE)


def half(setting: Setting, kind: str) -> Facts:
    """With what the probe of packed rows has found: nothing, where they are packed."""
    on = {place: trained(setting, kind, place, actor__model__precision="bf16") for place in {"cpu", setting.device}}
    own, here = error(on["cpu"], truth(setting, kind)), error(on[setting.device], truth(setting, kind))
    notes = "; ".join(on[setting.device].notes)
    facts = within(here, HALF * max(own, 1e-3), note=f"CPU {own:.1e}{'; ' + notes if notes else ''}")
    return facts if on[setting.device].notes == on["cpu"].notes else {**facts, "verdict": FAIL}


def unpacked(setting: Setting) -> Facts:
    """One row in each forward."""
    alone = trained(setting, "dense", setting.device, actor__micro_batch_size=1)
    return against(alone, truth(setting, "dense"), EXACT)


def lora(setting: Setting, precision: str) -> Facts:
    work = setting.work("numbers")
    model, adapter = model_of("dense", work / "dense"), work / "adapter"
    if not adapter.exists():
        save_adapter(model, adapter)
    changes = {"actor__model__is_lora": True, "actor__model__lora": {"adapter_path": str(adapter)}}
    true = trained(setting, "dense", "cpu", **changes)
    if precision == "fp64":
        return against(trained(setting, "dense", setting.device, **changes), true, EXACT)
    changes["actor__model__precision"] = precision
    own, here = (error(trained(setting, "dense", place, **changes), true) for place in ("cpu", setting.device))
    return within(here, HALF * max(own, 1e-3), note=f"CPU {own:.1e}")


def vision(setting: Setting, family: str) -> Facts:
    """Chats with images, two rows in a forward."""
    work = setting.work("numbers", family)
    directory = work / "model"
    if not directory.exists():
        save_vision_model(family, directory)
    file, _ = save_image_rows(work)
    made = [
        a_recipe(directory, file, actor__micro_batch_size=2, data__eval_data_paths=None, runner__device=device)
        for device in ("cpu", setting.device)
    ]
    with Doubles():
        true, run = (moved(run_recipe(each)) for each in made)
    return against(run, true, EXACT)


def resume(setting: Setting, precision: str) -> Facts:
    """Two steps, a checkpoint, two more, straight on and from the checkpoint; every bit of losses and weights."""
    checkpoint = setting.work("numbers") / f"checkpoint-{precision}"
    shutil.rmtree(checkpoint, ignore_errors=True)
    made = values(
        setting, "dense", runner__device=setting.device, actor__model__precision=precision, runner__max_steps=4
    )
    found = []
    for again in (False, True):
        worker = SFTWorker(load_recipe(made), report=quiet)
        worker.setup()
        if again:
            worker.load_checkpoint(str(checkpoint))
        else:
            worker.run_training()
            worker.run_training()
            worker.save_checkpoint(str(checkpoint), worker.step)
        numbers = [worker.run_training() for _ in range(2)]
        weights = {name: tensor.detach().cpu().clone() for name, tensor in worker.weights.parameters.items()}
        found.append(([(line["train/loss"], line["train/grad_norm"]) for line in numbers], weights))
        worker.release()
    (first, one), (second, other) = found
    different = [name for name in one if not torch.equal(one[name], other[name])]
    same = first == second and not different
    return {"verdict": PASS if same else FAIL, "note": "" if same else f"{len(different)} tensors differ"}


def export(setting: Setting) -> Facts:
    """Train, reload `final/` by transformers on the device, and compare its logits and the loss of evaluation."""
    name = f"export-{setting.device}"
    shutil.rmtree(setting.work("runs") / name, ignore_errors=True)
    rows = setting.work("numbers") / "rows.jsonl"
    made = values(
        setting, "dense", runner__device=setting.device, runner__max_steps=4, actor__model__precision="fp32",
        runner__logger={"log_path": str(setting.work("runs")), "experiment_name": name, "logger_backends": ["jsonl"]},
        data__eval_data_paths=str(rows),
    )  # fmt: skip
    run = shardtune.train(made)
    model: Any = AutoModelForCausalLM.from_pretrained(run.dir / "final", dtype=torch.float32)
    model.to(setting.device)
    ids = torch.arange(40, 70, device=setting.device)[None]
    with torch.no_grad():
        here = model(ids).logits
        model.to("cpu", torch.float64)
        there = model(ids.cpu()).logits
    stored = float((here.cpu().double() - there).abs().max())
    worked = run.evaluate()["eval/loss"]
    again = abs(worked - run.metrics["eval/loss"]) / abs(worked)
    return within(max(stored, again), SINGLE, note=f"logits {stored:.1e}, loss {again:.1e}")


def generation(setting: Setting) -> Facts:
    """Greedy answers of a model in fp64."""
    answers = []
    for device in ("cpu", setting.device):
        made = values(setting, "dense", runner__device=device, runner__max_steps=2)
        worker = SFTWorker(load_recipe(made), report=quiet)
        worker.setup()
        worker.run_training()
        ids = torch.arange(40, 60, device=worker.device)[None]
        settings: Mapping[str, object] = {"max_new_tokens": 12, "do_sample": False}
        adapter: Any = worker.adapter
        answers.append(adapter.generate(worker.state.inner, ids, torch.ones_like(ids), settings).tolist())
        worker.release()
    return {"verdict": PASS if answers[0] == answers[1] else FAIL}


def checks(setting: Setting) -> Sequence[Check]:
    kinds = ("dense", "gemma2", "gpt_oss") if setting.small else KINDS
    found: list[tuple[str, Callable[[Setting], Any]]] = []
    for kind in (*kinds, *(() if setting.small else STATES)):
        ways = (("fp64", exact), ("fp32", single), ("bf16", half))
        found += [(f"{kind}, {precision}", partial(way, kind=kind)) for precision, way in ways]
    found += [("dense, a row a forward, fp64", unpacked)]
    found += [(f"LoRA, {precision}", partial(lora, precision=precision)) for precision in ("fp64", "bf16")]
    families = ("llava",) if setting.small else ("llava", "qwen2_5_vl", "qwen3_vl", "smolvlm", "gemma3")
    found += [(f"{family}, fp64", partial(vision, family=family)) for family in families]
    found += [(f"resume, bitwise, {precision}", partial(resume, precision=precision)) for precision in ("fp32", "bf16")]
    found += [("final/, reloaded", export), ("greedy answers, fp64", generation)]
    return [Check(name, run, 20.0) for name, run in found]


PART = Part(
    "The numerical core on the device, against the CPU in fp64",
    checks,
    ("value", "limit", "loss", "norm", "gradient", "weights"),
    "20 steps of 8 ragged rows of tiny models. fp64, also of what transformers computes in fp32: largest difference of "
    f"losses and norms (relative above 1), clipped gradients and weights, limit {EXACT:g}. fp32: of losses and norms, "
    f"{SINGLE:g}. bf16: mean relative error of losses and norms, at most {HALF} times that of bf16 on the CPU; the "
    "probe of packed rows has to find what it "
    "finds there.",
)
