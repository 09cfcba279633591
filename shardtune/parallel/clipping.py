"""Clipping: the factor by which a gradient is scaled to a norm of at most some number."""

from __future__ import annotations

from shardtune.errors import ModelError

EPSILON = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`."""


def clip_factor(max_norm: float, norm: float) -> float:
    """At most 1; `norm` is that of all ranks."""
    return min(1.0, max_norm / (norm + EPSILON))


def check_max_norm(max_norm: float, where: str) -> None:
    """Refuse what turns or erases the gradient; `where` is the method that calls `clip_grad_norm_`.

    Raises:
        ModelError: it is no number above 0.
    """
    if not max_norm > 0:
        raise ModelError(
            f"clip_grad_norm_ is called with {max_norm}, which would turn or erase the gradient",
            where=where,
            remedy="give a number above 0, and float('inf') for the norm alone",
        )
