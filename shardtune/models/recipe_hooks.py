"""What a recipe adds to an adapter: another loss per target, and the user's metrics."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from shardtune.config import Recipe
from shardtune.errors import ConfigError
from shardtune.models.adapter import Adapter, AdapterRoot
from shardtune.models.causal_lm import CausalLM
from shardtune.models.chosen_loss import chosen_loss
from shardtune.models.distillation import Distillation
from shardtune.models.language_model import LanguageModel
from shardtune.models.loss import TokenLoss
from shardtune.models.teacher import find_teacher
from shardtune.models.user_metrics import METRICS, UserMetrics
from shardtune.models.whole_step_adapter import WholeStepAdapter

R = TypeVar("R", bound=AdapterRoot)
OF_LOSSES = ("loss", "perplexity")
"""Metrics that evaluation derives from the losses."""
OF_ANSWERS = ("eval_accuracy", "unparsed")
"""Metrics of generative evaluation."""
OWN_METRICS = (*OF_LOSSES, "token_accuracy", *OF_ANSWERS)
"""Metrics that evaluation computes without any function of the user."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """The loss and metrics that a recipe names, checked against the adapter whose predictions they take.

    Attributes:
        token_loss: the training loss of a target; None: the adapter's own.
        metrics: of evaluation.
        teacher: the adapter of the teacher, where the loss needs one.
    """

    token_loss: TokenLoss | None
    metrics: UserMetrics
    teacher: CausalLM | None = None

    @classmethod
    def of(cls, recipe: Recipe, adapter: Adapter, *, training: bool) -> Hooks:
        """The hooks of a recipe; the loss only for training.

        Raises:
            ConfigError: a function cannot be used, or the adapter has no predictions.
        """
        actor = recipe.actor
        hooks = cls(chosen_loss(actor) if training else None, UserMetrics(recipe.eval.metrics))
        hooks.metrics.check_names(OWN_METRICS)
        requested = {
            "actor.loss": actor.loss if training else None,
            "actor.label_smoothing": actor.label_smoothing if training else 0.0,
            "actor.z_loss": actor.z_loss if training else 0.0,
            METRICS: recipe.eval.metrics,
        }
        for key, value in requested.items():
            if value and not adapter.predicts:
                raise _no_predictions(key, adapter, recipe)
        if training and actor.neftune_alpha is not None:
            if not isinstance(adapter, CausalLM):
                raise ConfigError(
                    f"actor.neftune_alpha is noise on the embeddings of tokens, and {type(adapter).__name__} is no "
                    "language model of transformers",
                    where=recipe.where("actor.neftune_alpha") or "actor.neftune_alpha",
                    remedy="leave it out, or add the noise in the adapter's own loss (batch.rand_like)",
                )
            adapter.noise_alpha = actor.neftune_alpha
        if isinstance(hooks.token_loss, Distillation):
            return replace(hooks, teacher=find_teacher(recipe, adapter))
        return hooks

    def check_terms(self, terms: Collection[str], adapter: Adapter) -> None:
        """Refuse a loss per target for an adapter with several loss terms, except a language model's token term."""
        if self.token_loss is None or isinstance(adapter, LanguageModel) or len(terms) == 1:
            return
        raise ConfigError(
            f"the loss of {type(adapter).__name__} has {len(terms)} terms ({', '.join(sorted(terms))}), and a loss per "
            "target is one",
            where="actor.loss, actor.label_smoothing, actor.z_loss",
            remedy="leave them out, and change the adapter's own loss",
        )

    def attach(self, root: R) -> R:
        """Set the hooks on a root; returns the root."""
        root.token_loss = self.token_loss
        root.measure = self.metrics if self.metrics.names else None
        return root

    def all_names(self, own: Sequence[str]) -> list[str]:
        """The names of all metrics of an evaluation: the adapter's and the user's."""
        self.metrics.check_names(own)
        return [*own, *self.metrics.names]


def _no_predictions(key: str, adapter: Adapter, recipe: Recipe) -> ConfigError:
    name = type(adapter).__name__
    if isinstance(adapter, WholeStepAdapter):
        return ConfigError(
            f"{key} works on single targets, and the loss of {name} is one of all rows of a step",
            where=recipe.where(key) or key,
            remedy=f"leave it out; {name}.step_loss is the place for it",
        )
    return ConfigError(
        f"{key} works on predictions, and {name} gives none",
        where=recipe.where(key) or key,
        remedy=f"write {name}.predictions(model, batch), which yields shardtune.Prediction(outputs, targets, weights), "
        "or leave it out",
    )
