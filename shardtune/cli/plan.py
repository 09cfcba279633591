"""`shardtune plan`: what a recipe needs, from shapes alone. torch is imported when it runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardtune.cli.results import results_alone
from shardtune.cli.starting import starting
from shardtune.cli.words import split_words
from shardtune.errors import ConfigError

if TYPE_CHECKING:
    from shardtune.run.plan.plan import Planner

UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def plan(
    recipe: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE.yaml [key=value …]",
            help="A recipe, or a directory with a config.json; then overrides of keys.",
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", "--ranks", min=1, help="Ranks; by default those of the recipe.")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", metavar="SIZE", help="Memory of a GPU: 80G (1e9 bytes each), 80Gi.")
    ] = None,
    solve: Annotated[bool, typer.Option("--solve", help="Find the three cheapest changes of the recipe that fit.")] = (
        False
    ),
    tokens: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="Tokens of all rows together, in place of the data: 2M.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a row, in place of the data; by default data.max_length.")
    ] = None,
    tokens_per_second: Annotated[
        float | None, typer.Option(min=1e-9, max=1e15, help="The rate of all ranks together, for the time.")
    ] = None,
    rate_from: Annotated[
        Path | None, typer.Option("--rate-from", metavar="RUN", help="A run whose median rate is taken.")
    ] = None,
    mfu: Annotated[float | None, typer.Option(min=1e-6, max=1.0, help="Share of the GPUs' peak, for the time.")] = None,
    gpu_tflops: Annotated[
        float | None,
        typer.Option(
            "--gpu-tflops",
            min=1e-3,
            max=1e9,
            help="Peak of a GPU, for --mfu, 10^12 operations per second; 989 by default.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: bytes, seconds.")] = False,
) -> None:
    """Parameters, memory of a rank, tokens, steps and time of a recipe, from shapes alone: no weights, no GPU.

    A step is computed by the training code itself, on tensors that have shapes and no memory; the ranks need not exist.
    Rows are encoded, or found in the cache, unless --tokens or --length is given.

    **Examples**

    ```text
    shardtune plan recipe.yaml
    shardtune plan recipe.yaml --gpus 8 --gpu-memory 80G --solve
    shardtune plan recipe.yaml --gpus 8 --gpu-memory 80G --mfu 0.4 model.gradient_checkpointing=true
    shardtune plan recipe.yaml --rate-from runs/first --json
    shardtune plan my-model --gpus 8 --gpu-memory 80G --tokens 20M --length 2048
    ```
    """
    path, overrides = split_words(recipe)
    _check_words(path, overrides, {"--tokens-per-second": tokens_per_second, "--rate-from": rate_from, "--mfu": mfu})
    _check_peak(gpu_tflops, mfu)
    from shardtune.run.plan.plan import Speed, planner
    from shardtune.run.plan.rows import Given

    memory = None if gpu_memory is None else _memory(gpu_memory)
    given = Given(None if tokens is None else round(size("--tokens", tokens)), length)
    speed = Speed(tokens_per_second, rate_from, mfu, (gpu_tflops or 989.0) * 1e12)
    with results_alone(as_json) as show:
        report = partial(typer.echo, err=True)
        planning = planner(path, overrides, ranks=gpus, memory=memory, given=given, speed=speed, report=report)
        _show(planning, show, solve=solve, as_json=as_json)


def _show(planning: Planner, show: Callable[[str], None], *, solve: bool, as_json: bool) -> None:
    """Print the plan, and with `solve` the changes that fit, each as it is found."""
    from shardtune.run.plan.solve import solve as changes_that_fit
    from shardtune.run.plan.table import change_lines, lines

    found = planning.plan()
    changes = changes_that_fit(planning, found, _computing) if solve else ()
    if as_json:
        further = {"changes": [change.to_dict() for change in changes]} if solve else {}
        show(json.dumps({**found.to_dict(), **further}, indent=2))
        return
    show("\n".join(lines(found)))
    for line in change_lines(found, changes) if solve else ():
        show(line)


def _computing(words: Sequence[str]) -> AbstractContextManager[None]:
    """What is computed, on the terminal meanwhile."""
    return starting(f"computing {' '.join(words)} …")


def _check_words(path: str | None, overrides: list[str], rates: Mapping[str, object]) -> None:
    """Refuse a command that names no model, or several rates.

    Args:
        path: of the recipe.
        overrides: of its keys.
        rates: by option; None where one is not given.
    """
    if path is None and not any(word.partition("=")[0].endswith("model_path") for word in overrides):
        raise ConfigError(
            "there is nothing to plan", where="shardtune plan", remedy="shardtune plan recipe.yaml, or a model's folder"
        )
    typed = [name for name, value in rates.items() if value is not None]
    if len(typed) > 1:
        raise ConfigError(f"{' and '.join(typed)} exclude each other", where="shardtune plan", remedy="give one")


def size(option: str, text: str) -> float:
    """A number with a unit: 80G is 8e10, 80Gi is 80 x 2^30.

    Raises:
        ConfigError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if found is None or found[2] not in UNITS or not float(found[1]):
        raise ConfigError(f"{text!r} is no size", where=option, remedy="a number with K, M, G or T: 80G, 1.5M, 80Gi")
    return float(found[1]) * UNITS[found[2]]


def _memory(text: str) -> float:
    """The bytes of `--gpu-memory`; a number without its unit is refused, as no GPU has so few."""
    found = size("--gpu-memory", text)
    if found < 1e6:
        raise ConfigError(f"{text} is {found:,.0f} bytes", where="--gpu-memory", remedy="write the unit too: 80G, 80Gi")
    return found


def _check_peak(gpu_tflops: float | None, mfu: float | None) -> None:
    if gpu_tflops is not None and mfu is None:
        raise ConfigError(
            "--gpu-tflops is the peak that --mfu is a share of, and --mfu is not given",
            where="shardtune plan",
            remedy=f"add the share, as --mfu 0.4 --gpu-tflops {gpu_tflops:g}, or leave it out",
        )
