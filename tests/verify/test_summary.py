"""The line below the table of checks."""

from shardtune.verify.report import summary
from shardtune.verify.result import Report, Result


def test_checks_side_by_side_took_less_than_their_sum() -> None:
    results = [Result("resume", "passed", "", seconds=60.0), Result("elastic", "passed", "", seconds=70.0)]
    assert summary(Report("all", results)) == "all: 2 passed of 2 checks in 130 s"
    assert summary(Report("all", results, seconds=75.0)) == "all: 2 passed of 2 checks in 75 s"
