"""A sample of the architectures that `bench/zoo.py` tries, without LoRA: the numbers, the reloaded
`final/` and the answers of plain transformers."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaModel

from shardtune.config import load_recipe
from shardtune.config.rank_layout import Layout
from shardtune.errors import ModelError, ParallelError
from shardtune.models import packing_probe
from shardtune.models.causal_lm import CausalLM
from shardtune.models.find_adapter import find_adapter
from shardtune.models.language_model import LanguageRoot
from shardtune.models.packing_limit import BLOCKS
from shardtune.models.router_loss import RouterLoss
from shardtune.parallel.fp32_compute import computing_in_fp32
from shardtune.parallel.meta_init import init_empty_weights
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.chosen import slow_except
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import quiet
from tests.support.tiny_architectures import tiny_config
from tests.support.tiny_vision import ROWS_OF_IMAGES
from tests.support.zoo import (
    BF16,
    BY_DOCUMENT,
    BY_LENGTH,
    CAUSAL,
    FP32,
    FP64,
    PACKED,
    SAME,
    THROUGHOUT,
    WITHIN,
    by_shardtune,
    changed,
    decoder,
    loaded,
    otherwise,
    relative,
    throughout,
    trained,
    tried,
    with_images,
    with_settings,
)

pytestmark = pytest.mark.lengthy

SAMPLE = {
    "gpt_oss": PACKED,
    "gemma2": PACKED,
    "deepseek_v3": PACKED,
    "qwen3_next": BY_DOCUMENT,
    "olmo_hybrid": BY_DOCUMENT,
    "lfm2_moe": BY_DOCUMENT,
    "nemotron_h": BY_DOCUMENT,
    "jamba": BY_DOCUMENT,
    "mamba": BY_DOCUMENT,
    "bart": BY_LENGTH,
    "stablelm": BY_LENGTH,
    "llama4_text": BY_LENGTH,
}
WAYS = ("gpt_oss", "gemma2", "nemotron_h", "bart", "stablelm")
"""One of each way, and whose attention has sinks or soft caps; layers of others are tried by themselves elsewhere."""


@pytest.mark.parametrize("family", slow_except(SAMPLE, *WAYS))
def test_an_architecture_is_that_of_plain_transformers(family: str, tmp_path: Path) -> None:
    result = tried(CAUSAL, family, tmp_path, thorough=False)
    assert (result.how, result.answers) == (SAMPLE[family], SAME), result
    assert result.largest < WITHIN["fp64"]


LIMITED = {
    "phi3": (
        {
            "original_max_position_embeddings": 12,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "short_factor": [1.0, 1.0, 1.0, 1.0],
                "long_factor": [1.0, 2.0, 4.0, 8.0],
            },
        },
        "longrope's factors depend on a forward's longest row",
    ),
    "llama4_text": ({"attention_chunk_size": 12}, "attention is within chunks (attention_chunk_size)"),
    "minimax_m3_vl_text": (
        {"index_block_size": 4, "index_topk_blocks": 3},
        BLOCKS,
    ),
}
"""Settings with which packing is exact for rows of up to 12 tokens; those of the zoo have 10 to 18."""


@pytest.mark.parametrize("family", LIMITED)
def test_rows_beyond_what_packing_computes_are_not_packed(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the probe see what only longer rows show."""
    monkeypatch.setattr(packing_probe, "LONGEST", 10)
    changes, reason = LIMITED[family]
    with throughout(THROUGHOUT):
        material = decoder(family, tmp_path, THROUGHOUT, changes)
        ours = by_shardtune(changed(material.values, runner={"max_steps": 1}))
        expected = trained(loaded(material.auto, tmp_path, THROUGHOUT), material.rows(ours), 1)
    assert ours.notes[0] == f"{reason}, and a row has 18 tokens, more than 12: one row per forward"
    assert ours.how == BY_LENGTH
    assert relative(ours.numbers, expected) < 1e-10


@pytest.mark.parametrize("family", LIMITED)
def test_rows_beyond_what_packing_computes_are_not_shared_among_ranks(family: str, tmp_path: Path) -> None:
    changes, reason = LIMITED[family]
    adapter = find_adapter(load_recipe(decoder(family, tmp_path, FP64, changes).values))
    with init_empty_weights():
        model = adapter.build()
    two: Any = SimpleNamespace(layout=Layout(sequence=2), sequence_mesh="of two")
    adapter.check_rows(np.array([10, 12]), str)
    adapter.apply_model_parallel(model, two)
    adapter.check_rows(np.array([10, 18]), str)
    refusal = rf"cannot share sequences among ranks: {re.escape(reason)}, and a row has 18 tokens, more than 12"
    with pytest.raises(ParallelError, match=refusal):
        adapter.apply_model_parallel(model, two)


