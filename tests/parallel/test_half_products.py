"""Products in half precision on a processor that lacks their instructions: through fp32, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardtune.config import load_recipe
from shardtune.models import loss
from shardtune.parallel import half_products, shard
from shardtune.parallel.half_products import (
    ProductsInFp32,
    add_converted,
    factors_in_bf16,
    lacks_half_products,
    multiply_in_fp32,
    recomputing,
)
from shardtune.parallel.torch_private.operations import TorchDispatchMode, grouped_product, schema_of
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.training import recipe, save_model, save_rows

MKLDNN: Any = torch.backends.mkldnn
OFFSETS = torch.tensor([3, 8], dtype=torch.int32)
Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
OPERATIONS: dict[str, Operation] = {
    "linear": lambda x, w: F.linear(x, w[0], w[1, 0]),
    "matmul": torch.matmul,
    "an operator": lambda x, w: x @ w,
    "broadcast": lambda x, w: x[None].matmul(w[0]),
    "bmm": torch.bmm,
    "addmm": lambda x, w: torch.addmm(w[1, 0], x[0], w[0]),
    "baddbmm": lambda x, w: torch.baddbmm(x, x, w),
    "einsum": lambda x, w: torch.einsum("bij,bjk->bik", x, w),
    "einsum of a list": lambda x, w: torch.einsum("bij,bjk->bik", [x, w]),
    "groups": lambda x, w: grouped_product(x[0], w, offs=OFFSETS),
    "convolution": lambda x, w: F.conv1d(x.mT, w[:, :, :3]),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None], w[None], w[None]),
}


class Watch(TorchDispatchMode):
    """Records the products whose factors are of half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        name = schema_of(func).name
        if any(part in name for part in ("mm", "bmm", "convolution", "scaled_dot_product")):
            tensors = [each for each in args if isinstance(each, torch.Tensor)]
            self.found += [name for each in tensors if each.dtype in half_products.HALF]
        return func(*args, **(kwargs or {}))


@contextmanager
def watched() -> Iterator[list[str]]:
    """The products in half precision that torch computes inside, backward passes included."""
    watch = Watch()
    with watch:
        yield watch.found


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without these instructions, as many are."""
    monkeypatch.setattr(half_products, "half_is_native", lambda dtype: False)


def factors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 8, 16, dtype=dtype).requires_grad_(), torch.randn(2, 16, 16, dtype=dtype).requires_grad_()


def wide(name: str) -> torch.dtype:
    """The dtype to compare with; products of groups have no fp64."""
    return torch.float32 if name == "groups" else torch.float64


@pytest.mark.parametrize("dtype", half_products.HALF, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_results_and_gradients_are_those_of_torch_up_to_a_rounding(name: str, dtype: torch.dtype) -> None:
    operation, found = OPERATIONS[name], []
    exact = [each.detach().to(wide(name)).requires_grad_() for each in factors(dtype)]
    for given, mode in ((factors(dtype), ProductsInFp32()), (exact, nullcontext())):
        with mode, watched() as products:
            result = operation(*given)
            result.to(wide(name)).square().sum().backward()
        assert not products
        assert result.dtype == given[0].dtype
        assert given[0].grad is not None
        assert given[1].grad is not None
        found.append([result.detach(), given[0].grad, given[1].grad])
    for ours, wanted in zip(*found, strict=True):
        assert ours.double().sub(wanted).abs().max() <= 8 * torch.finfo(dtype).eps * wanted.abs().max()


def test_single_factors_and_other_dtypes_are_left_to_torch() -> None:
    half, single = torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2)
    with ProductsInFp32():
        assert (single @ single).dtype == torch.float32
        assert (half @ half).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="dtype"):
            _ = half @ single


def test_what_is_kept_for_the_backward_pass_stays_in_half_precision() -> None:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    rows, weights = factors(torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), ProductsInFp32():
        _ = F.linear(rows, weights[0]), rows @ weights
    assert {tensor.dtype for tensor in kept} == {torch.bfloat16}


def test_the_processor_is_asked_for_the_dtype_that_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_products, "half_is_native", lambda dtype: dtype == torch.bfloat16)
    cpu = torch.device("cpu")
    assert not lacks_half_products(cpu, torch.bfloat16)
    assert not lacks_half_products(cpu, torch.float32)
    assert lacks_half_products(cpu, torch.float16)
    assert not lacks_half_products(torch.device("cuda"), torch.float16)


class Block(nn.Module):
    """A layer with a matrix of its own, and one that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.matrix = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        x = self.inner(x) @ self.matrix
        if fails:
            raise ValueError("no")
        return x


