"""Steps of AdamW with each of torch's kernels on a CPU, time and numbers: `python bench/optimizer_kernels.py`.

The three run in turns; a ratio is the median of those of neighbours. Rewrites the section `optimizer_kernels` of
docs/benchmarks.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import torch  # noqa: E402
from results import machine, table, write_section  # noqa: E402
from torch import nn  # noqa: E402

KERNELS: Mapping[str, Mapping[str, bool]] = {
    "single": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
MODELS = {
    "3 layers of width 1024": [(1024, 1024), (1024, 1024), (1024, 3072), (1024, 3072), (3072, 1024), (1024,)] * 3,
    "30 layers of width 64": [(64, 64), (64, 64), (64, 192), (64, 192), (192, 64), (64,)] * 30,
}
TURNS, STEPS = 9, 20
Shapes = Sequence[tuple[int, ...]]


def values(shapes: Shapes, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Random tensors, on the scale of weights."""
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=draw) / 50).to(dtype) for shape in shapes]


def adamw(tensors: Sequence[torch.Tensor], kernel: str) -> torch.optim.AdamW:
    return torch.optim.AdamW([nn.Parameter(one.clone()) for one in tensors], lr=1e-3, **KERNELS[kernel])  # pyright: ignore


def speeds(shapes: Shapes, dtype: torch.dtype) -> tuple[float, dict[str, float]]:
    """Milliseconds of CPU of a step of the single kernels, and the ratio of each to it."""
    optimizers = {kernel: adamw(values(shapes, dtype, 0), kernel) for kernel in KERNELS}
    for optimizer in optimizers.values():
        for parameter, grad in zip(optimizer.param_groups[0]["params"], values(shapes, dtype, 1), strict=True):
            parameter.grad = grad
        optimizer.step()
    found: dict[str, list[float]] = {kernel: [] for kernel in KERNELS}
    for _ in range(TURNS):
        for kernel, optimizer in optimizers.items():
            start = time.thread_time()
            optimizer.step()
            found[kernel].append(time.thread_time() - start)
    ratios = {k: median(a / b for a, b in zip(each, found["single"], strict=True)) for k, each in found.items()}
    return 1e3 * median(found["single"]), ratios


def after_training(kernel: str, dtype: torch.dtype, cut: bool) -> torch.Tensor:
    """All weights after some steps; each in two parts of odd sizes, as two ranks might have it, or whole."""
    shapes = [(37, 53), (61,), (128, 64)]
    whole = values(shapes, dtype, 0)

    def parts(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        for one in tensors:
            yield from one.tensor_split((len(one) // 3,)) if cut else (one,)

    optimizer = adamw(list(parts(whole)), kernel)
    mine = optimizer.param_groups[0]["params"]
    for step in range(STEPS):
        for parameter, grad in zip(mine, parts(values(shapes, dtype, 1 + step)), strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in mine])


def main() -> int:
    torch.set_num_threads(1)
    speed, numbers = [], []
    for name, shapes in MODELS.items():
        for dtype in (torch.float32, torch.bfloat16):
            single, ratios = speeds(shapes, dtype)
            fast = (f"{ratios['foreach']:.2f}", f"{ratios['fused']:.2f}")
            speed.append((name, str(dtype).removeprefix("torch."), f"{single:.1f}", *fast))
            print(*speed[-1], flush=True)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        single = after_training("single", dtype, cut=False)
        for kernel in KERNELS:
            whole, cut = (after_training(kernel, dtype, cut=cut) for cut in (False, True))
            apart = [
                float((one.double() - other.double()).abs().max()) for one, other in ((whole, single), (cut, whole))
            ]
            numbers.append(
                (kernel, str(dtype).removeprefix("torch."), *("bitwise" if not a else f"{a:.1e}" for a in apart))
            )
            print(*numbers[-1], flush=True)
    text = table(("weights", "dtype", "single: ms of CPU a step", "foreach: of that", "fused: of that"), speed)
    text += f"\n\nThe largest difference of weights of about 0.02 after {STEPS} steps at a rate of 0.001:\n\n"
    text += table(("kernels", "dtype", "to single", "in two parts, to whole"), numbers)
    write_section("optimizer_kernels", f"{text}\n\n{machine()}, one thread.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
