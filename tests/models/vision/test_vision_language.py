"""Vision-language models: what packs and is seen, what joins a micro-batch without images, which parts are trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlavaConfig

from shardtune.batch import PackedBatch
from shardtune.config import load_recipe
from shardtune.config.schema import ModelConfig
from shardtune.data.images.images import ENDS
from shardtune.errors import ConfigError, ModelError, ParallelError
from shardtune.models.find_adapter import causal_lm
from shardtune.models.vision.vision_language import ZERO_PROJECTOR, VisionLanguage
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.models.vision.test_vision_on_ranks import a_recipe
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import Trace, quiet, run_recipe
from tests.support.vision import FAMILIES, save_image_rows, save_vision_model

pytestmark = pytest.mark.lengthy

ALONE = "one row per forward"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A directory for models, and rows with images."""
    folder = tmp_path_factory.mktemp("vision")
    return folder, save_image_rows(folder, 12)[0]


def a_worker(places: tuple[Path, Path], family: str, **changes: Any) -> SFTWorker:
    folder, rows = places
    if not (folder / family).exists():
        save_vision_model(family, folder / family)
    worker = SFTWorker(load_recipe(a_recipe(folder / family, rows, **changes)), report=quiet)
    worker.setup()
    return worker


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packing_is_kept_where_it_is_exact(places: tuple[Path, Path], family: str) -> None:
    """Rows with images and without in one forward give the logits that each has alone; Gemma's image tokens look ahead
    of themselves, which no packed row may."""
    worker = a_worker(places, family, data__eval_data_paths=None)
    worker.task.probe_assumptions(worker.model, worker.device)
    assert isinstance(worker.adapter, VisionLanguage)
    assert worker.adapter.rows_share_forwards == (family != "gemma3"), worker.notes
    assert any(ALONE in note for note in worker.notes) == (family == "gemma3")
    worker.release()


def test_noise_on_embeddings_where_positions_have_several_axes(places: tuple[Path, Path]) -> None:
    """The numbers of a row belong to its tokens' places, in any micro-batch and on any ranks."""
    folder, rows = places
    if not (folder / "qwen2_5_vl").exists():
        save_vision_model("qwen2_5_vl", folder / "qwen2_5_vl")
    plain, noisy, alone = (
        a_recipe(folder / "qwen2_5_vl", rows, data__eval_data_paths=None, actor__micro_batch_size=size, **noise)
        for size, noise in ((3, {}), (3, {"actor__neftune_alpha": 5.0}), (1, {"actor__neftune_alpha": 5.0}))
    )
    expected = run_recipe(noisy).losses
    assert abs(run_recipe(plain).losses[0] / expected[0] - 1) > 1e-4
    assert run_recipe(alone).losses == pytest.approx(expected, rel=1e-9)
    for trace in run_ranks(run_recipe, 2, noisy):
        assert trace.losses == pytest.approx(expected, rel=1e-9)


def test_a_step_without_images_says_so_where_they_alone_train(places: tuple[Path, Path]) -> None:
    """Row 0 has none; a step with one image somewhere has a gradient, as a blank image joins the others."""
    worker = a_worker(places, "llava", actor__model__freeze=["language_model"], data__eval_data_paths=None)
    step = worker.adapter.collate([worker.prepared.train.row(0)], [0], {})
    assert isinstance(step, PackedBatch)
    with pytest.raises(ModelError, match="no row of this step has an image, and nothing is trained but parts that"):
        worker.root(step)
    worker.release()


