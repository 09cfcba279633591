"""Checks of a user's worker class, made when it is defined: whatever it overrides, something calls."""

from __future__ import annotations

import difflib
from inspect import getattr_static, isfunction

from shardtune.config.other_trainers import OF_WORKERS
from shardtune.config.user_code import names_in

OPTIONAL = (
    *("model_provider_func", "loss_weights", "setup", "setup_evaluation", "run_training", "run_eval"),
    *("save_checkpoint", "load_checkpoint"),
)
"""Methods that a worker may leave out, so that a misspelt one would not be missed."""
OWN = "shardtune."
"""Prefix of the package's own modules."""


def check_worker_class(kind: type) -> None:
    """Refuse a class with methods that nothing would ever call.

    Raises:
        TypeError: it overrides a final method, or names one as another trainer does, or misspells one.
    """
    for base in kind.__mro__:  # a class beside the worker's may override too, as a mixin does
        for name, member in vars(base).items():
            method = member.fget if isinstance(member, property) else member
            final_here = isfunction(method) and "__final__" in vars(method)
            if final_here and getattr_static(kind, name) is not member:
                raise TypeError(
                    f"{kind.__name__}.{name} would never be called: {name} of {base.__name__} cannot be "
                    "overridden. Give the method or attribute another name"
                )
    if not kind.__module__.startswith(OWN):
        _check_names(kind)


def _check_names(kind: type) -> None:
    """Refuse such names, unless another method of the class uses them."""
    written = vars(kind)
    free = [name for name in OPTIONAL if name not in written]
    for name, member in written.items():
        if not isfunction(member) or name.startswith("_") or any(name in vars(base) for base in kind.__mro__[1:]):
            continue
        near = difflib.get_close_matches(name, free, n=1, cutoff=0.84)
        instead = f"Did you mean {near[0]}?" if near else OF_WORKERS.get(name, "")
        if instead and not any(name in names_in(other) for key, other in written.items() if key != name):
            end = "" if near else "."
            raise TypeError(
                f"{kind.__name__}.{name} would never be called. {instead}{end} The name of a helper may begin with _"
            )
