"""Which layouts a number of ranks can have, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest

from shardtune.config import ActorConfig
from shardtune.config.rank_layout import Layout
from shardtune.errors import ParallelError


def layout(ranks: int, backend: str = "fsdp", /, **sizes: int) -> Layout:
    values: Any = {"training_backend": backend, "parallel": sizes}
    return Layout.of(ActorConfig.model_validate(values), ranks)


@pytest.mark.parametrize(
    ("ranks", "sizes", "wanted"),
    [
        (1, {}, Layout()),
        (8, {}, Layout(shard=8)),
        (8, {"data_replicate": 2}, Layout(replicate=2, shard=4)),
        (8, {"tensor": 2}, Layout(shard=4, tensor=2)),
        (8, {"tensor": 2, "sequence": 2, "data_replicate": 2}, Layout(replicate=2, sequence=2, tensor=2)),
        (8, {"expert": 4}, Layout(shard=8, expert=4)),
        (8, {"data_shard": 2, "data_replicate": 4}, Layout(replicate=4, shard=2)),
    ],
)
def test_what_is_left_is_sharded(ranks: int, sizes: dict[str, int], wanted: Layout) -> None:
    found = layout(ranks, **sizes)
    assert found == wanted
    assert found.num_ranks == ranks


def test_ddp_is_copies_alone() -> None:
    assert layout(4, "ddp") == Layout(replicate=4)
    assert layout(4, "ddp", tensor=2) == Layout(replicate=2, tensor=2)


@pytest.mark.parametrize(
    ("ranks", "backend", "sizes", "what", "remedy"),
    [
        (6, "fsdp", {"tensor": 4}, "= 4 ranks do not divide 6 ranks", "sequence 1, tensor 3"),
        (6, "fsdp", {"tensor": 2, "sequence": 2}, "= 4 ranks do not divide 6 ranks", "sequence 1, tensor 2"),
        (6, "fsdp", {"data_replicate": 4}, "data_replicate: 4 does not divide 6 ranks", "set it to 3"),
        (8, "fsdp", {"data_replicate": 3, "tensor": 2}, "does not divide the 4 of 8 ranks", "set it to 2"),
        (8, "fsdp", {"data_shard": 3}, "data_replicate 1 x data_shard 3 = 3 is not 8 ranks", "to -1"),
        (8, "fsdp", {"expert": 3}, "expert: 3 does not divide the 8 ranks", "set it to 2"),
        (8, "fsdp", {"expert": 8, "data_replicate": 2}, "expert: 8 does not divide the 4 ranks", "set it to 4"),
        (4, "ddp", {"data_shard": 2}, "ddp keeps the whole model on every rank", "training_backend: fsdp"),
        (4, "ddp", {"data_replicate": 2}, "ddp keeps the whole model on every rank", "training_backend: fsdp"),
        (2, "fsdp1", {"data_replicate": 2}, "FSDP1 has nothing to shard", "training_backend: ddp"),
    ],
)
def test_the_nearest_that_fits_is_named(
    ranks: int, backend: str, sizes: dict[str, int], what: str, remedy: str
) -> None:
    with pytest.raises(ParallelError) as refused:
        layout(ranks, backend, **sizes)
    assert what in refused.value.what
    assert remedy in (refused.value.remedy or "")


def flat(ranks: int, **keys: Any) -> Layout:
    return Layout.of(ActorConfig.model_validate({"training_backend": "fsdp1", **keys}), ranks)


def test_fsdp1_is_laid_out_flat() -> None:
    assert flat(4) == Layout(shard=4, flat=True)
    assert flat(4, parallel={"data_replicate": 2, "sequence": 2}) == Layout(replicate=2, sequence=2, flat=True)
    assert flat(1) == Layout(flat=True)
    assert flat(2, model={"lora": {"base_dtype": "nf4"}}) == Layout(shard=2, flat=True)  # without is_lora: no adapter


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"parallel": {"tensor": 2}}, "actor.parallel.tensor"),
        ({"parallel": {"expert": 2}}, "actor.parallel.expert"),
        ({"fsdp_config": {"cpu_offload": True}}, "actor.fsdp_config.cpu_offload"),
        ({"model": {"compile": True}}, "actor.model.compile"),
        ({"model": {"is_lora": True, "lora": {"base_dtype": "nf4"}}}, "actor.model.lora.base_dtype"),
    ],
)
def test_fsdp1_refuses_what_it_cannot_do(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ParallelError, match=f"fsdp1 does not work with {named}: ") as refused:
        flat(4, **keys)
    assert refused.value.where == named


def test_ranks_that_share_rows_are_one_data_rank() -> None:
    found = layout(16, data_replicate=2, tensor=2, sequence=2)
    assert (found.num_data_ranks, found.model_ranks) == (4, 4)
    assert str(found) == "replicate 2 x shard 2 x sequence 2 x tensor 2"
