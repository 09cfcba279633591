"""Callbacks: a user's own classes that are told how a run goes, and may ask it to stop, save or evaluate."""

from __future__ import annotations

import difflib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Flag
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from shardtune.config.user_code import check_call, load_function, named_errors
from shardtune.errors import ConfigError, ShardtuneError
from shardtune.parallel.ranks import Ranks

KEY = "runner.callbacks"


class Ask(Flag):
    """What a callback may ask for; several at once as `Ask.SAVE | Ask.STOP`."""

    STOP = 1
    SAVE = 2
    EVALUATE = 4


NOTHING = Ask(0)


@dataclass(frozen=True, slots=True)
class Event:
    """What every event tells.

    Attributes:
        step: optimizer steps done.
        total_steps: the horizon.
        epoch: how far training is, in epochs.
        run_dir: the run directory.
    """

    method: ClassVar[str]

    step: int
    total_steps: int
    epoch: float
    run_dir: Path


@dataclass(frozen=True, slots=True)
class TrainStart(Event):
    """Before the first step of this process.

    Attributes:
        resumed_from: the checkpoint that is gone on from, after `step` steps; None for a fresh run.
    """

    method: ClassVar[str] = "on_train_start"

    resumed_from: Path | None


@dataclass(frozen=True, slots=True)
class StepEnd(Event):
    """After a step, before the evaluation and the checkpoint that may follow it.

    Attributes:
        metrics: of the step, read-only, as `metrics.jsonl` will have them.
        updated: False where the step moved no weight and `step` stayed what it was.
    """

    method: ClassVar[str] = "on_step_end"

    metrics: Mapping[str, float]
    updated: bool


@dataclass(frozen=True, slots=True)
class Evaluated(Event):
    """After an evaluation.

    Attributes:
        metrics: `eval/…` of all sets, read-only.
    """

    method: ClassVar[str] = "on_evaluate"

    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Saved(Event):
    """Once a checkpoint is complete on the disk; `step` is the checkpoint's.

    Attributes:
        path: of the checkpoint.
        best: whether it is the best so far.
    """

    method: ClassVar[str] = "on_save"

    path: Path
    best: bool


@dataclass(frozen=True, slots=True)
class TrainEnd(Event):
    """After the last step and its checkpoint, before `final/` is written; not when a run is interrupted.

    Attributes:
        metrics: of the last evaluation, read-only; empty where there was none.
        checkpoint: the last one.
    """

    method: ClassVar[str] = "on_train_end"

    metrics: Mapping[str, float]
    checkpoint: Path


class Callback:
    """A base for callbacks: a subclass writes those methods that it needs. Any other class with some of them will do.

    The methods are called on rank 0, one callback after the other in the order of the recipe. What they ask for is done
    on all ranks at the next place where it can be: an evaluation after the step that has just ended, a checkpoint after
    that evaluation, the end of training before the next step; what is asked for later than that, after the next step.
    They cannot change numbers: random state, grad mode and the like are put back after each call. An exception ends
    the run, after a checkpoint, and the same command goes on from there.
    """

    def on_train_start(self, event: TrainStart) -> Ask | None:
        """Before the first step; of a resumed run, `event.step` steps are done already."""

    def on_step_end(self, event: StepEnd) -> Ask | None:
        """After each step."""

    def on_evaluate(self, event: Evaluated) -> Ask | None:
        """After each evaluation."""

    def on_save(self, event: Saved) -> Ask | None:
        """Once a checkpoint is complete on the disk."""

    def on_train_end(self, event: TrainEnd) -> None:
        """After the last step and its checkpoint; there is nothing left to ask for."""


METHODS = tuple(kind.method for kind in (TrainStart, StepEnd, Evaluated, Saved, TrainEnd))


class CallbackError(ConfigError):
    """A callback failed; all ranks know it, at the same place."""


@dataclass(frozen=True, slots=True)
class CallbackClass:
    """A class that `runner.callbacks` names.

    Attributes:
        spec: `file.py:Class`.
        kind: the class.
        methods: those of `METHODS` that it has of its own.
    """

    spec: str
    kind: type
    methods: frozenset[str]


def load_callbacks(specs: Sequence[str]) -> list[CallbackClass]:
    """Import the classes of `runner.callbacks`; every process does so before anything starts.

    Raises:
        ConfigError: a file or class cannot be used, or has methods that nothing would call.
    """
    return [_load(spec) for spec in specs]


