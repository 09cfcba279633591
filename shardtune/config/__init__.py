"""The recipe: its schema, and how files, config groups and overrides become one validated `Recipe`."""

from shardtune.config.keys import ALIASES, KEYS
from shardtune.config.loading import load_recipe
from shardtune.config.schema import (
    ActorConfig,
    BestConfig,
    DataConfig,
    DataEntry,
    EarlyStopConfig,
    EvalConfig,
    FsdpConfig,
    LoggerConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    ParameterGroup,
    Recipe,
    RunnerConfig,
    TokenizerConfig,
    ValueHeadConfig,
)
from shardtune.config.tree import flatten

__all__ = [
    "ALIASES",
    "KEYS",
    "ActorConfig",
    "BestConfig",
    "DataConfig",
    "DataEntry",
    "EarlyStopConfig",
    "EvalConfig",
    "FsdpConfig",
    "LoggerConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "ParameterGroup",
    "Recipe",
    "RunnerConfig",
    "TokenizerConfig",
    "ValueHeadConfig",
    "flatten",
    "load_recipe",
]
