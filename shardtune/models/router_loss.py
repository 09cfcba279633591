"""The balance loss of a mixture of experts' routers, as the model's config declares it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.utils import ModelOutput

from shardtune.errors import ModelError
from shardtune.models.loss import router_balance

FACTORS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
"""Keys of configs with the loss's factor."""


@dataclass(frozen=True, slots=True)
class RouterLoss:
    """What a config declares.

    Attributes:
        factor: of the balance loss; 0: it is not trained.
        experts_per_token: 0 for a model without experts.
    """

    factor: float
    experts_per_token: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> RouterLoss:
        """That of the language model; a config may have a name of its own for the number of experts."""
        text = config.get_text_config()
        values: Mapping[str, Any] = text.to_dict()
        experts = values.get(text.attribute_map.get("num_experts_per_tok", "num_experts_per_tok")) or 0
        factors = (float(values.get(name) or 0.0) for name in FACTORS)
        factor = next(filter(None, factors), 0.0) if values.get("output_router_logits") else 0.0
        return cls(factor, int(max(experts) if isinstance(experts, list) else experts))

    def check(self, name: str, outputs: ModelOutput, tolerance: float) -> None:
        """Compare the loss with that of transformers' own forward of one row.

        Args:
            name: of the model's class.
            outputs: of that forward, with router logits.
            tolerance: relative, of the compute dtype.

        Raises:
            ModelError: transformers has none for this class, or another one.
        """
        theirs = outputs.get("aux_loss")
        if theirs is None:
            raise _refusal(f"{name} of transformers has no balance loss for its routers", self.factor)
        routers = outputs["router_logits"]
        rows = torch.tensor([0, len(routers[0])], device=routers[0].device)
        ours = router_balance(routers, rows, torch.ones(1, device=rows.device), self.experts_per_token)
        if not abs(float(ours) - float(theirs)) <= tolerance * abs(float(theirs)):  # nor is NaN
            raise _refusal(
                f"{name} of transformers computes another balance loss for its routers ({float(theirs):.4g}) than the "
                f"one of Switch Transformer ({float(ours):.4g})",
                self.factor,
            )


def _refusal(what: str, factor: float) -> ModelError:
    return ModelError(
        f"{what}, which its config sets with a factor of {factor:g}",
        where="actor.model.model_path: config.json, output_router_logits",
        remedy="train without it: actor.model.config_overrides: {output_router_logits: false}",
    )
