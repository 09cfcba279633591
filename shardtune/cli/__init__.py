"""The command line: its commands, and how they end."""

from shardtune.cli.commands import main

__all__ = ["main"]
