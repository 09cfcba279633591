"""Callbacks: user classes that receive a run's events and may request a stop, a checkpoint or an evaluation."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Flag
from pathlib import Path
from typing import Any, ClassVar

import torch

from shardtune.batch.seeds import generators_kept
from shardtune.config.user_code import check_call, load_function, named_errors
from shardtune.errors import ConfigError, ShardtuneError
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.torch_private.operations import TorchDispatchMode
from shardtune.parallel.torch_settings import restored
from shardtune.training.callback_state import as_text, own_states

KEY = "runner.callbacks"


class Ask(Flag):
    """What a callback may request; combine requests as `Ask.SAVE | Ask.STOP`."""

    STOP = 1
    SAVE = 2
    EVALUATE = 4


NOTHING = Ask(0)


@dataclass(frozen=True)
class Event:
    """The fields of every event, without slots: with them Python names no field that is set.

    Attributes:
        step: optimizer steps done.
        total_steps: steps of the whole run (the schedule's horizon).
        epoch: progress in epochs, with a fraction.
        run_dir: the run directory.
    """

    method: ClassVar[str]

    step: int
    total_steps: int
    epoch: float
    run_dir: Path


@dataclass(frozen=True)
class TrainStart(Event):
    """Before the first step of this process.

    Attributes:
        resumed_from: the checkpoint that training continues from, after `step` steps; None for a fresh run.
    """

    method: ClassVar[str] = "on_train_start"

    resumed_from: Path | None


@dataclass(frozen=True)
class StepEnd(Event):
    """After a step, before the evaluation and the checkpoint that may follow it.

    Attributes:
        metrics: of the step, read-only, as written to `metrics.jsonl`.
        updated: False when the step was skipped: no weight changed and `step` did not advance, or is that of the
            checkpoint of a rollback.
    """

    method: ClassVar[str] = "on_step_end"

    metrics: Mapping[str, float]
    updated: bool


@dataclass(frozen=True)
class Evaluated(Event):
    """After an evaluation.

    Attributes:
        metrics: `eval/…` of all sets, read-only.
    """

    method: ClassVar[str] = "on_evaluate"

    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Saved(Event):
    """Once a checkpoint is complete on the disk; `step` is the checkpoint's.

    Attributes:
        path: of the checkpoint.
        best: whether it is the best so far.
    """

    method: ClassVar[str] = "on_save"

    path: Path
    best: bool


@dataclass(frozen=True)
class RolledBack(Event):
    """After a rollback (`runner.on_nonfinite`, `runner.on_spike`); `step` is that of the checkpoint.

    Steps and evaluations after it are undone. Those that follow have their numbers again.

    Attributes:
        checkpoint: whose weights, optimizer and schedule are in use again.
        undone: the number of optimizer steps that are undone.
    """

    method: ClassVar[str] = "on_rollback"

    checkpoint: Path
    undone: int


@dataclass(frozen=True)
class TrainEnd(Event):
    """After the last step and its checkpoint, before `final/` is written; not when a run is interrupted.

    Attributes:
        metrics: of the last evaluation, read-only; empty without one.
        checkpoint: the last one.
    """

    method: ClassVar[str] = "on_train_end"

    metrics: Mapping[str, float]
    checkpoint: Path


class Callback:
    """Base class of callbacks: override the methods you need. Any other class that has some of them works as well.

    The methods are called on rank 0, one callback after the other in the order of the recipe. A request is carried out
    on all ranks at the next opportunity: an evaluation after the step that has just ended, a checkpoint after that
    evaluation, a stop before the next step; a request made later than that, after the next step. Callbacks cannot
    change numerics: random state, grad mode and the like are restored after each call. An exception ends the run after
    a checkpoint is written, and the same command continues from there.

    A resumed run makes its callbacks anew. What they have counted comes back with `state_dict` and `load_state_dict`,
    of which a class has both or none: the state is stored in each checkpoint, and loaded before `on_train_start` of a
    run that continues from it, and before `on_rollback`.
    """

    def on_train_start(self, event: TrainStart) -> Ask | None:
        """Before the first step; in a resumed run, after `event.step` steps."""

    def on_step_end(self, event: StepEnd) -> Ask | None:
        """After each step."""

    def on_evaluate(self, event: Evaluated) -> Ask | None:
        """After each evaluation."""

    def on_save(self, event: Saved) -> Ask | None:
        """Once a checkpoint is complete on the disk."""

    def on_rollback(self, event: RolledBack) -> Ask | None:
        """After a rollback; what is counted of steps and evaluations after `event.step` is to be forgotten."""

    def on_train_end(self, event: TrainEnd) -> None:
        """After the last step and its checkpoint; requests are no longer possible."""

    def state_dict(self) -> Mapping[str, object]:
        """What a resumed run needs: a dict of numbers, texts, booleans, None, lists and dicts of them.

        It is called when a checkpoint is begun, before the `on_save` of that checkpoint.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what `state_dict` returned for the checkpoint that training continues from."""


METHODS = tuple(kind.method for kind in (TrainStart, StepEnd, Evaluated, Saved, RolledBack, TrainEnd))
STATE_METHODS: dict[str, tuple[str, ...]] = {"state_dict": (), "load_state_dict": ("state",)}


class CallbackError(ConfigError):
    """A callback failed; raised on all ranks at the same point."""


@dataclass(frozen=True, slots=True)
class CallbackClass:
    """A class that `runner.callbacks` names.

    Attributes:
        spec: `file.py:Class`.
        kind: the class.
        methods: those of `METHODS` that it overrides.
        has_state: whether it has `state_dict` and `load_state_dict`.
    """

    spec: str
    kind: type
    methods: frozenset[str]
    has_state: bool

    @property
    def name(self) -> str:
        """By which its state in a checkpoint is found again, wherever its file lies then: `file.py:Class`."""
        file, _, kind = self.spec.rpartition(":")
        return f"{Path(file).name}:{kind}"


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
    written = {name: member for name, member in members if member is not vars(Callback).get(name)}
    overridden = {name: member for name, member in written.items() if name in METHODS}
    if not overridden:
        raise ConfigError(
            f"{kind.__name__} has no method of a callback",
            where=where,
            remedy=f"write one of {', '.join(METHODS)}, each with the event as its argument",
        )
    check_call(kind, 0, f"{kind.__name__}()", where)
    for name, member in overridden.items():
        _check_arguments(kind, name, member, ("event",), where)
    return CallbackClass(spec, kind, frozenset(overridden), _has_state(kind, written, where))


def _has_state(kind: type, written: Mapping[str, object], where: str) -> bool:
    found = {name: arguments for name, arguments in STATE_METHODS.items() if name in written}
    for name, arguments in found.items():
        _check_arguments(kind, name, written[name], arguments, where)
    if len(found) == 1:
        (there,) = found
        (missing,) = STATE_METHODS.keys() - found.keys()
        raise ConfigError(
            f"{kind.__name__} has {there} and no {missing}",
            where=where,
            remedy=f"write {missing}({', '.join(('self', *STATE_METHODS[missing]))}) too: what the one returns is "
            "stored in each checkpoint, and given to the other where a run continues from it",
        )
    return bool(found)


def _check_arguments(kind: type, name: str, member: object, arguments: tuple[str, ...], where: str) -> None:
    bound = isinstance(member, (staticmethod, classmethod))
    check_call(getattr(kind, name), len(arguments) + (not bound), f"{name}({', '.join(('self', *arguments))})", where)


class Callbacks:
    """The callbacks of a run. They live on rank 0; every rank calls every method, so that all act on the same requests.

    An event that no callback listens to costs nothing, any other one the reduction of a scalar.

    Args:
        classes: the same on every rank.
        ranks: of the run.

    Attributes:
        stopped_by: the names of the callbacks that requested a stop, on rank 0.
    """

    FAILED = 2 * Ask.EVALUATE.value

    def __init__(self, classes: Sequence[CallbackClass], ranks: Ranks) -> None:
        self._ranks = ranks
        self._listened = frozenset[str]().union(*(found.methods for found in classes))
        self._made: list[tuple[CallbackClass, object]] = []
        self._classes = list(classes)
        self._failed = False
        self.stopped_by: list[str] = []

    def make(self) -> None:
        """Create the callback objects, on rank 0."""
        self._agree(self._make)

    def listen_to(self, kind: type[Event]) -> bool:
        """Whether any callback handles this kind of event; the same on every rank."""
        return kind.method in self._listened

    def tell(self, event: Event) -> Ask:
        """Call all callbacks with an event; returns their requests, the same on every rank.

        Raises:
            CallbackError: one of them failed, on all ranks.
        """
        return self._agree(lambda: self._dispatch(event))

    def silence(self) -> None:
        """Call none of them for an event any more, as one has failed; their states are still those of checkpoints."""
        self._listened, self._failed = frozenset(), True

    def state(self) -> list[dict[str, str]]:
        """The states of those that have one, for a checkpoint; on other ranks than 0, none.

        Raises:
            CallbackError: one could not be taken, on all ranks; after `silence` it is left out instead.
        """
        taken: list[dict[str, str]] = []
        if any(found.has_state for found in self._classes):
            self._agree(lambda: self._take(taken))
        return taken

    def restore(self, stored: Sequence[Mapping[str, str]]) -> list[str]:
        """Load the states of a checkpoint; returns lines on those that have none in it, on rank 0.

        Raises:
            CallbackError: one of them does not take its state, on all ranks.
        """
        notes: list[str] = []
        if any(found.has_state for found in self._classes):
            self._agree(lambda: self._load(stored, notes))
        return notes

    def _agree(self, action: Callable[[], Ask]) -> Ask:
        """Run an action on rank 0; its requests, or its error, are broadcast to every rank."""
        requested, failure = NOTHING, None
        if self._ranks.is_main:
            try:
                with undisturbed(), RankAlone() if self._ranks.world_size > 1 else nullcontext():
                    requested = action()
            except ShardtuneError as error:
                failure = CallbackError(error.what, where=error.where, remedy=error.remedy)
        code = int(self._ranks.largest(self.FAILED if failure else requested.value))
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

    def _take(self, taken: list[dict[str, str]]) -> Ask:
        for found, callback in self._with_state():
            method, where = f"{found.kind.__name__}.state_dict()", f"{KEY}: {found.spec}"
            try:
                with named_errors(found.spec, KEY, "state_dict"):
                    text = as_text(callback.state_dict(), method, where)  # which a state that holds itself has not
                taken.append({"class": found.name, "state": text})
            except ConfigError:
                if not self._failed:
                    raise
        return NOTHING

    def _load(self, stored: Sequence[Mapping[str, str]], notes: list[str]) -> Ask:
        made = self._with_state()
        states = own_states([found.name for found, _ in made], stored)
        for (found, callback), state in zip(made, states, strict=True):
            if state is None:
                notes.append(f"{found.kind.__name__} has no state in the checkpoint: it begins anew")
                continue
            with named_errors(found.spec, KEY, "load_state_dict"):
                callback.load_state_dict(state)
        return NOTHING

    def _with_state(self) -> list[tuple[CallbackClass, Any]]:
        return [(found, callback) for found, callback in self._made if found.has_state]

    def _dispatch(self, event: Event) -> Ask:
        requested = NOTHING
        for found, callback in self._made:
            if event.method not in found.methods:
                continue
            with named_errors(found.spec, KEY, event.method):
                answer = getattr(callback, event.method)(event)
            _check_answer(answer, found, event)
            if answer is not None:
                requested |= answer
                self.stopped_by += [found.kind.__name__] if Ask.STOP in answer else []
        return requested


def _check_answer(answer: object, found: CallbackClass, event: Event) -> None:
    if answer is None or (isinstance(answer, Ask) and event.method != TrainEnd.method):
        return
    may = "None: training is over" if event.method == TrainEnd.method else "shardtune.Ask.STOP, SAVE, EVALUATE or None"
    raise ConfigError(
        f"{found.kind.__name__}.{event.method} returned {answer!r}",
        where=f"{KEY}: {found.spec}",
        remedy=f"return {may}",
    )


class RankAlone(TorchDispatchMode):
    """Refuse collectives inside: the other ranks would take them for one of their own, or never come to them."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile inside; with any other mode it does not, and fails where it has to."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace.lstrip("_").startswith("c10d"):
            raise RuntimeError(
                f"callbacks are called on rank 0 alone, so no other rank takes part in a collective ({func})"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore, after user code has run, the global state that this process's numerics depend on."""
    grad, threads, device = torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_device()
    try:
        with generators_kept(), restored():
            yield
    finally:
        torch.set_grad_enabled(grad)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
