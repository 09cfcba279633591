"""The context that a run passes to its worker at set-up."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


def silent(text: str) -> None:
    """Report nothing."""


def _nothing() -> None:
    """No polling: outside of a run nothing can stop a worker."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """The context that a run passes to `setup` or `setup_evaluation` of its worker.

    Attributes:
        poll: called where all ranks may stop together: before each step and each batch of an evaluation.
        report: receives one line of text for the user; None: printed on rank 0, silent on the others.
        samples_dir: where the answers of evaluations are written; None: nowhere.
        episodes_dir: where the table and the videos of episodes are written; None: in `samples_dir`, by step.
        weights_directory: an exported directory whose weights replace the initial ones.
        notes: lines for the first screen, besides the worker's.
        tries_loss: whether the loss of a user's adapter is tried on two rows before training.
    """

    poll: Callable[[], None] = _nothing
    report: Callable[[str], None] | None = None
    samples_dir: Path | None = None
    episodes_dir: Path | None = None
    weights_directory: Path | None = None
    notes: Sequence[str] = ()
    tries_loss: bool = False


class TrainedWorker(Protocol):
    """A worker, whose `setup` may be the user's."""

    context: RunContext

    def setup(self, context: RunContext | None = None) -> None: ...


def set_up(worker: TrainedWorker, context: RunContext) -> None:
    """Call the `setup` of a worker; an override need neither take the context nor pass it on."""
    worker.context = context
    try:
        inspect.signature(worker.setup).bind(context)
    except TypeError:
        worker.setup()
    else:
        worker.setup(context)
