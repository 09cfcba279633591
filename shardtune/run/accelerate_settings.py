"""What the file of `accelerate launch` sets besides the processes; here the recipe sets it."""

from __future__ import annotations

from collections.abc import Mapping

from shardtune.config import Recipe

OFF = ("", "no", "none", "false")
SETTINGS = {
    "ACCELERATE_MIXED_PRECISION": ("mixed_precision", "actor.model.precision"),
    "ACCELERATE_DYNAMO_BACKEND": ("dynamo_backend", "actor.model.compile"),
    "ACCELERATE_USE_DEEPSPEED": ("use_deepspeed", "actor.training_backend"),
    "ACCELERATE_USE_MEGATRON_LM": ("use_megatron_lm", "actor.training_backend"),
    "FSDP_OFFLOAD_PARAMS": ("fsdp_offload_params", "actor.fsdp_config.cpu_offload"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("fsdp_activation_checkpointing", "actor.model.gradient_checkpointing"),
}
"""Variables in which `accelerate launch` passes them, with their names in its file and our keys."""


def contradicted_settings(recipe: Recipe, environment: Mapping[str, str]) -> list[str]:
    """A note for the user on what accelerate's file switches on and the recipe does not; empty without any.

    Args:
        recipe: of the run.
        environment: of a rank.
    """
    actor = recipe.actor
    done = {
        "actor.model.precision": actor.model.precision.removeprefix("pure_"),
        "actor.model.compile": actor.model.compile,
        "actor.training_backend": False,
        "actor.fsdp_config.cpu_offload": actor.fsdp_config.cpu_offload,
        "actor.model.gradient_checkpointing": bool(actor.model.gradient_checkpointing),
    }
    given = {variable: environment.get(variable, "").lower() for variable in SETTINGS}
    found = [
        f"{name}: {given[variable]} ({key} decides)"
        for variable, (name, key) in SETTINGS.items()
        if given[variable] not in OFF and done[key] is not True and done[key] != given[variable]
    ]
    return [f"of accelerate's file without an effect here: {', '.join(found)}"] if found else []
