"""The frozen teacher of a distillation on all ranks, sharded as the model is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from shardtune.batch import PackedBatch
from shardtune.config import Recipe
from shardtune.models.causal_lm import CausalLM
from shardtune.models.distillation import TeacherLogits, TopTokens
from shardtune.models.language_model import LanguageRoot
from shardtune.models.sequence_part import SequencePart
from shardtune.models.teacher import teacher_recipe
from shardtune.parallel.meta_init import materialise
from shardtune.parallel.precision import COMPUTE_DTYPE, SUM_DTYPE
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.shard import shard_model
from shardtune.parallel.weights import Weights
from shardtune.training.build.model import build_empty, load_initial_weights, share_values

R = TypeVar("R")


class TeacherRoot(LanguageRoot):
    """The module that is sharded: its forward calls a function while the logits of a micro-batch can be had."""

    def __init__(self, adapter: CausalLM, model: nn.Module) -> None:
        super().__init__(adapter, model)
        self._teacher = adapter

    def forward(self, batch: PackedBatch, use: Callable[[TeacherLogits], None]) -> None:  # pyright: ignore
        use(self._teacher.target_logits(self.model, batch))


class ShardedTeacher:
    """A teacher with its weights, in the dtype of its computation; every rank makes one.

    Args:
        recipe: of the run.
        adapter: of the teacher.
        ranks: of the run.
        values: whether to load the weights; without them it has their memory alone.

    Attributes:
        root: the sharded module.
        weights: of the teacher.
        notes: on how it was built.
    """

    def __init__(self, recipe: Recipe, adapter: CausalLM, ranks: Ranks, *, values: bool = True) -> None:
        of_teacher = teacher_recipe(recipe)
        actor, path = of_teacher.actor, of_teacher.actor.model.model_path
        precision, seed = actor.model.precision, recipe.runner.seed
        model, self.notes = build_empty(adapter.build, seed)
        self.root = TeacherRoot(adapter, model)
        self._adapter = adapter
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        share_values(model, ranks)
        parallel = adapter.apply_model_parallel(model, ranks)
        hold = shard_model(
            self.root,
            adapter.shard_units(model)[0],
            ranks,
            precision,
            prefetch=actor.fsdp_config.prefetch,
            experts=parallel.experts,
            offload=actor.fsdp_config.cpu_offload,
            cast_inputs=False,
        )
        master, frozen = SUM_DTYPE[precision], COMPUTE_DTYPE[precision]
        if values:
            form = {"dtype": master, "frozen": frozen, "device": ranks.device, "ranks": ranks}
            self.notes += load_initial_weights(path, model, self.root, build=adapter.build, seed=seed, **form)
        else:
            materialise(self.root, dtype=master, device=ranks.device, frozen=frozen)
        self.weights: Weights = hold(model, partial=parallel.partial)
        self.root.eval()

    def compute(self, batch: PackedBatch, use: Callable[[TeacherLogits | TopTokens], R]) -> R:
        """See `shardtune.models.distillation.Teacher`."""
        found: list[R] = []
        graph = torch.is_grad_enabled()

        def used(logits: TeacherLogits) -> None:
            with torch.set_grad_enabled(graph):
                found.append(use(logits))

        with torch.no_grad():
            self.root(batch, used)
        self.weights.copy_masters_to_model()  # frees the root's gathered weights
        return found[0]

    def part(self, batch: PackedBatch) -> SequencePart | None:
        """The targets of a micro-batch whose logits this rank has, where ranks share sequences; None: all."""
        sharing = self._adapter.sharing
        return sharing.part(batch, batch.target_positions) if sharing.among_ranks else None
