"""Contradictions among the keys of the loss, the optimizer and its schedule."""

from __future__ import annotations

from collections.abc import Iterator

from shardtune.config.checks.context import Context
from shardtune.config.schema import OptimConfig
from shardtune.config.values import LARGEST, LOSSES, OUT_OF_RANGE
from shardtune.errors import ConfigError


def schedule(context: Context) -> Iterator[ConfigError]:
    optim = context.recipe.actor.optim
    for rate, decay in [(optim.lr, optim.weight_decay), *((group.lr, group.weight_decay) for group in optim.groups)]:
        product = (optim.lr if rate is None else rate) * (optim.weight_decay if decay is None else decay)
        if product > LARGEST:
            yield context.problem(
                "actor.optim.weight_decay",
                f"the learning rate times the weight decay is {product:g}: {OUT_OF_RANGE}",
                "lower one of them",
            )
    if optim.min_lr > optim.lr:
        yield context.problem(
            "actor.optim.min_lr",
            f"actor.optim.min_lr ({optim.min_lr:g}) is above actor.optim.lr ({optim.lr:g})",
            "lower it; it is the rate at the end",
        )
    if optim.lr_warmup_steps and optim.lr_warmup_steps_ratio:
        yield context.problem(
            "actor.optim.lr_warmup_steps_ratio",
            f"actor.optim.lr_warmup_steps ({optim.lr_warmup_steps}) and actor.optim.lr_warmup_steps_ratio "
            f"({optim.lr_warmup_steps_ratio:g}) both set the length of the warm-up",
            "keep one of them; the other is 0",
        )
    if optim.lr_warmup_from_zero and not optim.lr_warmup_steps and not optim.lr_warmup_steps_ratio:
        yield context.problem(
            "actor.optim.lr_warmup_from_zero",
            "actor.optim.lr_warmup_from_zero: true has no effect without a warm-up",
            "give actor.optim.lr_warmup_steps or lr_warmup_steps_ratio, or leave it out",
        )
    for number, group in enumerate(optim.groups):
        if group.lr is None and group.weight_decay is None:
            yield context.problem(
                "actor.optim.groups",
                f"actor.optim.groups[{number}] ({group.pattern}) has neither lr nor weight_decay, so it has no effect",
                "give it one of them, or leave it out",
            )
    if not optim.ema_use and optim.ema_decay is None:
        yield context.problem(
            "actor.optim.ema_use",
            "actor.optim.ema_use: false has no effect without actor.optim.ema_decay: no average is kept",
            "give it, or leave the key out",
        )
    if optim.min_lr and optim.lr_scheduler == "constant":
        yield context.problem(
            "actor.optim.min_lr",
            f"actor.optim.min_lr ({optim.min_lr:g}) has no effect with actor.optim.lr_scheduler: constant",
            "leave it out or choose linear, cosine or wsd",
        )
    if optim.decay_ratio != OptimConfig().decay_ratio and optim.lr_scheduler != "wsd":
        yield context.problem(
            "actor.optim.decay_ratio",
            f"actor.optim.decay_ratio has no effect with actor.optim.lr_scheduler: {optim.lr_scheduler}",
            "leave it out or choose wsd",
        )


