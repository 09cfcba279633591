"""The helper that runs ranks: results in order, failures told, nobody left over."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from shardtune.config.rank_layout import Layout
from shardtune.errors import ParallelError
from shardtune.parallel.ranks import check_launcher, lay_out
from tests.support.dist.ranks import run_ranks


def total(number: int) -> tuple[int, int]:
    value = torch.tensor(number + dist.get_rank())
    dist.all_reduce(value)
    return dist.get_rank(), int(value)


def fails(folder: str) -> None:
    with open(f"{folder}/{dist.get_rank()}", "w") as file:
        file.write(str(os.getpid()))
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    time.sleep(600)


def test_results_come_in_rank_order() -> None:
    assert run_ranks(total, 4, 10) == [(rank, 46) for rank in range(4)]


def shared_sparse(rows: int) -> tuple[list[list[bool]], str]:
    dense = torch.eye(rows, dtype=torch.bool)
    tensor = (dense if dist.get_rank() == 0 else ~dense).to_sparse()
    lay_out(Layout(shard=2), dist.get_rank(), torch.device("cpu")).share(tensor)
    return tensor.to_dense().tolist(), str(tensor.layout)


def test_sparse_tensors_take_the_values_of_rank_0() -> None:
    assert run_ranks(shared_sparse, 2, 3) == [(torch.eye(3).bool().tolist(), "torch.sparse_coo")] * 2


def process(fresh: bool) -> int:
    return os.getpid()


def test_processes_are_kept_for_the_next_call_unless_fresh_ones_are_asked_for() -> None:
    first = run_ranks(process, 2, False)
    assert run_ranks(process, 2, False) == first
    assert not {*run_ranks(process, 2, True, fresh=True)} & {*first}
    assert run_ranks(process, 2, False) == first


def test_a_failing_rank_is_told_and_the_others_are_ended(tmp_path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)ranks failed.*rank 1: .*ValueError: on purpose"):
        run_ranks(fails, 2, str(tmp_path))
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)


@pytest.mark.parametrize(
    ("variables", "wrong"),
    [
        ("WORLD_SIZE=2", "RANK, MASTER_ADDR, MASTER_PORT are not set"),
        ("WORLD_SIZE=2 RANK=0 MASTER_ADDR=a", "MASTER_PORT is not set"),
        ("WORLD_SIZE=two RANK=0", "which is no number of ranks"),
        ("WORLD_SIZE=2 RANK=2 MASTER_ADDR=a MASTER_PORT=1", "RANK is '2', which is none of these"),
        ("WORLD_SIZE=2 RANK=1 MASTER_ADDR=a MASTER_PORT=p", "MASTER_PORT is 'p', which is no port"),
        ("WORLD_SIZE=2 RANK=1 MASTER_ADDR=a MASTER_PORT=1", ""),
        ("RANK=0", ""),
        ("WORLD_SIZE=1", ""),
    ],
)
def test_a_part_of_a_launchers_variables_is_refused(
    variables: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    if not wrong:
        check_launcher()
        return
    with pytest.raises(ParallelError, match=wrong):
        check_launcher()
