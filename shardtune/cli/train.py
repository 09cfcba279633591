"""`shardtune train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardtune.cli.arguments import RecipeArgument
from shardtune.cli.interrupt import signals_as_usual
from shardtune.cli.starting import importing, starting
from shardtune.cli.words import split_words
from shardtune.errors import ConfigError
from shardtune.launch.signals import listening


def train(
    recipe: RecipeArgument = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show the first rows, run one step, save nothing.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(help="Record each step's rows, exact numbers and random draws in this folder, a file per rank."),
    ] = None,
    stop_after: Annotated[
        int | None, typer.Option(min=1, help="Stop after this step as on a signal: save, exit with 75.")
    ] = None,
) -> None:
    """Fine-tune a model by a recipe, or by a model and rows; the same command continues an interrupted run.

    A key may be set as key=value or as --key value, and by its usual name in other trainers where that means the same:
    --learning_rate, --epochs, --output_dir. Paths in a recipe start at the recipe, paths that are typed at the working
    directory.

    **Examples**

    ```text
    shardtune train recipe.yaml --dry-run
    shardtune train --model Qwen/Qwen3-0.6B --data rows.jsonl
    shardtune train recipe.yaml optim.lr=3e-5 runner.max_epochs=3
    shardtune train --config recipe.yaml --learning_rate 3e-5 --epochs 3
    shardtune train recipe.yaml runner.nproc_per_node=2
    shardtune train loss=sft model=llama datasets=[ultrachat] ++model.name_or_path=path/to/model
    torchrun --nproc-per-node 2 -m shardtune train recipe.yaml
    ```
    """
    signals_as_usual()
    path, overrides = split_words(recipe)
    if dry_run:
        given = [name for name, value in (("--record", record), ("--stop-after", stop_after)) if value is not None]
        if given:
            raise ConfigError(
                f"no run is made with --dry-run, so {' and '.join(given)} would have no effect",
                where=" ".join(given),
                remedy="leave out one or the other",
            )
        with importing():
            from shardtune.run.dry_run import dry_run as rehearse

        rehearse(path, *overrides)
        return
    run_here(path, *overrides, record=record, stop_after=stop_after)


def run_here(path: str | None, *overrides: str, record: Path | None = None, stop_after: int | None = None) -> None:
    with listening(own_process=True) as stop:
        with stop.deferred(), starting():  # torch takes seconds; code that is being imported may swallow an exception
            from shardtune.run.api import train as run_training
            from shardtune.training.recorder import Recording
        stop.check()
        recording = None if record is None and stop_after is None else Recording(record, stop_after)
        run_training(path, *overrides, recording=recording)
