"""What is told of a user's batch: its rows, its targets, whether it is as the others, and a hash of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shardtune.data.user_loader.batch import (
    Fields,
    SameFields,
    describe_batch,
    fingerprint,
    rows_agreed,
    rows_of,
    targets_of,
    tokens_of,
    with_names,
)
from shardtune.data.user_loader.state_json import NotPlain, decode, encode
from shardtune.errors import DataError

LABELS = torch.tensor([[5, -100, 3], [-100, 2, -100]])


def test_a_mean_weighs_as_many_targets_as_it_averages() -> None:
    assert targets_of({"labels": LABELS}, shifted=False) == 3
    assert targets_of({"labels": LABELS}, shifted=True) == 2
    assert targets_of({"labels": torch.tensor([1, 0, 2])}, shifted=True) == 3
    assert targets_of({"name": "x", "pixel_values": torch.zeros(4, 3)}, shifted=True) == 4


@pytest.mark.parametrize("batch", [[torch.zeros(2)], {"name": "x"}, {"loss_scale": torch.ones(())}], ids=str)
def test_a_batch_whose_rows_cannot_be_counted_is_refused(batch: Any) -> None:
    with pytest.raises(DataError):
        targets_of(batch, shifted=True)


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        ({"pixel_values": torch.zeros(40, 3), "input_ids": torch.zeros(2, 7)}, 2),
        ({"name": ["a", "b", "c"]}, 3),
        ({"x": np.zeros((4, 2))}, 4),
        ([1, 2], 2),
        (torch.zeros(5), 5),
        ({"x": torch.zeros(())}, None),
        ("text", None),
    ],
    ids=str,
)
def test_rows_are_counted(batch: Any, rows: int | None) -> None:
    assert rows_of(batch) == rows


def test_rows_that_tensors_agree_on() -> None:
    assert rows_agreed({"x": torch.zeros(3, 2), "y": torch.zeros(3)}) == 3
    assert rows_agreed({"x": torch.zeros(3, 2), "y": torch.zeros(4)}) is None
    assert rows_agreed([torch.zeros(3)]) is None


def test_tokens_leave_padding_out() -> None:
    mask = torch.tensor([[1, 1, 0]])
    assert tokens_of({"input_ids": torch.zeros(1, 3), "attention_mask": mask}) == 2
    assert tokens_of({"input_ids": torch.zeros(1, 3)}) == 3
    assert tokens_of({"x": torch.zeros(5, 3)}) == 5


def test_a_missing_key_names_itself_and_those_that_are_there() -> None:
    batch = with_names({"input_ids": 1, "labels": 2})
    assert isinstance(batch, Fields)
    assert (batch.get("pixel_values"), dict(**batch)) == (None, {"input_ids": 1, "labels": 2})
    with pytest.raises(KeyError) as error:
        batch["pixel_values"]
    assert isinstance(error.value, DataError)
    assert "has no 'pixel_values'; the collate function produced: input_ids, labels" in str(error.value)
    ready = [1]
    assert with_names(ready) is ready


def test_batches_with_other_fields_than_those_before_are_refused() -> None:
    same = SameFields()
    for number in range(2):
        same.check({"input_ids": 1, "pixel_values": 2}, number)
    with pytest.raises(DataError, match="batch 2 has no 'pixel_values', which those before it have"):
        same.check({"input_ids": 1}, 2)
    with pytest.raises(DataError, match="batch 3 has 'audio', which those before it lack"):
        same.check({"input_ids": 1, "audio": 2}, 3)


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.tensor([1, 3]), "y": ["a"]},
        {"x": torch.tensor([1, 2], dtype=torch.int32), "y": ["a"]},
        {"x": torch.tensor([[1, 2]]), "y": ["a"]},
        {"x": torch.tensor([1, 2]), "y": ["b"]},
        {"x": torch.tensor([1, 2]), "z": ["a"]},
        {"x": np.array([1, 2]), "y": ["a"]},
    ],
    ids=str,
)
def test_a_hash_tells_batches_apart(other: Any) -> None:
    batch = {"x": torch.tensor([1, 2]), "y": ["a"]}
    assert fingerprint(batch) == fingerprint({"y": ["a"], "x": torch.tensor([1, 2])})
    assert fingerprint(batch) != fingerprint(other)


def test_a_batch_is_described() -> None:
    batch = {"input_ids": torch.zeros(2, 3, dtype=torch.int64), "name": ["a", "b"], "size": np.zeros(2), "x": 1}
    assert describe_batch(batch) == "input_ids int64 [2, 3], name a list of 2 strs, size float64 [2], x int"
    assert describe_batch([{}, {}]) == "a list of 2 dicts"


def test_a_loaders_state_goes_through_json() -> None:
    state = {
        "rng": torch.get_rng_state(),
        "half": torch.tensor(3.5, dtype=torch.bfloat16),
        "none": torch.empty(0, 3),
        "rows": np.arange(3),
        "raw": b"\x00\xff",
        1: (2, [3.5, None]),
        "count": np.int64(3),
    }
    back = decode(encode(state))
    assert torch.equal(back.pop("rng"), state.pop("rng"))
    assert back.pop("half").dtype == torch.bfloat16
    assert back.pop("none").shape == (0, 3)
    assert back.pop("rows").tolist() == [0, 1, 2]
    assert back == {"raw": b"\x00\xff", 1: (2, [3.5, None]), "count": 3}
    with pytest.raises(NotPlain, match="a Generator"):
        encode({"deep": [torch.Generator()]})
