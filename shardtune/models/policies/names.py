"""The policies by name, imported when a recipe names them."""

from __future__ import annotations

from importlib import import_module

from shardtune.models.policies.policy import Policy

CLASSES = {
    "act": "act:ActPolicy",
    "diffusion": "diffusion:DiffusionPolicy",
    "pi0": "pi0:PI0Policy",
    "smolvla": "smolvla:SmolVLAPolicy",
}
"""Module of this package, and class, by `actor.model.model_type`; `shardtune.config.model_names` describes them."""


def policy_class(name: str) -> type[Policy] | None:
    """The adapter class of a policy; None where no policy has the name."""
    if name not in CLASSES:
        return None
    module, _, kind = CLASSES[name].partition(":")
    return vars(import_module(f"shardtune.models.policies.{module}"))[kind]
