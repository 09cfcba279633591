"""`shardtune verify resume` and the other claims about training: one command for each, and `all` for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from shardtune.cli.group import RecipeCommand
from shardtune.cli.results import results_alone
from shardtune.cli.words import split_words
from shardtune.errors import ConfigError

if TYPE_CHECKING:
    from shardtune.config import Recipe

RecipeWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE.yaml [key=value …]", help="The recipe to check, then overrides of its keys, as for train."
    ),
]
Steps = Annotated[int, typer.Option(min=1, help="Optimizer steps of each shortened run.")]
Ranks = Annotated[
    str,
    typer.Option(
        help="Numbers of ranks on this machine, separated by commas, for elastic, parity and layouts; the others train "
        "on the recipe's."
    ),
]
NoRanks = Annotated[str | None, typer.Option(hidden=True)]
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON, and progress on stderr.")]

SUMMARIES: Mapping[str, str] = {
    "resume": "Stop a run at several steps and continue it: bit by bit the uninterrupted one.",
    "preempt": "Stop a run by SIGTERM at random moments and continue it: no step is lost or computed twice.",
    "elastic": "Train on several numbers of ranks: the same rows and, in fp64, the same numbers.",
    "parity": "Compare a run in fp64 with a plain PyTorch loop, one row per forward; and bf16 with itself.",
    "layouts": "Compare the recipe's layout with one process; name the part that makes a difference.",
    "export": "Load what a run leaves by transformers and PEFT alone: logits, answers, tokens and template alike.",
}
"""The claims and what their commands do; `shardtune/verify/claims/table.py` has the checks of the same names."""
OF_RANKS = ("elastic", "parity", "layouts", "all")
"""Those that compare numbers of ranks."""
ALL = "Check all claims about training on a recipe."


def add_claims(verify: typer.Typer) -> None:
    """Add a command for each claim, and one for all."""
    for name, summary in {**SUMMARIES, "all": ALL}.items():
        verify.command(name, cls=RecipeCommand)(_command(name, summary))


def _command(name: str, summary: str) -> Callable[..., None]:
    """The command of a claim; one that compares no ranks refuses `--ranks`."""

    def on_ranks(words: RecipeWords = None, steps: Steps = 6, ranks: Ranks = "1,2", json: Json = False) -> None:
        _check(name, words, steps, _numbers(ranks), as_json=json)

    def on_those_of_the_recipe(
        words: RecipeWords = None, steps: Steps = 6, ranks: NoRanks = None, json: Json = False
    ) -> None:
        if ranks is not None:
            _refuse_ranks(name, ranks)
        _check(name, words, steps, [], as_json=json)

    compares = name in OF_RANKS
    command = on_ranks if compares else on_those_of_the_recipe
    command.__doc__ = f"""{summary}

    Runs are made by the command `train` on the recipe, shortened: a few steps, few rows, a checkpoint after each step,
    nothing evaluated, no callback, logger or Hub, in a folder that is removed. Exit code 0 where the claim holds or
    cannot be made for this recipe (the table has the reason), 1 where it does not hold.

    **Examples**

    ```text
    shardtune verify {name} recipe.yaml
    shardtune verify {name} recipe.yaml --steps 8 {"--ranks 1,2,4" if compares else "runner.nproc_per_node=2"}
    shardtune verify {name} recipe.yaml optim.lr=1e-4 --json
    ```
    """
    return command


def _refuse_ranks(name: str, ranks: str) -> None:
    most = max(_numbers(ranks))
    raise ConfigError(
        f"{name} compares no numbers of ranks: it trains on those of the recipe",
        where=f"--ranks {ranks}",
        remedy=f"shardtune verify {name} RECIPE.yaml runner.nproc_per_node={most}",
    )


def _check(name: str, words: list[str] | None, steps: int, ranks: list[int], *, as_json: bool) -> None:
    path, overrides = split_words(words)
    if path is None and not overrides:
        raise ConfigError(
            "no recipe is named", where=f"shardtune verify {name}", remedy=f"shardtune verify {name} RECIPE.yaml"
        )
    from rich.console import Console

    from shardtune.config import load_recipe
    from shardtune.run.choose_worker import make_worker
    from shardtune.run.directory import run_directory
    from shardtune.run.verified import Verified, note_verified
    from shardtune.verify import report as tables
    from shardtune.verify.claims.claim import check_claims
    from shardtune.verify.claims.table import CLAIMS
    from shardtune.verify.processor import describe, largest_error

    claims = [claim for claim in CLAIMS if name in (claim.name, "all")]
    recipe = load_recipe(path, overrides)
    progress = Console(stderr=as_json, highlight=False)
    title = f"{name} of {path or ' '.join(overrides)}"
    with results_alone(as_json), recipe.spelling.in_errors():
        found = check_claims(
            claims,
            recipe,
            steps=steps,
            ranks=ranks,
            make_worker=make_worker,
            fewer_rows=_has_built_in_loader(recipe),
            title=title,
            report=lambda line: progress.print(line, style="dim", markup=False),
        )
    outcomes = [Verified(result.name, result.outcome, result.text) for result in found.results]
    kept = note_verified(run_directory(recipe), outcomes)
    if kept is not None:
        progress.print(f"noted in {kept}", style="dim", markup=False)
    if as_json:
        typer.echo(tables.as_json(found))
    else:
        tables.show(found)
    if not found.passed:
        error = largest_error(seconds=2.0)
        if error:
            progress.print(f"division of doubles: {describe(error)}", style="red", markup=False)
    raise typer.Exit(0 if found.passed else 1)


def _has_built_in_loader(recipe: Recipe) -> bool:
    """Whether the rows that the recipe names are read by the built-in loader."""
    if recipe.actor.worker is None and not recipe.plugins:
        return True
    from shardtune.run.choose_worker import worker_class
    from shardtune.training.worker.adapter_worker import SFTWorker

    kind = worker_class(recipe)
    return issubclass(kind, SFTWorker) and kind.build_dataloader is SFTWorker.build_dataloader


def _numbers(ranks: str) -> list[int]:
    try:
        numbers = [int(part) for part in ranks.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise ConfigError(f"{ranks!r} is no list of numbers", where="--ranks", remedy="--ranks 1,2")
    return sorted(set(numbers))