def losses(context: Context) -> Iterator[ConfigError]:
    actor = context.recipe.actor
    for key, value in (("actor.label_smoothing", actor.label_smoothing), ("actor.z_loss", actor.z_loss)):
        if value and actor.loss is not None:
            yield context.problem(
                key,
                f"{key} ({value:g}) is part of the built-in cross-entropy, which actor.loss ({actor.loss}) replaces",
                "leave it out, or leave actor.loss out"
                if actor.loss in LOSSES
                else f"leave it out and implement it in {actor.loss.rpartition(':')[2]}, or leave actor.loss out",
            )
    if actor.loss == "distill":
        if actor.teacher.model_path is None:
            yield context.problem(
                "actor.loss",
                "actor.loss: distill needs a teacher, and none is named",
                "give actor.teacher.model_path: the directory or Hub name of a language model with the same vocabulary",
            )
        if actor.teacher.top_k is not None and actor.teacher.divergence != "forward_kl":
            yield context.problem(
                "actor.teacher.top_k",
                f"actor.teacher.top_k: {actor.teacher.top_k} keeps no probabilities for "
                f"actor.teacher.divergence: {actor.teacher.divergence}",
                "use forward_kl, or leave top_k out",
            )
        return
    for name in actor.teacher.model_dump(exclude_defaults=True):
        yield context.problem(
            f"actor.teacher.{name}",
            f"actor.teacher.{name} has no effect without actor.loss: distill",
            "set that, or leave the key out",
        )


# The optimizers whose states can be kept in bf16 or int8, and weights in bf16, and their arguments allowed then.
LOW_BIT = {
    "AdamW": ("maximize",),
    "Adam": ("maximize",),
    "SGD": ("momentum", "dampening", "nesterov", "maximize"),
}


def optimizer_states(context: Context) -> Iterator[ConfigError]:
    actor, key = context.recipe.actor, "actor.optim.state_dtype"
    optim, dtype = actor.optim, actor.optim.state_dtype
    if optim.name == "Muon" and actor.training_backend == "fsdp1":
        yield context.problem(
            "actor.optim.name",
            "actor.optim.name: Muon does not work with actor.training_backend: fsdp1, whose shards are no matrices",
            "use actor.training_backend: fsdp, or AdamW",
        )
    if dtype == "fp32":
        return
    yield from _of_low_bit(context, key, dtype, "fp32")
    if optim.name == "SGD" and not optim.args.get("momentum"):
        yield context.problem(
            key,
            f"{key}: {dtype} has no effect on SGD without momentum, which keeps no state",
            "give actor.optim.args: {momentum: 0.9}, or use fp32",
        )
    if dtype == "int8" and actor.training_backend == "fsdp1":
        yield context.problem(
            key,
            f"{key}: int8 does not work with actor.training_backend: fsdp1: its shards cut through rows, and each "
            "block of a row has one scale",
            "use bf16, or actor.training_backend: fsdp",
        )


def weights_in_bf16(context: Context) -> Iterator[ConfigError]:
    actor, key = context.recipe.actor, "actor.model.precision"
    if actor.model.precision != "pure_bf16":
        return
    if actor.optim.state_dtype == "fp32":
        yield from _of_low_bit(context, key, "pure_bf16", "bf16")
    if actor.training_backend == "fsdp1":
        yield context.problem(
            key,
            f"{key}: pure_bf16 does not work with actor.training_backend: fsdp1, which sums gradients in the dtype of "
            "the weights",
            "use actor.training_backend: fsdp",
        )
    if actor.model.is_lora:
        yield context.problem(
            key,
            f"{key}: pure_bf16 is for training all weights; the weights of an adapter are few",
            f"set {key}: bf16, and actor.model.lora.base_dtype: bf16 for the frozen ones",
        )


def _of_low_bit(context: Context, key: str, value: str, other: str) -> Iterator[ConfigError]:
    """Refuse other optimizers and arguments than those that round what they store.

    Args:
        key: that makes them round.
        value: that it has.
        other: that it may have with any optimizer.
    """
    optim = context.recipe.actor.optim
    if optim.name not in LOW_BIT:
        yield context.problem(
            key,
            f"{key}: {value} works with {', '.join(LOW_BIT)}, not with actor.optim.name: {optim.name}",
            f"use one of them, or {other}",
        )
        return
    for name in (name for name in optim.args if name not in LOW_BIT[optim.name]):
        yield context.problem(
            "actor.optim.args",
            f"actor.optim.args.{name} does not work with {key}: {value}",
            f"leave it out (allowed: {', '.join(LOW_BIT[optim.name])}), or use {key}: {other}",
        )
