"""HALOs' trainers and entry point, for its own configuration and for ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from omegaconf import DictConfig
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardtune.config import load_recipe
from shardtune.config.halos import in_names_of_halos
from shardtune.config.user_code import import_plugins
from shardtune.errors import ConfigError
from shardtune.parallel.precision import COMPUTE_DTYPE
from shardtune.run.api import train
from shardtune.run.choose_worker import Objects
from shardtune.run.push import check_push
from shardtune.run.run import Run
from shardtune.run.train_rank import train_rank
from shardtune.training.callbacks import load_callbacks
from shardtune.training.worker import sft_trainer
from shardtune.training.worker.sft_trainer import PaddedTrainer

SFT_TRAINER = "actor.worker=sft_trainer"


class BasicTrainer(PaddedTrainer):
    """A trainer without a loss: a subclass writes `get_batch_metrics`. Arguments as `PaddedTrainer` has them.

    Attributes:
        config: the recipe under HALOs' names (`config.lr`, `config.n_epochs`, `config.model.batch_size`) and ours.
        policy: the sharded model, as `model`.
        policy_dtype: the dtype that it computes in.
    """

    @property
    @final
    def config(self) -> DictConfig:
        return in_names_of_halos(self.recipe)

    @property
    @final
    def policy(self) -> nn.Module:
        return self.model

    @property
    @final
    def policy_dtype(self) -> torch.dtype:
        return COMPUTE_DTYPE[self.recipe.actor.model.precision]

    @final
    def train(self) -> Run:
        """Train to the end, with evaluations, checkpoints, resume and `FINAL/`; every rank calls it, once.

        Returns:
            The run, in `{cache_dir}/{exp_name}`. A model in memory has the trained weights afterwards; on several ranks
            each has its part of them.
        """
        runner = self.recipe.runner
        if runner.workers > self.ranks.world_size:
            raise ConfigError(
                f"the recipe sets {runner.workers} ranks, and this process is the only one",
                where=self.recipe.where("runner.nproc_per_node") or "runner",
                remedy=f"start it with torchrun --nproc-per-node {runner.workers}, or use shardtune.halos.main(config)",
            )
        import_plugins(self.recipe.plugins)
        load_callbacks(runner.callbacks)
        if self.ranks.world_size == 1:  # several check it together
            check_push(runner.push_to_hub)
        model, train_data, eval_data = self._held.values()
        objects = Objects(model=model, train_data=train_data, eval_data=eval_data)
        return Run(train_rank(self.recipe, objects, made=self), trained_here=True)


class SFTTrainer(BasicTrainer, sft_trainer.SFTTrainer):
    """HALOs' trainer of this name: the negative log-likelihood of the targets; `actor.worker: sft_trainer`.

    Its numbers are those of `SFTWorker`. A subclass that overrides `get_batch_metrics` trains another loss. Arguments
    as `PaddedTrainer` has them.
    """


def main(
    config: DictConfig | Mapping[str, object],
    *,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    train_data: object = None,
    eval_data: object = None,
) -> None:
    """Train as HALOs' `launch.main`: the result is `{cache_dir}/{exp_name}/FINAL/`.

    Args:
        config: under HALOs' names or ours; the worker is `SFTTrainer` unless `actor.worker` names another.
        model: a model in memory instead of `model.name_or_path`.
        tokenizer: a tokenizer in memory.
        train_data: rows in memory instead of `datasets`.
        eval_data: likewise, or a dict of named ones.
    """
    given = Objects(model, tokenizer, train_data, eval_data).keys()
    named = load_recipe(config, in_memory=given, files_must_exist=False).actor.worker is not None
    overrides = [] if named else [SFT_TRAINER]
    train(config, *overrides, model=model, tokenizer=tokenizer, train_data=train_data, eval_data=eval_data)
