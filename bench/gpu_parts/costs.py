"""Part e: where the time of a step goes, and the largest costs in words."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_parts.records import Check, Facts, Part, Setting
from gpu_parts.shapes import Case, recipe_of
from shardtune.config import load_recipe
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.training import quiet

KINDS = (
    ("attention", ("flash", "fmha", "attention", "flex")),
    ("matrix products", ("gemm", "cutlass", "cublas", "nvjet", "sgemm", "mm", "matmul", "linear", "wgmma")),
    ("updates of the weights", ("adam", "multi_tensor", "foreach", "sgd", "lerp", "addcdiv")),
    ("copies and casts", ("memcpy", "memset", "copy", "_to_copy", "cat", "index", "gather", "scatter", "embedding")),
    ("softmax and losses", ("softmax", "exp", "log", "loss", "reduce", "sum", "norm", "amax", "mean")),
    ("elementwise operations", ("elementwise", "vectorized", "mul", "add", "silu", "triton", "div", "neg", "fill")),
)
"""What kernels are, by parts of their names; the first that fits."""
STEPS = 3


def kind_of(kernel: str) -> str:
    """The words for a kernel."""
    name = kernel.lower()
    return next((kind for kind, parts in KINDS if any(part in name for part in parts)), "the rest")


def profiled(setting: Setting, case: Case) -> list[Facts]:
    """A line for each kind of kernel, and the five largest kernels; shares of the wall time of a step."""
    if setting.small:
        case = Case(case.model, case.lora, 128)
    worker = SFTWorker(load_recipe(recipe_of(case, setting)), report=quiet)
    worker.setup()
    on_gpu = setting.device == "cuda"
    for _ in range(1 if setting.small else 4):
        worker.run_training()
    if on_gpu:
        torch.cuda.synchronize()
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    began = time.perf_counter()
    parts: dict[str, float] = {}
    with profile(activities=activities) as found:
        for _ in range(STEPS):
            worker.run_training()
            parts = {name: parts.get(name, 0.0) + s for name, s in worker.step_seconds.items()}
        if on_gpu:
            torch.cuda.synchronize()
    wall = time.perf_counter() - began
    worker.release()
    kernels: Counter[str] = Counter()  # seconds
    for event in found.key_averages():
        micros: Any = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        kernels.update({event.key: micros / 1e6})
    kinds: Counter[str] = Counter()
    for name, seconds in kernels.items():
        kinds.update({kind_of(name): seconds})
    milliseconds = 1000 / STEPS
    lines: list[Facts] = [
        {"what": f"part: {name}", "ms a step": s * milliseconds, "share": s / wall} for name, s in parts.items()
    ]
    lines += [{"what": name, "ms a step": s * milliseconds, "share": s / wall} for name, s in kinds.most_common()]
    busy = sum(kernels.values())
    lines.append(
        {
            "what": "no kernel runs",
            "ms a step": max(0.0, wall - busy) * milliseconds,
            "share": max(0.0, 1 - busy / wall),
        }
    )
    for name, seconds in kernels.most_common(5):
        lines.append(
            {"what": f"{kind_of(name)}: {name[:90]}", "ms a step": seconds * milliseconds, "share": seconds / wall}
        )
    words = ", ".join(f"{name} {seconds / wall:.0%}" for name, seconds in kinds.most_common(5))
    return [*lines, {"what": "in words", "note": f"the five largest costs of {case}: {words}"}]


def checks(setting: Setting) -> Sequence[Check]:
    cases = [Case("1.7B", False, 8192), Case("8B", True, 8192), Case("Gemma 2 2B", True, 8192)]
    return [Check(str(case), partial(profiled, case=case), 90.0) for case in (cases[:1] if setting.small else cases)]


PART = Part(
    "Where the time of a step goes", checks, ("what", "ms a step", "share"), "Three steps under torch's profiler."
)
