"""A training step can be read in one sitting: how many functions of the package it passes through."""

from __future__ import annotations

import inspect
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import shardtune
from shardtune.config import load_recipe
from shardtune.run.display import Display
from shardtune.training.runner import SFTRunner
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.chosen import chosen, slow_except
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import quiet
from tests.support.tiny_run import make_tiny, write_rows

PACKAGE = Path(shardtune.__file__).parent
OF_A_PROCESSOR = ("parallel/half_products.py", "parallel/torch_private/graph.py backward")
"""What a processor without instructions for bf16 needs in addition."""
PARTS = re.compile(r"\.<locals>\.<(listcomp|dictcomp|setcomp|genexpr)>")
MAX_FUNCTIONS, MAX_FILES, MAX_LINES = 25, 10, 80
"""Of an optimizer step; a loss of whole steps passes through 4 functions more."""
LOOP_FUNCTIONS, LOOP_FILES = 49, 19
"""Of a whole iteration of the loop: the step, its data and metrics, the display with its forms of numbers, the logs."""
RANKS_FUNCTIONS, RANKS_FILES = 19, 5
"""On several ranks in addition: the hooks that let a part of the model be called by itself (parallel/parts.py), what
frees weights that it has gathered (parallel/whole_weights.py), and the comparison of what ranks have called and used
(parallel/unit_calls.py), with zeros for what one has not used; whether a backward pass is differentiated itself."""
MASTERS = {"bf16": 1}
"""Functions in addition, in a file of their own, where weights are kept in fp32 beside a model in half precision."""
HEALTHY = Path(__file__).parents[1] / "support" / "healthy_adapters.py"


@contextmanager
def traced() -> Iterator[dict[str, CodeType]]:
    """The package's functions that this thread enters meanwhile, by file and name; comprehensions aside."""
    entered: dict[int, CodeType] = {}
    seen: dict[str, CodeType] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered[id(frame.f_code)] = frame.f_code

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        for code in entered.values():
            file = Path(code.co_filename)
            name = f"{file.relative_to(PACKAGE)} {code.co_qualname}" if PACKAGE in file.parents else ""
            if name and not name.startswith(OF_A_PROCESSOR) and not PARTS.search(code.co_qualname):
                seen[name] = code


@dataclass(frozen=True, slots=True)
class Trace:
    """What a step entered, by file and name, with the lines of each.

    Attributes:
        step: the optimizer step: two micro-batches or more, forward to update.
        loop: an iteration of the loop around it, from one poll to the next, logging included.
    """

    step: dict[str, int]
    loop: dict[str, int]


def traces(recipes: list[dict[str, Any]]) -> list[Trace]:
    """Of each recipe's second step (what is done once is done), on every rank."""
    return [_trace(recipe) for recipe in recipes]


def _trace(recipe: dict[str, Any]) -> Trace:
    worker = SFTWorker(load_recipe(recipe), report=quiet)
    with tempfile.TemporaryDirectory() as folder:
        runner = SFTRunner(worker.recipe, worker, run_dir=Path(folder), observer=Display())
        loop = iteration(runner)
        step = inside(worker)
    worker.release()
    return Trace(lengths(step), lengths(loop))


def lengths(seen: Mapping[str, CodeType]) -> dict[str, int]:
    """The number of lines of each function."""
    return {name: len(inspect.getsourcelines(code)[0]) for name, code in seen.items()}


def iteration(runner: SFTRunner) -> dict[str, CodeType]:
    """The functions of the loop's second iteration; what is done once is done in the first."""
    traces: list[dict[str, CodeType]] = []
    poll = runner._poll

    with ExitStack() as stack:

        def traced_poll() -> None:
            if len(traces) == 2:
                stack.close()
            traces.append(stack.enter_context(traced()) if len(traces) == 1 else {})
            poll()

        runner._poll = traced_poll
        runner.run()
    assert len(traces) > 3, "the run was too short"
    return traces[1]


LENGTH = {"runner__max_steps": 5, "runner__max_epochs": 9, "runner__save_interval": -1}


