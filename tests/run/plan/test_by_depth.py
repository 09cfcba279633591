"""Plans of deep models from a few of their layers: what repeats, and the same bytes as of all layers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from transformers import Gemma3TextConfig, GptOssConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig, WhisperConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextModel
from transformers.models.whisper.modeling_whisper import WhisperModel

from shardtune.optim.quantized_state import CHUNK, chunks
from shardtune.parallel.meta_init import init_empty_weights
from shardtune.run.plan import plan as planning
from shardtune.run.plan import simulation
from shardtune.run.plan.by_depth import Shallow
from shardtune.run.plan.layer_stacks import Stack, pattern_of, stacks_of
from shardtune.run.plan.plan import Plan, planner
from shardtune.run.plan.rows import Given
from shardtune.run.plan.timeline import Change, fullest, inserted, repeated

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "sliding_window": 8}
MODELS: dict[str, PreTrainedConfig] = {
    "dense": Qwen3Config(**SIZES, num_hidden_layers=14, architectures=["Qwen3ForCausalLM"]),
    "window": Gemma3TextConfig(**SIZES, num_hidden_layers=80, sliding_window=8, architectures=["Gemma3ForCausalLM"]),
    "experts": Qwen3MoeConfig(
        **SIZES, **EXPERTS, num_hidden_layers=24, moe_intermediate_size=16, num_experts=4, mlp_only_layers=[0],
        architectures=["Qwen3MoeForCausalLM"],
    ),
    "two layers of experts": Qwen3MoeConfig(
        **SIZES, **EXPERTS, num_hidden_layers=2, moe_intermediate_size=16, num_experts=4,
        architectures=["Qwen3MoeForCausalLM"],
    ),
    "two layers with sinks": GptOssConfig(
        **SIZES, **EXPERTS, num_hidden_layers=2, num_local_experts=4, architectures=["GptOssForCausalLM"]
    ),
    "sinks": GptOssConfig(
        **SIZES, **EXPERTS, num_hidden_layers=40, num_local_experts=4, architectures=["GptOssForCausalLM"]
    ),
}  # fmt: skip
LORA = ("model.is_lora=true", "model.lora.r=4")


def plan_of(name: str, folder: Path, ranks: int, *changes: str, length: int = 16) -> Plan:
    MODELS[name].save_pretrained(folder / name)
    sizes = [f"data.max_length={length}", "micro_batch_size=2", f"global_batch_size={4 * ranks}"]
    words = [f"model.model_path={folder / name}", "runner.device=cuda", *sizes, *changes]
    found = planner(None, words, ranks=ranks, given=Given(None, length), report=lambda _: None).plan()
    assert not found.notes
    return found


def require_same_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, ranks: int, *changes: str) -> None:
    """The plan from a few layers is that of all, category by category, and is not made of all."""
    assert MODELS[name].num_hidden_layers is not None
    depths: list[object] = []
    changes_at = simulation._Step.changes

    def noted(step: Any, given: Any) -> list[Change]:
        depths.append(given)
        return changes_at(step, given)

    with monkeypatch.context() as patched:
        patched.setattr(simulation._Step, "changes", noted)
        found = plan_of(name, folder, ranks, *changes)
    assert {} not in depths
    assert len(depths) >= 3
    with monkeypatch.context() as patched:
        patched.setattr(planning, "simulate", partial(simulation.simulate, every_layer=True))
        whole = plan_of(name, folder, ranks, *changes)
    assert found.memory == whole.memory
    assert found.parameters == whole.parameters


@pytest.mark.lengthy
def test_a_few_layers_give_the_bytes_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_same_bytes(tmp_path, monkeypatch, "dense", 1, "model.gradient_checkpointing=selective")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "changes"),
    [
        ("dense", 2, (*LORA, "model.gradient_checkpointing=selective")),
        ("dense", 8, ("fsdp_config.reduce=every", "model.gradient_checkpointing=true")),
        ("dense", 2, ("fsdp_config.cpu_offload=true", "optim.state_dtype=int8")),
        ("dense", 4, ("parallel.tensor=2",)),
        ("window", 1, ("model.gradient_checkpointing=selective",)),
        ("window", 2, LORA),
        ("experts", 1, ()),
        ("experts", 2, (*LORA, "model.gradient_checkpointing=true")),
        ("sinks", 1, ("model.gradient_checkpointing=selective",)),
        ("sinks", 8, ()),
    ],
)
def test_so_they_do_for_each_kind_of_model(
    name: str, ranks: int, changes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_same_bytes(tmp_path, monkeypatch, name, ranks, *changes)


@pytest.mark.lengthy
def test_gradients_of_tensor_ranks_wait_for_the_last_micro_batch(tmp_path: Path) -> None:
    memory = plan_of("dense", tmp_path, 2, "parallel.tensor=2", length=2).memory
    assert memory is not None
    assert memory[simulation.BACKWARD] >= memory[simulation.WEIGHTS]


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "changes",
    [
        ("optim.state_dtype=int8",),
        pytest.param(("optim.state_dtype=bf16", "model.precision=pure_bf16"), marks=pytest.mark.slow),
        pytest.param(("optim.state_dtype=int8", "optim.weight_decay=0.1", "parallel.tensor=2"), marks=pytest.mark.slow),
    ],
)
def test_chunks_that_are_left_out_change_no_byte(
    changes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = 2 if "parallel.tensor=2" in changes else 1
    changes += ("micro_batch_size=1", f"global_batch_size={ranks}", "model.gradient_checkpointing=true")
    for device in CHUNK:
        monkeypatch.setitem(CHUNK, device, 2400 // ranks)  # four chunks of the embedding
    found = plan_of("dense", tmp_path, ranks, *changes, length=2)
    computed = []

    def every(_: object) -> Any:
        return lambda part: computed.append(list(chunks(part))) or computed[-1]

    with monkeypatch.context() as patched:
        patched.setattr(simulation, "UnlikeChunks", every)
        whole = plan_of("dense", tmp_path, ranks, *changes, length=2)
    assert max(map(len, computed)) > 3
    assert found.memory is not None
    assert simulation.UPDATE in found.memory  # the fullest moment is in an update
    assert found.memory == whole.memory


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("name", "changes"),
    [("two layers of experts", ()), ("two layers with sinks", (*LORA, "model.lora.base_dtype=nf4"))],
)
def test_a_mixture_of_experts_is_planned_for_a_gpu_from_a_step(
    name: str, changes: tuple[str, ...], tmp_path: Path
) -> None:
    """`plan_of` takes no note, such as that a plan is that of formulas."""
    assert sum(plan_of(name, tmp_path, 1, *changes).memory.values()) > 0


def timeline(*runs: tuple[str, int]) -> np.ndarray:
    """Letters, each run of them a number of times."""
    return np.frombuffer("".join(letters * times for letters, times in runs).encode(), np.uint8).astype(np.int32)


def test_what_a_period_adds_is_found_wherever_it_begins() -> None:
    def deep(layers: int) -> np.ndarray:
        return timeline(("ab", 1), ("cdd", layers), ("cde", 1), ("ddc", layers), ("x", 1), ("c", layers))

    blocks = inserted(deep(2), deep(3))
    assert blocks is not None
    for more in (0, 1, 2, 20):
        assert np.array_equal(repeated(deep(2), [(block, more) for block in blocks]), deep(2 + more))
    assert inserted(deep(2), deep(2)) == []
    assert inserted(deep(3), deep(2)) is None
    assert inserted(deep(2), timeline(("ab", 1), ("y", 40))) is None


def test_a_step_that_does_not_repeat_is_not_taken_to() -> None:
    """The third layer adds more than the second: with each depth tried the next one is otherwise."""
    stack = Stack("layers", 40, 0, 1)
    asked: list[int] = []

    def changes(depths: Any) -> list[Change]:
        asked.append(depths["layers"])
        return [("weights", layer) for layer in range(1, 1 + depths["layers"])]

    assert Shallow(changes).fullest([stack]) is None
    assert max(asked) < 12

    def repeating(depths: Any) -> list[Change]:
        return [("weights", 3), *[("weights", 2), ("states", 5)] * depths["layers"], ("states", -5)]

    assert Shallow(repeating).fullest([stack]) == {"weights": 83, "states": 200} == fullest(repeating({"layers": 40}))


@pytest.mark.parametrize(
    ("kinds", "pattern"),
    [
        ("aaaaaaaa", (0, 1)),
        ("baaaaaaa", (1, 1)),
        ("ababab", (0, 2)),
        ("bbabab", (1, 2)),
        ("aabaabaab", (0, 3)),
        ("sssssg" * 4 + "ss", (0, 6)),
        ("aaab", None),
        ("abc", None),
        ("ab", None),
    ],
)
def test_the_shortest_period_to_the_end(kinds: str, pattern: tuple[int, int] | None) -> None:
    assert pattern_of(kinds) == pattern


@pytest.mark.lengthy
def test_layers_are_alike_where_settings_and_lists_of_their_places_are() -> None:
    with init_empty_weights():
        gemma, whisper = (
            Gemma3TextModel._from_config(MODELS["window"]),
            WhisperModel(
                WhisperConfig(
                    d_model=16, encoder_layers=9, decoder_layers=7, encoder_attention_heads=2, decoder_attention_heads=2
                )
            ),
        )
    assert stacks_of(gemma) == [Stack("layers", 80, 0, 6)]
    assert [(s.name, s.depth, s.period) for s in stacks_of(whisper)] == [
        ("encoder.layers", 9, 1),
        ("decoder.layers", 7, 1),
    ]
    for layer in gemma.layers[:7]:
        layer.requires_grad_(False)
    assert stacks_of(gemma) == [Stack("layers", 80, 7, 6)]
    gemma.layers[-1].requires_grad_(False)
    assert stacks_of(gemma) == []


class Listed(nn.Module):
    """Layers that differ by their places alone, as those with attention to everything in a vision model do."""

    def __init__(self) -> None:
        super().__init__()
        self.full = [3, 7, 11, 15, 19, 23]
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(24))


def test_a_list_of_places_makes_layers_differ() -> None:
    model = Listed()
    assert stacks_of(model) == [Stack("blocks", 24, 0, 4)]
    assert stacks_of(model)[0].shallow(0) == 4
    assert stacks_of(model)[0].shallow(1) == 8
    model.full = [3, 7]
    assert stacks_of(model) == [Stack("blocks", 24, 8, 1)]
