"""Tensors through torch's distributed checkpoint: bitwise, on any number of ranks, strict, without pickles."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardtune.checkpoint.dcp import async_save_tensors, load_tensors, save_tensors, stored_names
from shardtune.checkpoint.safetensors_file import read_header, with_sorted_metadata
from shardtune.errors import CheckpointError
from tests.support.dist.ranks import run_ranks


def values() -> dict[str, torch.Tensor]:
    """One of each kind; most have fewer rows than four ranks, or rows that do not divide."""
    generator = torch.Generator().manual_seed(3)
    return {
        "layer.0.weight": torch.randn(7, 5, generator=generator),
        "bf16": torch.randn(2, generator=generator).to(torch.bfloat16),
        "fp64": torch.randn(1, 3, generator=generator, dtype=torch.float64),
        "step": torch.tensor(5.0),
        "int64": torch.arange(9) * 2**40,
        "layer.0.weight::exp_avg": torch.randn(64, 3, generator=generator) * 1e-30,
        "mask": torch.tensor([True, False, True]),
        "nothing": torch.zeros(0, 4),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
    }


def sharded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As FSDP has them on all ranks of this group: rows dealt out, scalars plain, one replicated."""
    if not dist.is_initialized():
        return tensors
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.ndim == 0 or name == "mask"
        placement = Replicate() if name == "int64" else Shard(0)
        made[name] = tensor if plain else distribute_tensor(tensor, mesh, [placement])
    return made


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in values().items()}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_ranks(folder: str, written_by_one: str) -> dict[str, Any]:
    """Saves both ways, loads back what this many ranks and what one process wrote."""
    world = dist.get_world_size()
    told: dict[str, Any] = {}
    save_tensors(f"{folder}/{world}", sharded(values()))
    tensors = sharded(values())
    pending = async_save_tensors(f"{folder}/{world}-async", tensors, process_group=dist.new_group(backend="gloo"))
    for tensor in tensors.values():
        local(tensor).zero_()
    pending.wait()
    told["done"] = pending.done()
    for name in (f"{folder}/{world}", f"{folder}/{world}-async", written_by_one):
        tensors = sharded(zeros())
        load_tensors(name, tensors)
        told[name] = check(tensors)
    mesh = init_device_mesh("cpu", (world,))
    other = {"layer.0.weight": distribute_tensor(torch.zeros(7, 6), mesh, [Shard(0)])}
    try:
        load_tensors(f"{folder}/{world}", other)
    except CheckpointError as error:
        told["error"] = str(error)
    return told


def check(tensors: dict[str, torch.Tensor]) -> list[str]:
    wrong = []
    for name, expected in values().items():
        found = tensors[name]
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        if not same_bits(whole, expected):
            wrong.append(name)
    return wrong


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat_a, flat_b = a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    return torch.equal(flat_a, flat_b)


def load_on_two(folder: str) -> list[str]:
    tensors = sharded(zeros())
    load_tensors(folder, tensors)
    return check(tensors)


