"""Trained weights in bf16: gradients are summed in fp32, and each update is rounded up or down at random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardtune.config.rank_layout import Layout
from shardtune.errors import ModelError
from shardtune.parallel.fsdp2 import shard
from shardtune.parallel.gradient_hooks import refuse_gradient_hooks
from shardtune.parallel.meta_init import materialise
from shardtune.parallel.ranks import Ranks, lay_out
from shardtune.parallel.weights import Weights
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import Trace, recipe, run_recipes, save_model, save_rows, whole

pytestmark = pytest.mark.lengthy


def cases(folder: Path, precision: str, *, ranks: int = 1) -> list[dict[str, Any]]:
    """One step of four micro-batches on one rank, of two on each of two ranks."""
    keys: dict[str, Any] = {"runner__max_steps": 1, "actor__micro_batch_size": 2, "actor__optim__lr_warmup_steps": 0}
    keys["actor__model__precision"] = precision
    more: list[dict[str, Any]] = [{}]
    if ranks > 1:
        more += [{"actor__fsdp_config__reduce": "every"}, {"actor__fsdp_config__cpu_offload": True}]
        more += [{"actor__training_backend": "ddp"}]
    return [recipe(folder / "model", folder / "rows.jsonl", **keys, **further) for further in more]


def assert_rounded(found: torch.Tensor, exact: torch.Tensor) -> tuple[int, float, float]:
    """Each number is one of its two neighbours in bf16; returns how many are the larger one, with mean and variance."""
    raw = exact.view(torch.int32)
    rest = raw & 0xFFFF
    below = (raw - rest).view(torch.float32)
    above = torch.where(rest > 0, raw - rest + 0x10000, raw).view(torch.float32)
    found = found.float()
    assert ((found == below) | (found == above)).all()
    chance = rest.double() / 2**16
    return int((found != below).sum()), float(chance.sum()), float((chance * (1 - chance)).sum())


def test_a_step_is_that_of_full_precision_rounded_at_random(tmp_path: Path) -> None:
    """`bf16` computes the same gradients from the same weights, which its masters hold exactly at first.

    Ranks have the weights of targets as one process has them: 0.3 in bf16 is 0.30078.
    """
    save_model("dense", tmp_path / "model", torch.bfloat16, tie_word_embeddings=False)
    save_rows(tmp_path / "rows.jsonl", weight=0.3)
    full, alone = run_recipes([*cases(tmp_path, "bf16"), *cases(tmp_path, "pure_bf16")])
    assert alone.losses == full.losses
    assert alone.norms == full.norms
    rounded_up = [assert_rounded(alone.weights[name], exact) for name, exact in full.weights.items()]
    found, mean, variance = (sum(each) for each in zip(*rounded_up, strict=True))
    assert variance > 1000
    assert abs(found - mean) < 4 * variance**0.5
    told: list[Trace] = run_ranks(run_recipes, 2, cases(tmp_path, "pure_bf16", ranks=2))[0]
    for trace in told:
        assert trace.losses == pytest.approx(alone.losses, rel=1e-6)
        assert trace.norms == pytest.approx(alone.norms, rel=1e-5)
        for name, exact in full.weights.items():
            assert trace.weights[name].dtype == torch.bfloat16
            assert (trace.weights[name] == alone.weights[name]).float().mean() > 0.99, name
            torch.testing.assert_close(trace.weights[name].float(), exact, rtol=2**-7, atol=1e-6)


class Odd(nn.Module):
    """A unit, a scalar, a norm with statistics, and a weight that only some rows use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.seldom = nn.Parameter(torch.ones(3, 2))

    def forward(self, inputs: torch.Tensor, seldom: bool) -> torch.Tensor:
        found = self.second(torch.relu(self.norm(self.first(inputs)))) * self.scale
        loss = found.float().square().sum()
        return loss + self.seldom.float().square().sum() if seldom else loss


def group() -> Ranks:
    return lay_out(Layout(shard=dist.get_world_size()), dist.get_rank(), torch.device("cpu"))


def gradients(micro_batches: int) -> dict[str, tuple[torch.dtype, torch.dtype, torch.Tensor]]:
    """The dtype of each parameter and of its gradient, and the gradient, after micro-batches of equal rows."""
    torch.manual_seed(0)
    model, ranks = Odd(), group()
    shard(model, [model.first], ranks, "pure_bf16")
    materialise(model, dtype=torch.bfloat16, device=torch.device("cpu"))
    weights = Weights(model, model, "pure_bf16", ranks)
    inputs = torch.linspace(-1, 1, 32).view(8, 4)
    for number in range(micro_batches):
        last = number == micro_batches - 1
        weights.begin_micro_batch(last)
        model(inputs.to(torch.bfloat16), last and ranks.rank == 0).backward()
    weights.sync_replicated_gradients()
    return {
        name: (parameter.dtype, parameter.grad.dtype, whole(parameter.grad))
        for name, parameter in weights.parameters.items()
        if parameter.grad is not None
    }


