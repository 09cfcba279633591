"""HALOs' entry point: `python launch.py`, `torchrun … launch.py` or `accelerate launch … launch.py`, then its keys."""

import sys

from omegaconf import DictConfig

import shardtune
from shardtune.cli.commands import main as command_line


def main(config: DictConfig) -> None:
    """Resolve the config, load the model, make the trainer, train."""
    shardtune.train(config)


if __name__ == "__main__":
    sys.argv.insert(1, "train")
    command_line()
