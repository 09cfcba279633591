"""Four-bit layers: the codes, the shards, and training over them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardtune.errors import ModelError
from shardtune.models.lora import nf4
from shardtune.models.lora.nf4 import (
    BLOCK,
    KERNEL_DTYPES,
    KERNELS,
    LEVELS,
    NF4Linear,
    decode,
    decode_plainly,
    encode,
    kernel_for,
    packed_width,
    to_nf4,
)
from shardtune.parallel.fsdp2 import shard
from shardtune.parallel.meta_init import fill, init_empty_weights, materialise, shard_of
from tests.support.adapted import group, whole
from tests.support.dist.ranks import run_ranks


def brute_force(weight: torch.Tensor) -> torch.Tensor:
    """NF4 by comparing every value with every level."""
    kept = torch.empty_like(weight)
    levels = torch.tensor(LEVELS)
    for row in range(weight.shape[0]):
        for start in range(0, weight.shape[1], BLOCK):
            block = weight[row, start : start + BLOCK]
            scale = block.abs().max()
            nearest = (block[:, None] / (scale if scale > 0 else 1.0) - levels).abs().argmin(-1)
            kept[row, start : start + BLOCK] = levels[nearest] * scale
    return kept


@pytest.mark.parametrize("columns", [1, 63, 64, 130])
def test_codes_are_the_nearest_levels_of_each_block(columns: int) -> None:
    weight = torch.randn(5, columns, generator=torch.Generator().manual_seed(columns))
    weight[2] = 0.0
    packed = encode(weight)
    assert packed.dtype == torch.uint8
    assert packed.shape == (5, packed_width(columns))
    assert torch.equal(decode(packed, columns, torch.float32), brute_force(weight))
    assert torch.equal(decode(encode(weight[3:4]), columns, torch.float32), brute_force(weight)[3:4]), (
        "rows stand alone"
    )


def test_values_on_the_levels_survive() -> None:
    weight = torch.tensor(LEVELS).repeat(2, 8) * torch.tensor([[3.0], [0.01]])
    assert torch.equal(decode(encode(weight), 128, torch.float32), weight)
    assert packed_width(4096) * 8 / 4096 == 4.5, "bits per weight"


def as_bitsandbytes(
    codes: torch.Tensor, scales: torch.Tensor, block: int, kind: str, shape: list[int], dtype: torch.dtype
) -> torch.Tensor:
    """What bitsandbytes' `dequantize_4bit` does: codes end to end, the first of two in a byte's upper half."""
    assert (codes.shape[1], kind, codes.numel() * 2, scales.numel() * block) == (1, "nf4", *2 * (math.prod(shape),))
    assert codes.is_contiguous()
    assert scales.is_contiguous()
    both = torch.stack([codes.view(-1) >> 4, codes.view(-1) & 15], dim=1).long()
    return (torch.tensor(LEVELS)[both].view(-1, block) * scales[:, None]).view(shape).to(dtype)


class Installed:
    """In place of bitsandbytes' operator, found as if it were installed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
        self.calls = 0
        self.kernel = kernel
        operators = SimpleNamespace(dequantize_4bit=SimpleNamespace(default=self))
        monkeypatch.setattr(torch.ops, KERNELS, operators, raising=False)
        monkeypatch.setattr(nf4.importlib.util, "find_spec", lambda _: True)
        monkeypatch.setattr(nf4.importlib, "import_module", lambda _: None)

    def __call__(self, *given: Any) -> torch.Tensor:
        self.calls += 1
        return self.kernel(*given)


@pytest.fixture
def fresh_kernels() -> Iterator[None]:
    kernel_for.cache_clear()
    yield
    kernel_for.cache_clear()


@pytest.mark.usefixtures("fresh_kernels")
@pytest.mark.parametrize("dtype", [*KERNEL_DTYPES, torch.float64])
def test_an_installed_kernel_decodes_to_the_same_bits(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    installed = Installed(monkeypatch, as_bitsandbytes)
    for columns in (1, 64, 130):
        packed = encode(torch.randn(5, columns, generator=torch.Generator().manual_seed(columns)))
        assert torch.equal(decode(packed, columns, dtype), decode_plainly(packed, columns, dtype))
    assert installed.calls == (4 if dtype in KERNEL_DTYPES else 0), "once on trial"


@pytest.mark.usefixtures("fresh_kernels")
def test_a_kernel_of_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    installed = Installed(monkeypatch, lambda *given: as_bitsandbytes(*given) * (1 + 1e-6))
    packed = encode(torch.randn(5, 64))
    for _ in range(2):
        assert torch.equal(decode(packed, 64, torch.float32), decode_plainly(packed, 64, torch.float32))
    assert installed.calls == 1
    assert "to other values" in caplog.text


@pytest.mark.usefixtures("fresh_kernels")
def test_a_kernel_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_given: Any) -> torch.Tensor:
        raise RuntimeError("no kernel image")

    Installed(monkeypatch, fails)
    packed = encode(torch.randn(5, 64))
    assert torch.equal(decode(packed, 64, torch.bfloat16), decode_plainly(packed, 64, torch.bfloat16))
    assert "no kernel image" in caplog.text


