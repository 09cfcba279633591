"""`shardtune models` and `shardtune init`: the models that there are, and the files of a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardtune.cli.words import is_override


def models(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE.yaml] [WORD …]", help="A recipe with plugins; words to search for: qwen3."),
    ] = None,
) -> None:
    """List the values of model.model_type, or search them: built in, from installed packages, from plugins.

    Of the built-in ones, the architectures that have been trained with the numbers of plain transformers, by how:
    packed, only rows of one length in a forward, or one row per forward. Others may train too; a probe checks each
    before it does.

    **Examples**

    ```text
    shardtune models
    shardtune models qwen3
    shardtune models recipe.yaml
    ```
    """
    from shardtune.cli.model_list import is_recipe, listing, read_plugins, search

    overrides = [word for word in words or () if is_override(word)]
    recipe = next((word for word in words or () if is_recipe(word)), None)
    wanted = [word for word in words or () if word != recipe and word not in overrides]
    read_plugins(recipe, overrides)
    for line in search(wanted) if wanted else listing():
        typer.echo(line)


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the model and its file, e.g. my_model.")],
    to: Annotated[
        Path | None, typer.Option("--dir", help="The directory to write into; by default one with the model's name.")
    ] = None,
) -> None:
    """Write the files of a new model: an adapter, a recipe, a few rows, and a test that passes.

    **Examples**

    ```text
    shardtune init my_model
    shardtune init my_model --dir .
    ```
    """
    from shardtune.cli.init import next_steps, write_starter

    typer.echo(next_steps(write_starter(name, to)))
