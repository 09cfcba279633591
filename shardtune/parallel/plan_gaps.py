"""What the plans that transformers declares leave out: parts between cut matrices that need more than a name."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from shardtune.parallel.adapted_layers import base_modules
from shardtune.parallel.adapted_names import without_adapter

PARTIAL = "replicated_with_grad_allreduce"
"""The style of what every rank holds and uses on its own features alone."""


def without_gaps(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """A plan that is right for two kinds of layers with which plans of transformers reckon wrongly.

    An activation function with weights of its own (Apertus) sees a rank's features alone, so that each rank computes a
    part of its gradient. A feed-forward layer that keeps the largest of its features, by their mean and deviation
    (Gemma 3n), needs all of them, so each rank computes it whole.

    Args:
        model: that the plan is for.
        plan: names with `*` for layer numbers, to styles of transformers.
    """
    made = dict(plan)
    for name, module in base_modules(model):
        place = replace_layer_number_by_wildcard(without_adapter(name))
        if vars(module).get("activation_sparsity"):
            made = {key: style for key, style in made.items() if not key.startswith(f"{place}.")}
        elif name.rpartition(".")[2] == "act_fn" and place not in made and any(True for _ in module.parameters()):
            beside = f"{place.rpartition('.')[0]}."
            if any(style == "rowwise" for key, style in made.items() if key.startswith(beside)):
                made |= dict.fromkeys((f"{place}.{key}" for key, _ in module.named_parameters()), PARTIAL)
    return made