@pytest.mark.usefixtures("fresh_kernels")
def test_codes_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip(f"{KERNELS}.functional")
    weight = torch.randn(31, 192, generator=torch.Generator().manual_seed(4))
    codes, state = functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4", compress_statistics=False)
    blocks = encode(weight).view(31, -1, BLOCK // 2 + 4)
    assert torch.equal(blocks[..., : BLOCK // 2].reshape(-1), codes.view(-1))
    assert torch.equal(decode_plainly(encode(weight), 192, torch.float32), functional.dequantize_4bit(codes, state))
    assert all(kernel_for(torch.device("cpu"), dtype) is not None for dtype in KERNEL_DTYPES)


def test_levels_are_the_published_ones() -> None:
    """The quantiles of a normal distribution that section 3 of the paper describes, to the fp32 of bitsandbytes."""
    normal, offset = torch.distributions.Normal(0.0, 1.0), 0.9677083
    positive = normal.icdf(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -normal.icdf(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    levels = torch.cat([positive, torch.zeros(1, dtype=torch.float64), negative]).sort().values / positive.max()
    assert torch.allclose(torch.tensor(LEVELS, dtype=torch.float64), levels, rtol=0, atol=1e-6)


def test_a_weight_that_is_no_number_is_refused() -> None:
    weight = torch.ones(2, 64)
    weight[1, 7] = torch.nan
    with pytest.raises(ModelError, match="infinite or not a number"):
        encode(weight)


class Net(nn.Module):
    """Three frozen layers between two that are trained; the last but one is tied to the first, so it stays."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(70, 70)
        self.layers = nn.ModuleList([nn.Linear(70, 70), nn.Linear(70, 7, bias=False)])
        self.tied = nn.Linear(70, 70)
        self.head = nn.Linear(7, 3)
        self.twin = nn.Linear(70, 70)
        self.twin.weight = self.tied.weight
        self.layers.requires_grad_(False)
        self.tied.requires_grad_(False)
        self.twin.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.layers[0](torch.tanh(self.first(x))))
        hidden = torch.tanh(self.twin(torch.tanh(self.tied(hidden))))
        return self.head(self.layers[1](hidden)).square().sum()


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {name: tensor.double() for name, tensor in Net().state_dict().items()}


def train(four_bits: bool) -> dict[str, torch.Tensor]:
    """Three steps in fp64, over codes or over what they decode to; the gradients and weights at the end, whole."""
    ranks = group()
    with init_empty_weights():
        model = Net()
    replaced = to_nf4(model, {model.head}, torch.float64) if four_bits else []
    assert replaced == (["layers.0", "layers.1"] if four_bits else [])
    shard(model, [*model.layers], ranks, "fp64")
    materialise(model, dtype=torch.float64, device=torch.device("cpu"))
    given = weights()
    for name, parameter in model.named_parameters():
        value = given[name.replace("packed", "weight")]
        if name in ("layers.0.weight", "layers.1.weight"):
            value = decode(encode(value), value.shape[1], torch.float64)
        shard_here = shard_of(parameter)
        first, rows = shard_here.offsets[0], shard_here.local.shape[0]
        value = value[first : first + rows]  # a rank encodes the rows that it has
        shard_here.local.copy_(encode(value) if name.endswith("packed") else value)
    x = torch.randn(6, 70, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    mine = x[ranks.rank :: ranks.world_size]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        model(mine).backward()
        optimizer.step()
    told = {name: whole(parameter) for name, parameter in model.named_parameters() if parameter.requires_grad}
    return told | {f"{name}.grad": whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def train_both() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return train(True), train(False)


def test_training_equals_training_over_the_decoded_weights_on_any_number_of_ranks() -> None:
    alone = train_both()
    for coded, decoded in [alone, *run_ranks(train_both, 2), *run_ranks(train_both, 3)]:
        assert coded.keys() == decoded.keys() == alone[0].keys()
        assert len(coded) == 8
        for name, tensor in coded.items():
            assert torch.allclose(tensor, decoded[name], rtol=1e-12, atol=1e-12), name
            assert torch.allclose(tensor, alone[0][name], rtol=1e-11, atol=1e-11), name
    started = weights()
    assert not torch.equal(alone[0]["first.weight"], started["first.weight"])


def test_half_precision_gathers_codes_as_they_are() -> None:
    """FSDP2 casts what it gathers to the dtype of the computation; codes have to be left alone."""
    assert run_ranks(gathered_in_half_precision, 2) == [0.0, 0.0]


def gathered_in_half_precision() -> float:
    model = nn.Sequential(nn.Linear(64, 5), nn.Linear(5, 5))
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    model[0].requires_grad_(False)
    model[0] = NF4Linear(model[0], torch.bfloat16)
    shard(model, [], group(), "bf16")
    materialise(model, dtype=torch.float32, device=torch.device("cpu"))
    fill(model[1].weight, torch.eye(5))
    fill(model[1].bias, torch.zeros(5))
    fill(model[0].bias, torch.zeros(5))
    here = shard_of(model[0].packed)
    here.local.copy_(encode(weight[here.offsets[0] : here.offsets[0] + here.local.shape[0]]))
    x = torch.randn(3, 64).bfloat16()
    wanted = F.linear(x, decode(encode(weight), 64, torch.bfloat16), torch.zeros(5).bfloat16())
    return float((model(x) - wanted).detach().abs().max())


def test_no_graph_keeps_the_decoded_matrix() -> None:
    linear = nn.Linear(640, 320).requires_grad_(False)
    layer = NF4Linear(linear, torch.float32).to_empty(device="cpu")
    layer.packed.copy_(encode(linear.weight))
    kept: list[torch.Tensor] = []
    x = torch.randn(2, 640, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(x).sum().backward()
    assert sum(tensor.nbytes for tensor in kept) == layer.packed.nbytes
    assert layer.packed.nbytes < 0.15 * linear.weight.nbytes
