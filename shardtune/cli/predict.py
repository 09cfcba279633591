"""`shardtune predict`: what the model of a task gives for rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardtune.cli.arguments import Checkpoint, Prepared, Trust, prepared_without_file
from shardtune.cli.first_rank import is_first_rank
from shardtune.cli.json_text import json_text
from shardtune.cli.results import results_alone
from shardtune.cli.starting import importing
from shardtune.cli.words import refuse_keys, refuse_models
from shardtune.errors import ConfigError

AS_TEXT = 'a row {{"text": …}} of --file with {}'
"""How a word is given to the model as a text, where it is refused among the arguments."""


def predict(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_MODEL",
            help="A run directory, a model directory (final/, an export, a classifier or encoder of transformers, "
            "sentence-transformers or PEFT), or a name on the Hub.",
        ),
    ],
    text: Annotated[list[str] | None, typer.Argument(metavar="[TEXT …]", help="Texts, each a row.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="A file with rows as in training, with or without the target; answered in order."),
    ] = None,
    prepared: Prepared = False,
    checkpoint: Checkpoint = "final",
    trust: Trust = None,
) -> None:
    """Print predictions, a JSON line for each row: a label with its probabilities, a number, a vector, a score, a text.

    It is for the tasks that model.model_type names: sequence_classifier, token_classifier, regression, embedding,
    reranker, seq2seq; and for an adapter of your own that has predict_rows. Each line has the row's columns and
    `prediction`, and `truncated` where the row was cut. To rows of --file data.transform and data.columns of the run's
    recipe are applied first; a text is read as it is.

    **Examples**

    ```text
    shardtune predict runs/reviews "what a film"
    shardtune predict runs/reviews --file unlabelled.jsonl > labelled.jsonl
    shardtune predict runs/search --file documents.jsonl --checkpoint best
    shardtune predict exported "what a film"
    ```
    """
    refuse_keys("predict", [str(run), *(text or ())], {}, f"as a text to the model: {AS_TEXT}")
    refuse_models("predict", text or (), AS_TEXT)
    if bool(text) == (file is not None):
        raise ConfigError(
            "a text and --file exclude each other" if text else "there is no text and no --file",
            where="shardtune predict",
            remedy=f'shardtune predict {run} "a text", or --file rows.jsonl',
        )
    if prepared and file is None:
        raise prepared_without_file("predict")
    with importing():
        from shardtune.run.plain_model import load_run_or_model

    with results_alone():
        source = load_run_or_model(run, trust=trust or ())
    rows = file if file is not None else [{"text": one} for one in text or ()]
    data = source.recipe.data
    as_they_are = file is None and bool(data.transform or data.columns)
    shown = is_first_rank()

    def note(line: str) -> None:
        if shown:
            typer.echo(f"predict: {line}", err=True)

    with results_alone() as show:
        for line in source.predictions(rows, checkpoint=checkpoint, prepared=prepared or as_they_are, report=note):
            if shown:
                show(json_text(line))
