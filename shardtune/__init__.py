"""Supervised fine-tuning of any Hugging Face or PyTorch model, sharded with FSDP2; what it claims, a command proves."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardtune import former_paths

if TYPE_CHECKING:
    from shardtune import nn
    from shardtune.batch import Batch, LossSum, Metric, Sample
    from shardtune.config.model_names import SupportedModel, register_model
    from shardtune.engine.engine import TrainEngine
    from shardtune.engine.session import init
    from shardtune.engine.split_arguments import NeedParallel
    from shardtune.models.adapter import Adapter
    from shardtune.models.get_model import get_model, get_model_config_and_processor
    from shardtune.models.user_metrics import Prediction
    from shardtune.models.value_head import ValueHead
    from shardtune.models.whole_step_adapter import WholeStepAdapter
    from shardtune.parallel.meta_init import init_empty_weights
    from shardtune.run.api import train
    from shardtune.run.halos import SFTTrainer
    from shardtune.run.policy import load_policy
    from shardtune.run.run import Run, load_run
    from shardtune.training.callbacks import Ask, Callback
    from shardtune.training.experiment.run import LoggedRun
    from shardtune.training.runner import SFTRunner
    from shardtune.training.worker.adapter_worker import SFTWorker
    from shardtune.training.worker.base import FSDPSftWorker

_HOME = {
    "Adapter": "models.adapter",
    "Ask": "training.callbacks",
    "Batch": "batch",
    "Callback": "training.callbacks",
    "FSDPSftWorker": "training.worker.base",
    "LoggedRun": "training.experiment.run",
    "LossSum": "batch",
    "Metric": "batch",
    "NeedParallel": "engine.split_arguments",
    "Prediction": "models.user_metrics",
    "Run": "run.run",
    "SFTRunner": "training.runner",
    "SFTTrainer": "run.halos",
    "SFTWorker": "training.worker.adapter_worker",
    "Sample": "batch",
    "SupportedModel": "config.model_names",
    "TrainEngine": "engine.engine",
    "ValueHead": "models.value_head",
    "WholeStepAdapter": "models.whole_step_adapter",
    "get_model": "models.get_model",
    "get_model_config_and_processor": "models.get_model",
    "init": "engine.session",
    "init_empty_weights": "parallel.meta_init",
    "load_policy": "run.policy",
    "load_run": "run.run",
    "register_model": "config.model_names",
    "train": "run.api",
}

__all__ = [
    "Adapter",
    "Ask",
    "Batch",
    "Callback",
    "FSDPSftWorker",
    "LoggedRun",
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
    "load_policy",
    "load_run",
    "nn",
    "register_model",
    "train",
]


former_paths.install()


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `shardtune --help` must not wait for torch."""
    if name == "nn":
        return import_module("shardtune.nn")
    if name not in _HOME:
        raise AttributeError(f"module 'shardtune' has no attribute {name!r}")
    return getattr(import_module(f"shardtune.{_HOME[name]}"), name)
