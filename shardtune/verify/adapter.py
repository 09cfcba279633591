"""The conformance kit: is a model integrated correctly? Each failed check reports what is wrong and how to fix it."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from shardtune.config.loading import RecipeSource
from shardtune.errors import ConfigError, ShardtuneError
from shardtune.verify.case import find_case
from shardtune.verify.kit import CannotStart, Kit
from shardtune.verify.lora import check_lora
from shardtune.verify.measures import check_metrics
from shardtune.verify.parity import check_parity, check_shards
from shardtune.verify.result import Failed, Outcome, Report, Result, Skipped
from shardtune.verify.runs import check_bf16, check_encode, check_reload, check_repeat, check_resume
from shardtune.verify.structure import check_build, check_gradient, check_ties
from shardtune.verify.sums import check_empty, check_masked, check_padding, check_sums

SAME_ERROR = 80
"""Two exceptions that agree in this many characters count as one fault; shapes and addresses come further on."""


@dataclass(frozen=True, slots=True)
class Check:
    """One property of an adapter.

    Attributes:
        name: for `--only`.
        run: returns the result in a sentence; raises `Failed` or `Skipped`.
        ranks: whether it needs the two ranks.
        fresh: whether it needs the fresh process.
    """

    name: str
    run: Callable[[Kit], str]
    ranks: bool = False
    fresh: bool = False

    @property
    def title(self) -> str:
        """The property that it checks, a sentence."""
        return (self.run.__doc__ or "").strip().partition("\n")[0]


CHECKS: tuple[Check, ...] = (
    Check("encode", check_encode),
    Check("build", check_build),
    Check("gradient", check_gradient),
    Check("sums", check_sums),
    Check("masked", check_masked),
    Check("padding", check_padding),
    Check("empty", check_empty),
    Check("metrics", check_metrics),
    Check("ties", check_ties),
    Check("repeat", check_repeat),
    Check("resume", check_resume),
    Check("bf16", check_bf16),
    Check("lora", check_lora),
    Check("reload", check_reload, fresh=True),
    Check("shards", check_shards, ranks=True),
    Check("parity", check_parity, ranks=True),
)
"""In the order in which they run; those that wait for other processes are last."""


def verify_adapter(
    adapter: str | Path,
    recipe: RecipeSource | None = None,
    *overrides: str,
    only: Collection[str] = (),
    processes: bool = True,
    report: Callable[[str], None] = print,
) -> Report:
    """Check an adapter.

    Args:
        adapter: `file.py:Class`, a name as `actor.model.model_type` takes it, or a recipe that names its model itself.
        recipe: whose model, options and training rows are taken; without one the adapter's own `examples`.
        overrides: `key=value` over the recipe.
        only: names of checks; all of them by default.
        processes: False leaves out what needs other processes (two ranks, a fresh one), and is quicker.
        report: receives a line per check.

    Raises:
        ShardtuneError: there is no such adapter or check, the recipe is wrong, or there are no rows.
    """
    with open_kit(adapter, recipe, *overrides, only=only, processes=processes) as (kit, checks):
        return Report(str(adapter), list(_run_all(kit, checks, report)))


@contextmanager
def open_kit(
    adapter: str | Path,
    recipe: RecipeSource | None,
    *overrides: str,
    only: Collection[str] = (),
    processes: bool = True,
) -> Iterator[tuple[Kit, Sequence[Check]]]:
    """The kit of an adapter and the chosen checks; its processes and files are removed at the end."""
    checks = chosen(only)
    with tempfile.TemporaryDirectory(prefix="shardtune-verify-") as folder, _single_thread():
        kit = Kit(find_case(adapter, recipe, overrides, Path(folder)), processes=processes)
        try:
            if processes and any(check.ranks for check in checks):
                kit.ranks.start()
            if processes and any(check.fresh for check in checks):
                kit.fresh.start()
            yield kit, checks
        finally:
            kit.close()


@contextmanager
def _single_thread() -> Iterator[None]:
    """One thread inside, as in the other processes; the caller's threads and generator are restored afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)


def chosen(only: Collection[str]) -> list[Check]:
    """The checks of these names, in order; all of them for none."""
    known = [check.name for check in CHECKS]
    for name in only:
        if name not in known:
            raise ConfigError(
                f"there is no check {name!r}", where="--only", remedy=f"the checks are: {', '.join(known)}"
            )
    return [check for check in CHECKS if not only or check.name in only]


def _run_all(kit: Kit, checks: Sequence[Check], report: Callable[[str], None]) -> Iterator[Result]:
    for number, check in enumerate(checks, 1):
        result = run_check(kit, check)
        report(f"{number:2}/{len(checks)} {check.name:<9} {result.outcome:<8} {result.seconds:5.1f} s  {check.title}")
        yield result


OF_ANOTHER_DTYPE = (
    "the checks compute in fp64, as model.precision: fp64 does: make layers and parameters in the constructor of the "
    "model (one made in forward or loss has random values and is not trained), and other tensors with the dtype and "
    "device of an input: torch.ones_like(x), x.new_zeros(3), buffer.to(x.dtype); a layer that casts to fp32 by itself "
    "(x.float() before a norm) cannot be checked: cast to the dtype of its weight"
)


def run_check(kit: Kit, check: Check) -> Result:
    """Run one check, whatever error it meets; a model that cannot be set up or used is reported by the first check
    only."""
    began = time.perf_counter()

    def result(outcome: Outcome, text: str, where: str = "", remedy: str = "") -> Result:
        return Result(check.name, outcome, text, where, remedy, time.perf_counter() - began)

    try:
        return result("passed", check.run(kit))
    except Skipped as reason:
        return result("skipped", str(reason))
    except CannotStart as error:
        if kit.cannot_start:
            return result("skipped", f"the model cannot be set up (see {kit.cannot_start})")
        kit.cannot_start = check.name
        what, where, remedy = error.args
        return result("failed", what, where or "setting up", remedy or "fix what the message names")
    except Failed as found:
        return result("failed", found.what, found.where, found.remedy)
    except ShardtuneError as error:
        # One fault of the adapter itself, which every further check would meet again.
        kind = error.remedy or error.what
        first = kit.reported.setdefault(kind, check.name)
        if first != check.name:
            return result("skipped", f"it cannot run, with the same error as {first}: {error.what}")
        return result("failed", error.what, error.where or check.name, error.remedy or "fix what the message names")
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        first = kit.reported.setdefault(message[:SAME_ERROR], check.name)
        if first != check.name:
            return result("skipped", f"it cannot run, with the same error as {first}: {message}")
        return result(
            "failed", message, _place(kit, error), OF_ANOTHER_DTYPE if _dtypes(error) else "fix what the message names"
        )


def _dtypes(error: Exception) -> bool:
    """Whether torch refuses tensors of two dtypes."""
    return isinstance(error, RuntimeError) and "dtype" in str(error)


def _place(kit: Kit, error: Exception) -> str:
    """Where an exception arose: the last line of the adapter's own file that it came through, or else the last line."""
    file = (kit.case.recipe.actor.model.adapter or "").rpartition(":")[0]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if file and frame.filename == file] or frames[-1:]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "unknown"
