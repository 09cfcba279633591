"""A training step can be read in one sitting: how many functions of the package it passes through."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import pytest

import shardtune
from shardtune.config import load_recipe
from shardtune.sft_worker import SFTWorker
from tests.dist.training import quiet
from tests.tiny_run import Tiny, make_tiny

PACKAGE = Path(shardtune.__file__).parent
PARTS = re.compile(r"\.<locals>\.<(listcomp|dictcomp|setcomp|genexpr)>")
MAX_FUNCTIONS, MAX_FILES, MAX_LINES = 25, 10, 80
AROUND = 20
"""What the worker does besides: it fetches the batches, sets the rate, counts and measures."""


@contextmanager
def traced() -> Iterator[dict[str, CodeType]]:
    """The package's functions that this thread enters meanwhile, by file and name; comprehensions aside."""
    seen: dict[str, CodeType] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents:
            name = PARTS.sub("", frame.f_code.co_qualname)
            if name == frame.f_code.co_qualname:
                seen[f"{file.relative_to(PACKAGE)} {name}"] = frame.f_code

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, CodeType], dict[str, CodeType]]:
    """The functions of an optimizer step (two micro-batches, forward to update), and of all that the worker does."""
    tiny: Tiny = make_tiny(tmp_path_factory.mktemp("trace"))
    worker = SFTWorker(load_recipe(tiny.recipe()), say=quiet)
    worker.setup()
    worker.run_training()  # what is done once is done
    with traced() as everything:
        metrics = worker.run_training()
    assert metrics["train/loss"] > 0
    return inside(worker), everything


def inside(worker: SFTWorker) -> dict[str, CodeType]:
    """Of a step, what `optimizer_step` enters, itself included."""
    import shardtune.worker as module

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


def report(functions: dict[str, CodeType]) -> str:
    return f"{len(functions)} functions in {len(files(functions))} files:\n" + "\n".join(sorted(functions))


def files(functions: dict[str, CodeType]) -> set[str]:
    return {name.split()[0] for name in functions}


def test_an_optimizer_step_is_few_functions_in_few_files(steps) -> None:
    assert "step.py accumulate" in steps[0], "the trace has lost its object"
    assert "loss.py _LinearCrossEntropy.backward" in steps[0]
    assert len(steps[0]) <= MAX_FUNCTIONS, report(steps[0])
    assert len(files(steps[0])) <= MAX_FILES, report(steps[0])


def test_so_is_what_goes_on_around_it(steps) -> None:
    around = {name: code for name, code in steps[1].items() if name not in steps[0]}
    assert "worker.py FSDPSftWorker.run_training" in around
    assert len(around) <= AROUND, report(around)


def test_none_of_them_is_long(steps) -> None:
    lengths = {name: len(inspect.getsourcelines(code)[0]) for name, code in steps[1].items()}
    assert max(lengths.values()) <= MAX_LINES, lengths
