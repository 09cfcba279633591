"""`shardtune eval`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shardtune.cli.arguments import Checkpoint, Trust
from shardtune.cli.first_rank import is_first_rank
from shardtune.cli.json_text import json_text
from shardtune.cli.results import results_alone
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
    if path is None and not _models_in(overrides):
        raise ConfigError(
            f"there is nothing to evaluate: {' '.join(target)} names neither a run nor a recipe",
            where="RUN_OR_RECIPE",
            remedy="shardtune eval runs/recipe, or shardtune eval recipe.yaml, or a model and rows: shardtune eval "
            "--model Qwen/Qwen3-0.6B --eval_data rows.jsonl",
        )
    with importing():
        from shardtune.run.evaluation import evaluate as run_evaluation
        from shardtune.run.plain_model import ADAPTER, SETTINGS, is_run

    if path is not None and _holds(path, SETTINGS, ADAPTER) and not is_run(Path(path)):
        overrides = [*without_flags([f"--model={path}"], []), *overrides]
        path = None
    _check_one_model(path, overrides, checkpoint)
    if path is None:
        overrides = _of_model(_models_in(overrides)[-1].strip("'\""), overrides)
    with results_alone() as show:
        metrics = run_evaluation(path, *overrides, checkpoint=checkpoint, trust=trust or ())
        if metrics and is_first_rank():
            show(json_text(metrics, indent=2))


def _holds(path: str, *names: str) -> bool:
    return any((Path(path) / name).is_file() for name in names)


def _of_model(model: str, overrides: Sequence[str]) -> list[str]:
    """Overrides that name a model, with those for its task; of an adapter with its base model."""
    from shardtune.run.described_task import task_overrides
    from shardtune.run.plain_model import ADAPTER, SETTINGS, adapter_overrides

    if not _holds(model, ADAPTER) or _holds(model, SETTINGS):
        return [*task_overrides(model, overrides), *overrides]
    found = adapter_overrides(Path(model))
    others = [word for word in overrides if not _models_in([word])]
    base = _models_in(found)[0].strip('"')
    return [*found, *task_overrides(base, others, adapter=Path(model)), *others]


def _check_one_model(path: str | None, overrides: Sequence[str], checkpoint: str) -> None:
    """Refuse another model beside the final one of a run, which is what is evaluated."""
    models = _models_in(overrides)
    if path is not None and Path(path).is_dir() and models and checkpoint == "final":
        model = models[-1]
        raise ConfigError(
            f"{path} is a run, whose final model is evaluated, and {model} is a second model",
            where="model.model_path",
            remedy=f"leave one of them out: shardtune eval {path}, or shardtune eval --model {model} --eval_data "
            "rows.jsonl",
        )


def _models_in(overrides: Sequence[str]) -> list[str]:
    """The models that overrides name."""
    words = (word.partition("=") for word in overrides)
    return [value for key, _, value in words if key.lstrip("+").removeprefix("actor.") == "model.model_path"]
