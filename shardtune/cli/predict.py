"""`shardtune predict`: what the model of a task gives for rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardtune.cli.arguments import Checkpoint, RunArgument, Trust
from shardtune.errors import ConfigError


def predict(
    run: RunArgument,
    text: Annotated[list[str] | None, typer.Argument(metavar="[TEXT …]", help="Texts, each a row.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="A file with rows as in training, without the target; answered in order.")
    ] = None,
    checkpoint: Checkpoint = "final",
    trust: Trust = None,
) -> None:
    """Print a run's predictions, a JSON line for each row: a label with its probabilities, a number, a vector, a text.

    It is for the tasks that model.model_type names: sequence_classifier, token_classifier, regression, embedding,
    reranker, seq2seq. Each line has the row's columns and `prediction`.

    **Examples**

    ```text
    shardtune predict runs/reviews "what a film"
    shardtune predict runs/reviews --file unlabelled.jsonl > labelled.jsonl
    shardtune predict runs/search --file documents.jsonl --checkpoint best
    ```
    """
    if bool(text) == (file is not None):
        raise ConfigError(
            "a text and --file exclude each other" if text else "there is no text and no --file",
            where="shardtune predict",
            remedy=f'shardtune predict {run} "a text", or --file rows.jsonl',
        )
    from shardtune.run.run import load_run

    rows = file if file is not None else [{"text": one} for one in text or ()]
    for line in load_run(run, trust=trust or ()).predictions(rows, checkpoint=checkpoint):
        typer.echo(json.dumps(line, ensure_ascii=False, default=str))
