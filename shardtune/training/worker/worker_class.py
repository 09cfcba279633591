"""Checks of a user's worker class: whatever it writes, something calls."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from inspect import getattr_static, isfunction

from shardtune.config.other_trainers import OF_WORKERS
from shardtune.config.user_code import function_of, names_in
from shardtune.errors import ConfigError

OPTIONAL = (
    *("model_provider_func", "loss_weights", "setup", "setup_evaluation", "run_training", "run_eval"),
    *("save_checkpoint", "load_checkpoint"),
)
"""Methods that a worker may leave out, so that a misspelt one would not be missed."""
OWN = "shardtune."
"""Prefix of the package's own modules."""


def check_worker_class(kind: type) -> None:
    """Refuse a class that overrides a final method, when it is defined.

    Raises:
        TypeError: names the method.
    """
    for base in kind.__mro__:  # a class beside the worker's may override too, as a mixin does
        for name, member in vars(base).items():
            method = function_of(member)
            final_here = isfunction(method) and "__final__" in vars(method)
            if final_here and getattr_static(kind, name) is not member:
                raise TypeError(
                    f"{kind.__name__}.{name} would never be called: {name} of {base.__name__} cannot be "
                    "overridden. Give the method or attribute another name"
                )


def check_worker_names(kind: type, root: type, instead: Mapping[str, str] = OF_WORKERS) -> None:
    """Refuse methods that nothing calls: those named as another trainer does, and misspelt ones.

    It is called for the class of which a worker is made, and not when a class is defined: what a class defines, one
    derived from it may call.

    Args:
        kind: the user's class.
        root: the class of all workers of its sort.
        instead: by the name of a method that another trainer calls, what does its work.

    Raises:
        ConfigError: no other method of the class or of those that it derives from names such a method.
    """
    users = [base for base in kind.__mro__ if not base.__module__.startswith(OWN)]
    workers = [base for base in users if issubclass(base, root)]
    others = [base for base in kind.__mro__ if base not in workers]
    members = [item for base in users for item in vars(base).items()]
    for owner in workers:
        free = [name for name in OPTIONAL if name not in vars(owner)]
        for name, member in vars(owner).items():
            if not isfunction(member) or name.startswith("_") or any(name in vars(base) for base in others):
                continue
            near = difflib.get_close_matches(name, free, n=1, cutoff=0.84)
            advice = f"did you mean {near[0]}?" if near else instead.get(name, "")
            if advice and not any(name in names_in(other) for key, other in members if key != name):
                raise ConfigError(
                    f"{owner.__name__}.{name} would never be called",
                    where=f"class {owner.__qualname__}",
                    remedy=f"{advice if near else f'leave it out: {advice}.'} The name of a helper of your own may "
                    "begin with _",
                )
