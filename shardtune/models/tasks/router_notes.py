"""What the routers of a mixture of experts do not do in a task, or do differently, for the first lines of a run."""

from __future__ import annotations

from transformers import PreTrainedConfig

from shardtune.models.router_loss import RouterLoss

NO_BALANCE = (
    "output_router_logits: true of the model's config has no effect: the loss of this {} has no balance loss of routers"
)
EVALUATED_CAPACITY = "moe_eval_capacity_token_fraction"
"""A setting of NLLB-MoE; in evaluation the capacity is this share of the tokens of a forward, from then on."""
SHARED_CAPACITY = (
    "all tokens of a forward share the capacity of this model's experts, and an evaluation changes it "
    f"({EVALUATED_CAPACITY}: {{}}): losses depend on the micro-batch and on evaluations before; with actor.model."
    f"config_overrides: {{{{{EVALUATED_CAPACITY}: 0.0, expert_capacity: N}}}}, N the tokens of a micro-batch, "
    "they are those of each row alone"
)


def router_notes(config: PreTrainedConfig, task: str) -> list[str]:
    """Notes on the routers of a model; none for a model without experts.

    Args:
        config: the model's.
        task: the name of the task.
    """
    notes = [NO_BALANCE.format(task)] if RouterLoss.of(config).factor else []
    share = config.to_dict().get(EVALUATED_CAPACITY)
    return [*notes, SHARED_CAPACITY.format(share)] if isinstance(share, int | float) and share > 0 else notes
