"""The claim that a run which is preempted at any moment loses nothing."""

from __future__ import annotations

import random
import signal
import time

from shardtune.errors import Interrupted, counted
from shardtune.verify.claims.evidence import read_evidence
from shardtune.verify.claims.resume import repeatable, require_same
from shardtune.verify.claims.short_runs import Attempt, ShortRun, ShortRuns
from shardtune.verify.result import Failed

PREEMPTIONS = 4
"""How often a run is preempted."""
SEED = 0
POLL_SECONDS = 0.01
LONGEST_STEP = 300.0
"""Seconds that a step may take before the run counts as stuck."""


def check_preempt(runs: ShortRuns) -> str:
    """SIGTERM at random moments, then continued: nothing is lost, bit by bit."""
    drawn = random.Random(SEED)
    changes, how = repeatable(runs)
    whole = runs.uninterrupted("whole", changes)
    run = runs.new("preempted", changes)
    places: list[int] = []
    while len(places) < PREEMPTIONS:
        attempt = runs.start(run)
        # The first arrives before the first step, while the process starts; the others within or after a step.
        if places:
            _wait_for_step(run, attempt, places[-1] + 1, LONGEST_STEP)
            time.sleep(drawn.uniform(0.0, _seconds_of_a_step(whole, runs.steps)))
        else:
            _wait_for_step(run, attempt, 1, drawn.uniform(0.0, runs.seconds_to(whole, 1)))
        attempt.process.send_signal(signal.SIGTERM)
        # Before Python has imported anything, and once the run has ended, a SIGTERM ends the process at once.
        at_once = -signal.SIGTERM
        code = attempt.wait(expect=(0, Interrupted.exit_code, at_once))
        done = _steps_done(run)
        if places and done < places[-1]:
            raise Failed(
                f"after a SIGTERM the run has {counted(done, 'step')}, before it had {places[-1]}",
                where=whole.summary,
                remedy="look at what is in its checkpoints folder; shardtune verify checkpoint RUN names damage",
            )
        places.append(done)
        if code == 0:
            break
    if places[-1] < runs.steps or not (run.directory / "final").is_dir():
        runs.start(run).wait()
    if run.evidence.again:
        again = run.evidence.again[0]
        raise Failed(
            f"step {again} was computed twice: the SIGTERM after it lost it",
            where=f"step {again}",
            remedy="let nothing catch shardtune's Interrupted in the worker or a plugin",
        )
    require_same(whole, run, runs.steps, f"the run that received SIGTERM {len(places)} times")
    return (
        f"SIGTERM at {len(places)} random moments, with {', '.join(map(str, places))} of {runs.steps} steps saved: "
        f"no step lost or computed twice, bitwise the uninterrupted run{how}"
    )


def _seconds_of_a_step(whole: ShortRun, steps: int) -> float:
    """Between the checkpoints of two steps, on average."""
    first, last = (whole.checkpoint(step).stat().st_mtime for step in (1, steps))
    return (last - first) / max(1, steps - 1)


def _steps_done(run: ShortRun) -> int:
    """The steps of the newest checkpoint."""
    return max(
        (int(path.name.rpartition("_")[2]) for path in run.directory.glob("checkpoints/global_step_*")), default=0
    )


def _wait_for_step(run: ShortRun, attempt: Attempt, number: int, seconds: float) -> None:
    """Until a step has been recorded, the process has ended, or so many seconds have passed."""
    until = time.monotonic() + seconds
    while attempt.process.poll() is None and time.monotonic() < until:
        steps = read_evidence(run.recorded).steps
        if steps and steps[-1].number >= number:
            return
        time.sleep(POLL_SECONDS)
