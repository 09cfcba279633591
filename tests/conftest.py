"""No test asks the network for anything, and none leaves a process group behind."""

import os
from collections.abc import Iterator

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """A group that stays open makes the next training in this process one of several ranks, and hangs a fork."""
    yield
    import torch.distributed as dist

    left = dist.is_initialized()
    if left:
        dist.destroy_process_group()  # the next test is not to blame
    assert not left
