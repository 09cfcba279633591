"""Which rank writes which part: each part once, divided evenly, and what is small in one file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardtune.checkpoint.dcp import load_tensors, save_tensors
from shardtune.checkpoint.save_plan import SMALL_BYTES, choose_writers
from tests.checkpoint.test_dcp import local
from tests.support.dist.ranks import run_ranks

LARGE = 4 * SMALL_BYTES


def places(rows: list[list[int]]) -> np.ndarray:
    return np.array(rows, np.int64).reshape(-1, 3)


def chosen(of_ranks: list[np.ndarray], element_bytes: int = 1) -> list[list[int]]:
    """For each rank the numbers of the tensors that it writes."""
    tensors = 1 + max(int(each[:, 0].max()) for each in of_ranks)
    kept = choose_writers(of_ranks, [element_bytes] * tensors)
    return [each[mask, 0].tolist() for each, mask in zip(of_ranks, kept, strict=True)]


def test_each_part_that_one_rank_has_is_written_by_it() -> None:
    parts = [places([[0, 2 * rank, 2], [1, 5 * rank, 5]]) for rank in range(3)]
    assert chosen(parts) == [[0, 1]] * 3


def test_what_all_ranks_have_is_divided_by_size() -> None:
    sizes = [8, 1, 1, 1, 1, 1, 1, 1, 1]
    alike = places([[number, 0, size * LARGE] for number, size in enumerate(sizes)])
    written = chosen([alike, alike])
    assert sorted(written[0] + written[1]) == list(range(9))
    loads = [sum(sizes[number] for number in of_rank) for of_rank in written]
    assert loads == [8, 8]


def test_what_is_small_and_alike_is_written_by_the_first_rank_that_has_it() -> None:
    alike = places([[number, 0, SMALL_BYTES] for number in range(5)])
    assert chosen([alike, alike, alike]) == [[0, 1, 2, 3, 4], [], []]
    assert chosen([alike[:2], alike, alike]) == [[0, 1], [2, 3, 4], []]


def test_copies_of_shards_are_divided_among_those_that_have_them() -> None:
    """Two copies of two shards: ranks 0 and 2 have the first ones, 1 and 3 the second."""
    parts = [places([[number, LARGE * (rank % 2), LARGE] for number in range(6)]) for rank in range(4)]
    written = chosen(parts)
    assert [len(of_rank) for of_rank in written] == [3] * 4
    assert sorted(written[0] + written[2]) == sorted(written[1] + written[3]) == list(range(6))


def alike_and_cut() -> dict[str, torch.Tensor]:
    """Tensors whole on every rank, cut into two copies of two shards, and cut along both axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
    values = whole()
    return {
        **{name: tensor for name, tensor in values.items() if name.startswith(("step", "plain"))},
        "copies": distribute_tensor(values["copies"], mesh, [Replicate(), Shard(0)]),
        "submesh": distribute_tensor(values["submesh"], mesh["shard"], [Shard(0)]),
        "both": distribute_tensor(values["both"], mesh, [Shard(1), Shard(0)]),
        "empty": distribute_tensor(values["empty"], mesh, [Replicate(), Shard(1)]),
    }


def whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    steps = {f"step.{number}": torch.tensor(float(number)) for number in range(8)}
    plain = {f"plain.{number}": torch.randn(LARGE // 8, generator=generator) for number in range(4)}
    return {
        **steps,
        **plain,
        "copies": torch.randn(5, 3, generator=generator),
        "submesh": torch.randn(7, generator=generator),
        "both": torch.randn(5, 6, generator=generator),
        "empty": torch.zeros(0, 4),
    }


def save_and_load(folder: str) -> list[str]:
    save_tensors(folder, alike_and_cut())
    dist.barrier()
    tensors = alike_and_cut()
    for tensor in tensors.values():
        tensor.zero_()
    load_tensors(folder, tensors)
    expected = alike_and_cut()
    return [name for name, tensor in tensors.items() if not torch.equal(local(tensor), local(expected[name]))]


def test_every_layout_is_written_once_and_read_back(tmp_path: Path) -> None:
    assert run_ranks(save_and_load, 4, str(tmp_path)) == [[]] * 4
    loaded = {name: torch.full_like(tensor, 3.0) for name, tensor in whole().items()}
    load_tensors(tmp_path, loaded)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in whole().items())
    files = [load_file(file) for file in sorted(tmp_path.glob("*.safetensors"))]
    assert len(files) == 4
    assert all(set(files[0]) >= {f"step.{number}"} for number in range(8)), "counters are in one file"
    for name, tensor in whole().items():
        assert sum(file[name].numel() for file in files if name in file) == tensor.numel()
    assert [sum(name.startswith("plain") for name in file) for file in files] == [1] * 4


def save_different(folder: str) -> str:
    try:
        save_tensors(folder, {"a": torch.ones(2), f"b{dist.get_rank()}": torch.ones(2)})
    except CheckpointException as error:
        return str(error)
    return ""


def test_ranks_that_save_different_names_end_together(tmp_path: Path) -> None:
    for error in run_ranks(save_different, 2, str(tmp_path)):
        assert "the ranks save tensors of different names" in error


def test_a_tensor_of_which_no_rank_has_a_part_is_not_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shardtune.checkpoint.save_plan._place", lambda item, number, dims: [number, 0, 1])
    with pytest.raises(CheckpointException, match=r"the ranks have 1 elements of tensor 'a', which has 2"):
        save_tensors(tmp_path, {"a": torch.ones(2)})
