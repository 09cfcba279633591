"""Supervised fine-tuning of any Hugging Face or PyTorch model, sharded with FSDP2; what it claims, a command proves."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardtune import nn
    from shardtune.batch import Batch, LossSum, Metric, Sample
    from shardtune.callbacks import Ask, Callback
    from shardtune.engine.division import NeedParallel
    from shardtune.engine.engine import TrainEngine
    from shardtune.engine.session import init
    from shardtune.models.adapter import Adapter, Prediction, WholeStepAdapter
    from shardtune.models.registry import get_model, get_model_config_and_processor
    from shardtune.models.value_head import ValueHead
    from shardtune.parallel.materialise import init_empty_weights
    from shardtune.registration import SupportedModel, register_model
    from shardtune.run import Run, load_run, train
    from shardtune.runner import SFTRunner
    from shardtune.sft_trainer import SFTTrainer
    from shardtune.sft_worker import SFTWorker
    from shardtune.worker import FSDPSftWorker

_HOME = {
    "Adapter": "models.adapter",
    "Ask": "callbacks",
    "Batch": "batch",
    "Callback": "callbacks",
    "FSDPSftWorker": "worker",
    "LossSum": "batch",
    "Metric": "batch",
    "NeedParallel": "engine.division",
    "Prediction": "models.adapter",
    "Run": "run",
    "SFTRunner": "runner",
    "SFTTrainer": "sft_trainer",
    "SFTWorker": "sft_worker",
    "Sample": "batch",
    "SupportedModel": "registration",
    "TrainEngine": "engine.engine",
    "ValueHead": "models.value_head",
    "WholeStepAdapter": "models.adapter",
    "get_model": "models.registry",
    "get_model_config_and_processor": "models.registry",
    "init": "engine.session",
    "init_empty_weights": "parallel.materialise",
    "load_run": "run",
    "register_model": "registration",
    "train": "run",
}

__all__ = [
    "Adapter",
    "Ask",
    "Batch",
    "Callback",
    "FSDPSftWorker",
    "LossSum",
    "Metric",
    "NeedParallel",
    "Prediction",
    "Run",
    "SFTRunner",
    "SFTTrainer",
    "SFTWorker",
    "Sample",
    "SupportedModel",
    "TrainEngine",
    "ValueHead",
    "WholeStepAdapter",
    "get_model",
    "get_model_config_and_processor",
    "init",
    "init_empty_weights",
    "load_run",
    "nn",
    "register_model",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `shardtune --help` must not wait for torch."""
    if name == "nn":
        return import_module("shardtune.nn")
    if name not in _HOME:
        raise AttributeError(f"module 'shardtune' has no attribute {name!r}")
    return getattr(import_module(f"shardtune.{_HOME[name]}"), name)