def recipes(folder: Path) -> dict[str, dict[str, Any]]:
    tiny = make_tiny(folder)
    numbers = [{"x": [0.1 * n, 0.2, -0.1 * n, 1.0], "y": [1.0, n % 3], "seen": [1.0, 1.0]} for n in range(21)]
    rows = write_rows(folder / "numbers.jsonl", numbers)
    spikes = {"warmup_steps": 1, "factor": 1e9}
    plain = tiny.recipe(**LENGTH, data__train_data_paths=str(rows), runner__on_spike="skip", runner__spike=spikes)
    plain["actor"]["model"] = {"adapter": f"{HEALTHY}:Regressor", "precision": "fp32"}
    return {
        "causal": tiny.recipe(**LENGTH),
        "bf16": tiny.recipe(**LENGTH, actor__model__precision="bf16"),
        "lora": tiny.recipe(**LENGTH, actor__model__is_lora=True, actor__model__lora={"target_modules": "all-linear"}),
        "plain": plain,
    }


KINDS = ("causal", "bf16", "lora", "plain")


@pytest.fixture(scope="module")
def steps(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Trace]:
    """By kind of run and number of ranks."""
    every = recipes(tmp_path_factory.mktemp("trace"))
    assert tuple(every) == KINDS
    kinds = chosen(request, "kind")
    made = [every[kind] for kind in kinds]
    alone, together = traces(made), run_ranks(traces, 2, made)[0]
    return {
        (kind, ranks): trace
        for ranks, found in ((1, alone), (2, together))
        for kind, trace in zip(kinds, found, strict=True)
    }


def inside(worker: SFTWorker) -> dict[str, CodeType]:
    """Of a step, what `optimizer_step` enters, itself included."""
    import shardtune.training.worker.base as module

    found: list[dict[str, CodeType]] = []
    original = module.optimizer_step

    def optimizer_step(*args, **known):
        with traced() as seen:
            result = original(*args, **known)
        found.append(seen)
        return result

    module.optimizer_step = optimizer_step
    try:
        worker.run_training()
    finally:
        module.optimizer_step = original
    return found[0]


def report(functions: Iterable[str]) -> str:
    names = sorted(functions)
    return f"{len(names)} functions in {len(files(names))} files:\n" + "\n".join(names)


def files(functions: Iterable[str]) -> set[str]:
    return {name.split()[0] for name in functions}


@pytest.mark.lengthy
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", slow_except(KINDS, "causal", "plain"))
def test_an_optimizer_step_is_few_functions_in_few_files(
    steps: dict[tuple[str, int], Trace], kind: str, ranks: int
) -> None:
    step = steps[kind, ranks].step
    assert "training/step.py accumulate" in step, "the trace has lost its object"
    assert "models/loss.py _LinearCrossEntropy.backward" in step or kind == "plain"
    more = ranks > 1
    assert len(step) <= MAX_FUNCTIONS + MASTERS.get(kind, 0) + more * RANKS_FUNCTIONS, report(step)
    assert len(files(step)) <= MAX_FILES + MASTERS.get(kind, 0) + more * RANKS_FILES, report(step)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", slow_except(KINDS, "causal", "plain"))
def test_so_is_an_iteration_of_the_loop(steps: dict[tuple[str, int], Trace], kind: str, ranks: int) -> None:
    loop = steps[kind, ranks].loop
    for name in ("training/worker/base.py FSDPSftWorker.run_training", "training/loggers.py JsonLines.log"):
        assert name in loop
    more = ranks > 1
    assert len(loop) <= LOOP_FUNCTIONS + MASTERS.get(kind, 0) + more * RANKS_FUNCTIONS, report(loop)
    assert len(files(loop)) <= LOOP_FILES + MASTERS.get(kind, 0) + more * RANKS_FILES, report(loop)


def test_none_of_them_is_long(steps: dict[tuple[str, int], Trace]) -> None:
    longest = {name: lines for trace in steps.values() for name, lines in (trace.step | trace.loop).items()}
    assert max(longest.values()) <= MAX_LINES, longest
