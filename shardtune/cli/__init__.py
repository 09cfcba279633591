"""What does a person type, and how does a command end."""

from shardtune.cli.commands import main

__all__ = ["main"]
