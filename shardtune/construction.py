"""What a model goes through before it is trained: parameters are frozen, weights come from where the recipe says."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from shardtune.checkpoint.huggingface import initialise_weights, load_weights
from shardtune.config import Recipe
from shardtune.errors import ConfigError
from shardtune.models.registry import model_directory
from shardtune.parallel.mesh import Ranks
from shardtune.parallel.shard import MASTER_DTYPE


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Stop training the parameters whose names match one of the patterns."""
    for pattern in patterns:
        matched = [parameter for name, parameter in model.named_parameters() if re.search(pattern, name)]
        if not matched:
            names = [name for name, _ in model.named_parameters()]
            raise ConfigError(
                f"actor.model.freeze: the pattern {pattern!r} matches no parameter",
                where="actor.model.freeze",
                remedy=f"names look like {', '.join(names[:3])}",
            )
        for parameter in matched:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"actor.model.freeze: {list(patterns)} leaves nothing to train",
            where="actor.model.freeze",
            remedy="freeze less",
        )


def load_initial_weights(
    model: PreTrainedModel, root: nn.Module, recipe: Recipe, ranks: Ranks, device: torch.device
) -> None:
    """Give a sharded model the weights that training starts from, in full precision.

    Args:
        model: whose names the files use; its parameters are on the meta device, unless it is a model in memory.
        root: the module around it that is sharded.
        recipe: says where the weights come from.
        ranks: of the run.
        device: where they belong.
    """
    config = recipe.actor.model
    dtype = MASTER_DTYPE[config.precision]
    if not any(parameter.is_meta for parameter in model.parameters()):
        if ranks.world_size > 1:
            raise ConfigError(
                "a model in memory trains on one rank",
                where=f"{ranks.world_size} ranks",
                remedy="save it and give its directory as actor.model.model_path",
            )
        nn.Module.to(model, device=device)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    elif config.from_scratch:
        initialise_weights(model, recipe.runner.seed, dtype=dtype, device=device, root=root)
    else:
        assert config.model_path is not None
        load_weights(model, model_directory(config.model_path), dtype=dtype, device=device, root=root)
