"""The claim that a run which is stopped and continued equals one that is not, bit by bit."""

from __future__ import annotations

from shardtune.verify.claims.checkpoints import tensor_difference
from shardtune.verify.claims.evidence import Evidence, first_difference, require_frozen
from shardtune.verify.claims.short_runs import Attempt, ShortRun, ShortRuns, stopped
from shardtune.verify.result import Failed, Skipped


def check_resume(runs: ShortRuns) -> str:
    """Stopped and continued at several steps, an epoch's end among them, a run equals the uninterrupted one."""
    if runs.steps < 2:
        raise Skipped("a run of one step cannot be stopped before its end: --steps 2 or more")
    changes, how = repeatable(runs)
    parts = runs.new("stopped", changes)
    first = runs.start(parts, stop_after=1)
    whole = runs.uninterrupted("whole", changes)
    require_stopped(first, 1)
    places = stops(whole.evidence, runs.steps)
    for place in places[1:]:
        require_stopped(runs.start(parts, stop_after=place), place)
    runs.start(parts).wait()
    require_same(whole, parts, runs.steps, f"the run that was stopped after {_steps(places)}")
    ends = [step for step in whole.evidence.epoch_ends() if step in places]
    epoch = f"step {ends[0]} ends an epoch" if ends else "no epoch ends within these steps"
    return (
        f"stopped after {_steps(places)} of {runs.steps} ({epoch}): rows, losses, norms, weights and optimizer "
        f"states are bitwise those of the uninterrupted run{how}"
    )


def repeatable(runs: ShortRuns) -> tuple[dict[str, object], str]:
    """What a run needs so that its bits can be repeated, and the words for it; nothing on a processor."""
    if not runs.on_gpu or runs.recipe.runner.deterministic:
        return {}, ""
    return {"runner.deterministic": True}, "; with runner.deterministic=true, as kernels of a GPU may add in any order"


def require_stopped(attempt: Attempt, place: int) -> None:
    """Wait for a process that is to be stopped after a step.

    Raises:
        Failed: it went on to its end.
    """
    if not stopped(attempt):
        raise Failed(
            f"to be stopped after step {place}, the run went on to its end",
            where=attempt.run.summary,
            remedy="let nothing catch shardtune's Interrupted in the worker or a plugin",
        )


def stops(evidence: Evidence, steps: int) -> list[int]:
    """Where a run is stopped: after the first step, at the first end of an epoch, and before the last step."""
    ends = [step for step in evidence.epoch_ends() if step < steps]
    return sorted({1, *ends[:1], steps - 1})


def require_same(whole: ShortRun, other: ShortRun, steps: int, what: str) -> None:
    """Refuse any difference between two runs of the same recipe on the same ranks.

    Raises:
        Failed: with the first step, and the first number or tensor that differ.
    """
    require_frozen(whole.evidence, "the uninterrupted run")
    require_frozen(other.evidence, what)
    found = first_difference(whole.evidence, other.evidence)
    # A step's numbers come before what it leaves, so what an earlier one left is the first difference.
    _require_same_tensors(whole, other, steps if found is None else found.step - 1, what)
    if found is not None:
        raise Failed(
            f"{what} parts from the uninterrupted one in step {found.step}: {found.text}",
            where=f"step {found.step}",
            remedy=_remedy(found.what),
        )


def _require_same_tensors(whole: ShortRun, other: ShortRun, steps: int, what: str) -> None:
    """Refuse any difference between what the first steps of two runs have left."""
    for step in range(1, steps + 1):
        apart = tensor_difference(whole.checkpoint(step), other.checkpoint(step))
        if apart is not None:
            raise Failed(
                f"{what} parts from the uninterrupted one after step {step}: {apart.text}",
                where=f"step {step}: {apart.name}",
                remedy="what a step changes has to be in the checkpoint: parameters, buffers, the optimizer's state; "
                "call super() in overrides of save_checkpoint and load_checkpoint",
            )


def _remedy(what: str) -> str:
    if what in ("rows", "content", "content of the micro-batches", "micro-batches"):
        return (
            "let the loader give the same batches from any position: seed what it shuffles and draws by epoch and row, "
            "or give it state_dict and load_state_dict"
        )
    return (
        "what the step reads besides rows and weights has to be in the checkpoint, or follow from the step: counters, "
        "running values, caches, generators of random numbers of its own (those of torch, numpy and Python are seeded "
        "in each step); where kernels are not deterministic, set runner.deterministic=true"
    )


def _steps(numbers: list[int]) -> str:
    *others, last = (str(number) for number in numbers)
    return f"steps {', '.join(others)} and {last}" if others else f"step {last}"
