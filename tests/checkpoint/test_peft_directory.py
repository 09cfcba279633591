"""Adapters on disk: PEFT loads what is written, and merging gives the same model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from shardtune.checkpoint.hf_load import save_pretrained
from shardtune.checkpoint.peft_directory import merging, save_adapter
from shardtune.config import LoraConfig
from tests.support.adapted import adapted, train
from tests.support.chosen import slow_except
from tests.support.dist.ranks import run_ranks
from tests.support.tiny_checkpoint import logits, saved

pytestmark = pytest.mark.lengthy

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"dropout": 0.2}),
    "rslora": ("llama", {"use_rslora": True}),
    "dora": ("llama", {"use_dora": True}),
    "head": ("llama", {"target_modules": ["q_proj", "lm_head", "embed_tokens"]}),
    "tied head": ("qwen2_tied", {"target_modules": ["q_proj", "lm_head"]}),
    "tied embedding": ("qwen2_tied", {"target_modules": ["v_proj", "embed_tokens"], "use_dora": True}),
    "in full": ("llama", {"target_modules": ["up_proj"], "modules_to_save": ["lm_head", "layers.1.mlp.down_proj"]}),
    "tied in full": ("qwen2_tied", {"modules_to_save": ["embed_tokens"]}),
    "pissa": ("llama", {"init": "pissa"}),
    "pissa, rslora": ("llama", {"init": "pissa_niter_4", "use_rslora": True}),
    "olora, dora": ("llama", {"init": "olora", "use_dora": True}),
    "mica": ("llama", {"init": "mica"}),
    "experts": ("qwen3_moe", {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
    "tokens": ("llama", {"target_modules": ["q_proj"], "new_ids": [5, 12, 66]}),
    "more tokens, tied": ("qwen2_tied", {"use_dora": True, "new_ids": [14, 67, 68]}),
    "only experts": ("mixtral", {"target_modules": [], "target_parameters": ["experts.down_proj"]}),
}
COMBINED = ("rslora", "pissa, rslora", "olora, dora", "tokens", "only experts")
"""Of what the others have."""
ON_RANKS = ("dora", "tied head", "tied in full", "pissa", "more tokens, tied", "experts")


def write(base: Path, to: Path, changes: dict[str, Any]) -> torch.Tensor:
    """Train an adapter for some steps and write it, alone and merged; returns the logits of the model in memory."""
    new_ids = changes.get("new_ids", ())
    config = {key: value for key, value in changes.items() if key != "new_ids"}
    model, weights, ranks = adapted(base, LoraConfig(r=4, alpha=6.0, **config), "fp32", new_ids=new_ids)
    train(model, weights, ranks, steps=3)
    save_adapter(model, to / "adapter", base=str(base))
    merged = merging(model, torch.float32)
    settings = {"tie_word_embeddings": False} if merged.unties else {}
    save_pretrained(
        model, to / "merged", dtype=torch.float32, tensors=merged.tensors, gather=merged.gather, settings=settings
    )  # fmt: skip
    return logits(model.eval())


def write_all(base: Path, to: Path, cases: list[str]) -> dict[str, torch.Tensor]:
    return {case: write(base / CASES[case][0], to / case, CASES[case][1]) for case in cases}


def check(base: Path, directory: Path, own: torch.Tensor) -> None:
    """Plain transformers and PEFT load what was written, and compute what the model in memory did."""
    fresh = AutoModelForCausalLM.from_pretrained(base)
    before = logits(fresh)
    rows = own.shape[-1]
    if rows > before.shape[-1]:
        fresh.resize_token_embeddings(rows)
        before = torch.nn.functional.pad(before, (0, rows - before.shape[-1]))
    loaded = peft.PeftModel.from_pretrained(fresh, str(directory / "adapter"))
    with_adapter = logits(loaded)
    changed = float((own - before).abs().max())
    assert changed > 1e-4
    assert float((with_adapter - own).abs().max()) < min(1e-5, changed / 50)
    merged = AutoModelForCausalLM.from_pretrained(directory / "merged")
    assert float((logits(merged) - with_adapter).abs().max()) < min(1e-5, changed / 50)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for kind in {kind for kind, _ in CASES.values()}:
        saved(kind, folder / kind)
    return folder


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", slow_except(CASES, *(case for case in CASES if case not in COMBINED)))
def test_peft_and_the_merged_model_compute_what_was_trained(case: str, bases: Path, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    check(bases / kind, tmp_path, write(bases / kind, tmp_path, changes))


@pytest.mark.parametrize(
    "cases", [ON_RANKS[::2], pytest.param(ON_RANKS[1::2], marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_two_ranks_write_the_same(bases: Path, tmp_path: Path, cases: Sequence[str]) -> None:
    told = run_ranks(write_all, 2, bases, tmp_path, list(cases))
    for case in cases:
        check(bases / CASES[case][0], tmp_path / case, told[0][case])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["llama", "qwen2_tied"])
def test_base_weights_that_came_with_an_adapter_stay_with_it(kind: str, bases: Path, tmp_path: Path) -> None:
    changed = AutoModelForCausalLM.from_pretrained(bases / kind)
    with torch.no_grad():
        changed.get_input_embeddings().weight.mul_(1.5)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(changed, config).save_pretrained(str(tmp_path / "given"), save_embedding_layers=True)
    for given, to in (("given", "adapter"), ("adapter", "again")):
        model, *_ = adapted(bases / kind, LoraConfig(load_from=str(tmp_path / given)), adapter=tmp_path / given)
        save_adapter(model, tmp_path / to, base=str(bases / kind))
        fresh = AutoModelForCausalLM.from_pretrained(bases / kind)
        loaded = peft.PeftModel.from_pretrained(fresh, str(tmp_path / to))
        torch.testing.assert_close(logits(loaded), logits(changed))
        torch.testing.assert_close(logits(model.eval()), logits(changed))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["llama", "qwen2_tied"])
@pytest.mark.parametrize("in_full", [True, False])
def test_an_adapter_over_a_grown_embedding_is_continued(kind: str, in_full: bool, bases: Path, tmp_path: Path) -> None:
    """PEFT saves some of its tensors under two names then, and the embedding from before training."""
    grown = AutoModelForCausalLM.from_pretrained(bases / kind)
    rows, tied = len(grown.get_input_embeddings().weight) + 2, kind == "qwen2_tied"
    grown.resize_token_embeddings(rows)
    ids, names = [5, rows - 2, rows - 1], ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    whole: dict[str, Any] = {"modules_to_save": names, "ensure_weight_tying": tied}
    keys = whole if in_full else {"trainable_token_indices": ids if tied else dict.fromkeys(names, ids)}
    made = peft.get_peft_model(grown, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **keys))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.rand_like(parameter) * parameter.requires_grad)
    made.save_pretrained(str(tmp_path / "given"))
    stored = LoraConfig(load_from=str(tmp_path / "given"))
    model, *_ = adapted(bases / kind, stored, adapter=tmp_path / "given", new_ids=ids)
    torch.testing.assert_close(logits(model.eval()), logits(made.eval()))
    save_adapter(model, tmp_path / "adapter", base=str(bases / kind))
    fresh = AutoModelForCausalLM.from_pretrained(bases / kind)
    fresh.resize_token_embeddings(rows)
    loaded = peft.PeftModel.from_pretrained(fresh, str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(loaded), logits(made))
