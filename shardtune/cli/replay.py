"""`shardtune replay`: one step of a run again, for a reader or as JSON, and its rows for `data.quarantine`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardtune.cli.arguments import RunArgument, Trust
from shardtune.cli.results import results_alone
from shardtune.errors import ConfigError

Step = Annotated[int, typer.Option(help="The step, as in metrics.jsonl: the first is 1.")]
OnlyRows = Annotated[bool, typer.Option("--rows", help="List the rows alone; no model is loaded, nothing is computed.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and progress on stderr.")]
Checkpoint = Annotated[
    str | None,
    typer.Option(help="Where to begin: a step, a path, latest, best, or initial; by default the nearest before it."),
]
Worst = Annotated[
    int | None,
    typer.Option(min=0, help="How many rows with the highest losses are shown token by token; 3 by default."),
]
Rows = Annotated[
    list[str] | None,
    typer.Option("--row", help="A row to leave out, by its number or file:number as listed; may be repeated."),
]
Quarantine = Annotated[
    Path | None,
    typer.Option(help="The file for data.quarantine to which those rows are added; made if it is not there."),
]
Reason = Annotated[str | None, typer.Option(help="Why; by default the run, the step and the loss.")]


def replay(
    run: RunArgument,
    step: Step,
    only_rows: OnlyRows = False,
    as_json: AsJson = False,
    checkpoint: Checkpoint = None,
    worst: Worst = None,
    row: Rows = None,
    quarantine: Quarantine = None,
    reason: Reason = None,
    trust: Trust = None,
) -> None:
    """Compute one step of a run again, in one process: its rows, the loss of each, its gradient beside what was logged.

    The run is not changed. It begins at the nearest checkpoint before the step and trains the steps in between first.
    Rows are not recorded in training: their order is a function of the recipe, and --rows lists those of any step.

    **Examples**

    ```text
    shardtune replay runs/recipe --step 120
    shardtune replay runs/recipe --step 120 --rows
    shardtune replay runs/recipe --step 120 --worst 10 --json > step120.json
    shardtune replay runs/recipe --step 120 --rows --row train.jsonl:17 --quarantine quarantine.jsonl
    ```
    """
    if (quarantine is None) != (not row) or (reason is not None and quarantine is None):
        raise ConfigError(
            "--row names rows and --quarantine the file they are added to: one is missing",
            where="shardtune replay",
            remedy=f"shardtune replay {run} --step {step} --rows --row NUMBER --quarantine quarantine.jsonl",
        )
    if only_rows and worst is not None:
        raise ConfigError(
            "--rows lists the rows and computes no losses, and --worst is about the highest of them",
            where="shardtune replay",
            remedy="leave one of them out",
        )
    from shardtune.run.display import Display, LastingConsole
    from shardtune.run.replay.choose import add_rows
    from shardtune.run.replay.replay import replay as replayed
    from shardtune.run.replay.show import as_json as values
    from shardtune.run.replay.show import show

    highest = 3 if worst is None else worst
    with results_alone(as_json):
        found = replayed(run, step, only_rows=only_rows, checkpoint=checkpoint, worst=highest, trust=trust or ())
    if as_json:
        typer.echo(json.dumps(values(found), indent=2))
    else:
        show(found, Display(LastingConsole(highlight=False, soft_wrap=True)))
    if quarantine is not None:
        for line in add_rows(found, row or (), quarantine, reason):
            typer.echo(line, err=as_json)