def test_a_step_of_rows_that_nothing_joins_says_so(places: tuple[Path, Path], tmp_path: Path) -> None:
    """Others of the step may have images, so that the whole step has to be computed first."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(places[1].read_text().splitlines(keepends=True)[::3]))  # those without images
    changes: dict[str, Any] = {"data__train_data_paths": str(rows), "data__eval_data_paths": None}
    worker = a_worker(places, "llava", actor__model__freeze=["language_model"], **changes)
    worker.adapter.sharing.one_row_per_forward(worker.inner_model)
    with pytest.raises(ModelError, match=r"(?s)no gradient for any .*until each step has a row with an image"):
        worker.run_training()
    worker.release()


def test_a_model_whose_projector_is_zero_is_not_packed(places: tuple[Path, Path]) -> None:
    """Whatever the probe sees of images that are all alike: Gemma 3 begins so."""
    worker = a_worker(places, "qwen2_5_vl", data__eval_data_paths=None)
    with torch.no_grad():
        worker.inner_model.get_parameter("model.visual.merger.mlp.2.weight").zero_()
    notes = worker.task.probe_assumptions(worker.model, worker.device)
    assert notes[0] == ZERO_PROJECTOR
    assert not worker.adapter.rows_share_forwards
    worker.release()


def test_an_adapter_that_begins_at_zero_is_no_projector_of_zeros(places: tuple[Path, Path]) -> None:
    """LoRA's second factor is zero at first, in the projector too; packing and the check of images stay."""
    worker = a_worker(places, "llava", actor__model__is_lora=True, data__eval_data_paths=None)
    assert ZERO_PROJECTOR not in worker.notes
    assert worker.adapter.rows_share_forwards
    worker.release()


def test_a_model_that_does_not_see_is_refused(places: tuple[Path, Path]) -> None:
    worker = a_worker(places, "llava", data__eval_data_paths=None)
    with torch.no_grad():
        worker.inner_model.get_parameter("model.multi_modal_projector.linear_2.weight").fill_(1e-30)
        worker.inner_model.get_parameter("model.multi_modal_projector.linear_1.weight").fill_(1e-300)
    with pytest.raises(ModelError, match="the model ignores images"):
        worker.task.probe_assumptions(worker.model, worker.device)
    worker.release()


def test_a_blank_image_joins_where_others_have_images(places: tuple[Path, Path]) -> None:
    """And nothing joins in a step without any; what joins moves no loss."""
    worker = a_worker(places, "qwen2_5_vl", data__eval_data_paths=None)
    rows = worker.prepared.train
    assert rows is not None
    counts = rows.field_counts(ENDS)
    plain, seeing = np.flatnonzero(counts == 0), np.flatnonzero(counts)
    assert len(plain)
    assert len(seeing)
    maker = worker.loader._maker
    *_, alone = maker.micro_batches(plain[:1])
    joined = {
        batch.rows[0]: batch for batch in maker.micro_batches(np.array([plain[0], seeing[0]])) if plain[0] in batch.rows
    }[int(plain[0])]
    assert isinstance(joined, PackedBatch)
    assert isinstance(alone, PackedBatch)
    assert alone.rows == (plain[0],)
    assert "pixel_values" not in alone.fields
    assert joined.rows == (plain[0], -1)
    assert len(joined.fields["pixel_values"])
    assert joined.target_weight == alone.target_weight
    with torch.no_grad():
        totals = [float(worker.root(batch)["ce"].total) for batch in (alone, joined)]
    assert totals[0] == pytest.approx(totals[1], rel=1e-14)
    worker.release()


@pytest.mark.parametrize(
    ("family", "part", "trained"),
    [
        ("llava", "vision_tower", {"model.multi_modal_projector", "model.language_model", "lm_head"}),
        ("llava", "projector", {"model.vision_tower", "model.language_model", "lm_head"}),
        ("qwen3_vl", "vision_tower", {"model.visual", "model.language_model", "lm_head"}),
        ("qwen3_vl", "projector", {"model.visual", "model.language_model", "lm_head"}),
        ("smolvlm", "language_model", {"model.vision_model", "model.connector"}),
    ],
)
def test_parts_are_frozen_by_name(places: tuple[Path, Path], family: str, part: str, trained: set[str]) -> None:
    worker = a_worker(places, family, actor__model__freeze=[part], data__eval_data_paths=None)
    names = worker.weights.trainable()
    heads = {name if name.startswith("lm_head") else ".".join(name.split(".")[:2]) for name in names}
    assert {head.removesuffix(".weight") for head in heads} == trained
    if family == "qwen3_vl":
        assert any("merger" in name for name in names) == (part == "vision_tower")
    worker.release()