def test_a_longer_row_of_a_file_that_is_read_later_is_refused(tmp_path: Path) -> None:
    values = decoder("llama4_text", tmp_path, FP64, {"attention_chunk_size": 20}).values
    worker = SFTWorker(load_recipe(values), report=quiet)
    worker.setup()
    assert worker.adapter.rows_share_forwards
    with pytest.raises(ModelError, match=r"a row has 21 tokens, more than 20; rows of files .* are packed"):
        worker.adapter.check_rows(np.array([20, 21]), str)
    worker.release()


def test_half_precision_that_a_models_code_does_not_take_is_refused(tmp_path: Path) -> None:
    """xLSTM's meets two dtypes in plain transformers too."""
    values = changed(decoder("xlstm", tmp_path, FP32).values, actor={"model": {"precision": "bf16"}})
    with pytest.raises(ModelError, match=r"(?s)in half precision: RuntimeError: .* actor\.model\.precision: fp32"):
        by_shardtune(values)
    with pytest.raises(RuntimeError, match="expected scalar type Float but found BFloat16"):
        loaded(AutoModelForCausalLM, tmp_path, BF16)(torch.arange(9)[None])
    ours = by_shardtune(changed(values, actor={"model": {"precision": "fp32"}}, runner={"max_steps": 1}))
    assert len(ours.numbers) == 2


IN_HALF = {"xglm": "embed_positions.weights", "minimax": "query_decay", "openai-gpt": "attn.bias"}
"""Families whose code takes one dtype alone, and a buffer that plain transformers has in bf16."""


@pytest.mark.parametrize("family", slow_except([*IN_HALF, "inkling2_text"], "xglm", "inkling2_text"))
def test_in_half_precision_a_model_has_the_dtypes_of_from_pretrained(family: str, tmp_path: Path) -> None:
    """Inkling 2 takes some weights in fp32 alone. `final/` has the buffers as they were."""
    material = decoder(family, tmp_path, FP32)
    values = changed(material.values, actor={"model": {"precision": "bf16"}}, runner={"max_steps": 1})
    ours = by_shardtune(values, final=tmp_path / "final")
    exact = trained(loaded(material.auto, tmp_path, FP32), material.rows(ours), 1)
    assert relative(ours.numbers[:1], exact[:1]) < 1e-3
    assert relative(ours.numbers, exact) < 1e-2
    assert family not in IN_HALF or any(IN_HALF[family] in note for note in ours.notes)
    assert isinstance(ours.answers, list)
    models = (loaded(material.auto, place, FP32) for place in (tmp_path, tmp_path / "final"))
    before, after = (dict(model.named_buffers()) for model in models)
    assert all(torch.equal(buffer, after[name]) for name, buffer in before.items())


def test_pixels_kept_as_bytes_have_the_dtype_of_the_computation(tmp_path: Path) -> None:
    """LFM3-VL's first layer takes pixels in the dtype of its weights alone."""
    values = changed(with_images("lfm3_vl", tmp_path, FP32, ROWS_OF_IMAGES[0]).values, runner={"max_steps": 1})
    exact = by_shardtune(values)
    ours = by_shardtune(changed(values, actor={"model": {"precision": "bf16"}}), prepared=exact.prepared)
    assert relative(ours.numbers, exact.numbers) < 1e-2


def numbers_and_dtypes(values: dict[str, Any]) -> tuple[list[float], dict[str, torch.dtype]]:
    """Losses and gradient norms of two steps, and the dtypes that the model's weights have while it computes."""
    worker = SFTWorker(load_recipe(values), report=quiet)
    worker.setup()
    found: dict[str, torch.dtype] = {}
    for prefix, module in worker.inner_model.named_modules():

        def note(module: nn.Module, *_: object, prefix: str = prefix) -> None:
            found.update({f"{prefix}.{key}": p.dtype for key, p in module.named_parameters(recurse=False)})

        module.register_forward_pre_hook(note)
    numbers = []
    for _ in range(2):
        metrics = worker.run_training()
        numbers += [metrics["train/loss"], metrics["train/grad_norm"]]
    worker.release()
    return numbers, found


@pytest.mark.parametrize("lora", slow_except([False, True], False))
def test_weights_that_transformers_keeps_in_fp32_are_so_on_any_ranks(lora: bool, tmp_path: Path) -> None:
    model = {"precision": "bf16", "is_lora": lora, "lora": {"base_dtype": "bf16"} if lora else {}}
    values = changed(decoder("ernie4_5_moe", tmp_path, FP32).values, actor={"model": model})
    alone, found = numbers_and_dtypes(values)
    (both, on_ranks), _ = run_ranks(numbers_and_dtypes, 2, values)
    assert both == pytest.approx(alone, rel=1e-2)
    for dtypes in (found, on_ranks):
        assert {dtype for name, dtype in dtypes.items() if "gate.weight" in name} == {torch.float32}
        assert {dtype for name, dtype in dtypes.items() if "q_proj.weight" in name} <= {torch.bfloat16}


