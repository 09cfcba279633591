"""Adam in one pass, in Triton's interpreter (`make test-fast-parts`), stores what torch's operations store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardtune.config import OptimConfig
from shardtune.optim.build import build_optimizer
from shardtune.optim.fused_adam import first_index
from shardtune.optim.low_bit import LowBitAdam, one_pass_agrees
from shardtune.optim.quantized_state import Place

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is off: make test-fast-parts"
)
SHAPES = {"matrix": (6, 512), "experts": (2, 3, 256), "norm": (768,), "odd": (5, 300)}


def stepped(name: str, state: str, half: bool, one_pass: bool, **values: Any) -> dict[str, torch.Tensor]:
    """All that is stored after four steps, by name."""
    draw = torch.Generator().manual_seed(1)
    given = {key: nn.Parameter(torch.randn(shape, generator=draw)) for key, shape in SHAPES.items()}
    for parameter in given.values():
        parameter.data = parameter.data.bfloat16() if half else parameter.data
        parameter.grad_dtype = torch.float32
    config = OptimConfig.model_validate({"name": name, "lr": 1e-2, "state_dtype": state, **values})
    optimizer = build_optimizer(given, config, seed=11)
    assert isinstance(optimizer, LowBitAdam)
    optimizer.one_pass = one_pass
    for _ in range(4):
        for parameter in given.values():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        optimizer.step()
    states = {f"{key} {part}": each for key, p in given.items() for part, each in optimizer.state[p].items()}
    tensors = {**{key: parameter.detach() for key, parameter in given.items()}, **states}
    return {key: tensor for key, tensor in tensors.items() if torch.is_tensor(tensor)}


@interpreted
@pytest.mark.parametrize(
    ("name", "state", "half", "values"),
    [
        ("AdamW", "int8", True, {"weight_decay": 0.1}),
        ("AdamW", "bf16", True, {}),
        ("AdamW", "fp32", True, {}),
        ("Adam", "int8", False, {"weight_decay": 0.1, "args": {"maximize": True}}),
        ("Adam", "bf16", False, {}),
    ],
)
def test_one_pass_stores_what_chunks_store(name: str, state: str, half: bool, values: dict[str, Any]) -> None:
    wanted, found = (stepped(name, state, half, one_pass, **values) for one_pass in (False, True))
    for key, tensor in wanted.items():
        apart = (found[key].float() - tensor.float()).abs() > 1e-6 + 1e-5 * tensor.float().abs()
        assert apart.float().mean() < 2e-3, key
        assert found[key].dtype == tensor.dtype


@interpreted
def test_the_probe_sees_agreement_and_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (LowBitAdam, torch.device("cpu"), torch.bfloat16, "int8")
    one_pass_agrees.cache_clear()
    assert one_pass_agrees(*asked)
    one_pass_agrees.cache_clear()
    monkeypatch.setattr("shardtune.optim.fused_adam._signed", lambda number: 7)
    assert not one_pass_agrees(*asked)
    one_pass_agrees.cache_clear()


@interpreted
def test_the_kernel_compiles_for_gpus(tmp_path: Path) -> None:
    """For Ampere, Hopper and Blackwell; each operation is rounded, as in the interpreter, and registers suffice."""
    generations = ("80", "90", "100", "120")
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "error", "-m", "tests.support.compiled_adam", *generations]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert {kernel["name"].split("-")[0] for kernel in found} == {*generations}
    assert len(found) >= 5 * len(generations)
    for kernel in found:
        assert kernel["target"], kernel
        assert kernel["contracted"] == kernel["approximate"] == kernel["local"] == 0, kernel


def test_what_fails_is_done_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler of kernels may raise anything."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no ptxas here")

    monkeypatch.setattr("shardtune.optim.low_bit.launch", fails)
    monkeypatch.setattr("shardtune.optim.low_bit.kernel", object)
    one_pass_agrees.cache_clear()
    assert not one_pass_agrees(LowBitAdam, torch.device("cpu"), torch.float32, "int8")
    one_pass_agrees.cache_clear()
    assert all(tensor.isfinite().all() for tensor in stepped("AdamW", "int8", False, False).values())


@pytest.mark.parametrize(
    ("shape", "place", "expected"),
    [
        ((4, 512), Place((12, 512), (8, 0)), 8 * 512),
        ((4, 512), Place((4, 1024), (0, 512), 2), None),  # columns
        ((4, 300), Place((4, 300), (0, 0)), None),  # a block that ends with its row
        ((2, 3, 256), Place((6, 3, 256), (4, 0, 0)), 4 * 3 * 256),
    ],
)
def test_only_whole_rows_of_whole_blocks_are_updated_in_one_pass(
    shape: tuple[int, ...], place: Place, expected: int | None
) -> None:
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.zeros(shape)
    state = {"exp_avg": torch.zeros(shape, dtype=torch.uint8), "exp_avg_scale": torch.zeros(*shape[:-1], 2)}
    assert first_index(parameter, place, state) == expected
    parameter.grad = torch.zeros(*reversed(shape)).permute(*reversed(range(len(shape))))
    assert first_index(parameter, place, state) is None
