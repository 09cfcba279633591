"""How tensors get to a device."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardtune.batch import moved

GPU = torch.device("cuda", 0)


class Moves(TorchFunctionMode):
    """A GPU to which nothing is moved: notes what would be."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if func is torch.Tensor.pin_memory:
            self.calls.append("pinned")
            return args[0]
        if func is torch.Tensor.to:
            self.calls.append((args[1], kwargs))
            return args[0]
        return func(*args, **(kwargs or {}))


def test_a_gpu_copies_from_pinned_memory_without_a_wait() -> None:
    with Moves() as moves:
        moved(torch.zeros(3), GPU)
        moved(torch.zeros(3), torch.device("cpu"))
    assert moves.calls == ["pinned", (GPU, {"non_blocking": True}), (torch.device("cpu"), {"non_blocking": True})]


def test_an_expanded_tensor_is_pinned_with_memory_for_all_its_numbers() -> None:
    """torch refuses to pin one whose numbers are one in memory, such as the masks of some processors."""
    with Moves() as moves:
        found = moved(torch.arange(3)[None].expand(2, 3), GPU)
    assert moves.calls[0] == "pinned"
    assert found.is_contiguous()
    assert found.tolist() == [[0, 1, 2]] * 2


def test_other_tensors_keep_their_layout() -> None:
    """Such as images whose channels come last."""
    images = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    with Moves():
        assert moved(images, GPU).stride() == images.stride()
