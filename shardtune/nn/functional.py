"""Ready pieces of post-training methods: pure functions of tensors, for methods of an engine, adapters and scripts."""

from shardtune.models.objectives.log_probs import (
    TokenScores,
    entropy,
    linear_log_probs,
    linear_log_probs_and_entropy,
    log_probs,
    log_probs_and_entropy,
)
from shardtune.models.objectives.masked import kl_estimate, loss_sum, masked_mean, masked_sum, masked_whiten
from shardtune.models.objectives.policy import (
    cispo_loss,
    generalised_advantages,
    group_advantages,
    leave_one_out_advantages,
    policy_loss,
    value_loss,
)
from shardtune.models.objectives.preference import cpo_loss, dpo_loss, kto_loss, orpo_loss, reward_loss, simpo_loss

__all__ = [
    "TokenScores",
    "cispo_loss",
    "cpo_loss",
    "dpo_loss",
    "entropy",
    "generalised_advantages",
    "group_advantages",
    "kl_estimate",
    "kto_loss",
    "leave_one_out_advantages",
    "linear_log_probs",
    "linear_log_probs_and_entropy",
    "log_probs",
    "log_probs_and_entropy",
    "loss_sum",
    "masked_mean",
    "masked_sum",
    "masked_whiten",
    "orpo_loss",
    "policy_loss",
    "reward_loss",
    "simpo_loss",
    "value_loss",
]
