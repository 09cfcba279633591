"""Second derivatives: what refuses them, where a gradient is computed in a way that has no graph."""

from __future__ import annotations

from typing import NoReturn

from shardtune.errors import ModelError


def refuse_second_derivatives(what: str, remedy: str) -> NoReturn:
    """Refuse a backward pass whose own graph is recorded (`create_graph=True`: gradients are enabled in it).

    Where a gradient has no graph, autograd would take it for a constant. torch's `once_differentiable` notices that
    only where the incoming gradient itself has one.

    Args:
        what: is differentiated, for the message.
        remedy: what to compute in its place.

    Raises:
        ModelError: always.
    """
    raise ModelError(
        f"{what} has first derivatives only, and the loss differentiates its gradient",
        where="create_graph=True",
        remedy=remedy,
    )
