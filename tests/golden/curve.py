"""A training run of 20 steps in fp64 whose losses are on record: `python -m tests.golden.curve` writes the record anew.

Everything is made from numbers that no library version changes: weights and rows come from NumPy's frozen legacy
generator, and the tokenizer is a table of bytes. The run is ragged on purpose: rows of 5 to 36 tokens, some of them not
trained, two sources of which one counts one and a half times, a last step of an epoch that is short, clipping in some
steps, warm-up, weight decay, tied embeddings, grouped heads.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardtune
from tests.support.workspace import make_tokenizer, write_rows

RECORD = Path(__file__).with_name("losses.json")
KEYS = ("train/loss", "train/grad_norm", "train/learning_rate", "train/tokens", "train/supervised_tokens")
STEPS = 20


def measure(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Train in `folder` and return the `KEYS` of every step."""
    tokenizer = make_tokenizer()
    _model(len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    draw = np.random.RandomState(7)
    write_rows(folder / "many.jsonl", [_row(draw) for _ in range(41)])
    write_rows(folder / "few.jsonl", [_row(draw) for _ in range(12)])
    run = shardtune.train(_recipe(folder), *overrides)
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in KEYS} for line in lines]


def _model(vocabulary: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    draw = np.random.RandomState(3)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = torch.from_numpy(draw.standard_normal(tuple(parameter.shape)) * 0.06)
            parameter.copy_(values + 1 if "norm" in name else values)
    return model


def _row(draw: np.random.RandomState) -> dict[str, Any]:
    prompt, answer = (
        "".join(chr(97 + letter) for letter in draw.randint(0, 26, size)) for size in draw.randint(2, 20, 2)
    )
    return {"prompt": prompt, "completion": answer}


def _recipe(folder: Path) -> dict[str, Any]:
    return {
        "runner": {
            "max_steps": STEPS,
            "max_epochs": -1,
            "seed": 11,
            "device": "cpu",
            "logger": {"log_path": str(folder / "runs"), "experiment_name": "golden", "logger_backends": ["jsonl"]},
        },
        "actor": {
            "global_batch_size": 8,
            "micro_batch_size": 8,
            "model": {"model_path": str(folder / "model"), "precision": "fp64"},
            "optim": {"lr": 3e-3, "weight_decay": 0.1, "clip_grad": 1.2, "lr_warmup_steps": 3, "min_lr": 1e-4},
        },
        "data": {
            "train_data_paths": [
                str(folder / "many.jsonl"),
                {"path": str(folder / "few.jsonl"), "name": "few", "weight": 1.5},
            ],
            "max_length": 36,
            "num_workers": 0,
            "cache_dir": str(folder / "cache"),
        },
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        lines = measure(Path(folder))
    RECORD.write_text(json.dumps(lines, indent=1) + "\n")
    print(f"{RECORD}: loss {lines[0]['train/loss']:.6f} -> {lines[-1]['train/loss']:.6f}")


if __name__ == "__main__":
    main()
