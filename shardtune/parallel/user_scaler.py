"""`torch.amp.GradScaler` in a user's own loop: it skips the same updates on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from shardtune.parallel.ranks import Ranks
from shardtune.parallel.torch_private.operations import get_unscale, set_unscale
from shardtune.parallel.weights import local


@contextmanager
def unscaling_on_all_ranks(
    ranks: Ranks, note: Callable[[torch.Tensor], object] = lambda _found: None
) -> Iterator[None]:
    """Inside, an update that a `GradScaler` of this thread has to skip on one rank is skipped on all.

    torch's own operation refuses gradients that a rank holds whole beside sharded ones. With FSDP1 each rank would
    look at its part alone, and go on without the others.

    Args:
        ranks: which all unscale the same gradients.
        note: gets the scalar, 1 where a gradient was not finite, each time that gradients are unscaled.
    """
    plain, thread = get_unscale(), threading.get_ident()

    def unscale(grads: list[torch.Tensor], found: torch.Tensor, factor: torch.Tensor) -> None:
        if threading.get_ident() != thread:
            plain(grads, found, factor)
            return
        plain([local(grad) for grad in grads], found, factor)
        found.copy_(ranks.largest_of(found.to(ranks.device)))
        note(found)

    set_unscale(unscale)
    try:
        yield
    finally:
        set_unscale(plain)
