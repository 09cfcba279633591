"""What a recipe adds to an adapter: another loss per target, and metrics of the user's own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shardtune.config import Recipe
from shardtune.errors import ConfigError
from shardtune.models.adapter import Adapter, AdapterRoot, LanguageModel, WholeStepAdapter
from shardtune.models.loss import TokenLoss, chosen_loss
from shardtune.models.user_metrics import METRICS, UserMetrics

R = TypeVar("R", bound=AdapterRoot)
OWN_METRICS = ("loss", "perplexity", "token_accuracy", "eval_accuracy", "unparsed")
"""What evaluation gives by itself."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """The loss and metrics that a recipe names, checked against the adapter that is to give predictions for them.

    Attributes:
        token_loss: the training loss of a target; None: the adapter's own.
        metrics: of evaluation.
    """

    token_loss: TokenLoss | None
    metrics: UserMetrics

    @classmethod
    def of(cls, recipe: Recipe, adapter: Adapter, *, training: bool) -> Hooks:
        """Those of a recipe; the loss only for training.

        Raises:
            ConfigError: a function cannot be used, or the adapter gives no predictions.
        """
        actor = recipe.actor
        hooks = cls(chosen_loss(actor) if training else None, UserMetrics(recipe.eval.metrics))
        hooks.metrics.check_names(OWN_METRICS)
        asked = {
            "actor.loss": actor.loss if training else None,
            "actor.label_smoothing": actor.label_smoothing if training else 0.0,
            "actor.z_loss": actor.z_loss if training else 0.0,
            METRICS: recipe.eval.metrics,
        }
        for key, value in asked.items():
            if value and not adapter.predicts:
                raise _no_predictions(key, adapter, recipe)
        return hooks

    def check_terms(self, terms: Collection[str], adapter: Adapter) -> None:
        """Refuse a loss per target in place of a loss of several terms; of a language model it replaces the tokens'."""
        if self.token_loss is None or isinstance(adapter, LanguageModel) or len(terms) == 1:
            return
        raise ConfigError(
            f"the loss of {type(adapter).__name__} has {len(terms)} terms ({', '.join(sorted(terms))}), and a loss per "
            "target is one",
            where="actor.loss, actor.label_smoothing, actor.z_loss",
            remedy="leave them out, and change the adapter's own loss",
        )

    def attach(self, root: R) -> R:
        """The same root, which now uses them."""
        root.token_loss = self.token_loss
        root.measure = self.metrics if self.metrics.names else None
        return root

    def all_names(self, own: Sequence[str]) -> list[str]:
        """The names of an evaluation's metrics, these included."""
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
