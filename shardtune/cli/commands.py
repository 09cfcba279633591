"""The commands, in the order of `shardtune --help`. Only those that need torch import it, when they run."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from shardtune.cli.act import act
from shardtune.cli.audit import audit
from shardtune.cli.claims import add_claims
from shardtune.cli.diff import diff
from shardtune.cli.evaluate import evaluate
from shardtune.cli.exit import UsageError, end, leave, wrong_usage
from shardtune.cli.export import export, push
from shardtune.cli.generate import chat, generate
from shardtune.cli.group import SETTINGS, Commands, RecipeCommand
from shardtune.cli.installation import env, version
from shardtune.cli.interrupt import handle_interrupts
from shardtune.cli.launch import launch
from shardtune.cli.models import init, models
from shardtune.cli.plan import plan
from shardtune.cli.predict import predict
from shardtune.cli.recipe import convert, explain_key, preview
from shardtune.cli.replay import replay
from shardtune.cli.report import report
from shardtune.cli.train import train
from shardtune.launch.cores import waiting
from shardtune.launch.signals import end_with_parent, is_supervised
from shardtune.verify.commands import verify_app

CTRL_C = 130
"""The exit code that typer returns for a KeyboardInterrupt."""

app = typer.Typer(
    cls=Commands,
    context_settings=dict(SETTINGS),
    help=(
        "Supervised fine-tuning of any Hugging Face model, sharded with FSDP2, with numbers that a command proves.\n\n"
        "**Start with**\n\n"
        "    shardtune train recipe.yaml --dry-run\n"
        "    shardtune train recipe.yaml\n"
        "    shardtune train --model Qwen/Qwen3-0.6B --data rows.jsonl\n"
        '    shardtune generate runs/recipe --prompt "What is 2 plus 3?"\n\n'
        "Any key of a recipe may be overridden on the command line: optim.lr=3e-5, or --optim.lr 3e-5. "
        "`shardtune COMMAND -h` has examples of each command.\n\n"
        "**Exit codes**: 0 done; 2 an error in your input, see the message; 75 stopped by a signal after saving, run "
        "the same command to continue; 76 stuck, the same command continues from the last checkpoint; 1 anything else."
    ),
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
data_app = typer.Typer(help="Show the data as the model sees it.")
config_app = typer.Typer(help="Explain the keys of a recipe.")
app.add_typer(data_app, name="data")
app.add_typer(config_app, name="config")
app.add_typer(verify_app, name="verify")
add_claims(verify_app)


@config_app.callback(invoke_without_command=True)
@data_app.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _print_version(is_set: bool) -> None:
    if is_set:
        version()
        raise typer.Exit


@app.callback(invoke_without_command=True)
def shardtune(
    context: typer.Context,
    print_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def help_(context: typer.Context) -> None:
    """Print the list of commands; `shardtune help COMMAND`, the help of one."""
    typer.echo(context.parent.get_help() if context.parent else "")


# A command is a function in a module of its own, and one line here.
app.command("train", cls=RecipeCommand)(train)
app.command("eval", cls=RecipeCommand)(evaluate)
app.command("generate")(generate)
app.command("chat")(chat)
app.command("predict")(predict)
app.command("act")(act)
app.command("export")(export)
app.command("push")(push)
app.command("diff")(diff)
app.command("report")(report)
app.command("replay")(replay)
app.command("launch", cls=RecipeCommand)(launch)
app.command("plan", cls=RecipeCommand)(plan)
app.command("models", cls=RecipeCommand)(models)
app.command("convert", context_settings={"ignore_unknown_options": True})(convert)
app.command("init")(init)
app.command("version")(version)
app.command("help", hidden=True)(help_)
app.command("env")(env)
data_app.command("preview", cls=RecipeCommand)(preview)
data_app.command("audit", cls=RecipeCommand)(audit)
config_app.command("explain")(explain_key)


def main() -> None:
    """Run the command line; exit with 0, 1, 2 (an error in the input), 75 (stopped after saving) or 76 (stuck)."""
    if is_supervised():
        end_with_parent()
    elif sys.argv[1:2] and not sys.argv[1].startswith("-"):
        os.environ |= waiting(os.environ)  # of this process and of the ranks that it starts
    handle_interrupts()
    try:
        code = app(standalone_mode=False, prog_name="shardtune")
    except UsageError as error:
        end(wrong_usage(error))
    except BaseException as error:
        end(error)
    if code == CTRL_C:
        end(KeyboardInterrupt())
    leave(code if isinstance(code, int) else 0)
