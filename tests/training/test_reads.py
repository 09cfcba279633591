"""How often a step reads numbers from the device: each time the CPU waits for a GPU."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from shardtune.config import load_recipe
from shardtune.models import packed_attention
from shardtune.parallel.ranks import Ranks
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.training import quiet
from tests.support.tiny_run import make_tiny

READS = ("item", "tolist", "cpu", "numpy", "nonzero", "equal", "__bool__", "__float__", "__int__", "__index__")


class Counted(TorchFunctionMode):
    """Counts calls that wait for a GPU where the tensor is on one.

    Those of attention to packed rows are left out: on a CPU it splits by their lengths, on a GPU it does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        name = getattr(func, "__name__", "")
        if name in READS and sys._getframe(1).f_code.co_filename != packed_attention.__file__:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def test_a_step_reads_its_numbers_at_once(tmp_path: Path) -> None:
    """Two micro-batches. SGD, as AdamW counts its steps on the CPU."""
    tiny = make_tiny(tmp_path, save_interval=-1)
    values = tiny.recipe(runner__max_steps=2)
    values["actor"]["optim"] = {"name": "SGD", "lr": 0.1, "clip_grad": 0.5}
    worker = SFTWorker(load_recipe(values), report=quiet)
    worker.setup()
    worker.run_training()
    with Counted() as counted:
        worker.run_training()
    worker.release()
    assert counted.calls == {"tolist": 1}


def test_what_a_gpu_has_is_not_copied_to_the_cpu_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that began on the CPU (a term that no micro-batch had) beside one on a GPU, for which "meta" stands."""
    seen: list[str] = []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: seen.append(tensor.device.type) or [0.0, 0.0])
    Ranks(0, 1, torch.device("cpu")).sum([torch.zeros(()), torch.zeros((), device="meta")])
    assert seen == ["meta"]
