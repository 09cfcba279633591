"""The keys of `actor` as attributes of the recipe itself, where a recipe may leave out `actor.`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardtune.config.schema.section import Section

if TYPE_CHECKING:
    from shardtune.config.schema.actor import ActorConfig, FsdpConfig, OptimConfig, ParallelConfig, TeacherConfig
    from shardtune.config.schema.model import ModelConfig, TokenizerConfig


class ShortForm(Section):
    """What a recipe derives from; each attribute is the one of that name in `actor`."""

    if TYPE_CHECKING:
        actor: ActorConfig

    @property
    def training_backend(self) -> str:
        return self.actor.training_backend

    @property
    def micro_batch_size(self) -> int | None:
        return self.actor.micro_batch_size

    @property
    def max_tokens_per_micro_batch(self) -> int | None:
        return self.actor.max_tokens_per_micro_batch

    @property
    def fill_micro_batches(self) -> bool | None:
        return self.actor.fill_micro_batches

    @property
    def eval_micro_batch_size(self) -> int | None:
        return self.actor.eval_micro_batch_size

    @property
    def global_batch_size(self) -> int | None:
        return self.actor.global_batch_size

    @property
    def global_batch_tokens(self) -> int | None:
        return self.actor.global_batch_tokens

    @property
    def loss(self) -> str | None:
        return self.actor.loss

    @property
    def label_smoothing(self) -> float:
        return self.actor.label_smoothing

    @property
    def z_loss(self) -> float:
        return self.actor.z_loss

    @property
    def neftune_alpha(self) -> float | None:
        return self.actor.neftune_alpha

    @property
    def teacher(self) -> TeacherConfig:
        return self.actor.teacher

    @property
    def worker(self) -> str | None:
        return self.actor.worker

    @property
    def model(self) -> ModelConfig:
        return self.actor.model

    @property
    def tokenizer(self) -> TokenizerConfig:
        return self.actor.tokenizer

    @property
    def optim(self) -> OptimConfig:
        return self.actor.optim

    @property
    def parallel(self) -> ParallelConfig:
        return self.actor.parallel

    @property
    def fsdp_config(self) -> FsdpConfig:
        return self.actor.fsdp_config
