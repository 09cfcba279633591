"""A sample of the architectures that `bench/zoo.py` tries, without LoRA: the numbers, the reloaded
`final/` and the answers of plain transformers."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardtune.config import load_recipe
from shardtune.config.rank_layout import Layout
from shardtune.errors import ModelError, ParallelError
from shardtune.models import packing_probe
from shardtune.models.find_adapter import find_adapter
from shardtune.models.packing_limit import BLOCKS
from shardtune.models.router_loss import RouterLoss
from shardtune.parallel.meta_init import init_empty_weights
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.training import quiet
from tests.support.tiny_architectures import tiny_config
from tests.support.zoo import (
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


@pytest.mark.parametrize("family", SAMPLE)
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
    two: Any = SimpleNamespace(layout=Layout(sequence=2), sequence_mesh=None)
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


@pytest.mark.parametrize("family", ["xglm", "minimax", "openai-gpt", "inkling2_text", "xlstm"])
def test_half_precision_that_a_models_code_does_not_take_is_refused(family: str, tmp_path: Path) -> None:
    """Their code adds buffers, which are in fp32 here, to activations, or takes some weights in fp32 alone; xLSTM's
    meets two dtypes in plain transformers too."""
    values = changed(decoder(family, tmp_path, FP32).values, actor={"model": {"precision": "bf16"}})
    with pytest.raises(ModelError, match=r"(?s)in half precision: RuntimeError: .* actor\.model\.precision: fp32"):
        by_shardtune(values)
    ours = by_shardtune(changed(values, actor={"model": {"precision": "fp32"}}, runner={"max_steps": 1}))
    assert len(ours.numbers) == 2


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
