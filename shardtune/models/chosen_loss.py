"""The training loss of a target that a recipe names."""

from __future__ import annotations

import torch

from shardtune.config import ActorConfig
from shardtune.config.user_code import check_call, load_function, named_errors
from shardtune.errors import ConfigError
from shardtune.models.distillation import Distance, Distillation
from shardtune.models.loss import CrossEntropy, TokenLoss


def chosen_loss(config: ActorConfig) -> TokenLoss | None:
    """The training loss of a target that a recipe names; None for the model's own.

    Raises:
        ConfigError: the function of `actor.loss` cannot be used.
    """
    if config.loss == "dft":
        return CrossEntropy(by_probability=True)
    if config.loss == "distill":
        teacher = config.teacher
        return Distillation(Distance(teacher.divergence, teacher.temperature, teacher.ce_share))
    if config.loss is None:
        changed = config.label_smoothing or config.z_loss
        return CrossEntropy(config.label_smoothing, config.z_loss) if changed else None
    spec, name = config.loss, config.loss.rpartition(":")[2]
    function = load_function(spec, "actor.loss")
    check_call(function, 2, f"{name}(outputs, targets)", f"actor.loss: {spec}")

    def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with named_errors(spec, "actor.loss"):
            found = function(outputs, targets)
        fits = isinstance(found, torch.Tensor) and found.shape == (len(outputs),) and found.is_floating_point()
        if fits and found.requires_grad == outputs.requires_grad:
            return found
        what = f"{list(found.shape)} of {found.dtype}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise ConfigError(
            f"{name} returned {what + ' without a graph' if fits else what} for {len(outputs)} targets",
            where=f"actor.loss: {spec}",
            remedy="return one loss per target, a tensor [n] computed from the outputs, without taking a mean or sum",
        )

    return losses
