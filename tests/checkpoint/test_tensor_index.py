"""The index of a folder: small, complete, checked when it is read, and the same as the headers say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, Shard

from shardtune.checkpoint.dcp import load_tensors, save_tensors
from shardtune.checkpoint.tensor_index import INDEX, IndexedTensor, Part, TensorIndex, series_of
from shardtune.config.rank_layout import Layout
from shardtune.data.checksum import sealed
from shardtune.errors import CheckpointError
from shardtune.run.plan.simulation import ranks_of
from tests.checkpoint.test_dcp import check, sharded, values, zeros
from tests.support.dist.ranks import run_ranks
from tests.support.opened_files import opened_in


def grid(shape: tuple[int, ...], pieces: tuple[int, ...], *, swapped: bool = False) -> np.ndarray:
    """The parts of a tensor that is cut into pieces along each dimension, as torch cuts: the last ones are smaller.

    Ranks count along the last dimension first, or, swapped, along the first.
    """
    steps = [-(-size // number) for size, number in zip(shape, pieces, strict=True)]
    places = list(itertools.product(*map(range, pieces)))
    places = sorted(places, key=lambda place: place[::-1]) if swapped else places
    rows = []
    for file, place in enumerate(places):
        offsets = [min(size, step * each) for size, step, each in zip(shape, steps, place, strict=True)]
        rows.append(
            [file, *offsets, *(min(step, size - o) for step, size, o in zip(steps, shape, offsets, strict=True))]
        )
    return np.array(rows)


CUTS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((), ()),
    ((9,), (4,)),
    ((3,), (8,)),
    ((64, 6), (16, 1)),
    ((10, 4), (4, 1)),
    ((12, 10), (4, 3)),
    ((5, 7), (1, 3)),
    ((4, 6, 5), (2, 2, 3)),
]


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("shape", "pieces"), CUTS)
def test_parts_come_back_from_series_and_are_found_by_the_block_they_touch(
    shape: tuple[int, ...], pieces: tuple[int, ...], swapped: bool
) -> None:
    rows = grid(shape, pieces, swapped=swapped)
    files = tuple(map(str, range(len(rows))))
    stored = IndexedTensor(torch.float32, shape, series_of(rows))
    index = TensorIndex.of_document(json.loads(TensorIndex(files, {"t": stored}).to_text()))
    dims = len(shape)
    every = [Part(str(row[0]), tuple(row[1 : 1 + dims]), tuple(row[1 + dims :])) for row in rows.tolist()]
    every = [part for part in every if all(part.sizes)]
    key = lambda part: part.offsets  # noqa: E731
    assert sorted(index.parts("t", (0,) * dims, shape), key=key) == sorted(every, key=key)
    assert index.tensors["t"].stored_elements == int(np.prod(shape))
    for begins in itertools.product(*(range(size) for size in shape)):
        for ends in itertools.product(*(range(b + 1, size + 1) for b, size in zip(begins, shape, strict=True))):
            sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
            found = {part.file for part in index.parts("t", begins, sizes)}
            assert found == {part.file for part in every if touches(part, begins, ends)}
        if np.prod(shape) > 60:
            break


def touches(part: Part, begins: tuple[int, ...], ends: tuple[int, ...]) -> bool:
    return all(
        begin < o + n and o < end for o, n, begin, end in zip(part.offsets, part.sizes, begins, ends, strict=True)
    )


def test_it_does_not_grow_with_the_ranks_that_cut_a_dimension() -> None:
    for pieces in ((8, 1), (1024, 1), (128, 8)):
        for swapped in (False, True):
            assert len(series_of(grid((4096, 64), pieces, swapped=swapped))) <= pieces[1]
    assert len(series_of(grid((1000,), (1024,)))) == 1  # 24 of them have no elements


def rank_files(folder: Path, ranks: int) -> None:
    """A tensor of two rows for each rank, cut among them, and a counter on the first."""
    names = [f"layer.{number}.weight" for number in range(5)]
    for rank in range(ranks):
        part = {name: torch.full((2, 3), rank + 1.0) for name in names}
        begins = {name: {"saved_offsets": [2 * rank, 0]} for name in names}
        if rank == 0:
            part["step"], begins["step"] = torch.tensor(7.0), {"saved_offsets": []}
        file = folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
        save_file(part, file, {"DCP_SHARDING_INFO": json.dumps(begins)})


def opened_by_the_first(folder: Path, ranks: int) -> list[str]:
    """The files that rank 0 of many opens to load its part; the others are not there."""
    with ranks_of(Layout(1, ranks)) as simulated:
        tensors: dict[str, torch.Tensor] = {
            f"layer.{number}.weight": DTensor.from_local(torch.zeros(2, 3), simulated.shard_mesh, [Shard(0)])
            for number in range(5)
        }
        tensors["step"] = torch.zeros(())
        with opened_in(folder) as opened:
            load_tensors(folder, tensors)
    assert all(bool((t.to_local() == 1).all()) for t in tensors.values() if isinstance(t, DTensor))
    assert tensors["step"] == 7
    return opened


def test_a_rank_opens_the_index_and_the_files_with_its_own_parts(tmp_path: Path) -> None:
    """Not those of other ranks: its own twice, for header and data, on any number of ranks."""
    for ranks in (4, 64):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        rank_files(folder, ranks)
        without = opened_by_the_first(folder, ranks)
        assert len(set(without)) == ranks, "without an index the headers of all files are read"
        (folder / INDEX).write_text(TensorIndex.of(folder).to_text())
        own = "shard-00001-model-00001-of-00001.safetensors"
        assert opened_by_the_first(folder, ranks) == [INDEX, own, own]


def load_and_count(folder: str) -> tuple[list[str], list[str]]:
    tensors = sharded(zeros())
    with opened_in(Path(folder)) as opened:
        load_tensors(folder, tensors)
    return opened, check(tensors)


def save_sharded(folder: str) -> None:
    save_tensors(folder, sharded(values()))


def test_of_several_ranks_one_reads_the_index_and_each_its_own_files(tmp_path: Path) -> None:
    run_ranks(save_sharded, 4, str(tmp_path))
    (tmp_path / "checksums.json").unlink()  # in a run they are elsewhere, and have been compared
    for rank, (opened, wrong) in enumerate(run_ranks(load_and_count, 4, str(tmp_path))):
        assert wrong == []
        assert opened.count(INDEX) == (rank == 0)
        small = 1  # the first rank's file, with what is alike on all ranks
        assert {name for name in opened if name != INDEX} <= {file_of(rank), file_of(0)}
        assert len(opened) <= (rank == 0) + 2 * (1 + small)


def file_of(rank: int) -> str:
    return f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"


def test_what_torchs_own_planner_wrote_without_an_index_is_loaded_by_headers(tmp_path: Path) -> None:
    run_ranks(save_as_before, 4, str(tmp_path))
    assert not (tmp_path / INDEX).exists()
    for ranks in (4, 2):
        for opened, wrong in run_ranks(load_and_count, ranks, str(tmp_path)):
            assert wrong == []
            assert len(opened) <= 4 + 2 * 4, "headers by one rank, and the files with its parts"
    assert load_and_count(str(tmp_path))[1] == []


def save_as_before(folder: str) -> None:
    """As earlier versions saved: with torch's planner and without an index."""
    tensors = sharded(values())
    writer = dcp.HuggingFaceStorageWriter(folder, fqn_to_index_mapping=dict.fromkeys(tensors, 1), save_distributed=True)
    dcp.save(dict(tensors), storage_writer=writer)
    dist.barrier()


