"""The machine: what it is, what is installed, and how fast it multiplies and copies."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Sequence

import torch

from gpu_parts.records import SKIP, Check, Facts, Part, Setting

OPTIONAL = (
    "trl", "liger-kernel", "flash-attn", "bitsandbytes", "torchao", "kernels", "causal-conv1d",
    "flash-linear-attention",
    "mamba-ssm", "peft", "datasets", "triton",
)  # fmt: skip


def versions(setting: Setting) -> list[Facts]:
    """Of Python, torch, transformers, and of what is optional, with what is missing."""
    name = torch.cuda.get_device_name(0) if setting.device == "cuda" else f"{platform.machine()}, a CPU"
    cores = len(os.sched_getaffinity(0))
    lines: list[Facts] = [{"what": "device", "note": f"{name}, {cores} cores, CUDA {torch.version.cuda}"}]
    lines.append({"what": "Python", "note": platform.python_version()})
    for package in ("torch", "transformers", *OPTIONAL):
        try:
            lines.append({"what": package, "note": importlib.metadata.version(package)})
        except importlib.metadata.PackageNotFoundError:
            lines.append({"what": package, "verdict": SKIP, "note": "missing"})
    return lines


def _seconds(function: Callable[[], object], setting: Setting, times: int = 10) -> float:
    for _ in range(3):
        function()
    if setting.device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        function()
    if setting.device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def products(setting: Setting) -> Facts:
    """A square product in bf16."""
    size = 256 if setting.small else 8192
    left, right = (torch.randn(size, size, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * size**3 / _seconds(lambda: left @ right, setting) / 1e12
    return {"value": rate, "note": f"TFLOP/s, bf16, {size} x {size}"}


def copies(setting: Setting) -> Facts:
    """Reading and writing."""
    one = torch.empty((2**20 if setting.small else 2**32) // 4, device=setting.device)
    other = torch.empty_like(one)
    return {
        "value": 2 * one.nbytes / _seconds(lambda: other.copy_(one), setting) / 1e12,
        "note": "TB/s, read and written",
    }


def checks(setting: Setting) -> Sequence[Check]:
    return [Check("installed", versions), Check("products", products), Check("copies", copies)]


PART = Part("The machine", checks, ("what", "value"))
