"""What may be switched on around a causal language model without moving its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from shardtune.config import load_recipe
from shardtune.errors import ConfigError, ModelError
from shardtune.models.packing_probe import MIXED
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import (
    Trace,
    make_tokenizer,
    quiet,
    recipe,
    run_recipe,
    run_recipes,
    save_model,
    save_rows,
)
from tests.support.tiny_architectures import shake, tiny_config

pytestmark = pytest.mark.lengthy

STEPS = 5
GRAPHS = {"dense": 8, "mixtral": 20}
"""Pieces of a layer between its graph breaks (attention, experts), with and without gradients; whatever the steps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("models")
    save_rows(made / "rows.jsonl")
    return made


def values_of(folder: Path, kind: str, **changes: Any) -> dict[str, Any]:
    if not (folder / kind).exists():
        save_model(kind, folder / kind)
    return recipe(folder / kind, folder / "rows.jsonl", **{"runner__max_steps": STEPS, **changes})


def same(one: Trace, other: Trace, tolerance: float) -> None:
    assert one.losses == pytest.approx(other.losses, abs=tolerance)
    assert one.norms == pytest.approx(other.norms, abs=tolerance)
    assert one.weights.keys() == other.weights.keys()
    for name, weight in one.weights.items():
        torch.testing.assert_close(weight, other.weights[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("dense", True),
        ("dense", "selective"),
        *(pytest.param(kind, "selective", marks=pytest.mark.slow) for kind in ("gemma", "mixtral")),
        *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in ("mixtral", "gemma")),
    ],
)
def test_gradient_checkpointing_moves_no_number(folder: Path, kind: str, how: bool | str) -> None:
    plain = values_of(folder, kind, actor__micro_batch_size=4)
    again = values_of(folder, kind, actor__micro_batch_size=4, actor__model__gradient_checkpointing=how)
    tolerance = 1e-10 if kind != "gemma" else 1e-5
    alone, recomputed = run_recipes([plain, again])
    same(recomputed, alone, tolerance)
    if kind == "mixtral":
        same(run_ranks(run_recipes, 2, [again])[0][0], alone, tolerance)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_selective_checkpointing_draws_the_same(folder: Path, ranks: int) -> None:
    """Dropout of attention, and of an adapter's inputs."""
    dropping = {
        "actor__micro_batch_size": 4,
        "runner__max_steps": 3,
        "actor__model__config_overrides": {"attention_dropout": 0.3},
        "actor__model__is_lora": True,
        "actor__model__lora": {"r": 4, "dropout": 0.3},
    }
    plain = values_of(folder, "dense", **dropping)
    again = values_of(folder, "dense", actor__model__gradient_checkpointing="selective", **dropping)
    both = [plain, again]
    kept, computed = run_recipes(both) if ranks == 1 else run_ranks(run_recipes, ranks, both)[0]
    same(computed, kept, 1e-10)


def run_compiled(values: dict[str, Any]) -> tuple[Trace, list[int]]:
    """With a backend that compiles nothing: graphs are captured as with any other, in less time.

    Returns:
        The run, and the number of graphs after each step.
    """
    step, graphs = SFTWorker.run_training, []

    def counted(worker: SFTWorker) -> dict[str, float]:
        metrics = step(worker)
        graphs.append(counters["stats"]["unique_graphs"])
        return metrics

    torch._dynamo.reset()
    counters.clear()
    SFTWorker.run_training = counted
    try:
        with torch.compiler.set_stance(force_backend="eager"):
            return run_recipe(values), graphs
    finally:
        SFTWorker.run_training = step
        torch._dynamo.reset()


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["kept", "computed again"])
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("dense", 1),
        pytest.param("dense", 2, marks=pytest.mark.slow),
        pytest.param("mixtral", 1, marks=pytest.mark.slow),
    ],
)
def test_compiled_layers_give_the_same_losses_with_few_graphs(folder: Path, kind: str, ranks: int, again: bool) -> None:
    """Of layers that are computed again, pieces begin anew where the checkpoint does."""
    plain = values_of(folder, kind, actor__micro_batch_size=3)
    changes = {"actor__model__compile": True, "actor__model__gradient_checkpointing": again}
    compiled = values_of(folder, kind, actor__micro_batch_size=3, **changes)
    trace, graphs = run_compiled(compiled) if ranks == 1 else run_ranks(run_compiled, ranks, compiled)[0]
    assert (GRAPHS[kind] if again else 1) <= graphs[0] <= graphs[-1] <= GRAPHS[kind] + 2 * again
    assert graphs[-1] - graphs[0] <= 2, "rows of other lengths were compiled again and again"
    assert trace.notes == []
    same(trace, run_recipe(plain), 1e-10)


@pytest.mark.slow
def test_frozen_weights_stay_and_have_no_optimizer_state(folder: Path) -> None:
    values = values_of(folder, "dense", actor__model__freeze=["embed_tokens", r"layers\.0\."])
    trained = values_of(folder, "dense")
    one, two, free = run_recipe(values), run_ranks(run_recipes, 2, [values])[0][0], run_recipe(trained)
    same(two, one, 1e-10)
    start = run_recipe({**values, "runner": {**values["runner"], "max_steps": 1}})
    frozen = {name for name in one.weights if "embed_tokens" in name or "layers.0." in name}
    assert 0 < len(frozen) < len(one.weights)
    for name, weight in one.weights.items():
        assert torch.equal(weight, start.weights[name]) == (name in frozen), name
        assert not torch.equal(free.weights[name], start.weights[name])
    assert not frozen & one.gradients[0].keys()


