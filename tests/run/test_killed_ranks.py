"""Two ranks of which one is killed by SIGKILL: the same command goes on and ends with the bits of a run left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.robot import save_episodes
from tests.support.tiny_run import assert_same_tensors, lines, make_model, make_tokenizer, rows, write_rows
from tests.support.tiny_tasks import rows as task_rows
from tests.support.tiny_tasks import save_encoder, write
from tests.support.vision import save_vision_model

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = str(ROOT / "tests" / "support" / "killed_after.py")
STEPS, KILLED, SAVED = 6, 5, 4


def language(folder: Path, name: str, width: int) -> str:
    """A directory with a model and a tokenizer."""
    tokenizer = make_tokenizer()
    make_model(tokenizer, width=width, dropout=0.1).save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    return str(folder / name)


def distillation(folder: Path) -> dict[str, Any]:
    return {
        "model": {"model_path": language(folder, "student", 16)},
        "loss": "distill",
        "teacher": {"model_path": language(folder, "teacher", 32)},
        "neftune_alpha": 5.0,
        "data": {"train_data_paths": str(write_rows(folder / "rows.jsonl", rows(21))), "max_length": 96},
    }


def classification(folder: Path) -> dict[str, Any]:
    return {
        "model": {"model_path": str(save_encoder(folder / "encoder")), "model_type": "sequence_classifier"},
        "data": {"train_data_paths": write(folder / "rows.jsonl", task_rows("sequence_classifier", 21))},
    }


def act(folder: Path) -> dict[str, Any]:
    sizes = {"chunk_size": 2, "dim_model": 16, "n_heads": 2, "dim_feedforward": 32, "latent_dim": 4}
    layers = {"n_encoder_layers": 1, "n_vae_encoder_layers": 1, "n_action_steps": 2}
    return {
        "model": {"model_type": "act", "options": {**sizes, **layers}},
        "data": {"train_data_paths": str(save_episodes(folder / "light"))},
    }


def vision_language_action(folder: Path) -> dict[str, Any]:
    save_vision_model("llava", folder / "llava")
    actions = {"action_chunks_len": 2, "num_action_bins": 16, "action_tokens": "appended"}
    return {
        "model": {"model_type": "vision_language_action", "model_path": str(folder / "llava"), **actions},
        "data": {"train_data_paths": str(save_episodes(folder / "light"))},
    }


def train(recipe: Mapping[str, Any], name: str, folder: Path, killed: int | None = None) -> str:
    """Train by command; returns what is printed on the error stream.

    Args:
        recipe: without what all of these runs share.
        name: of the run's directory in `folder / "runs"`.
        folder: of the recipe, the cache and the runs.
        killed: the step after which rank 1 is killed; None: never.
    """
    file = folder / f"{name}.yaml"
    logger = {"log_path": str(folder / "runs"), "experiment_name": name, "logger_backends": ["jsonl"]}
    limits = {"max_epochs": -1, "max_steps": STEPS}
    runner = {**limits, "save_interval": 2, "nproc_per_node": 2, "device": "cpu", "logger": logger}
    data = {"num_workers": 0, "cache_dir": str(folder / "cache"), **recipe["data"]}
    rest = {"micro_batch_size": 2, "global_batch_size": 8, "plugins": [PLUGIN], "optim": {"lr": 1e-3}}
    model = {"precision": "fp32", **recipe["model"]}
    file.write_text(json.dumps({**recipe, **rest, "runner": runner, "data": data, "model": model}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if killed is not None:
        environment["TEST_KILLED_AFTER"] = str(killed)
    command = [sys.executable, "-m", "shardtune", "train", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == (0 if killed is None else 1), done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("made", [distillation, classification, act, vision_language_action])
def test_a_killed_rank_changes_no_bit(made: Callable[[Path], dict[str, Any]], tmp_path: Path) -> None:
    recipe = made(tmp_path)
    train(recipe, "whole", tmp_path)
    assert "rank 1 was ended by SIGKILL" in train(recipe, "killed", tmp_path, killed=KILLED)
    whole, killed = tmp_path / "runs" / "whole", tmp_path / "runs" / "killed"
    saved = killed / "checkpoints" / f"global_step_{SAVED}"
    assert saved.is_dir()
    assert not saved.with_name(f"global_step_{STEPS}").exists()
    assert f"continuing after step {SAVED}" in train(recipe, "killed", tmp_path)
    last = f"checkpoints/global_step_{STEPS}"
    assert_same_tensors(whole / last, killed / last)
    assert len(lines(whole)) == STEPS
    assert lines(killed) == lines(whole)
