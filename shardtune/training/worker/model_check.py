"""Checks of a recipe's model before any rank is started: built without memory, adapted, with its optimizer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardtune.checkpoint.hf_load import check_weights
from shardtune.config import Recipe
from shardtune.config.rank_layout import Layout
from shardtune.models.adapter import Adapter, WeightSource
from shardtune.models.adapter_contract import check_value_head
from shardtune.models.pretrained import model_directory
from shardtune.optim.build import build_optimizer
from shardtune.parallel.layer_drop import check_layer_drop
from shardtune.parallel.ranks import num_ranks
from shardtune.parallel.unfit_parameters import check_joined, check_python, check_saved, check_trained
from shardtune.training.build.lora import adapt, check_frozen, check_stored
from shardtune.training.build.model import build_empty, check_read_values, freeze, may_lack
from shardtune.training.worker.model_state import outer_parameters, shared_names


def weights_of(adapter: Adapter, recipe: Recipe) -> WeightSource:
    """Where the first weights come from; None where they are drawn."""
    return None if recipe.actor.model.from_scratch else adapter.initial_weights()


def check_model(adapter: Adapter, recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Check an adapter's model, its weights, the layout of its ranks and its optimizer.

    Args:
        adapter: describes the model.
        recipe: of the run.
        tokenizer: for the names of added tokens; None for a model without text.

    Raises:
        ConfigError: the recipe does not fit the model.
        ModelError: the model cannot be trained or saved so.
    """
    config = recipe.actor.model
    layout = Layout.of(recipe.actor, num_ranks(recipe.runner))
    adapter.check_layout(layout)
    model, _ = build_empty(adapter.build, recipe.runner.seed)
    source = weights_of(adapter, recipe)
    check_read_values(model, source, by_class=adapter.builds_by_class, from_scratch=config.from_scratch)
    check_value_head(adapter, model)
    adapter.check_parallel(model, layout)
    new = partial(adapter.new_weights, model)
    adapt(model, recipe, tokenizer, lambda: source, adapter.new_parts, new)
    freeze(model, config.freeze)
    check_frozen(model, config)
    check_saved(model)
    check_trained(model, config.precision, on_ranks=layout.num_ranks > 1)
    if layout.num_ranks > 1:
        check_python(model)
    if layout.flat and layout.num_ranks > 1:
        check_joined(dict(model.named_parameters()))
    check_layer_drop(model, adapter.shard_units(model)[0], layout)
    if isinstance(model, PreTrainedModel) and isinstance(source, (str, Path)):
        directory, parts = model_directory(str(source)), may_lack(adapter.new_parts)

        def known(missing: Sequence[str]) -> Collection[str]:
            return {*new(missing), *(parts(directory, missing) if parts is not None else ())}

        check_weights(model, directory, grow=bool(recipe.actor.added_tokens), may_lack=known)
    check_stored(model, config)
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    build_optimizer(trainable, recipe.actor.optim, outer=outer_parameters(model), shared=shared_names(model))
