"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardtune.errors import ConfigError

RecipeArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE.yaml [key=value …]",
        help="A recipe, also as --config FILE; then overrides of its keys, key=value (Hydra's grammar) or --key value.",
    ),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run directory of a training run.")]
RunOrModel = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN_OR_MODEL",
        help="A run directory, a model directory (final/, an export, any causal or image-text model of transformers, "
        "an adapter of PEFT), or a name on the Hub.",
    ),
]
AdapterOption = Annotated[
    str | None, typer.Option("--adapter", "--lora-model-dir", "--adapter-name-or-path", hidden=True)
]
ModelOption = Annotated[
    str | None, typer.Option("--model", "--model-name-or-path", help="The same as RUN_OR_MODEL, as an option.")
]
Checkpoint = Annotated[str, typer.Option(help="final | latest | best | a step | a checkpoint's path")]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", "--max-tokens", min=1, help="Maximum tokens of one answer.")
]
Temperature = Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0: greedy decoding.")]
TopP = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=1.0, help="Sample from the likeliest tokens of this total probability; 1 by default: from all."
    ),
]
Prepared = Annotated[
    bool,
    typer.Option(
        "--prepared",
        help="The rows of --file are as data.transform returns them, with the standard names of columns: they are read "
        "as they are.",
    ),
]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        help="Code that the run names and that may be executed: a file, module or model; may be repeated. A run that "
        "you trained needs none.",
    ),
]
TemplateKwargs = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="Values for the chat template, such as '{\"enable_thinking\": false}'; they replace those of the run.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Seed of the sampling: the same seed gives the same answers; 0 by default."),
]


def prepared_without_file(command: str) -> ConfigError:
    """The error for `--prepared` with what is typed."""
    return ConfigError(
        "--prepared is about the rows of --file, and there is none",
        where=f"shardtune {command}",
        remedy="leave it out: what is typed is read as it is",
    )