def test_bitwise_on_one_process_four_ranks_and_two(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    save_tensors(alone, values())
    tensors = zeros()
    load_tensors(alone, tensors)
    assert check(tensors) == []
    for told in run_ranks(on_ranks, 4, str(tmp_path), str(alone)):
        assert told.pop("done") is True
        assert "7, 6" in told.pop("error")
        assert list(told.values()) == [[], [], []]
    for folder in (tmp_path / "4", tmp_path / "4-async"):
        tensors = zeros()
        load_tensors(folder, tensors)
        assert check(tensors) == []
        assert stored_names(folder) == sorted(values())
        assert len(list(folder.glob("*.safetensors"))) == 4
    assert run_ranks(load_on_two, 2, str(tmp_path / "4")) == [[], []]


def test_asynchronous_save_holds_the_values_of_its_call(tmp_path: Path) -> None:
    tensors = values()
    pending = async_save_tensors(tmp_path, tensors)
    for tensor in tensors.values():
        tensor.zero_()
    pending.wait()
    load_tensors(tmp_path, tensors)
    assert check(tensors) == []


def test_equal_tensors_are_equal_files(tmp_path: Path) -> None:
    tensors = {'layer "é"\\.weight': torch.arange(6.0).view(2, 3), "b": torch.ones(3)}
    for number in range(8):  # the library's order of three keys is another one in five of six files
        save_tensors(tmp_path / str(number), tensors)
    paths = [path for number in range(8) for path in (tmp_path / str(number)).glob("*.safetensors")]
    files = [path.read_bytes() for path in paths]
    assert len(files) == 8
    assert set(files) == {files[0]}
    assert files[0] == b"".join(with_sorted_metadata(memoryview(files[0])))
    tensors, metadata = read_header(paths[0])
    assert 'layer "é"\\.weight' in tensors
    assert [*metadata] == ["DCP_SHARDING_INFO", "DCP_VERSION", "format"]


def test_no_tensors_at_all(tmp_path: Path) -> None:
    """An optimizer has none before its first step."""
    save_tensors(tmp_path / "a", {})
    async_save_tensors(tmp_path / "a", {}).wait()
    load_tensors(tmp_path / "a", {})
    with pytest.raises(CheckpointError, match="1 not in it: w"):
        load_tensors(tmp_path / "a", {"w": torch.zeros(2)})


def test_a_checkpoint_of_another_model_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    save_tensors(tmp_path, {"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.ones(1), "e": torch.ones(5)})
    target = {
        "a": torch.zeros(3, 2),
        "b": torch.zeros(4, dtype=torch.float64),
        "d1": torch.zeros(1),
        "d2": torch.zeros(1),
        "e": torch.zeros(5),
    }
    with pytest.raises(CheckpointError) as caught:
        load_tensors(tmp_path, target)
    told = str(caught.value)
    assert "2 not in it: d1, d2" in told
    assert "1 not in the model: c" in told
    assert "2 differ in shape or dtype: a (saved: float32 [2, 3]; expected: float32 [3, 2])" in told
    assert "b (saved: float32 [4]; expected: float64 [4])" in told
    assert caught.value.where == str(tmp_path)
    assert caught.value.remedy
    assert all(not tensor.any() for tensor in target.values())


def test_half_precision_is_read_into_full_precision_where_that_is_allowed(tmp_path: Path) -> None:
    half = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    save_tensors(tmp_path, {"weight": half, "norm": torch.ones(3)})
    target = {"weight": torch.zeros(4, 3, dtype=torch.float64), "norm": torch.zeros(3)}
    load_tensors(tmp_path, target, widen=True)
    assert torch.equal(target["weight"], half.double())
    assert torch.equal(target["norm"], torch.ones(3))
    narrower = {"weight": torch.zeros(4, 3), "norm": torch.zeros(3, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointError, match="1 differ in shape or dtype: norm"):
        load_tensors(tmp_path, narrower, widen=True)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    save_tensors(tmp_path, {"first": torch.ones(50), "second": torch.ones(50)})
    [file] = tmp_path.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 30)
    with pytest.raises(CheckpointError) as caught:
        load_tensors(tmp_path, {"first": torch.zeros(50), "second": torch.zeros(50)})
    assert file.name in str(caught.value)
    assert "ends inside or before tensor" in str(caught.value)


class Trap:
    """Unpickling an instance raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('unpickled')",)


def test_nothing_on_disk_is_unpickled(tmp_path: Path) -> None:
    """Neither `.metadata`, which torch's default reader trusts, nor any other pickle in the folder is opened."""
    save_tensors(tmp_path, values())
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json"}
    for name in (".metadata", "__0_0.distcp", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(pickle.dumps(Trap()))
    tensors = zeros()
    load_tensors(tmp_path, tensors)
    assert check(tensors) == []


def test_large_sets_are_cut_into_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardtune.checkpoint.dcp._FILE_BYTES", 100)
    save_tensors(tmp_path, values())
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    tensors = zeros()
    load_tensors(tmp_path, tensors)
    assert check(tensors) == []


def test_a_folder_that_cannot_be_written_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_tensors(tmp_path / "file" / "model", {"a": torch.ones(1)})
