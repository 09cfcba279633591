"""Supervised fine-tuning of any Hugging Face or PyTorch model, sharded with FSDP2; what it claims, a command proves."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardtune.batch import Batch, LossSum, Sample
    from shardtune.models.adapter import Adapter
    from shardtune.models.registry import get_model
    from shardtune.parallel.materialise import init_empty_weights
    from shardtune.run import Run, load_run, train
    from shardtune.runner import SFTRunner
    from shardtune.sft_worker import SFTWorker
    from shardtune.worker import FSDPSftWorker

_HOME = {
    "Adapter": "models.adapter",
    "Batch": "batch",
    "FSDPSftWorker": "worker",
    "LossSum": "batch",
    "Run": "run",
    "SFTRunner": "runner",
    "SFTWorker": "sft_worker",
    "Sample": "batch",
    "get_model": "models.registry",
    "init_empty_weights": "parallel.materialise",
    "load_run": "run",
    "train": "run",
}

__all__ = [
    "Adapter",
    "Batch",
    "FSDPSftWorker",
    "LossSum",
    "Run",
    "SFTRunner",
    "SFTWorker",
    "Sample",
    "get_model",
    "init_empty_weights",
    "load_run",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `shardtune --help` must not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'shardtune' has no attribute {name!r}")
    return getattr(import_module(f"shardtune.{_HOME[name]}"), name)