def test_a_routers_balance_loss_is_that_of_transformers_under_any_name(tmp_path: Path) -> None:
    """Ernie 4.5's config calls the number of experts per token `moe_k`."""
    changes = otherwise(tiny_config("ernie4_5_moe", {}))
    assert changes["output_router_logits"]
    assert with_settings("ernie4_5_moe", changes, tmp_path, THROUGHOUT) < 1e-10


def test_a_balance_loss_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    changes = otherwise(tiny_config("llama4_text", {}))
    with pytest.raises(ModelError, match=r"Llama4ForCausalLM of transformers has no balance loss .* factor of 0\.5"):
        with_settings("llama4_text", changes, tmp_path, THROUGHOUT)


def test_routers_as_configs_name_them() -> None:
    layers = tiny_config("hunyuan_v1_moe", {"moe_topk": [2, 1], "output_router_logits": True})
    assert RouterLoss.of(layers) == RouterLoss(0.0, 2)
    assert RouterLoss.of(tiny_config("jetmoe", {"output_router_logits": True})) == RouterLoss(0.01, 2)
    assert RouterLoss.of(tiny_config("llama", {})) == RouterLoss(0.0, 0)


def test_in_half_precision_what_differs_by_less_than_it_rounds_is_found(tmp_path: Path) -> None:
    """Images of Gemma 3 see one another, which packed rows do not compute: 2 % of the logits, as bf16 rounds."""
    material = with_images("gemma3", tmp_path, FP32, ROWS_OF_IMAGES[0])
    values = changed(material.values, runner={"max_steps": 1}, actor={"model": {"precision": "bf16"}})
    ours = by_shardtune(values)
    exact = trained(loaded(material.auto, tmp_path, FP32), material.rows(ours), 1)
    assert ours.how == BY_LENGTH, ours.notes
    assert relative(ours.numbers, exact) < 1e-2


