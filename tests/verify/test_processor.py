"""Whether a processor divides exactly."""

import os
import sys

import pytest
import torch

from shardtune.verify.processor import describe, largest_error


def test_division_one_by_one_is_exact() -> None:
    assert largest_error(0.02, lambda one, numbers: torch.stack([one / each for each in numbers.unbind()])) == 0.0
    assert describe(0.0) == "exact"


def test_a_wrong_quotient_is_found_and_its_error_shown() -> None:
    def divide(one: float, numbers: torch.Tensor) -> torch.Tensor:
        found = one / numbers
        found[7] *= 1 + 3e-11
        return found

    error = largest_error(0.01, divide)
    assert 2.9e-11 < error < 2e-10
    assert f"{error:.0e}" in describe(error)
    assert "ATEN_CPU_CAPABILITY=default and ONEDNN_MAX_CPU_ISA=SSE41" in describe(error)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has it")
def test_the_process_may_run_everywhere_again() -> None:
    before = os.sched_getaffinity(0)
    seen = set()

    def divide(one: float, numbers: torch.Tensor) -> torch.Tensor:
        seen.add(frozenset(os.sched_getaffinity(0)))
        return one / numbers

    largest_error(0.001, divide)
    assert os.sched_getaffinity(0) == before
    assert seen == {frozenset({each}) for each in before}
