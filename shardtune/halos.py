"""HALOs' names of its trainers and entry point; their home is `shardtune.run.halos`."""

from shardtune.run.halos import BasicTrainer, SFTTrainer, main

__all__ = ["BasicTrainer", "SFTTrainer", "main"]
