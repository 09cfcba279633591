"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    float, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens of this total probability.")
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
Seed = Annotated[int, typer.Option(help="Seed of the sampling: the same seed gives the same answers.")]
