"""The checks of the conformance kit, each a test: run by `pytest --pyargs shardtune.verify.pytest --adapter …`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardtune.errors import ShardtuneError
from shardtune.verify.adapter import CHECKS, Check, open_kit, run_check
from shardtune.verify.kit import Kit

USAGE_ERROR = 4
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    """What the checks that were selected share."""
    adapter = request.config.getoption("--adapter")
    if adapter is None:
        pytest.exit("name what to check: --adapter file.py:Class [--recipe recipe.yaml]", USAGE_ERROR)
    selected = [item.name.partition("[")[2].rstrip("]") for item in request.session.items if _is_ours(item)]
    try:
        with open_kit(adapter, request.config.getoption("--recipe"), only=selected) as (opened, _):
            yield opened
    except ShardtuneError as error:
        pytest.exit(str(error), USAGE_ERROR)


def _is_ours(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and item.originalname == "test_adapter" and item.path == Path(__file__)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_adapter(kit: Kit, check: Check) -> None:
    result = run_check(kit, check)
    if result.outcome == "skipped":
        pytest.skip(result.text)
    if result.outcome == "failed":
        pytest.fail(str(result), pytrace=False)
