"""`shardtune eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardtune.cli.arguments import Checkpoint, Trust
from shardtune.cli.first_rank import is_first_rank
from shardtune.cli.starting import importing
from shardtune.cli.words import split_words, without_flags
from shardtune.errors import ConfigError


def evaluate(
    target: Annotated[
        list[str],
        typer.Argument(metavar="RUN_OR_RECIPE [key=value …]", help="A run or a recipe, then overrides of keys."),
    ],
    checkpoint: Checkpoint = "final",
    trust: Trust = None,
) -> None:
    """Evaluate a run's model, a recipe's base model, or any model, on the evaluation rows of the recipe; prints JSON.

    Paths that are typed start at the working directory; those in the run's recipe are the files that it was trained
    with.

    **Examples**

    ```text
    shardtune eval runs/recipe
    shardtune eval runs/recipe --checkpoint best data.eval_data_paths=other.jsonl
    shardtune eval runs/recipe data.eval_data_paths.math=a.jsonl data.eval_data_paths.chat=b.jsonl
    shardtune eval recipe.yaml eval.generate=true
    shardtune eval --model Qwen/Qwen3-0.6B --eval_data rows.jsonl
    ```
    """
    path, overrides = split_words(target)
    if path is None and not any(word.partition("=")[0].endswith("model_path") for word in overrides):
        raise ConfigError(
            f"there is nothing to evaluate: {' '.join(target)} names neither a run nor a recipe",
            where="RUN_OR_RECIPE",
            remedy="shardtune eval runs/recipe, or shardtune eval recipe.yaml, or a model and rows: shardtune eval "
            "--model Qwen/Qwen3-0.6B --eval_data rows.jsonl",
        )
    if path is not None and (Path(path) / "config.json").is_file():
        path, overrides = None, without_flags([f"--model={path}"], []) + overrides
    with importing():
        from shardtune.run.evaluation import evaluate as run_evaluation

    metrics = run_evaluation(path, *overrides, checkpoint=checkpoint, trust=trust or ())
    if metrics and is_first_rank():
        typer.echo(json.dumps(metrics, indent=2))
