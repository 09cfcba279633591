"""Configurations of other trainers, and what `convert` makes of one that is given as a dict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from shardtune.config import load_recipe
from shardtune.config.foreign.command_line import CommandLine
from shardtune.config.foreign.convert import Converted, convert
from shardtune.optim.build import set_learning_rate

SOURCES = Path(__file__).parent / "sources"
FILES = {
    "trl.yaml": "TRL",
    "axolotl.yaml": "Axolotl",
    "llama_factory.yaml": "LLaMA-Factory",
    "torchtune.yaml": "torchtune",
    "nemo.yaml": "NeMo Automodel",
    "halos.yaml": "HALOs",
    "rlinf.yaml": "RLinf",
    "torchtitan.toml": "torchtitan",
    "verl.yaml": "verl",
    "swift.yaml": "ms-swift",
}
SMALLEST: dict[str, dict[str, Any]] = {
    "trl": {"model_name_or_path": "org/model", "dataset_name": "org/rows"},
    "axolotl": {
        "base_model": "org/model",
        "learning_rate": 1e-4,
        "datasets": [{"path": "org/rows", "type": "chat_template"}],
    },
    "llama-factory": {"model_name_or_path": "org/model", "dataset": "org/rows", "dataset_dir": "ONLINE"},
    "torchtune": {
        "model": {"_component_": "torchtune.models.llama3.llama3_8b"},
        "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "org/model"},
        "dataset": {"_component_": "torchtune.datasets.chat_dataset", "source": "org/rows"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-5},
    },
    "nemo": {
        "step_scheduler": {"global_batch_size": 8},
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
            "pretrained_model_name_or_path": "org/model",
        },
        "dataset": {
            "_target_": "nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset",
            "path_or_dataset_id": "org/rows",
        },
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 2e-5},
    },
    "torchtitan": {
        "model": {"name": "llama3", "hf_assets_path": "org/model"},
        "training": {"dataset": "c4", "steps": 20},
        "optimizer": {"lr": 3e-4},
    },
    "ms-swift": {"model": "org/model", "dataset": ["org/rows"]},
    "verl": {"model": {"path": "org/model"}, "data": {"train_files": "rows.parquet"}, "trainer": {"nnodes": 1}},
}
"""The fewest keys of each trainer."""


@pytest.fixture
def of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Converted]:
    """Convert the fewest keys of a trainer with others: `of("trl", packing=True)`."""
    monkeypatch.chdir(tmp_path)

    def make(trainer: str, world_size: int | None = 1, **changes: Any) -> Converted:
        file = tmp_path / "source.yaml"
        file.write_text(yaml.safe_dump({**SMALLEST[trainer], **changes}))
        return convert(CommandLine(file), trainer, world_size=world_size)

    return make


def value(found: Converted, key: str) -> object:
    """The value of a line of the recipe; `absent` where there is none."""
    line = found.conversion.lines.get(key)
    return "absent" if line is None else line.value


def rates_here(found: Converted, folder: Path, steps: int) -> list[float]:
    """The rate of each step by the recipe that was written."""
    (folder / "made.yaml").write_text(found.recipe)
    optim = load_recipe(folder / "made.yaml", files_must_exist=False).actor.optim
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=optim.lr)
    optimizer.param_groups[0]["base_lr"] = optim.lr
    return [set_learning_rate(optimizer, step, steps, optim) for step in range(steps)]