def test_parts_have_their_own_rates(places: tuple[Path, Path]) -> None:
    groups = [{"pattern": "vision_tower", "lr": 0.0}, {"pattern": "projector", "lr": 0.5}]
    optim = {"name": "SGD", "lr": 0.05, "clip_grad": None, "weight_decay": 0.0, "groups": groups}
    worker = a_worker(places, "llava", actor__optim=optim, data__eval_data_paths=None)
    before = {name: tensor.detach().clone() for name, tensor in worker.weights.parameters.items()}
    worker.run_training()
    for name, tensor in worker.weights.parameters.items():
        assert torch.equal(tensor, before[name]) == ("vision_tower" in name), name
    worker.release()


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"actor__parallel": {"tensor": 2}},
    "ddp": {"actor__training_backend": "ddp"},
    "fsdp1": {"actor__training_backend": "fsdp1"},
    "offload": {"actor__fsdp_config": {"cpu_offload": True}},
    "checkpointing": {"actor__model__gradient_checkpointing": True},
    "packed": {"actor__micro_batch_size": 4},
    "lora": {"actor__model__is_lora": True},
}


def _distance(one: Trace, other: Trace) -> float:
    """The largest difference of losses and weights."""
    losses = [abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)]
    return max(*losses, *(float((other.weights[name] - one.weights[name]).abs().max()) for name in one.weights))


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "tensor" else pytest.mark.slow) for name in LAYOUTS]
)
def test_layouts_of_two_ranks_give_the_numbers_of_one(places: tuple[Path, Path], layout: str) -> None:
    folder, rows = places
    if not (folder / "qwen2_5_vl").exists():
        save_vision_model("qwen2_5_vl", folder / "qwen2_5_vl")
    changes = {"runner__max_steps": 2, "data__eval_data_paths": None}
    base = a_recipe(folder / "qwen2_5_vl", rows, **changes, **(LAYOUTS[layout] if layout == "lora" else {}))
    one = run_recipe(base)
    for two in run_ranks(
        run_recipe, 2, a_recipe(folder / "qwen2_5_vl", rows, **changes, **LAYOUTS[layout]), fresh=True
    ):
        assert _distance(one, two) < 1e-12


def test_sequences_are_not_shared(places: tuple[Path, Path]) -> None:
    worker = a_worker(places, "llava", data__eval_data_paths=None)
    with pytest.raises(ParallelError, match="images belong to whole rows"):
        worker.adapter.check_layout(replace(worker.ranks.layout, sequence=2))
    worker.release()


def test_a_text_model_is_no_vision_model(places: tuple[Path, Path], tmp_path: Path) -> None:
    from tests.support.dist.training import save_model

    folder = save_model("dense", tmp_path / "text")
    with pytest.raises(ModelError, match="takes no images and text") as caught:
        SFTWorker(load_recipe(a_recipe(folder, places[1])), report=quiet)
    assert "causal_lm" in str(caught.value.remedy)


def test_a_vision_model_is_no_text_model(tmp_path: Path) -> None:
    LlavaConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no causal language model") as caught:
        causal_lm(ModelConfig(model_path=str(tmp_path)))
    assert "actor.model.model_type: vision_language" in str(caught.value.remedy)


def test_a_tokenizer_in_memory_is_refused(places: tuple[Path, Path]) -> None:
    worker = a_worker(places, "llava", data__eval_data_paths=None)
    with pytest.raises(ConfigError, match="comes with its processor"):
        SFTWorker(worker.recipe, tokenizer=worker.tokenizer, report=quiet)
    worker.release()


def test_blocks_of_the_vision_tower_shard_as_wholes(places: tuple[Path, Path]) -> None:
    """SmolVLM declares the attention in them alone."""
    worker = a_worker(places, "smolvlm", data__eval_data_paths=None)
    units = {type(unit).__name__ for unit in worker.task.shard_units(worker.inner_model)[0]}
    assert units == {"SmolVLMEncoderLayer", "LlamaDecoderLayer"}
    worker.release()
