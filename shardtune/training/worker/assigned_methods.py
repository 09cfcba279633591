"""Methods that a user's code assigns to a worker object, where only those of its class are called."""

from __future__ import annotations

from dataclasses import fields

from shardtune.errors import ConfigError
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.padded_task import PaddedMethods
from shardtune.training.worker.task import UserMethods

BOUND = {each.name for kind in (UserMethods, PaddedMethods) for each in fields(kind)}
"""The methods that are looked up once, when the worker is made."""


def refuse_assigned_methods(worker: FSDPSftWorker) -> None:
    """Refuse a method that was assigned to a worker: it would be called in some places, and not in others.

    Raises:
        ConfigError: names it.
    """
    for name in sorted(BOUND & vars(worker).keys()):
        kind = type(worker).__name__
        raise ConfigError(
            f"{name} is assigned to the {kind} object, and that of the class is called in its place",
            where=f"self.{name}",
            remedy=f"define {name} in the class; it may decide there, by an attribute, what it calls",
        )
