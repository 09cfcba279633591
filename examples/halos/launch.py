"""HALOs' entry point: `python launch.py`, `torchrun … launch.py` or `accelerate launch … launch.py`, then its keys."""

import sys

from shardtune.cli.commands import main as command_line
from shardtune.halos import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    command_line()
