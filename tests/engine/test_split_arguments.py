"""Samples are divided so that none is lost or doubled, and their weights add up to one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

from shardtune import NeedParallel
from shardtune.config.rank_layout import Layout
from shardtune.engine.split_arguments import divide
from shardtune.errors import DataError


def parts(data: object, layout: Layout, **options: object) -> list:
    weighed = bool(options.pop("weighed", False))
    return divide([NeedParallel(data, **options)], {}, layout, weighed=weighed)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("size", range(1, 12))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_sample_goes_to_one_rank(size: int, ranks: int):
    found = parts(list(range(size)), Layout(1, ranks))
    assert [sample for part in found if not part.idle for sample in part.args[0]] == list(range(size))
    assert sum(part.share for part in found) == pytest.approx(1.0, abs=1e-15)
    for part in found:
        assert part.args[0], "a rank without samples computes on another's"
        assert part.share == (0.0 if part.idle else len(part.args[0]) / size)


def test_one_sample_over_four_ranks():
    found = parts([[1, 2, 3]], Layout(1, 4))
    assert [part.idle for part in found].count(False) == 1
    assert [part.args[0] for part in found] == [[[1, 2, 3]]] * 4


def test_tensors_arrays_tuples_and_dicts():
    data = {"a": torch.arange(6).view(3, 2), "b": np.arange(3), "c": {"d": ("x", "y", "z")}}
    first, second = parts(data, Layout(1, 2))
    assert (first.args[0]["a"].tolist(), first.args[0]["b"].tolist()) == ([[0, 1]], [0])
    assert second.args[0]["c"]["d"] == ("y", "z")
    whole = data["a"]
    assert isinstance(whole, torch.Tensor)
    assert first.args[0]["a"].untyped_storage().nbytes() < whole.untyped_storage().nbytes(), "the whole would travel"


class Batch(NamedTuple):
    rows: object
    targets: torch.Tensor


def test_named_tuples_and_batches_of_transformers_keep_their_class():
    """Their fields are divided, and not the tuple of them."""
    first, second = parts(Batch({"a": [1, 2, 3, 4]}, torch.arange(4)), Layout(1, 2))
    assert (first.args[0].rows, second.args[0].rows) == ({"a": [1, 2]}, {"a": [3, 4]})
    assert (first.args[0].targets.tolist(), second.args[0].targets.tolist()) == ([0, 1], [2, 3])
    assert isinstance(first.args[0], Batch)
    (whole,) = parts(BatchEncoding({"input_ids": torch.zeros(2, 3)}), Layout())
    assert whole.args[0].to("cpu").input_ids.shape == (2, 3)
    outputs = CausalLMOutput(logits=torch.arange(4))
    assert [part.args[0].logits.tolist() for part in parts(outputs, Layout(1, 2))] == [[0, 1], [2, 3]]
    assert outputs.logits.tolist() == [0, 1, 2, 3], "the caller's stays as it is"
    (grouped,) = parts(defaultdict(list, a=[1, 2]), Layout())
    assert grouped.args[0]["b"] == []


def test_ranks_that_share_a_model_get_the_same_samples():
    found = parts([0, 1, 2, 3], Layout(1, 2, sequence=1, tensor=2))
    assert [part.args[0] for part in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [part.share for part in found] == [0.5] * 4


def test_weights_of_samples():
    found = parts(["a", "b", "c"], Layout(1, 2), weights=[1, 2, 5])
    assert [part.share for part in found] == [1 / 8, 7 / 8]
    handed = parts(["a", "b", "c"], Layout(1, 2), weights=[1, 2, 5], weighed=True)
    assert [part.kwargs["weights"].tolist() for part in handed] == [[1 / 8], [2 / 8, 5 / 8]]
    assert [part.share for part in handed] == [1.0, 1.0]


def test_tokens_are_divided_among_ranks_that_share_sequences():
    found = parts([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], Layout(1, 1, sequence=2), type="seq")
    assert [part.args[0] for part in found] == [[[1, 2, 3], [6, 7, 8]], [[4, 5], [9, 10]]]
    # The first has three tokens that another follows, the second one.
    assert [part.share for part in found] == [3 / 4, 1 / 4]
    weighed = parts(torch.zeros(2, 5), Layout(1, 1, sequence=2), type="seq", weighed=True)
    assert torch.cat([part.kwargs["weights"] for part in weighed], 1).sum().item() == pytest.approx(1.0)
    assert weighed[1].kwargs["weights"].tolist() == [[1 / 8, 0], [1 / 8, 0]]


def test_nothing_marked_goes_to_all_alike():
    assert [part.share for part in divide([[1, 2]], {"b": 3}, Layout(1, 2, sequence=2), weighed=False)] == [0.25] * 4


@pytest.mark.parametrize(
    ("data", "options", "told"),
    [
        ([], {}, "no samples"),
        ("text", {}, "a str has no samples"),
        (torch.tensor(3), {}, "no samples to divide"),
        ({"a": [1], "b": [1, 2]}, {}, "of the dict have different numbers of samples: 'a' 1, 'b' 2"),
        (Batch([1], torch.zeros(2)), {}, "of the Batch have different numbers of samples: 'rows' 1, 'targets' 2"),
        ({"a": [1], "b": None}, {}, "a NoneType has no samples"),
        ({"a": [1], "b": {"c": None}}, {}, "'c' of the dict: a NoneType has no samples"),
        (torch.eye(2).to_sparse(), {}, "a sparse tensor cannot be divided"),
        (torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), {}, "a nested tensor cannot be divided"),
        ([1, 2], {"weights": [1]}, "1 weights for 2 samples"),
        ([1, 2], {"weights": [1, float("nan")]}, "a weight is nan"),
        ([1, 2], {"weights": [1, float("inf")]}, "a weight is inf"),
        ([1, 2], {"weights": [1, -1]}, "a weight is -1"),
        ([1, 2], {"weights": 0.5}, "weights is 0.5"),
        ([[1], [2]], {"lengths": [1, 1]}, "lengths has no effect without max_tokens"),
        ([[1], [2]], {"max_tokens": 2.5}, "no whole number above 0"),
        ([[1], [2]], {"max_tokens": 4, "lengths": [1.5, 1]}, "a length is 1.5"),
        ([{"a": NeedParallel([1])}, 2], {}, "inside a list"),
        ([1, 2], {"type": "sequence"}, "type is 'sequence'"),
        ([[1, 2], [1, 2, 3]], {"type": "seq"}, "2 to 3 tokens"),
        ([[1]], {"type": "seq"}, "cannot be divided"),
        ([1, 2], {"type": "seq"}, "no sequence of tokens"),
    ],
)
def test_what_cannot_be_divided_is_refused(data: object, options: dict, told: str):
    with pytest.raises(DataError, match=told):
        parts(data, Layout(1, 1, sequence=2), **options)


@dataclass(slots=True)
class Rollout:
    rows: object
    rewards: list[float] = field(init=False)


MARKED = [{"a": {"b": NeedParallel([1, 2])}}, [3, NeedParallel([1, 2])], Rollout([NeedParallel([1])])]


@pytest.mark.parametrize("argument", MARKED)
def test_a_mark_inside_an_argument_is_refused(argument: object):
    with pytest.raises(DataError, match=f"inside a {type(argument).__name__}, where nothing divides it"):
        divide([], {"batch": argument}, Layout(2), weighed=False)


def test_an_argument_that_leads_back_to_itself_is_passed_on():
    loop = Rollout(0)
    loop.rows = loop
    parts = divide([loop, NeedParallel([1, 2])], {}, Layout(2), weighed=False)
    assert [part.args for part in parts] == [(loop, [1]), (loop, [2])]


def test_arguments_have_to_have_as_many_samples():
    with pytest.raises(DataError, match=r"1 \(a list\), 2 \(a list\)"):
        divide([NeedParallel([1])], {"b": NeedParallel([1, 2])}, Layout(), weighed=False)


def test_rows_dealt_by_tokens_are_micro_batches():
    rows = [[row] * size for row, size in enumerate((9, 2, 7, 4))]
    numbers = NeedParallel(torch.arange(4), weights=[1, 1, 1, 1])
    parts = divide([NeedParallel(rows, max_tokens=9), numbers], {}, Layout(2), weighed=True)
    assert [[tensor.tolist() for tensor in part.args[1]] for part in parts] == [[[0], [3]], [[2], [1]]]  # pyright: ignore
    assert parts[1].args[0] == [[rows[2]], [rows[1]]]
    assert [weight.tolist() for weight in parts[0].kwargs["weights"]] == [[0.25], [0.25]]  # pyright: ignore
    (alone,) = divide([NeedParallel(torch.zeros(2, 5), max_tokens=5, lengths=[3, 5])], {}, Layout(), weighed=True)
    assert [tuple(tensor.shape) for tensor in alone.args[0]] == [(1, 5), (1, 5)]  # pyright: ignore


def test_rows_that_cannot_be_dealt_by_tokens():
    with pytest.raises(DataError, match="a sample of 3 tokens"):
        NeedParallel([[1, 2, 3]], max_tokens=2)
    with pytest.raises(DataError, match="0 lengths for 2 samples"):
        NeedParallel([1, 2], max_tokens=2)
    with pytest.raises(DataError, match="0 lengths for 2 samples"):
        NeedParallel(torch.tensor([1, 2]), max_tokens=2)
    with pytest.raises(DataError, match="divides tokens among ranks"):
        NeedParallel([[1, 2]], "seq", max_tokens=2)
    with pytest.raises(DataError, match="let the method have a parameter weights"):
        divide([NeedParallel([[1, 2]], max_tokens=2)], {}, Layout(), weighed=False)
    with pytest.raises(DataError, match="divided differently"):
        divide([NeedParallel([[1]], max_tokens=2), NeedParallel([[1]], max_tokens=3)], {}, Layout(), weighed=True)


def test_fewer_samples_than_ranks_are_the_first_ranks():
    found = parts(["a", "b"], Layout(1, 4))
    assert [part.idle for part in found] == [False, False, True, True]
    assert [part.args[0] for part in found[:2]] == [["a"], ["b"]]
