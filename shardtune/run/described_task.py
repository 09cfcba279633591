"""Which task a directory of a trained model is for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from shardtune.checkpoint.atomic import read_json
from shardtune.config import ModelConfig
from shardtune.errors import ModelError
from shardtune.models.pretrained import load_config, settings_directory
from shardtune.models.tasks.sentence_transformers_files import MODULES, settings_of
from shardtune.models.tasks.task import TASK_FILE

HEADS = {
    "ForTokenClassification": "token_classifier",
    "ForConditionalGeneration": "seq2seq",
    "MTModel": "seq2seq",
}
"""Ends of the names of classes of transformers, and the task of their models."""
CLASSIFIER = "ForSequenceClassification"
CROSS_ENCODER = "CrossEncoder"
"""What sentence-transformers calls its models of pairs, whose directories have its files too."""


def described_task(directory: Path, config: PreTrainedConfig) -> dict[str, Any]:
    """`model_type`, `options` and `max_length` as the directory of a model has them; empty where it is of no task.

    Of a directory that shardtune has not written only the first is known, by the class that its config names: one
    output is a reranker's, unless the config names regression.

    Args:
        directory: of the model.
        config: of the model, or of an adapter's base.
    """
    if (directory / TASK_FILE).is_file():
        return read_json(directory / TASK_FILE)
    if (directory / MODULES).is_file() and settings_of(directory).get("model_type") != CROSS_ENCODER:
        return {"model_type": "embedding"}
    names = config.architectures or []
    if any(name.endswith(CLASSIFIER) for name in names):
        single = "regression" if config.problem_type == "regression" else "reranker"
        return {"model_type": single if config.num_labels == 1 else "sequence_classifier"}
    found = [task for name in names for end, task in HEADS.items() if name.endswith(end)]
    if not found or (found[0] == "seq2seq" and not config.is_encoder_decoder):
        return {}
    return {"model_type": found[0]}


def task_overrides(model: str, overrides: Sequence[str], *, adapter: Path | None = None) -> list[str]:
    """`described_task` as overrides of a recipe; none where other overrides choose the kind of the model.

    Args:
        model: its directory, or its name on the Hub.
        overrides: `key=value`.
        adapter: the directory of an adapter of it, which has the task.
    """
    keys = {word.partition("=")[0].lstrip("+").removeprefix("actor.") for word in overrides}
    if keys & {"model.model_type", "model.adapter"}:
        return []
    try:
        config = load_config(ModelConfig(model_path=model))
    except ModelError:  # the recipe has its own message, or may execute the code that comes with the model
        return []
    task = described_task(adapter or settings_directory(model) or Path(model), config)
    options, kind = task.pop("options", {}), task.pop("model_type", None)
    named = {f"actor.model.options.{key}": value for key, value in options.items()}
    named |= {f"data.{key}": value for key, value in task.items()}
    found = [f"{key}={json.dumps(value)}" for key, value in named.items()]
    return found if kind is None else [f"actor.model.model_type={kind}", *found]
