"""Commands around a recipe: its rows, its keys, and one from the configuration of another trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardtune.cli.arguments import RecipeArgument
from shardtune.cli.words import split_words


def preview(
    recipe: RecipeArgument = None,
    rows: Annotated[int, typer.Option(min=1, help="How many training rows to show, and of each evaluation set.")] = 3,
    start: Annotated[int, typer.Option(min=0, help="The first training row to show, counted from 0.")] = 0,
    images: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a picture of these rows' images with data.augmentation.")
    ] = None,
) -> None:
    """Show rows as the model receives them, with the trained tokens marked, and count the rows left out.

    **Examples**

    ```text
    shardtune data preview recipe.yaml
    shardtune data preview recipe.yaml --rows 10 --start 500 data.max_length=512
    shardtune data preview recipe.yaml --images augmented.png data.augmentation.color_jitter.brightness=0.3
    ```
    """
    from shardtune.run.dry_run import preview as show

    path, overrides = split_words(recipe)
    show(path, *overrides, rows=rows, start=start, images=images)


def explain_key(
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="A key or a group of keys, e.g. optim.lr.")] = None,
) -> None:
    """Show a key's type, default, meaning and former names; of a group its keys; without KEY all groups.

    **Examples**

    ```text
    shardtune config explain optim.lr
    shardtune config explain runner.logger
    shardtune config explain warmup_ratio
    ```
    """
    from shardtune.config.explain import explain, groups

    typer.echo(groups() if key is None else explain(key))


def convert(
    context: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE | COMMAND",
            help="A configuration of another trainer, YAML or JSON; or its command: trl sft --learning_rate …",
        ),
    ],
    to: Annotated[
        Path | None, typer.Option("-o", "--output", help="The recipe to write; by default it is printed.")
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="trl | axolotl | llama-factory | ms-swift | torchtune | nemo | torchtitan | verl | halos | rlinf; "
            "recognised by itself.",
        ),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="The processes (GPUs) it was run with, for the rows of a step.")
    ] = None,
) -> None:
    """Write a recipe from a configuration of another trainer, and report what became of each of its keys.

    **Examples**

    ```text
    shardtune convert axolotl.yaml -o recipe.yaml
    shardtune convert sft.yaml --world-size 8 -o recipe.yaml
    shardtune convert arguments.json --from trl > recipe.yaml
    shardtune convert -o recipe.yaml trl sft --model_name_or_path Qwen/Qwen3-0.6B --dataset_name me/rows --packing
    ```
    """
    from shardtune.cli.convert import write_recipe

    options = [name for param in context.command.params for name in param.opts if name.startswith("--")]
    write_recipe(words, options, trainer, to, world_size)
