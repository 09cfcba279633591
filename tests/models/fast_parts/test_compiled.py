"""Fast parts in layers that torch compiles (`actor.model.compile`): the numbers are those without compiling.

The compiler's last stage, which writes C++ or Triton, takes minutes here and is left out: what is tested is that fast
parts are in its graphs, forward and backward, and that layers which differ in their weights alone share one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from transformers import Qwen3Config, Qwen3ForCausalLM

from shardtune.config.schema import Fp8Config, KernelsConfig, ModelConfig
from shardtune.models.fast_parts import kernels
from shardtune.models.fast_parts.kernels import Maker, gated_by, norms_by, rotated_by
from shardtune.models.fast_parts.start import FastParts
from tests.models.fast_parts.test_replacement import ALONE, TOKENS, norm, rotated, silu_times
from tests.support.tiny_architectures import shake

pytestmark = pytest.mark.lengthy

LAYERS = 3
"""Each compiled anew would be a graph each, and after eight torch gives up."""
OFF = 1 + 1e-7
"""By this factor the parts of these tests differ from the model's own: enough to see which is computed."""


def model(layers: int = LAYERS) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    made = Qwen3ForCausalLM(config).double()
    shake(made)
    return made


def results(made: Any) -> dict[str, torch.Tensor]:
    """The logits, and the gradient of each parameter."""
    made.zero_grad()
    logits = made(TOKENS, use_cache=False).logits
    logits.square().mean().backward()
    return {"logits": logits.detach()} | {name: parameter.grad.clone() for name, parameter in made.named_parameters()}


def start(made: Any, config: ModelConfig) -> None:
    with torch.no_grad():
        FastParts(made, config).start(lambda: made(TOKENS, use_cache=False), ALONE, made.dtype)


def compile_layers(made: Any) -> list[GraphModule]:
    """Let layers be compiled as `actor.model.compile` does; the graphs that are made."""
    torch._dynamo.reset()
    graphs: list[GraphModule] = []

    def backend(graph: GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    for layer in made.model.layers:
        layer.compile(dynamic=True, backend=backend)
    return graphs


def off_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return norm(x, weight, epsilon) * OFF


def off_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return silu_times(gate, up) * OFF


def off_rotated(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    one, other = rotated(q, k, cos, sin)
    return one * OFF, other * OFF


EAGER: Callable[[Any], Any] = torch.compiler.disable
PARTS: dict[str, Callable[[Callable[[Any], Any]], Maker]] = {
    "rms_norm": lambda way: norms_by(way(off_norm)),
    "swiglu": lambda way: gated_by(way(off_swiglu)),
    "rope": lambda way: rotated_by(way(off_rotated)),
}


FAST = {(True, "rms_norm")}
"""The others take the same ways."""


@pytest.mark.parametrize(
    ("traced", "part"),
    [
        pytest.param(traced, part, id=f"{way}-{part}", marks=() if (traced, part) in FAST else pytest.mark.slow)
        for traced, way in ((True, "compiled too"), (False, "called as it is"))
        for part in PARTS
    ],
)
def test_kernels_have_their_numbers_in_compiled_layers(
    part: str, traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that the compiler reads, as torch's, and those that it is kept from, as Liger's and the Hub's."""
    maker = PARTS[part]((lambda function: function) if traced else EAGER)
    monkeypatch.setitem(kernels.SOURCES, "hub", lambda: {part: maker})
    made = model()
    plain = results(made)
    start(made, ModelConfig(kernels=KernelsConfig(source="hub")))
    expected = results(made)
    graphs = compile_layers(made)
    found = results(made)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)
    assert float((expected["logits"] - plain["logits"]).abs().max()) > 1e-9
    if traced:
        assert len(graphs) == 1


def test_fp8_has_its_numbers_in_compiled_layers() -> None:
    """The backward pass is compiled with the forward pass."""
    pytest.importorskip("torchao")
    made = model(1).float()
    plain = results(made)
    start(made, ModelConfig(fp8=Fp8Config(scaling="rowwise_with_gw_hp", emulate=True)))
    expected = results(made)
    torch._dynamo.reset()
    for layer in made.model.layers:
        layer.compile(dynamic=True, backend="aot_eager")
    found = results(made)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)
    assert float((expected["logits"] - plain["logits"]).abs().max()) > 1e-3
