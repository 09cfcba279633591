"""`shardtune verify`: commands that prove a property. torch is imported when one of them runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardtune.errors import ConfigError

verify_app = typer.Typer(help="Prove a property on your own adapter, rows and recipe; exit code 0 or 1.")


@verify_app.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@verify_app.command("adapter")
def adapter(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ADAPTER [RECIPE.yaml] [key=value …]",
            help="file.py:Class or a registered name; a recipe for its model, options and rows (without one, those of "
            "the adapter's own examples); overrides of keys. A recipe alone: the adapter that it names.",
        ),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run only this check; may be repeated.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the checks and exit.")] = False,
) -> None:
    """Check that a model is integrated correctly: a dozen rows, a few seconds, a table of results.

    **Examples**

    ```text
    shardtune verify adapter my_model.py:MyModel
    shardtune verify adapter my_model.py:MyModel recipe.yaml actor.model.options.width=8
    shardtune verify adapter recipe.yaml --only sums --only padding
    shardtune verify adapter --list
    ```
    """
    if listing:
        from shardtune.verify.report import list_checks

        if words:
            raise ConfigError(
                f"--list checks nothing, so that {words[0]} has no effect",
                where="shardtune verify adapter --list",
                remedy="leave one of them out",
            )
        list_checks(only or ())
        return
    name, recipe, overrides = _split(words or [])
    from shardtune.verify.adapter import verify_adapter
    from shardtune.verify.report import show

    report = verify_adapter(name, recipe, *overrides, only=only or (), report=typer.echo)
    show(report)
    raise typer.Exit(0 if report.passed else 1)


@verify_app.command("checkpoint")
def checkpoint(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run directory, one checkpoint, or an exported directory.")
    ],
) -> None:
    """Read every file of a run's checkpoints and of final/ and compare it with its checksum.

    **Examples**

    ```text
    shardtune verify checkpoint runs/my-run
    shardtune verify checkpoint runs/my-run/checkpoints/global_step_500
    ```
    """
    from shardtune.verify.checkpoint import Finding, verify_checkpoints

    def report(finding: Finding) -> None:
        typer.echo(f"{'ok ' if finding.sound else 'BAD'}  {finding.name}  {finding.what}")

    raise typer.Exit(0 if verify_checkpoints(run.expanduser().absolute(), report) else 1)


def _split(words: list[str]) -> tuple[str, str | None, list[str]]:
    """The adapter, the recipe if one is named, and the overrides."""
    names = [word for word in words if "=" not in word or Path(word).is_file()]
    if not 1 <= len(names) <= 2:
        what = "no adapter is named" if not names else f"{', '.join(names)}: an adapter and a recipe at most"
        raise ConfigError(
            what, where="shardtune verify adapter", remedy="shardtune verify adapter file.py:Class [RECIPE.yaml]"
        )
    from shardtune.config.overrides import replaced

    overrides = [word for word in words if word not in names]
    for line in replaced(overrides):
        typer.echo(line, err=True)
    return names[0], names[1] if len(names) == 2 else None, overrides