def test_a_call_that_fails_leaves_products_as_they_were() -> None:
    block = Block().bfloat16()
    multiply_in_fp32(block)
    x = torch.ones(3, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="no"):
        block(x, fails=True)
    with watched() as products:
        _ = x @ x.t()
    assert products, "outside of the model torch multiplies"
    with watched() as products:
        block(x)
        block.inner(x)
        with_grad = x.clone().requires_grad_()
        checkpoint(block, with_grad, use_reentrant=False).float().sum().backward()
        with ProductsInFp32():  # as in the model's own forward; the recomputation calls no hook of the block
            found = checkpoint(block.forward, with_grad, use_reentrant=False)
        with recomputing():
            found.float().sum().backward()
    assert not products


def test_a_model_with_compiled_layers_is_left_as_it_is() -> None:
    block = Block().bfloat16()
    block.inner.compile(backend="eager")
    multiply_in_fp32(block)
    with watched() as products:
        block(torch.ones(3, 4, dtype=torch.bfloat16))
    assert products


CHANGES: dict[str, dict[str, Any]] = {
    "dense": {},
    "selective": {"actor__model__is_lora": True, "actor__model__gradient_checkpointing": "selective"},
    "qwen3_moe": {},
}


def steps(folder: Path, name: str) -> tuple[list[float], bool]:
    """The losses of two steps in bf16, and whether torch multiplied matrices of half precision in them."""
    kind = "dense" if CHANGES[name] else name
    model, rows = save_model(kind, folder / "model"), save_rows(folder / "rows.jsonl", count=16, longest=20)
    values = recipe(model, rows, actor__model__precision="bf16", runner__max_steps=2, **CHANGES[name])
    worker = SFTWorker(load_recipe(values), report=lambda _: None)
    worker.setup()
    with watched() as products:
        losses = [worker.run_training()["train/loss"] for _ in range(2)]
    worker.release()
    return losses, bool(products)


@pytest.mark.lengthy
@pytest.mark.usefixtures("lacking")
@pytest.mark.parametrize("name", CHANGES)
def test_no_product_of_a_step_is_left_to_torch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward, layers that are computed again, head and experts."""
    losses, by_torch = steps(tmp_path, name)
    assert not by_torch
    if name == "dense":
        monkeypatch.setattr(shard, "lacks_half_products", lambda *_: False)
        monkeypatch.setattr(loss, "lacks_half_products", lambda *_: False)
        wanted, by_torch = steps(tmp_path, name)
        assert by_torch
        assert losses == pytest.approx(wanted, rel=0.01)


def test_the_setting_for_factors_ends_with_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the process's: other products, and those of fp32 numbers, never see it."""
    settings, cpu = MKLDNN.matmul, torch.device("cpu")
    before = settings.fp32_precision
    monkeypatch.setattr(half_products, "half_is_native", lambda dtype: True)

    def fails() -> None:
        with factors_in_bf16(cpu, torch.bfloat16):
            assert settings.fp32_precision == "bf16"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert settings.fp32_precision == before
    for device, dtype in ((cpu, torch.float32), (cpu, torch.float16), (torch.device("meta"), torch.bfloat16)):
        with factors_in_bf16(device, dtype):
            assert settings.fp32_precision == before
    settings.fp32_precision = "bf16"
    with factors_in_bf16(cpu, torch.bfloat16):
        settings.fp32_precision = "ieee"  # by somebody else, meanwhile
    assert settings.fp32_precision == "ieee"
    settings.fp32_precision = before
    monkeypatch.setattr(half_products, "half_is_native", lambda dtype: False)
    with factors_in_bf16(cpu, torch.bfloat16):
        assert settings.fp32_precision == before


def test_a_head_in_bf16_has_unrounded_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of its logits alone is computed with factors in bf16, which they were; sums are in fp32."""
    seen: list[tuple[torch.dtype, str]] = []

    class Settings(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
            if schema_of(func).name in ("aten::mm", "aten::addmm_"):
                seen.append((args[0].dtype, MKLDNN.matmul.fp32_precision))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(half_products, "half_is_native", lambda dtype: True)
    before = MKLDNN.matmul.fp32_precision
    torch.manual_seed(0)
    hidden, weight = (torch.randn(size, 48).bfloat16().requires_grad_() for size in (70, 300))
    targets, ones = torch.randint(300, (70,)), torch.ones(70)
    wanted = F.cross_entropy(hidden.double() @ weight.double().t(), targets, reduction="sum")
    with Settings():
        total, _ = loss.linear_cross_entropy(hidden, weight, targets, ones)
        total.backward()
    assert float(total.detach()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    assert seen[0] == (torch.float32, "bf16")
    assert len(seen) == 3
    assert all(setting == before for _, setting in seen[1:])
    seen.clear()
    with Settings():
        loss.linear_cross_entropy(hidden.float(), weight.float(), targets, ones)
    assert seen[0] == (torch.float32, before)


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (7, 100_003), (3, 2, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_converted_sums_have_the_bits_of_whole_ones(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    total, part = torch.randn(shape), torch.randn(shape).to(dtype)
    wanted = total + part
    add_converted(total, part)
    assert torch.equal(total, wanted)
