"""A part of another library is measured beside the module that it replaces, and refused where it differs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Phi3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from shardtune.config import load_recipe
from shardtune.config.schema import KernelsConfig, ModelConfig
from shardtune.errors import ConfigError
from shardtune.models.fast_parts import kernels
from shardtune.models.fast_parts.kernels import Maker, gated_by, norms_by, rotated_by
from shardtune.models.fast_parts.start import BOUND, FastParts, check_available
from shardtune.parallel.ranks import Ranks
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import recipe, run_recipe, run_recipes, save_model, save_rows
from tests.support.tiny_architectures import shake, tiny_config

ALONE = Ranks(0, 1, torch.device("cpu"))
TOKENS = (torch.arange(24) * 7 % 250)[None]


def tiny(family: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(tiny_config(family, {}), attn_implementation="eager")
    shake(model)
    return model.to(dtype).eval()


def started(model: Any, source: str = "torch", parts: Sequence[Any] = ()) -> tuple[FastParts, list[str]]:
    config = ModelConfig(kernels=KernelsConfig(source=source, parts=list(parts)))  # type: ignore[arg-type]
    found = FastParts(model, config)
    with torch.no_grad():
        return found, found.start(lambda: model(TOKENS), ALONE, model.dtype)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(TOKENS, labels=TOKENS).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, Maker]], None]:
    """Parts of the test's own, in the place of a library."""

    def put(parts: Mapping[str, Maker]) -> None:
        monkeypatch.setitem(kernels.SOURCES, "hub", lambda: parts)

    return put


