"""The recipe as types: every key, its default, its allowed values and its meaning.

The descriptions are the configuration reference: `python -m shardtune.config.reference` prints them as a page.
"""

from shardtune.config.schema.actor import (
    ActorConfig,
    FsdpConfig,
    OptimConfig,
    ParallelConfig,
    ParameterGroup,
    SequenceMethod,
)
from shardtune.config.schema.data import AuditConfig, DataConfig, DataEntry
from shardtune.config.schema.evaluation import EvalConfig
from shardtune.config.schema.key_names import (
    ACTOR,
    ACTOR_KEYS,
    ALTERNATIVE_KEYS,
    FORMER_KEYS,
    MODEL,
    OTHER_KEYS,
    is_actors,
    long_key,
    present_key,
    short_key,
    short_keys,
)
from shardtune.config.schema.model import (
    Fp8Config,
    KernelsConfig,
    LoraConfig,
    ModelConfig,
    TokenizerConfig,
    ValueHeadConfig,
    action_tokens,
)
from shardtune.config.schema.recipe import Recipe, escape_interpolation
from shardtune.config.schema.runner import BestConfig, EarlyStopConfig, LoggerConfig, RayConfig, RunnerConfig
from shardtune.config.schema.spelling import Spelling

__all__ = [
    "ACTOR",
    "ACTOR_KEYS",
    "ALTERNATIVE_KEYS",
    "FORMER_KEYS",
    "MODEL",
    "OTHER_KEYS",
    "ActorConfig",
    "AuditConfig",
    "BestConfig",
    "DataConfig",
    "DataEntry",
    "EarlyStopConfig",
    "EvalConfig",
    "Fp8Config",
    "FsdpConfig",
    "KernelsConfig",
    "LoggerConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "ParameterGroup",
    "RayConfig",
    "Recipe",
    "RunnerConfig",
    "SequenceMethod",
    "Spelling",
    "TokenizerConfig",
    "ValueHeadConfig",
    "action_tokens",
    "escape_interpolation",
    "is_actors",
    "long_key",
    "present_key",
    "short_key",
    "short_keys",
]
