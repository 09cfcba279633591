"""Vision-language models learn a few pictures by heart: the answer to one question depends on the picture alone."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import shardtune
from tests.support.vision import save_vision_model

SIDE, CELLS = 56, 4


@dataclass(frozen=True)
class Memorised:
    """What a model knows of the pictures it was trained on.

    Attributes:
        seconds: of CPU time, for training and evaluating.
        exact: the share of pictures whose answer it gives letter by letter.
        loss: on the rows it was trained on.
        exchanged: the loss on the same rows, each with the picture of the next one.
    """

    seconds: float
    exact: float
    loss: float
    exchanged: float


def save_pictures(folder: Path, count: int) -> tuple[Path, Path]:
    """Rows with one question, a picture of coloured squares and a word each, and the same with exchanged pictures."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    draw, names, words = random.Random(5), [], []
    for number in range(count):
        cells = np.random.default_rng(number).integers(0, 256, (CELLS, CELLS, 3), np.uint8)
        names.append(f"pictures/{number}.png")
        Image.fromarray(cells.repeat(SIDE // CELLS, 0).repeat(SIDE // CELLS, 1)).save(folder / names[-1])
        words.append("".join(draw.choice("abcdefgh") for _ in range(4)))
    return _save(folder / "same.jsonl", names, words), _save(folder / "exchanged.jsonl", names[1:] + names[:1], words)


def _save(file: Path, names: Sequence[str], words: Sequence[str]) -> Path:
    rows = [
        {
            "messages": [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": word}],
            "images": [name],
        }
        for name, word in zip(names, words, strict=True)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def memorise(family: str, folder: Path, *, count: int, steps: int, lr: float = 5e-3) -> Memorised:
    """Train a family's tiny model on `count` pictures, all of them in each step, and ask for their words."""
    began = time.process_time()
    model = save_vision_model(family, folder / "model")
    same, exchanged = save_pictures(folder, count)
    values: dict[str, Any] = {
        "runner": {
            "max_steps": steps, "max_epochs": -1, "save_interval": -1, "eval_interval": -1,
            "logger": {"log_path": str(folder / "runs"), "experiment_name": "run", "logger_backends": ["jsonl"]},
        },
        "actor": {
            "micro_batch_size": count,
            "global_batch_size": count,
            "model": {"model_type": "vision_language", "model_path": str(model), "precision": "fp32"},
            "optim": {"lr": lr, "lr_scheduler": "cosine", "lr_warmup_steps": 10},
        },
        "data": {
            "train_data_paths": str(same),
            "eval_data_paths": {"same": str(same), "exchanged": str(exchanged)},
            "num_workers": 0,
            "cache_dir": str(folder / "cache"),
        },
        "eval": {"generate": True, "max_new_tokens": 8},
    }  # fmt: skip
    found = shardtune.train(values).metrics
    return Memorised(
        time.process_time() - began,
        found["eval/same/eval_accuracy"],
        found["eval/same/loss"],
        found["eval/exchanged/loss"],
    )