def noted_distance(distance: Any, differences: list[float], got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    away: torch.Tensor = distance(got, expected)
    differences += [float(away.max())] if got.dtype == torch.float32 else []
    return away


def compared_in_fp32(values: dict[str, Any], layouts: list[dict[str, Any]]) -> list[tuple[float, bool]]:
    """Of each layout the largest difference of logits in fp32, and whether rows are packed and train."""
    found = []
    for layout in layouts:
        differences: list[float] = []
        distance = partial(noted_distance, packing_probe._distance, differences)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(packing_probe, "_distance", distance)
            worker = SFTWorker(load_recipe(changed(values, actor=layout)), report=quiet)
            worker.setup()
        trains = np.isfinite(worker.run_training()["train/loss"])
        found.append((max(differences, default=0.0), bool(worker.adapter.rows_share_forwards and trains)))
        worker.release()
    return found


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([{"parallel": {"tensor": 2}}, {"fsdp_config": {"cpu_offload": True}}], id="some"),
        pytest.param(
            [
                {},
                {"training_backend": "fsdp1"},
                {"parallel": {"sequence": 2}},
                {"model": {"precision": "fp16", "is_lora": True, "gradient_checkpointing": True}},
            ],
            id="others",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_half_precision_is_compared_in_fp32_however_a_model_is_sharded(
    layouts: list[dict[str, Any]], tmp_path: Path
) -> None:
    """`test_in_fp32_only_the_weights_are_rounded` has FSDP2 and FSDP1."""
    values = changed(decoder("qwen3_moe", tmp_path, FP32).values, actor={"model": {"precision": "bf16"}})
    for of_rank in run_ranks(compared_in_fp32, 2, values, layouts):
        for layout, (away, trained_packed) in zip(layouts, of_rank, strict=True):
            assert 0 < away < 1e-5, layout
            assert trained_packed, layout


def logits_in_fp32(values: dict[str, Any], backends: list[str]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The logits of a row in fp32 with each backend, and those in half precision."""
    found = []
    for backend in backends:
        worker = SFTWorker(load_recipe(changed(values, actor={"training_backend": backend})), report=quiet)
        worker.setup()
        root, adapter = worker.model, worker.adapter
        assert isinstance(root, LanguageRoot)
        assert isinstance(adapter, CausalLM)
        assert worker.task.rows is not None
        row = worker.task.rows.row(0)
        batch, places = adapter.collate([row], [0], {}), torch.arange(row.length)
        with torch.no_grad():
            with computing_in_fp32():
                exact = root.reference_logits(batch, places)
            found.append((exact.clone(), root.reference_logits(batch, places).clone()))
        worker.release()
    return found


def test_in_fp32_only_the_weights_are_rounded(tmp_path: Path) -> None:
    """On two ranks, whose sharding casts the inputs of each unit too: the logits of an fp32 model with such weights."""
    material = decoder("qwen3", tmp_path, FP32)
    values = changed(material.values, actor={"model": {"precision": "bf16"}})
    ours = by_shardtune(changed(values, runner={"max_steps": 1}))
    plain = loaded(material.auto, tmp_path, FP32)
    with torch.no_grad():
        for weight in plain.parameters():
            weight.copy_(weight.bfloat16())
        expected = plain(torch.from_numpy(ours.samples[0].input_ids).long()[None]).logits[0]
    for of_rank in run_ranks(logits_in_fp32, 2, values, ["fsdp", "fsdp1"]):
        for exact, rounded in of_rank:
            assert float((exact - expected).abs().max() / expected.abs().max()) < 1e-5
            assert float((rounded - expected).abs().max() / expected.abs().max()) > 1e-4


def test_prompts_are_not_padded_where_that_changes_less_than_half_precision_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that sees the padding, a little."""
    forward = LlamaModel.forward

    def leaking(self: LlamaModel, input_ids: Any, attention_mask: Any = None, **given: Any) -> Any:
        out: Any = forward(self, input_ids=input_ids, attention_mask=attention_mask, **given)
        if isinstance(attention_mask, torch.Tensor) and not bool(attention_mask.bool().all()):
            out.last_hidden_state = out.last_hidden_state * 1.02
        return out

    values = decoder("llama", tmp_path, FP32).values
    for precision, leaks in (("bf16", False), ("bf16", True), ("fp32", True)):
        worker = SFTWorker(load_recipe(changed(values, actor={"model": {"precision": precision}})), report=quiet)
        worker.setup()
        adapter, alone = worker.adapter, torch.tensor([[5, 6, 7]])
        assert isinstance(adapter, CausalLM)
        padded = torch.tensor([[0, 5, 6, 7], [5, 6, 7, 8]])
        prompts = (
            {"input_ids": alone, "attention_mask": torch.ones_like(alone)},
            {"input_ids": padded, "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])},
        )
        with monkeypatch.context() as patched, torch.no_grad():
            if leaks:
                patched.setattr(LlamaModel, "forward", leaking)
            assert adapter.padding_changes(worker.inner_model, *prompts) == leaks, precision
        worker.release()


STATEFUL = {"jamba": "JambaMambaMixer", "qwen3_next": "Qwen3NextGatedDeltaNet"}


@pytest.mark.parametrize("family", STATEFUL)
def test_ranks_share_no_sequence_of_a_model_with_a_state(family: str, tmp_path: Path) -> None:
    """A state goes on from one rank's tokens to the next's. Refused before ranks start, and by the ranks."""
    adapter = find_adapter(load_recipe(decoder(family, tmp_path, FP64).values))
    with init_empty_weights():
        model = adapter.build()
    with pytest.raises(ParallelError, match=rf"cannot share sequences among ranks: {STATEFUL[family]} computes a row"):
        adapter.check_parallel(model, Layout(sequence=2))
    adapter.check_parallel(model, Layout(tensor=2))


def test_a_rank_that_shares_sequences_does_not_go_on_unpacked(tmp_path: Path) -> None:
    """Its own attention would see this rank's tokens alone."""
    adapter = find_adapter(load_recipe(decoder("llama", tmp_path, FP64).values))
    with init_empty_weights():
        model = adapter.build()
    two: Any = SimpleNamespace(layout=Layout(sequence=2), sequence_mesh=object())
    adapter.apply_model_parallel(model, two)
    assert isinstance(adapter, CausalLM)
    with pytest.raises(ParallelError, match="cannot share sequences among ranks: packed rows see each other"):
        adapter.sharing.one_row_per_forward(model, "packed rows see each other")


def test_heads_have_the_names_of_their_config(tmp_path: Path) -> None:
    adapter = find_adapter(load_recipe(decoder("gpt2", tmp_path / "gpt2", FP64).values))
    adapter.check_layout(Layout(sequence=2))
    with pytest.raises(ParallelError, match="8 ranks cannot share 4 heads of queries"):
        adapter.check_layout(Layout(tensor=8))
    without = find_adapter(load_recipe(decoder("mamba", tmp_path / "mamba", FP64).values))
    with pytest.raises(ParallelError, match=r"a mamba has no attention heads \(num_attention_heads\)"):
        without.check_layout(Layout(tensor=2))
