"""Shapes that are known: the second result of an operation is as torch's own, in memory of the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardtune.parallel.torch_private.operations import FakeTensor, FakeTensorMode
from shardtune.parallel.torch_private.tensors import storage_identity
from shardtune.run.plan.known_shapes import KnownShapes

aten = torch.ops.aten
MODE = FakeTensorMode(allow_non_fake_inputs=True)


def tensors() -> list[torch.Tensor]:
    with MODE:
        return [torch.empty(4, 6), torch.empty(6, 4).T, torch.empty(4, 6, dtype=torch.bfloat16)[1:]]


def description(result: Any, given: list[torch.Tensor]) -> list[object]:
    """What a result is, and of which of the given tensors."""
    found: list[object] = [type(result)]
    for value in result if isinstance(result, list | tuple) else [result]:
        if value is None:
            found.append(None)
            continue
        assert type(value) is FakeTensor
        memory = [storage_identity(tensor.untyped_storage()) for tensor in given]
        own = storage_identity(value.untyped_storage())
        found.append((
            value.dtype, value.shape, value.stride(), value.storage_offset(), value.device,
            [value is tensor for tensor in given], [own == each for each in memory], value.untyped_storage().nbytes(),
        ))  # fmt: skip
    return found


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b, c: (aten.add.Tensor, (a, b), {}),
        lambda a, b, c: (aten.mul.Tensor, (c, 2.0), {}),
        lambda a, b, c: (aten.mul.Tensor, (c, torch.ones(3, 6)), {}),  # with values
        lambda a, b, c: (aten.add_.Tensor, (a, b), {}),
        lambda a, b, c: (aten.view.default, (a, [2, 12]), {}),
        lambda a, b, c: (aten.split.Tensor, (c, 2), {}),
        lambda a, b, c: (aten.t.default, (b,), {}),
        lambda a, b, c: (aten._to_copy.default, (b,), {"dtype": torch.float16}),
        lambda a, b, c: (aten.empty_like.default, (b,), {"memory_format": torch.contiguous_format}),
        lambda a, b, c: (aten.native_layer_norm.default, (a, [6], None, None, 1e-5), {}),
        lambda a, b, c: (aten._foreach_add.List, ([a, a], [b, b]), {}),
        lambda a, b, c: (aten._foreach_mul_.Scalar, ([a, b], 2.0), {}),
    ],
)
def test_a_known_result_is_torchs(call: Callable[..., tuple[Any, Any, Any]]) -> None:
    known = KnownShapes()
    found = []
    for _ in range(3):
        given = tensors()
        operation, args, kwargs = call(*given)
        with MODE:
            found.append(description(known.compute(MODE, operation, args, kwargs), given))
    given = tensors()
    operation, args, kwargs = call(*given)
    with MODE:
        assert found == [description(operation(*args, **kwargs), given)] * 3


def test_other_shapes_and_numbers_are_other_operations() -> None:
    known = KnownShapes()
    with MODE:
        for size in (3, 5):
            for dtype in (torch.float32, torch.bfloat16):
                assert known.compute(MODE, aten.neg.default, (torch.empty(size, dtype=dtype),), {}).shape == (size,)
        narrow = torch.empty(2, dtype=torch.int64)
        assert known.compute(MODE, aten.mul.Tensor, (narrow, 1), {}).dtype == torch.int64
        assert known.compute(MODE, aten.mul.Tensor, (narrow, 1.0), {}).dtype == torch.float32
        assert known.compute(MODE, aten.mul.Tensor, (narrow, True), {}).dtype == torch.int64
