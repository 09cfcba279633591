"""How much memory ranks take while they load a checkpoint."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from shardtune.config import load_recipe
from shardtune.parallel.weights import local
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.model_state import ModelState
from tests.support.dist.layouts import parallel
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import make_tokenizer, quiet, recipe, save_rows

LAYOUTS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("FSDP2", 2, {}),
    ("TP 2", 2, parallel(tensor=2)),
    ("FSDP2", 4, {}),
    ("FSDP 2 x TP 2", 4, parallel(tensor=2)),
)


def save_checkpoint(folder: Path, *, layers: int, width: int) -> Path:
    """A model of random weights in fp32, with its tokenizer, in one file."""
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
        eos_token_id=257,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "model", max_shard_size="20GB")
    make_tokenizer().save_pretrained(folder / "model")
    return folder / "model"


def checkpoint_bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def anonymous_bytes() -> int:
    """What this process has in memory that is no file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise OSError("this system does not say how much anonymous memory a process has")


class Watched:
    """Samples anonymous memory in a thread while it is entered.

    Attributes:
        baseline: bytes at first.
        peak: the most bytes seen.
    """

    def __enter__(self) -> Watched:
        self.baseline = self.peak = anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._ended.wait(0.002):
            self.peak = max(self.peak, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self.peak = max(self.peak, anonymous_bytes())
        self._ended.set()
        self._thread.join()


def load(values: dict[str, Any], small: dict[str, Any]) -> int:
    """The bytes that building and loading take at their peak on this rank."""
    torch.set_num_threads(1)
    warm = SFTWorker(load_recipe(small), report=quiet)  # imports, connections and pools are no part of it
    warm.setup_evaluation()
    warm.release()
    worker = SFTWorker(load_recipe(values), report=quiet)
    with Watched() as watched:  # without the probe of packing, for which units of the model are gathered
        state = ModelState(worker.recipe, worker.ranks, worker.task, worker.model_provider_func, worker.tokenizer)
    held = sum(local(tensor).nbytes for tensor in state.weights.tensors().values())
    assert held >= (checkpoint_bytes(Path(values["actor"]["model"]["model_path"])) / worker.ranks.world_size) * 0.99
    worker.release()
    return watched.peak - watched.baseline


def peaks(model: Path, ranks: int, keys: dict[str, Any]) -> list[int]:
    """Of each rank."""
    rows = save_rows(model.parent / "rows.jsonl", 4)
    small = save_checkpoint(model.parent / "small", layers=2, width=64)
    changes = {"actor__model__precision": "fp32", "actor__micro_batch_size": 1, **keys}
    recipes = [recipe(path, rows, **changes) for path in (model, small)]
    return run_ranks(load, ranks, *recipes, fresh=True)
