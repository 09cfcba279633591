"""The batches of a user-defined loader in training: split into steps, weighed, their loss computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import nn

from shardtune.config import Recipe
from shardtune.data.user_loader.batch import UserBatch, with_names
from shardtune.data.user_loader.loader import BatchLoader
from shardtune.errors import ConfigError, ShardtuneError
from shardtune.parallel.ranks import Ranks
from shardtune.training.train_output import TRAIN, TrainOutput
from shardtune.training.worker.user_errors import explaining
from shardtune.training.worker.user_loss import BatchWeights, measured


@final
class UserBatches:
    """The batches of a user-defined loader.

    Args:
        recipe: of the run.
        ranks: of the run.
        model: the sharded model.
        output: the worker's `get_train_model_output`.
    """

    def __init__(self, recipe: Recipe, ranks: Ranks, model: nn.Module, output: Callable[[Any], TrainOutput]) -> None:
        self._recipe = recipe
        self._ranks = ranks
        self._model = model
        self._output = output

    def loader(
        self,
        loader: object,
        info: Mapping[str, object],
        loss_weights: Callable[[Any], Mapping[str, float] | None],
        report: Callable[[str], None],
    ) -> BatchLoader:
        """The user's loader, split into steps.

        Args:
            loader: the user's.
            info: facts about it, as `build_dataloader` returns them.
            loss_weights: the worker's method.
            report: receives a line for the user.

        Raises:
            ConfigError: the recipe leaves out rows, which has no effect on batches.
        """
        actor = self._recipe.actor
        if self._recipe.data.quarantine is not None:
            raise ConfigError(
                "data.quarantine leaves out rows that the recipe names; build_dataloader returns batches of its own",
                where=self._recipe.where("data.quarantine") or "data.quarantine",
                remedy="set it to null, and leave the rows out in build_dataloader",
            )
        if self._recipe.data.cache != "whole":
            raise ConfigError(
                "data.cache: by_file tokenises rows that the recipe names; build_dataloader returns batches of its own",
                where=self._recipe.where("data.cache") or "data.cache",
                remedy="leave it out",
            )
        if self._recipe.data.augmentation.is_on:
            raise ConfigError(
                "data.augmentation changes rows that the recipe names; build_dataloader returns batches of its own",
                where=self._recipe.where("data.augmentation") or "data.augmentation",
                remedy="leave it out, and change the images in build_dataloader",
            )
        return BatchLoader.of(
            loader,
            info,
            ranks=self._ranks,
            global_batch_size=actor.global_batch_size,
            micro_batch_size=actor.micro_batch_size,
            weigh=BatchWeights(loss_weights, self._measure, self._ranks),
            seed=self._recipe.runner.seed,
            report=report,
        )

    def loss(self, batch: UserBatch) -> TrainOutput:
        """The loss of a batch; errors caused by the batch are reported as such."""
        with explaining(TRAIN, batch.fields, self._ranks.device):
            return self._output(with_names(batch.fields))

    def _measure(self, batch: Any) -> float | None:
        """The loss of a batch as a number, without dropout; None if the task fails on it. All ranks call it."""
        self._model.eval()
        try:
            with torch.no_grad(), explaining(TRAIN, batch, self._ranks.device):
                return measured(self._output(with_names(batch)))
        except (ShardtuneError, torch.OutOfMemoryError):
            raise
        except (ArithmeticError, AssertionError, IndexError, RuntimeError, ValueError):  # as of a mean over no target
            return None
        finally:
            self._model.train()
