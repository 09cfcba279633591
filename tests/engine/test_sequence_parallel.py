"""What a model takes where ranks share its sequences."""

from __future__ import annotations

from typing import Any

import pytest

from shardtune.engine import sequence_parallel
from shardtune.errors import DataError

UNREAD: Any = None


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_refused_by_either_name(name: str) -> None:
    with pytest.raises(DataError, match=f"{name} cannot be given where ranks share sequences"):
        sequence_parallel._arguments({"input_ids": UNREAD, name: object()}, UNREAD, 4)
