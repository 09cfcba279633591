"""What torch 2.11 lacks, on a class of its kind: parameters of integers, which are neither trained nor cast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.torch_version import TorchVersion

from shardtune.parallel.torch_private.fsdp2 import shard_integers


class OfTorch211:
    """Its way of deciding in which dtype a parameter is gathered."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.orig_dtype = dtype
        self.param_dtype: torch.dtype | None = None

    def init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
        self.param_dtype = mp_policy.param_dtype


@pytest.mark.parametrize("version", ["2.11.0+cpu", "2.12.0"])
def test_integers_are_neither_trained_nor_cast(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    private: Any = _fsdp_param
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(private, "FSDPParam", type("OfTorch", (OfTorch211,), dict(vars(OfTorch211))))
    monkeypatch.setattr(private, "nn", nn)
    shard_integers.__wrapped__()
    if version == "2.12.0":  # which does so by itself
        assert private.nn is nn
        return
    assert private.nn.Module is nn.Module
    assert not private.nn.Parameter(torch.ones(2, dtype=torch.uint8)).requires_grad
    assert private.nn.Parameter(torch.ones(2)).requires_grad
    for dtype, gathered in ((torch.uint8, None), (torch.float32, torch.bfloat16)):
        one = private.FSDPParam(dtype)
        one.init_dtype_attrs(MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        assert one.param_dtype == gathered
