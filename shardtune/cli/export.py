"""`shardtune export` and `shardtune push`: a trained model for other software, and on the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardtune.cli.arguments import Checkpoint, RunArgument, Trust
from shardtune.cli.words import refuse_keys
from shardtune.errors import ConfigError

OPTIONS = {"runner.final_dtype": "--dtype"}
"""The option that has the value of a recipe's key."""


def export(
    run: RunArgument,
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="The directory to write; must be new or empty.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", "--output-dir", "-o", help="The same directory, as an option.")
    ] = None,
    checkpoint: Checkpoint = "final",
    dtype: Annotated[str, typer.Option(help="auto (the base model's) | fp64 | fp32 | bf16 | fp16")] = "auto",
    merge: Annotated[bool, typer.Option("--merge", help="Merge a LoRA adapter into the base weights.")] = False,
    trust: Trust = None,
) -> None:
    """Write a directory for other software, then load it in a fresh process and compare its logits (or tensors).

    **Examples**

    ```text
    shardtune export runs/recipe my-model
    shardtune export runs/recipe my-model --checkpoint best --dtype bf16
    shardtune export runs/lora my-model --merge
    ```
    """
    target = directory or to
    if target is None or (directory and to):
        raise ConfigError(
            f"two directories are given: {directory} and {to}" if target else "there is no directory to write",
            where="shardtune export",
            remedy=f"shardtune export {run} my-model",
        )
    from shardtune.run.run import load_run

    if to is None:
        option, equals, value = str(target).partition("=")
        if equals and option in ("checkpoint", "dtype"):
            raise ConfigError(
                f"{target} is the place of the directory, and {option} is an option",
                where="shardtune export",
                remedy=f"write --{option} {value}; as a directory of this name: --to {target}",
            )
        refuse_keys("export", [str(target)], OPTIONS, "as a directory of this name: --to {}")
    load_run(run, trust=trust or ()).export(target, checkpoint=checkpoint, dtype=dtype, merge=merge, report=typer.echo)


def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or one that shardtune export wrote.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="The repository on the Hugging Face Hub: owner/name.")],
    public: Annotated[
        bool, typer.Option("--public", help="Anyone may read it; a new one is private otherwise.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="The branch; by default main. A new one is made.")] = None,
    replace_card: Annotated[
        bool, typer.Option("--replace-card", help="Replace a README.md there that somebody has written or edited.")
    ] = False,
) -> None:
    """Publish a trained model on the Hugging Face Hub, with a model card made from the run's records.

    **Examples**

    ```text
    shardtune push runs/recipe me/my-model
    shardtune push my-model me/my-model --public --revision v1
    ```
    """
    from shardtune.run.push import push as publish

    typer.echo(publish(run, repo, public=public, revision=revision, replace_card=replace_card, report=typer.echo))
