"""Process groups, and the processes of data loaders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _world
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter


def end_processes(batches: Iterator[object]) -> None:
    """End the processes of a `DataLoader`'s iterator, which otherwise ends them when it is collected.

    A traceback that somebody keeps, as notebooks do, keeps the iterator.
    """
    if isinstance(batches, _MultiProcessingDataLoaderIter):
        batches._shutdown_workers()


def default_store() -> dist.Store:
    """The store at which the default process group met. A second one of our own would need another free port."""
    return cast(dist.Store, _get_default_store())


def open_group_of_one(num_ranks: int) -> None:
    """Make this process rank 0 of a default process group whose collectives move nothing, and wait for nobody.

    torch tests its own sharding with it; no public backend does without the other ranks.
    """
    from torch.distributed._tools import fake_collectives  # noqa: F401 (it registers collectives of fake tensors)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)


def collectives_issued() -> int:
    """The number of collectives that this process has called so far, in all of its groups.

    torch counts them for its own reports of a lack of agreement; there is no public name for the count.
    """
    issued = 0
    for group in list(_world.pg_map):
        with suppress(RuntimeError):  # a backend that does not count
            issued += group._get_sequence_number_for_group()  # pyright: ignore[reportAttributeAccessIssue]
    return issued
