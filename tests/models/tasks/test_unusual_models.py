"""Models of transformers whose head lies in their base, and whose code takes no half precision."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    FNetConfig,
    FNetModel,
    LongT5Config,
    LongT5ForConditionalGeneration,
    PerceiverConfig,
    PerceiverForMaskedLM,
    PreTrainedModel,
)

import shardtune
from shardtune.errors import ModelError
from shardtune.parallel.token_layers import input_embedding
from tests.support.plain_tasks import LABELS
from tests.support.tiny_tasks import SIZES, rows, save_tokenizer, write


def made(kind: str) -> PreTrainedModel:
    """A tiny model that was trained to fill masks (Perceiver), that has no attention (FNet), or whose mask is -1e10."""
    torch.manual_seed(0)
    if kind == "fnet":
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "max_position_embeddings": 32}
        return FNetModel(FNetConfig(**sizes, **SIZES))
    if kind == "longt5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "local_radius": 5}
        ends = {"eos_token_id": 3, "decoder_start_token_id": 0}
        return LongT5ForConditionalGeneration(LongT5Config(**sizes, **ends, **SIZES))
    heads = {"num_self_attention_heads": 2, "num_cross_attention_heads": 2, "num_self_attends_per_block": 1}
    sizes = {"num_latents": 4, "d_latents": 16, "d_model": 16, "num_blocks": 1, "max_position_embeddings": 32, **heads}
    return PerceiverForMaskedLM(PerceiverConfig(**sizes, **SIZES, attention_probs_dropout_prob=0.0)).double()


def recipe(folder: Path, kind: str, precision: str) -> dict[str, Any]:
    task = "seq2seq" if kind == "longt5" else "sequence_classifier"
    folder.mkdir(exist_ok=True)
    made(kind).save_pretrained(folder / kind)
    save_tokenizer(folder / kind, pair=task != "seq2seq")
    return {
        "runner": {"max_steps": 2, "device": "cpu", "logger": {"log_path": str(folder), "experiment_name": "run"}},
        "micro_batch_size": 4,
        "global_batch_size": 8,
        "optim": {"lr": 1e-2},
        "model": {"model_type": task, "model_path": str(folder / kind), "precision": precision},
        "data": {
            "train_data_paths": write(folder / "train.jsonl", rows(task, 24)), "max_length": 32, "num_workers": 0,
            "cache_dir": str(folder / "cache"),
        },
    }  # fmt: skip


def test_a_head_within_the_base_is_new(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Perceiver's decoder; and what has its place for embeddings is a bare parameter, its latents."""
    run = shardtune.train(recipe(tmp_path, "perceiver", "fp64"))
    assert "begin as the model's class initialises them" in " ".join(capfd.readouterr().err.split())
    model = AutoModelForSequenceClassification.from_pretrained(run.dir / "final")
    assert input_embedding(model) is None
    tokenizer = AutoTokenizer.from_pretrained(run.dir / "final")
    asked = [{"text": row["text"]} for row in rows("sequence_classifier", 5, 2)]
    for row, found in zip(asked, run.predict(asked), strict=True):
        inputs = tokenizer(row["text"], return_tensors="pt")
        with torch.no_grad():
            scores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[0].softmax(-1)
        assert [found["scores"][label] for label in LABELS] == pytest.approx(scores.tolist(), abs=1e-12)
    # What the base has by itself is still asked for.
    weights = tmp_path / "perceiver" / "model.safetensors"
    stored = load_file(weights)
    del stored["perceiver.embeddings.latents"]
    save_file(stored, weights, {"format": "pt"})
    shutil.rmtree(run.dir)
    broken = recipe(tmp_path / "broken", "perceiver", "fp64")
    shutil.copy(weights, tmp_path / "broken" / "perceiver" / "model.safetensors")
    with pytest.raises(ModelError, match=r"are not among the weights: perceiver[.]embeddings[.]latents"):
        shardtune.train(broken)


def test_a_model_without_half_precision_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"fails in half precision: \w+: Unsupported dtype BFloat16") as raised:
        shardtune.train(recipe(tmp_path, "fnet", "bf16"))
    assert raised.value.where.startswith("FNetForSequenceClassification")


def test_steps_beyond_fp16_name_the_precision(tmp_path: Path) -> None:
    """The mask of LongT5 is -1e10, infinite in fp16, so that a row of padding has no finite attention."""
    with pytest.raises(ModelError, match="nothing was trained") as raised:
        shardtune.train(recipe(tmp_path, "longt5", "fp16"))
    assert "model.precision: bf16 or fp32" in raised.value.remedy
