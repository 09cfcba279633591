"""What a step costs: memory and utilisation."""

from __future__ import annotations

import resource
import sys

import torch

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "L40S": 362e12, "L4": 121e12}
"""Dense bf16 operations per second by the name of the device, from the vendors' data sheets."""


def peak_memory_gb(device: torch.device) -> float:
    """The most memory this rank has used, in GB (1e9 bytes): of the device, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Operations per second that the device could do at best, None where that is not known."""
    if device.type != "cuda" or precision not in ("bf16", "fp16"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name.replace("-", " ").split()), None)


def train_flops_per_token(num_parameters: int, num_layers: int, width: int, mean_length: float) -> float:
    """Operations of forward and backward per token: 6 per parameter, and attention to half of the row (PaLM, app. B)."""
    return 6.0 * num_parameters + 6.0 * num_layers * width * mean_length
