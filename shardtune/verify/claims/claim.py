"""A claim, and the check of some claims on one recipe."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardtune.config import Recipe
from shardtune.config.user_code import user_fault
from shardtune.data.encoder import DRAWS
from shardtune.errors import Interrupted, ShardtuneError
from shardtune.launch.signals import listening
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.verify.claims.short_recipe import notes_on
from shardtune.verify.claims.short_runs import ShortRuns
from shardtune.verify.result import Failed, Report, Result, Skipped


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that training is claimed to do.

    Attributes:
        name: as typed.
        title: the claim in a sentence.
        check: what was seen, in a sentence; raises `Failed` where the claim does not hold, and `Skipped` where it
            cannot be made, with the reason.
    """

    name: str
    title: str
    check: Callable[[ShortRuns], str]


def check_claims(
    claims: Sequence[Claim],
    recipe: Recipe,
    *,
    steps: int,
    ranks: Sequence[int],
    make_worker: Callable[..., FSDPSftWorker],
    fewer_rows: bool = True,
    title: str,
    report: Callable[[str], None],
) -> Report:
    """Check claims on a recipe, by shortened runs in a folder that is removed.

    Args:
        claims: to check.
        recipe: the user's.
        steps: optimizer steps of each run.
        ranks: the numbers of ranks to compare.
        make_worker: maps a recipe to its worker, and takes `report`.
        fewer_rows: whether the built-in loader reads the rows, which can then be cut.
        title: of the table.
        report: receives a line for each run that starts.

    Raises:
        ShardtuneError: the recipe has a mistake.
        Interrupted: stopped by a signal; the shortened runs have been ended.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardtune-verify-") as folder:
        runs = ShortRuns(
            recipe,
            Path(folder),
            steps=steps,
            ranks=tuple(ranks),
            fewer_rows=fewer_rows,
            make_worker=make_worker,
            report=report,
        )
        threads = ThreadPoolExecutor(max_workers=len(claims))
        try:
            with listening():
                results = list(threads.map(partial(_checked, runs=runs), claims))
                notes = [*notes_on(recipe), *runs.said(DRAWS)]
        except Interrupted as stopped:
            raise Interrupted("stopped: nothing of this is noted, and the shortened runs are removed") from stopped
        finally:
            runs.close()  # first: threads wait for these processes
            threads.shutdown(cancel_futures=True)
    return Report(title, results, time.monotonic() - began, notes)


def _checked(claim: Claim, *, runs: ShortRuns) -> Result:
    began = time.monotonic()
    try:
        text = claim.check(runs)
    except Failed as failure:
        seconds = time.monotonic() - began
        return Result(claim.name, "failed", failure.what, failure.where, failure.remedy, seconds)
    except Skipped as reason:
        return Result(claim.name, "skipped", str(reason), seconds=time.monotonic() - began)
    except (ShardtuneError, Interrupted):
        raise
    except Exception as error:
        what, where, remedy = _explained(error)
        return Result(claim.name, "failed", what, where, remedy, time.monotonic() - began)
    return Result(claim.name, "passed", text, seconds=time.monotonic() - began)


def _explained(error: Exception) -> tuple[str, str, str]:
    """What, where and remedy of an error that no check foresees; the other claims keep their results."""
    fault = user_fault(error)
    if fault is not None:
        return f"nothing was compared: {fault.what}", fault.where or "", fault.remedy or ""
    frames = traceback.extract_tb(error.__traceback__)
    lines = "".join(traceback.format_exception(error)).rstrip()
    return (
        f"nothing was compared: {type(error).__name__}: {error}\n{lines}",
        f"{frames[-1].filename}:{frames[-1].lineno}",
        "please report it with these lines and the output of shardtune env",
    )
