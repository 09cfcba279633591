"""What a training task is: a model, its data and its loss, driven one optimizer step at a time."""

from __future__ import annotations

import json
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardtune.batch import LossSum, Metric
from shardtune.checkpoint.materialise import materialise
from shardtune.checkpoint.sharded import load_checkpoint_tensors, save_checkpoint_tensors
from shardtune.config import Recipe, load_recipe
from shardtune.data.loader import DataState, Step
from shardtune.errors import CheckpointError, ConfigError, DataError
from shardtune.optim import build_optimizer, set_learning_rate
from shardtune.parallel.mesh import Ranks, join_ranks
from shardtune.parallel.shard import COMPUTE_DTYPE, MASTER_DTYPE, Weights, shard
from shardtune.step import LossScale, optimizer_step