def test_torchs_own_reader_reads_the_files(tmp_path: Path) -> None:
    run_ranks(save_sharded, 4, str(tmp_path))
    tensors = zeros()
    dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)))
    assert check(tensors) == []


def changed(path: Path, change: Any) -> None:
    """Change the index, and give it the checksum of what it says now."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(sealed(document)))


def test_a_damaged_index_is_named(tmp_path: Path) -> None:
    save_tensors(tmp_path, values())
    path, kept = tmp_path / INDEX, (tmp_path / INDEX).read_text()
    (tmp_path / "checksums.json").unlink()

    def refused(match: str) -> None:
        tensors = zeros()
        with pytest.raises(CheckpointError, match=match) as caught:
            load_tensors(tmp_path, tensors)
        assert caught.value.remedy == "continue from another checkpoint"
        assert all(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in tensors.values())
        path.write_text(kept)

    path.write_text(kept.replace("[7,5]", "[7,4]"))
    refused(r"index\.json is damaged: its content has changed")
    path.write_text(kept[: len(kept) // 2])
    refused(r"index\.json is damaged")
    path.write_text("[]")
    refused(r"index\.json is damaged")
    changed(path, lambda document: document["files"].__setitem__(0, "../shard-00001-model-00001-of-00001.safetensors"))
    refused("it names a file outside of its folder")
    changed(path, lambda document: document["tensors"]["fp64"][2][0].__setitem__(1, 5))
    refused(r"describes no parts of a tensor of 2 dimensions in 1 files")
    changed(path, lambda document: document["tensors"]["fp64"].__setitem__(0, "Pickle"))
    refused(r"index\.json is damaged: 'Pickle'")
    changed(path, lambda document: document["tensors"]["fp64"][2].clear())
    refused("a part of tensor 'fp64' is missing")
    tensors = zeros()
    load_tensors(tmp_path, tensors)
    assert check(tensors) == []


def test_a_file_that_is_not_the_one_of_the_index_is_named(tmp_path: Path) -> None:
    save_tensors(tmp_path / "one", {"a": torch.ones(4, 2), "b": torch.ones(3)})
    save_tensors(tmp_path / "other", {"a": torch.ones(4, 2), "b": torch.ones(2)})
    for name in ("one", "other"):
        (tmp_path / name / "checksums.json").unlink()
    file = tmp_path / "one" / file_of(0)
    file.write_bytes((tmp_path / "other" / file_of(0)).read_bytes())
    target = {"a": torch.zeros(4, 2), "b": torch.zeros(3)}
    with pytest.raises(CheckpointError, match="does not hold the part of tensor 'b'"):
        load_tensors(tmp_path / "one", target)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        load_tensors(tmp_path / "one", target)
    assert not any(tensor.any() for tensor in target.values())


def refused_on_ranks(folder: str) -> str:
    tensors = sharded(zeros())
    try:
        load_tensors(folder, tensors)
    except CheckpointError as error:
        assert not any(bool(t.any()) for t in tensors.values() if not isinstance(t, DTensor))
        return str(error)
    return ""


def test_damage_to_one_ranks_file_is_an_error_on_every_rank(tmp_path: Path) -> None:
    run_ranks(save_sharded, 4, str(tmp_path))
    with (tmp_path / file_of(2)).open("r+b") as stream:
        stream.seek(-1, 2)
        last = stream.read(1)
        stream.seek(-1, 2)
        stream.write(bytes([last[0] ^ 1]))
    for error in run_ranks(refused_on_ranks, 4, str(tmp_path)):
        assert "has another content than was written" in error
    (tmp_path / INDEX).unlink()
    for error in run_ranks(refused_on_ranks, 2, str(tmp_path)):
        assert f"{INDEX} is missing" in error or "has another content" in error
