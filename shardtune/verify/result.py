"""The outcome of a check: passed, failed (what, where, remedy) or skipped (why)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["passed", "failed", "skipped"]


class Failed(Exception):
    """A check found something wrong.

    Args:
        what: is wrong, with numbers.
        where: the method, field, parameter or row.
        remedy: how to fix it.
    """

    def __init__(self, what: str, *, where: str, remedy: str) -> None:
        super().__init__(what, where, remedy)
        self.what = what
        self.where = where
        self.remedy = remedy


class Skipped(Exception):
    """A check does not apply; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one check.

    Attributes:
        name: of the check.
        outcome: passed, failed or skipped.
        text: the result in a sentence; for a failure, what is wrong, with numbers.
        where: of a failure.
        remedy: of a failure.
        seconds: it took.
    """

    name: str
    outcome: Outcome
    text: str
    where: str = ""
    remedy: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.outcome != "failed":
            return f"{self.name}: {self.outcome}: {self.text}"
        return f"{self.name}: {self.text}\n  where:  {self.where}\n  remedy: {self.remedy}"


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of some checks.

    Attributes:
        subject: what was checked, as it was named.
        results: in the order of the checks.
        seconds: that all took which ran side by side; None: they ran one after another.
        notes: what the results do not cover, a sentence each.
    """

    subject: str
    results: Sequence[Result]
    seconds: float | None = None
    notes: Sequence[str] = ()

    @property
    def failures(self) -> list[Result]:
        return [result for result in self.results if result.outcome == "failed"]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    def __getitem__(self, name: str) -> Result:
        """The result of the check of a name."""
        return next(result for result in self.results if result.name == name)