def silu_times(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate * torch.sigmoid(gate) * up


def rotated(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As Liger has it: by halves."""

    def one(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        c, s = (each[..., : x.shape[-1] // 2].unsqueeze(1) for each in (cos, sin))
        return torch.cat([first * c - second * s, second * c + first * s], dim=-1)

    return one(q), one(k)


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, epsilon)


PARTS: dict[str, Maker] = {
    "rms_norm": norms_by(norm),
    "swiglu": gated_by(silu_times),
    "rope": rotated_by(rotated),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_closest_formula_is_used(family: str, dtype: torch.dtype) -> None:
    """Qwen's norms scale by w, Gemma's by 1 + w."""
    model = tiny(family, dtype)
    found, notes = started(model)
    chosen = {one.chosen for one in found._kernels["rms_norm"]}
    assert chosen == {int(family == "gemma2")}
    assert notes[0].startswith(f"kernels: rms_norm of {len(found._kernels['rms_norm'])} modules by torch: relative")
    assert max(min(one.errors) for one in found._kernels["rms_norm"]) <= BOUND[dtype]


def decorated(function: Callable[..., object]) -> Callable[..., object]:
    @wraps(function)
    def renaming(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)

    return renaming


@pytest.mark.parametrize("has_decorator", [False, True], ids=["plain", "decorated"])
def test_all_parts_train_as_their_own_modules_do(
    own: Callable[[Mapping[str, Maker]], None], monkeypatch: pytest.MonkeyPatch, has_decorator: bool
) -> None:
    """transformers 5.24 has decorators, which rename arguments, around the forwards of attention layers."""
    own(PARTS)
    if has_decorator:
        monkeypatch.setattr(Qwen3Attention, "forward", decorated(Qwen3Attention.forward))
    model = tiny("qwen3", torch.float64)
    expected = gradients(model)
    found, notes = started(model, "hub")
    assert [note.split()[1] for note in notes] == ["rms_norm", "swiglu", "rope"]
    assert all("forward" in vars(one.module) for ones in found._kernels.values() for one in ones)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-7)  # norms round to fp32 in fp64
    found.restore()
    assert not any("forward" in vars(module) for module in model.modules())
    for name, grad in gradients(model).items():
        assert torch.equal(grad, expected[name]), name


def test_gate_and_up_as_one_matrix(own: Callable[[Mapping[str, Maker]], None]) -> None:
    own({"swiglu": gated_by(silu_times)})
    model = tiny("phi3")
    assert isinstance(model, Phi3ForCausalLM)
    _, notes = started(model, "hub")
    assert "swiglu of 2 modules" in notes[0]


def without_epsilon(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, 100 * epsilon + 1e-2)


def without_gradient(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return norm(x, weight.detach(), epsilon)


def gelu_times(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate) * up


def backwards(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return rotated(q, k, cos, -sin)


def failing(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel image is available")


WRONG: dict[str, tuple[str, Maker, str]] = {
    "another epsilon": ("rms_norm", norms_by(without_epsilon), "differs from the plain one by"),
    "no gradient of the weight": ("rms_norm", norms_by(without_gradient), "differs from the plain one by 1,"),
    "another activation": ("swiglu", gated_by(gelu_times), "differs from the plain one by"),
    "turned the other way": ("rope", rotated_by(backwards), "differs from the plain one by"),  # type: ignore[arg-type]
    "an exception": ("swiglu", gated_by(failing), "fails (RuntimeError: no kernel image is available)"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_part_is_refused(wrong: str, own: Callable[[Mapping[str, Maker]], None]) -> None:
    part, maker, says = WRONG[wrong]
    own({**PARTS, part: maker})
    model = tiny("qwen3", torch.bfloat16)
    with pytest.raises(ConfigError) as refused:
        started(model, "hub", ["rms_norm", "swiglu", "rope"])
    message = str(refused.value)
    assert f"{part} by hub {says}" in message
    assert f"leave {part} out" in message
    assert not any("forward" in vars(module) for name, module in model.named_modules() if part in name)


@pytest.mark.parametrize(("parts", "says"), [(["swiglu"], "has no swiglu"), ([], "has no part that it replaces")])
def test_a_model_without_the_part_is_refused(parts: list[str], says: str, own: Any) -> None:
    own(PARTS if parts else {"swiglu": gated_by(silu_times)})
    with pytest.raises(ConfigError, match=says):
        started(tiny("gpt2"), "hub", parts)


class HubNorm(torch.nn.Module):
    """As a layer of the Hub: without weights of its own, over the module's."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return norm(x, self.weight, self.variance_epsilon)


def test_a_layer_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    class LayerRepository:
        def __init__(self, **names: object) -> None:
            asked.update(names)

        def load(self) -> type[torch.nn.Module]:
            return HubNorm

    library = ModuleType("kernels")
    library.LayerRepository = LayerRepository  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels", library)
    _, notes = started(tiny("qwen3"), "hub")
    assert asked == {"repo_id": "kernels-community/liger-kernels", "layer_name": "LigerRMSNorm", "version": 3}
    assert "rms_norm of 9 modules by hub" in notes[0]


def test_what_a_machine_lacks_is_refused_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernels_, fp8 = "actor.model.kernels", "actor.model.fp8"
    missing = {
        f"{kernels_}.source: liger": {"kernels": {"source": "liger"}},
        f"{fp8}.scaling: rowwise": {"fp8": {"scaling": "rowwise"}},
        f"{kernels_}.source: torch has no rope": {"kernels": {"source": "torch", "parts": ["rope"]}},
    }
    for says, section in missing.items():
        recipe = load_recipe({"actor": {"model": {"model_path": "x", **section}}, "data": {"train_data_paths": "y"}})
        with pytest.raises(ConfigError) as refused:
            check_available(recipe)
        assert says in str(refused.value)


@pytest.mark.slow
def test_sharded_modules_are_replaced_too(tmp_path: Path) -> None:
    """Two ranks with two micro-batches each have the numbers of one process, in fp64."""
    model, rows = save_model("dense", tmp_path / "model"), save_rows(tmp_path / "rows.jsonl")
    changes: dict[str, Any] = {"runner__max_steps": 6, "actor__model__kernels__source": "torch"}
    alone = run_recipe(recipe(model, rows, **changes))
    plain = run_recipe(recipe(model, rows, runner__max_steps=6))
    (both,) = run_ranks(run_recipes, 2, [recipe(model, rows, actor__micro_batch_size=2, **changes)])[0]
    assert both.notes[0].startswith("kernels: rms_norm of 5 modules by torch")
    assert both.losses == pytest.approx(alone.losses, rel=1e-10)
    assert both.norms == pytest.approx(alone.norms, rel=1e-10)
    assert alone.losses != plain.losses
    assert alone.losses == pytest.approx(plain.losses, rel=1e-6)
    for name, weight in alone.weights.items():
        torch.testing.assert_close(both.weights[name], weight, rtol=1e-10, atol=1e-10)