def _load(spec: str) -> CallbackClass:
    where = f"{KEY}: {spec}"
    kind = load_function(spec, KEY)
    if not isinstance(kind, type):
        raise ConfigError(
            f"{spec.rpartition(':')[2]} is not a class",
            where=where,
            remedy="name a class with methods such as on_step_end(self, event)",
        )
    members = inspect.getmembers_static(kind)
    for name in (name for name, _ in members if name.startswith("on_") and name not in METHODS):
        near = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.5)
        raise ConfigError(
            f"{kind.__name__}.{name}: nothing would call it",
            where=where,
            remedy=f"did you mean {near[0]}?" if near else f"the methods are {', '.join(METHODS)}",
        )
    own = {name: member for name, member in members if name in METHODS and member is not vars(Callback)[name]}
    if not own:
        raise ConfigError(
            f"{kind.__name__} has no method of a callback",
            where=where,
            remedy=f"write one of {', '.join(METHODS)}, each with the event as its argument",
        )
    check_call(kind, 0, f"{kind.__name__}()", where)
    for name, member in own.items():
        arguments = 1 if isinstance(member, (staticmethod, classmethod)) else 2
        check_call(getattr(kind, name), arguments, f"{name}(self, event)", where)
    return CallbackClass(spec, kind, frozenset(own))


class Callbacks:
    """The callbacks of a run. Rank 0 has them; every rank calls every method, so that all do what they ask for.

    An event that no callback listens to costs nothing, any other one reduction of a number.

    Args:
        classes: the same on every rank.
        ranks: of the run.

    Attributes:
        stopped_by: the names of the callbacks that asked to stop, on rank 0.
    """

    FAILED = 2 * Ask.EVALUATE.value

    def __init__(self, classes: Sequence[CallbackClass], ranks: Ranks) -> None:
        self._ranks = ranks
        self._listened = frozenset[str]().union(*(found.methods for found in classes))
        self._made: list[tuple[CallbackClass, object]] = []
        self._classes = list(classes)
        self.stopped_by: list[str] = []

    def make(self) -> None:
        """Make the objects, on rank 0."""
        self._agree(self._make)

    def listen_to(self, kind: type[Event]) -> bool:
        """Whether any callback has the method of such events; the same on every rank."""
        return kind.method in self._listened

    def tell(self, event: Event) -> Ask:
        """Tell all callbacks; returns what they ask for, the same on every rank.

        Raises:
            CallbackError: one of them failed, on all ranks.
        """
        return self._agree(lambda: self._tell(event))

    def _agree(self, action: Callable[[], Ask]) -> Ask:
        """What an action on rank 0 asks for; its error is every rank's."""
        asked, failure = NOTHING, None
        if self._ranks.is_main:
            try:
                with undisturbed():
                    asked = action()
            except ShardtuneError as error:
                failure = CallbackError(error.what, where=error.where, remedy=error.remedy)
        code = int(self._ranks.largest(self.FAILED if failure else asked.value))
        if code == self.FAILED:
            failure = self._ranks.broadcast(failure)
            assert failure is not None
            raise failure
        return Ask(code)

    def _make(self) -> Ask:
        for found in self._classes:
            with named_errors(found.spec, KEY):
                self._made.append((found, found.kind()))
        return NOTHING

    def _tell(self, event: Event) -> Ask:
        asked = NOTHING
        for found, callback in self._made:
            if event.method not in found.methods:
                continue
            with named_errors(found.spec, KEY, event.method):
                answer = getattr(callback, event.method)(event)
            _check_answer(answer, found, event)
            if answer is not None:
                asked |= answer
                self.stopped_by += [found.kind.__name__] if Ask.STOP in answer else []
        return asked


def _check_answer(answer: object, found: CallbackClass, event: Event) -> None:
    if answer is None or (isinstance(answer, Ask) and event.method != TrainEnd.method):
        return
    may = "None: training is over" if event.method == TrainEnd.method else "shardtune.Ask.STOP, SAVE, EVALUATE or None"
    raise ConfigError(
        f"{found.kind.__name__}.{event.method} returned {answer!r}",
        where=f"{KEY}: {found.spec}",
        remedy=f"return {may}",
    )


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put back, after somebody else's code, what the numbers of this process depend on."""
    python, numbers, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    grad, dtype, threads = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        torch.set_rng_state(torchs)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)
