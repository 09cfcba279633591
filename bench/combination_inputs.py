"""The models and rows of the drawn recipes of `combinations.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FAMILIES = ("qwen2", "llama", "gemma2", "qwen3_moe", "gpt2", "olmo2", "granite", "phi3")
TASKS = ("sequence_classifier", "token_classifier", "regression", "embedding", "reranker", "seq2seq")
IMAGES = ("llava", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm", "gemma3", "internvl")
POLICIES = ("act", "diffusion", "smolvla", "pi0")
OWN = "own"
ACTIONS = "vision_language_action"
KINDS = (*FAMILIES, *FAMILIES, *TASKS, *IMAGES, *POLICIES, ACTIONS, OWN, OWN)
CODE = '''\
import os

import numpy as np
import torch.nn.functional as F

from shardtune import Callback
from tests.support.healthy_adapters import Denoiser, Tower


class Own(Denoiser):
    def build(self):
        model = super().build()
        model.drop.p = 0.0  # whose draws depend on the layout
        return model


def focal(logits, targets):
    losses = F.cross_entropy(logits, targets, reduction="none")
    return losses * (1 - (-losses).exp())


def changed(row):
    """Another row, whatever its format."""
    row = dict(row)
    if "actions" in row:
        row["actions"] = np.asarray(row["actions"]) * np.linspace(0.5, 1.5, len(row["actions"]))[:, None]
    for key in ("completion", "label", "ner_tags", "score", "query", "source", "y"):
        if isinstance(row.get(key), str):
            row[key] = {"bad": "good"}.get(row[key], row[key]) if key == "label" else row[key] + " a " + row[key]
        elif isinstance(row.get(key), float):
            row[key] /= 2
        elif isinstance(row.get(key), list):
            row[key] = row[key][::-1]
    if "messages" in row:
        row["messages"] = [{**turn, "content": turn["content"] + " so"} for turn in row["messages"]]
    return row


class Stop(Callback):
    def on_step_end(self, event):
        if str(event.step) == os.environ.get("STOP_AFTER"):
            raise RuntimeError("stopped on purpose")
'''
FILES = ("own.py", "train.jsonl", "eval.jsonl", "teacher", "other.jinja", "model", "smolvlm", "paligemma")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ': ' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}"
)


def placed(value: Any, folder: Path) -> Any:
    """A value in which files of the folder have their paths; a data set of a robot is a directory."""
    if isinstance(value, dict):
        return {key: placed(each, folder) for key, each in value.items()}
    if isinstance(value, list):
        return [placed(each, folder) for each in value]
    if not isinstance(value, str) or not value.startswith(FILES):
        return value
    directory = (folder / value).with_suffix("")
    return str(directory if value.endswith(".jsonl") and directory.is_dir() else folder / value)


def make_inputs(kind: str, chats: bool, folder: Path) -> None:
    """The files that recipes name.

    Args:
        kind: of the model.
        chats: whether rows are conversations, of a language model.
        folder: for the files.
    """
    (folder / "own.py").write_text(CODE)
    (folder / "other.jinja").write_text(TEMPLATE)
    if kind in FAMILIES:
        _language_model(kind, chats, folder)
    elif kind in TASKS:
        from tests.support import tiny_tasks

        save = tiny_tasks.save_t5 if kind == "seq2seq" else tiny_tasks.save_encoder
        save(folder / "model")
        tiny_tasks.write(folder / "train.jsonl", tiny_tasks.rows(kind, 21))
        tiny_tasks.write(folder / "eval.jsonl", tiny_tasks.rows(kind, 7, seed=1))
    elif kind in IMAGES:
        from tests.support.vision import save_image_rows, save_vision_model

        save_vision_model(kind, folder / "model")
        file, _ = save_image_rows(folder, 14)
        lines = file.read_text().splitlines(keepends=True)
        (folder / "train.jsonl").write_text("".join(lines[:10]))
        (folder / "eval.jsonl").write_text("".join(lines[10:]))
    elif kind in POLICIES or kind == ACTIONS:
        _robot(kind, folder)
    else:
        import numpy as np

        numbers = np.random.default_rng(0)
        for name, count in (("train", 21), ("eval", 7)):
            rows = [
                {"x": [*numbers.normal(size=4)], "y": [*numbers.normal(size=2)], "seen": [1.0, float(row % 3 > 0)]}
                for row in range(count)
            ]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _language_model(kind: str, chats: bool, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from tests.support.tiny_architectures import shake, tiny_config
    from tests.support.tiny_run import make_tokenizer, rows, write_rows
    from tests.support.zoo import DECODERS

    for name, seed in (("model", 0), ("teacher", 1)):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(tiny_config(kind, DECODERS.get(kind, {})))
        shake(model, seed)
        model.save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)
    for name, count, start in (("train", 21, 0), ("eval", 7, 100)):
        given: list[Any] = [
            {**row, "prompt": row["prompt"] + "please " * 4 * (number % 7 == 3)}
            for number, row in enumerate(rows(count, start))
        ]
        if chats:
            pairs = [(row["prompt"][:12], row["completion"][:8]) for row in given]
            sides = ("user", "assistant")
            turns = [
                [{"role": role, "content": text} for role, text in zip(sides, pair, strict=True)] for pair in pairs
            ]
            given = [{"messages": turns[n] + (turns[n - 1] if n % 3 == 1 else [])} for n in range(count)]
        write_rows(folder / f"{name}.jsonl", given)


SIDE = 24
FLOW_OPTIONS: dict[str, dict[str, Any]] = {
    "smolvla": {
        "chunk_size": 3, "n_action_steps": 2, "max_state_dim": 4, "max_action_dim": 5, "vlm_model_name": "smolvlm",
        "resize_imgs_with_padding": [SIDE, SIDE], "num_steps": 2, "train_expert_only": False,
        "freeze_vision_encoder": False, "prefix_length": 40,
    },
    "pi0": {
        "chunk_size": 3, "n_action_steps": 2, "max_state_dim": 4, "max_action_dim": 5, "paligemma_variant": "paligemma",
        "image_resolution": [SIDE, SIDE], "num_inference_steps": 2,
        "action_expert_variant": {
            "width": 8, "depth": 2, "mlp_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4,
        },
    },
}  # fmt: skip
"""Of tiny policies with a vision-language model."""


def model_keys(kind: str) -> dict[str, Any]:
    """The keys of a recipe that choose the model, by dotted name; files as `placed` takes them."""
    if kind == OWN:
        return {"model.adapter": "own.py:Own"}
    if kind in POLICIES:
        from tests.support.robot import OPTIONS

        return {"model.model_type": kind, "model.options": (OPTIONS | FLOW_OPTIONS)[kind]}
    keys: dict[str, Any] = {"model.model_path": "model"}
    if kind == ACTIONS:
        keys |= {"model.num_action_bins": 16, "model.action_tokens": "appended", "model.action_chunks_len": 2}
    if kind in TASKS or kind == ACTIONS:
        keys["model.model_type"] = kind
    if kind in IMAGES:
        keys["model.model_type"] = "vision_language"
    return keys


def _robot(kind: str, folder: Path) -> None:
    from examples.policies.make_vlm import make
    from tests.support.robot import save_episodes
    from tests.support.vision import save_vision_model

    if kind == ACTIONS:
        save_vision_model("qwen2_5_vl", folder / "model")
    elif kind in ("smolvla", "pi0"):
        make(folder, width=16, layers=2, vocabulary=270, side=SIDE, patch=8)
    save_episodes(folder / "train", 5)
    save_episodes(folder / "eval", 2, seed=9)
