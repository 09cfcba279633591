"""Whether this machine's processors divide doubles exactly.

Some do not: processors have been met that divide four doubles at once with errors of 1e-10, now and then and on some
cores alone, and eight floats in the last bit, while single divisions and everything else are exact. No comparison of
bits or in fp64 holds on such a machine, and nothing else shows it (Dixit et al., Silent Data Corruptions at Scale,
arXiv:2102.11245).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator

import torch

NUMBERS = 4096
REMEDY = (
    "with ATEN_CPU_CAPABILITY=default and ONEDNN_MAX_CPU_ISA=SSE41 in the environment torch divides fewer numbers at "
    "once, which was exact where this was met; the machine should be replaced"
)
Divide = Callable[[float, torch.Tensor], torch.Tensor]


def largest_error(seconds: float, divide: Divide = lambda one, numbers: one / numbers) -> float:
    """The largest relative error of quotients of doubles; 0.0 where all are exact, as they have to be (IEEE 754).

    Args:
        seconds: of the search on each processor that this process may use; an error may come and go.
        divide: a number by each of float64 [NUMBERS].
    """
    numbers = torch.linspace(0.1, 4.1, NUMBERS, dtype=torch.float64)
    exact = torch.tensor([1.0 / number for number in numbers.tolist()], dtype=torch.float64)  # one at a time
    worst = 0.0
    for _ in _processors():
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            found = divide(1.0, numbers)
            if not torch.equal(found, exact):
                worst = max(worst, float(((found - exact) / exact).abs().max()))
    return worst


def describe(error: float) -> str:
    """A line about an error that was found, or about none."""
    if not error:
        return "exact"
    return f"WRONG by up to {error:.0e} on this machine, so that fp64 cannot be compared; {REMEDY}"


def _processors() -> Iterator[None]:
    """Run on each processor in turn, where the system allows it, and on all of them afterwards."""
    if sys.platform != "linux":
        yield
        return
    allowed = os.sched_getaffinity(0)
    try:
        for each in sorted(allowed):
            os.sched_setaffinity(0, {each})
            yield
    finally:
        os.sched_setaffinity(0, allowed)
