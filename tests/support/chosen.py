"""Which cases of a test run: those that bind in `make test`, the others in `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Cases of one parameter, those that are not quick marked as slow."""
    found = list(cases)
    missing = [case for case in quick if case not in found]
    assert not missing, f"{missing} is none of {found}"
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in found]


def chosen(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """The values of a parameter among this module's tests that run, for a fixture that computes all cases at once.

    With `slow` on c of the cases a, b and c it is [a, b] in `make test`, and [c] in `make test-slow`.
    """
    found: list[Any] = []
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function) and "callspec" in vars(item):
            values = item.callspec.params
            found += [values[parameter]] if parameter in values and values[parameter] not in found else []
    return found
