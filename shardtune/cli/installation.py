"""`shardtune version` and `shardtune env`."""

from __future__ import annotations

import typer


def version() -> None:
    """Print the version.

    **Examples**

    ```text
    shardtune version
    shardtune --version
    ```
    """
    from shardtune.run.versions import installed_version

    typer.echo(f"shardtune {installed_version('shardtune')}")


def env() -> None:
    """Print versions and devices, for a bug report, and whether the processors divide exactly.

    **Examples**

    ```text
    shardtune env
    ```
    """
    import torch

    from shardtune.run.directory import environment
    from shardtune.verify.processor import describe, largest_error

    for name, value in environment().items():
        typer.echo(f"{name}: {value}")
    typer.echo(f"cpu threads: {torch.get_num_threads()}")
    typer.echo(f"division of doubles: {describe(largest_error(seconds=0.2))}")
    typer.echo(f"cuda devices: {torch.cuda.device_count()}")
    for number in range(torch.cuda.device_count()):
        typer.echo(f"cuda:{number}: {torch.cuda.get_device_name(number)}")
