"""Activation checkpointing: what is saved of a forward pass, and what is computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

from torch.utils import checkpoint as checkpointing
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    _allowed_determinism_checks_to_fns,
    _VersionWrapper,
    create_selective_checkpoint_contexts,
)

Policy = Callable[..., CheckpointPolicy]
"""Whether the result of an operation is saved in a checkpointed forward pass."""
SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_FORGOTTEN = vars(checkpointing).get("_RECOMPUTE", object())
"""Stands in the place of a saved result that is computed again; torch 2.13 and later have an object for that."""


def selective_contexts(policy: Policy) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """The contexts of a checkpointed forward pass and of its recomputation; what is changed in place is not saved.

    torch refuses a saved result that is changed after its operation, with an error in the backward pass. Here it is
    computed again. So `out = product(x, w); out.add_(bias)`, as the experts of transformers have it, needs one product
    more: the saved tensor has the bias in it by the time the product is due.
    """

    def unless_forgotten(
        context: SelectiveCheckpointContext, op: object, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        """torch 2.11 and 2.12 call the policy in the recomputation too; what they have saved waits in a list per op."""
        decided = policy(context, op, *args, **kwargs)
        if context.is_recompute and decided in SAVED:
            waiting = saved.get(op)
            if waiting and waiting[0] is _FORGOTTEN:
                waiting.pop(0)
                return CheckpointPolicy.PREFER_RECOMPUTE
        return decided

    forward, again = create_selective_checkpoint_contexts(unless_forgotten)
    saved = cast(dict[object, list[object]], forward.storage)  # `forward` holds the policy, which must not hold it too

    def forget_changed() -> None:
        for results in forward.storage.values():
            for place, result in results.items() if isinstance(results, dict) else enumerate(results):
                if _is_changed(result):
                    results[place] = _FORGOTTEN

    @contextmanager
    def computing() -> Iterator[None]:
        with forward:
            yield
        forget_changed()  # what the layer itself has changed, whose memory is free now

    return computing(), _Again(forget_changed, again)


class _Again(AbstractContextManager[None]):
    """The context of a recomputation: the first has what was saved, those behind it compute everything again.

    There are several where a backward pass is differentiated itself, or a graph is retained for another one.

    Args:
        begin: is called before the first.
        first: torch's context, which forgets each saved result when it was used.
    """

    def __init__(self, begin: Callable[[], None], first: AbstractContextManager[object]) -> None:
        self._begin = begin
        self._first: AbstractContextManager[object] | None = first
        self._entered: list[AbstractContextManager[object]] = []

    def __enter__(self) -> None:
        if self._first is not None:
            self._begin()
        self._entered.append(self._first or nullcontext())
        self._first = None
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def _is_changed(result: object) -> bool:
    """Whether a tensor of a saved result has been changed in place since it was saved."""
    parts = [part for part in tree_iter(result) if isinstance(part, _VersionWrapper)]
    return any(part.version is not None and part.val._version != part.version for part in parts)


@contextmanager
def unchecked_recomputation() -> Iterator[None]:
    """Inside, what checkpointed layers compute again is not compared with what they computed first.

    `checkpoint` has an argument for it, which a model of transformers that checkpoints itself does not pass on.
    """
    before = dict(_allowed_determinism_checks_to_fns)
    _allowed_determinism_checks_to_fns.update({name: lambda _: None for name in before})
    try:
        yield
    finally:
        _allowed_determinism_checks_to_fns.update(before)
