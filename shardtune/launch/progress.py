"""How far this process has come: a counter that training increments, read by the watchdog's thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """What a process is doing.

    Attributes:
        name: completes "stuck in …".
        patience: how many times `runner.watchdog_seconds` it may take without progress; 0: any time.
    """

    name: str
    patience: int = 1


START = Phase("the start", 6)
"""Loading, tokenising, meeting: whoever computes, reads or writes makes progress."""
FIRST_STEP = Phase("the first step, which compiles the model", 6)
STEP = Phase("a training step")
EVALUATION = Phase("an evaluation")
GENERATION = Phase("the generation of answers", 6)
HARNESS = Phase("an evaluation by lm-evaluation-harness", 6)
SAVING = Phase("saving a checkpoint", 6)
LOADING = Phase("loading a checkpoint", 6)
CALLBACK = Phase("a callback", 6)
FINAL = Phase("writing final/", 6)
IDLE = Phase("waiting for a call", 0)


class Progress:
    """The progress of this process. Plain attributes, so that a step writes them without a call.

    Attributes:
        beats: increases with each micro-batch, evaluation batch and phase.
        rounds: calls of `run_training` that have returned.
        begun: optimizer steps begun, computed or not; one more than `rounds` inside of a step. Where it is smaller, a
            step was left out.
        micro_batch: begun in the current step, of `micro_batches`.
        phase: the current one.
        step: optimizer steps done.
    """

    __slots__ = ("beats", "begun", "micro_batch", "micro_batches", "phase", "rounds", "step")

    def __init__(self) -> None:
        self.beats = 0
        self.phase = START
        self.start()

    def start(self) -> None:
        """Count steps from here on: a run begins."""
        self.step = self.rounds = self.begun = self.micro_batch = self.micro_batches = 0

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Another phase inside; the one before is restored."""
        before, self.phase = self.phase, phase
        self.beats += 1
        try:
            yield
        finally:
            self.phase = before
            self.beats += 1


PROGRESS = Progress()
"""This process's."""
