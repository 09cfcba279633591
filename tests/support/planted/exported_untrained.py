"""One norm is written as it was before training."""

import torch

from shardtune.checkpoint.safetensors_file import SafetensorsWriter

own = SafetensorsWriter.write


def write(self, name, tensor):
    own(self, name, torch.ones_like(tensor) if name == "model.norm.weight" else tensor)


SafetensorsWriter.write = write
