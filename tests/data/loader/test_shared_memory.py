"""What goes from process to process comes as it was, all in one piece of memory, which nobody has to clean up."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardtune.data.loader.shared_memory import SharedMemoryMessage, packed

OBJECTS: dict[str, Any] = {
    "float": torch.randn(300, 7),
    "bf16": torch.randn(40, 50).to(torch.bfloat16),
    "bool": torch.arange(3000) % 2 == 0,
    "strided": torch.arange(6000).view(60, 100).t()[::2],
    "one": torch.tensor(2.5),
    "none": torch.empty(0, 3, dtype=torch.int32),
    "array": np.arange(5000, dtype=np.int16).reshape(50, 100),
    "ones": torch.ones((), dtype=torch.int64).expand(1, 40, 90, 90),
    "words": [{"a": "b" * 5000}, 3, None],
}


def sent(value: Any) -> Any:
    message = packed(value)
    try:
        return message.opened()
    finally:
        if message.file is not None:
            os.close(message.file)


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_everything_comes_as_it_was(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    """Where there is no memory without a name, all of it goes through the pipe."""
    monkeypatch.setattr("shardtune.data.loader.shared_memory.sys.platform", platform)
    assert (packed(OBJECTS).file is None) == (platform == "darwin")
    found = sent(OBJECTS)
    for name, value in OBJECTS.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert found[name].shape == value.shape
            assert torch.equal(found[name], value), name
    assert (found["array"] == OBJECTS["array"]).all()
    assert found["words"] == OBJECTS["words"]
    found["float"].add_(1)  # it is the receiver's
    found["one"].mul_(2)


def test_one_number_everywhere_takes_no_room() -> None:
    assert packed(OBJECTS["ones"]).file is None
    assert sent(OBJECTS["ones"]).stride() == (0, 0, 0, 0)


def test_memory_goes_with_the_last_tensor() -> None:
    def maps() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:shardtune")

    before, files = maps(), len(os.listdir("/proc/self/fd"))
    found = sent([torch.ones(5000), torch.ones(7000)])
    assert maps() == before + 1
    last = found.pop()[5:]
    del found
    assert float(last.sum()) == 6995
    assert maps() == before + 1
    del last
    assert maps() == before
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_sender_that_is_gone_is_noticed() -> None:
    message = packed(torch.ones(5000))
    assert message.file is not None
    os.close(message.file)
    gone = SharedMemoryMessage(message.object, message.places, message.process, 1_000_000)
    with pytest.raises(FileNotFoundError):
        gone.opened()