def test_sums_of_gradients_are_in_fp32_whatever_a_parameter_is() -> None:
    """Of n equal micro-batches of two ranks a bf16 sum would be off by one part in 2^8 or more."""
    once, often = (run_ranks(gradients, 2, number)[0] for number in (1, 9))
    assert {name for name, (held, _, _) in often.items() if held == torch.float32} == {"norm.weight", "norm.bias"}
    for name, (_, dtype, grad) in often.items():
        assert dtype == torch.float32, name
        if name != "seldom":
            torch.testing.assert_close(grad, 9 * once[name][2], rtol=1e-5, atol=1e-5)
    assert often["seldom"][2].any()


class Scaled(nn.Module):
    """A number that every rank holds whole, and rows of one rank use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs: torch.Tensor, scaled: bool) -> torch.Tensor:
        return self.linear(inputs).float().sum() * (self.scale.float() * (1 + 2.0**-9) if scaled else 1.0)


def test_a_number_that_one_rank_uses_has_one_gradient_in_fp32() -> None:
    told = run_ranks(scale_gradient, 2)
    assert [found.dtype for found in told] == [torch.float32] * 2
    assert torch.equal(*told)
    assert told[0].abs() > 1


def scale_gradient() -> torch.Tensor:
    torch.manual_seed(0)
    model, ranks = Scaled(), group()
    shard(model, [], ranks, "pure_bf16")
    materialise(model, dtype=torch.bfloat16, device=torch.device("cpu"))
    weights = Weights(model, model, "pure_bf16", ranks)
    weights.begin_micro_batch(True)
    model(torch.ones(2, 4, dtype=torch.bfloat16), ranks.is_main).backward()
    weights.sync_replicated_gradients()
    grad = weights.parameters["scale"].grad
    assert grad is not None
    return grad


def test_only_hooks_of_users_are_refused() -> None:
    assert run_ranks(hooks_on_scale, 2) == [["", "a hook on the gradient of scale"]] * 2


def hooks_on_scale() -> list[str]:
    ranks, model = group(), Scaled()
    shard(model, [], ranks, "pure_bf16")
    materialise(model, dtype=torch.bfloat16, device=torch.device("cpu"))
    weights, found = Weights(model, model, "pure_bf16", ranks), []
    for hooks in range(2):
        for _ in range(hooks):
            weights.parameters["scale"].register_hook(lambda grad: grad)
        try:
            refuse_gradient_hooks(weights.parameters.items(), ranks, own=weights.hooked)
            found.append("")
        except ModelError as error:
            found.append(str(error).partition(" (")[0])
    return found


def test_a_unit_that_is_gathered_again_sums_in_fp32_still() -> None:
    """FSDP2 notes dtypes anew in `unshard`."""
    assert run_ranks(dtype_after_unshard, 1) == [torch.float32]


def dtype_after_unshard() -> torch.dtype:
    torch.manual_seed(0)
    model, ranks = nn.Linear(4, 4), group()
    shard(model, [], ranks, "pure_bf16")
    materialise(model, dtype=torch.bfloat16, device=torch.device("cpu"))
    weights = Weights(model, model, "pure_bf16", ranks)
    assert isinstance(model, FSDPModule)
    model.unshard()
    model.reshard()
    weights.begin_micro_batch(True)
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    grad = weights.parameters["weight"].grad
    assert isinstance(grad, DTensor)
    return grad.dtype


def test_a_weight_that_a_method_uses_itself_has_its_sum_in_fp32() -> None:
    """In bf16 1 + 2^-9 is 1."""
    assert run_ranks(direct_gradient, 2) == [[1 + 2.0**-9] * 16] * 2


def direct_gradient() -> list[float]:
    model, ranks = nn.Linear(4, 4, bias=False), group()
    shard(model, [], ranks, "pure_bf16")
    materialise(model, dtype=torch.bfloat16, device=torch.device("cpu"))
    weights = Weights(model, model, "pure_bf16", ranks)
    weights.begin_micro_batch(True)
    with weights.whole.method("own"):
        loss = (model.weight.float() * (1.0 if ranks.is_main else 2.0**-9)).sum()
    loss.backward()
    grad = weights.parameters["weight"].grad
    assert grad is not None
    return whole(grad).flatten().tolist()