def test_freezing_by_a_pattern_that_fits_nothing_or_all_is_refused(folder: Path) -> None:
    for patterns in (["lm_haed"], ["."]):
        with pytest.raises(ConfigError, match="freeze"):
            SFTWorker(load_recipe(values_of(folder, "dense", actor__model__freeze=patterns)), report=quiet).setup()


def resumed(values: dict[str, Any], checkpoint: str) -> list[float]:
    """The losses after the second step, once straight on and once from a checkpoint."""
    losses: list[float] = []
    for again in (False, True):
        worker = SFTWorker(load_recipe(values), report=quiet)
        worker.setup()
        if again:
            worker.load_checkpoint(checkpoint)
        else:
            worker.run_training()
            worker.run_training()
            worker.save_checkpoint(checkpoint, worker.step)
        losses += [worker.run_training()["train/loss"] for _ in range(2)]
        worker.release()
    return losses


@pytest.mark.parametrize("ranks", [1, 2])
def test_dropout_draws_the_same_on_the_same_layout_also_after_a_resume(folder: Path, ranks: int) -> None:
    with_dropout = {"actor__model__config_overrides": {"attention_dropout": 0.3}, "actor__micro_batch_size": 2}
    values = values_of(folder, "dense", **with_dropout, actor__model__precision="fp32")
    checkpoint = str(folder / f"checkpoint on {ranks}")
    told = [resumed(values, checkpoint)] if ranks == 1 else run_ranks(resumed, ranks, values, checkpoint)
    for losses in told:
        assert losses[:2] == losses[2:]
    without = values_of(folder, "dense", actor__micro_batch_size=2, actor__model__precision="fp32")
    assert run_recipe(without).losses[2:4] != pytest.approx(told[0][:2], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_a_recurrent_model_is_packed(folder: Path, precision: str) -> None:
    """Mamba: no positions, residuals in fp32, layers that are declared one inside the other."""
    fast = {"lr": 5e-2, "clip_grad": 0.5, "lr_warmup_steps": 0}  # three steps move a loss by more than bf16 rounds
    values = values_of(folder, "mamba", actor__model__precision=precision, runner__max_steps=3, actor__optim=fast)
    one, two = run_recipe(values), run_ranks(run_recipes, 2, [values])[0][0]
    assert one.notes == two.notes == [f"packed rows see each other in this model: {MIXED}"]
    assert one.losses == pytest.approx(two.losses, rel=1e-5 if precision == "fp32" else 0.02)


def test_a_recurrent_model_starts_from_scratch_alike_on_any_ranks(folder: Path) -> None:
    changes = {"actor__model__precision": "fp32", "actor__model__from_scratch": True, "runner__max_steps": 2}
    values = values_of(folder, "mamba", **changes)
    one, two = run_recipe(values), run_ranks(run_recipes, 2, [values])[0][0]
    assert one.losses == pytest.approx(two.losses, rel=1e-5)


def test_evaluation_leaves_the_weights_of_rwkv(folder: Path) -> None:
    """In evaluation mode RWKV halves weights of later layers in place, and `final/` is saved after an evaluation."""
    torch.manual_seed(1)
    config = tiny_config("rwkv", {"rescale_every": 1})
    model: Any = AutoModelForCausalLM.from_config(config)
    shake(model)
    values = values_of(folder, "mamba", data__eval_data_paths=str(folder / "rows.jsonl"), runner__max_steps=1)
    worker = SFTWorker(load_recipe(values), model=model.double(), tokenizer=make_tokenizer(), report=quiet)
    worker.setup()
    worker.run_training()
    before = {name: tensor.detach().clone() for name, tensor in worker.weights.parameters.items()}
    worker.run_eval()
    for name, tensor in worker.weights.parameters.items():
        assert torch.equal(tensor, before[name]), name
    assert model.config.rescale_every == 1
    worker.release()


def test_fp16_scales_its_loss_and_learns(folder: Path) -> None:
    values = values_of(folder, "dense", actor__model__precision="fp16")
    half, full = run_recipe(values), run_recipe(values_of(folder, "dense", actor__model__precision="fp32"))
    assert half.losses == pytest.approx(full.losses, rel=0.02)
    assert half.norms == pytest.approx(full.norms, rel=0.05)
    same_on_two = run_ranks(run_recipes, 2, [values])[0][0]
    assert same_on_two.losses == pytest.approx(full.losses, rel=0.02)


def test_tied_embeddings_stay_one_weight(folder: Path) -> None:
    worker = SFTWorker(load_recipe(values_of(folder, "dense", actor__model__precision="bf16")), report=quiet)
    worker.setup()
    worker.run_training()
    model = worker.inner_model
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert not any("lm_head" in name for name in worker.weights.parameters)


def test_a_wrapped_list_of_modules_is_refused_by_name(folder: Path) -> None:
    values = values_of(folder, "dense", actor__fsdp_config__wrap=["ModuleList"])
    with pytest.raises(ModelError, match="names a list of modules"):
        SFTWorker(load_recipe(values), report=quiet).setup()
