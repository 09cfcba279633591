"""Vision-language models on one and two ranks give the numbers of plain transformers, row by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from shardtune.batch import Prompt
from shardtune.config import load_recipe
from shardtune.data.images.images import ENDS
from shardtune.errors import ConfigError
from shardtune.evaluate.generate import Sampling
from shardtune.models.find_adapter import find_adapter
from shardtune.models.teacher import find_teacher
from shardtune.models.vision.processors import load_processor
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support import flat_vision
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import quiet, recipe, run_recipe
from tests.support.vision import save_image_rows, save_vision_model

pytestmark = pytest.mark.lengthy

STEPS, ROWS_PER_STEP, LR = 5, 4, 0.05
EXACT = 1e-10
ROUNDED = 5e-6
"""Of Gemma, whose norms are computed in fp32 whatever the precision."""


def a_recipe(directory: Path, rows: Path, **changes: Any) -> dict[str, Any]:
    return recipe(
        directory,
        rows,
        **{
            "runner__max_steps": STEPS,
            "actor__model__model_type": "vision_language",
            "actor__micro_batch_size": 1,
            "actor__global_batch_size": ROWS_PER_STEP,
            "actor__optim": {
                "name": "SGD", "lr": LR, "args": {"momentum": 0.9}, "weight_decay": 0.0, "clip_grad": None,
                "lr_scheduler": "constant",
            },
            "data__eval_data_paths": str(rows),
            **changes,
        },
    )  # fmt: skip


def order(values: dict[str, Any]) -> list[list[int]]:
    """The rows of each step."""
    worker = SFTWorker(load_recipe(values), report=quiet)
    worker.setup()
    states, steps = worker.loader.steps(worker.data_state), []
    steps = [next(states).rows.tolist() for _ in range(STEPS)]
    worker.release()
    return steps


@pytest.mark.parametrize(
    "family", ["llava", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_5_vl", "smolvlm", "gemma3"))]
)
def test_one_and_two_ranks_give_the_numbers_of_plain_transformers(family: str, tmp_path: Path) -> None:
    """Rows of no, one and two images: in most steps some micro-batch of one row has none while another's has."""
    directory = save_vision_model(family, tmp_path / "model")
    file, rows = save_image_rows(tmp_path)
    values = a_recipe(directory, file)
    dtype = torch.float64
    oracle = flat_vision.train(directory, rows, order(values), lr=LR, dtype=dtype)
    exact = ROUNDED if family == "gemma3" else EXACT
    one = run_recipe(values)
    two = run_ranks(run_recipe, 2, values)
    for got in (one, *two):
        assert got.losses == pytest.approx(oracle.losses, rel=exact)
        assert got.norms == pytest.approx(oracle.norms, rel=exact)
        for name, tensor in got.weights.items():
            torch.testing.assert_close(tensor, oracle.weights[name], rtol=exact, atol=exact)
    for got in two:
        assert got.evaluation == pytest.approx(one.evaluation, rel=exact)
        assert torch.allclose(got.logits, one.logits, rtol=exact, atol=exact)


def start_at_zero(directory: Path) -> None:
    """Let images change nothing yet, as in an untrained Gemma 3: such a model is not packed."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    next(tensor for name, tensor in tensors.items() if name.endswith("linear_2.weight")).zero_()
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("family", "part"), [("llava", "projector"), pytest.param("gemma3", "vision_tower", marks=pytest.mark.slow)]
)
def test_rows_without_images_have_no_gradient_where_they_run_by_themselves(
    family: str, part: str, tmp_path: Path
) -> None:
    """Of a model that is not packed, whose projector or tower alone is trained: no blank image joins such a row."""
    directory = save_vision_model(family, tmp_path / "model")
    if family == "llava":
        start_at_zero(directory)
    file, rows = save_image_rows(tmp_path)
    freeze = [name for name in ("projector", "vision_tower", "language_model") if name != part]
    values = a_recipe(directory, file, actor__model__freeze=freeze, data__eval_data_paths=None)
    steps = order(values)
    assert all(any(rows[row]["images"] for row in step) for step in steps)
    assert any(not rows[row]["images"] for step in steps for row in step)
    oracle = flat_vision.train(directory, rows, steps, lr=LR, dtype=torch.float64, trained=part)
    exact = ROUNDED if family == "gemma3" else EXACT
    for got in (run_recipe(values), *run_ranks(run_recipe, 2, values)):
        assert got.losses == pytest.approx(oracle.losses, rel=exact)
        assert got.norms == pytest.approx(oracle.norms, rel=exact)
        for name, tensor in got.weights.items():
            torch.testing.assert_close(tensor, oracle.weights[name], rtol=exact, atol=exact)


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("llava", marks=pytest.mark.slow)])
def test_a_teacher_reads_the_images_of_the_rows(family: str, tmp_path: Path) -> None:
    """It was refused, as the inputs for images are further ones."""
    directory, teacher = (save_vision_model(family, tmp_path / name) for name in ("model", "teacher"))
    file, rows = save_image_rows(tmp_path)
    tensors = load_file(teacher / "model.safetensors")
    save_file(
        {name: tensor.flip(0) for name, tensor in tensors.items()}, teacher / "model.safetensors", {"format": "pt"}
    )
    values = a_recipe(directory, file, data__eval_data_paths=None, actor__micro_batch_size=2)
    values["actor"] |= {"loss": "distill", "teacher": {"model_path": str(teacher)}}
    oracle = flat_vision.train(directory, rows, order(values), lr=LR, dtype=torch.float64, teacher=teacher)
    for got in (run_recipe(values), *run_ranks(run_recipe, 2, values)):
        assert got.losses == pytest.approx(oracle.losses, rel=EXACT)
        assert got.norms == pytest.approx(oracle.norms, rel=EXACT)
        for name, tensor in got.weights.items():
            torch.testing.assert_close(tensor, oracle.weights[name], rtol=EXACT, atol=EXACT)


def test_a_teacher_that_reads_images_otherwise_is_refused(tmp_path: Path) -> None:
    models = [save_vision_model(family, tmp_path / family) for family in ("qwen2_5_vl", "qwen3_vl")]
    other = save_vision_model("qwen2_5_vl", tmp_path / "other")
    processor = json.loads((other / "processor_config.json").read_text())
    processor["image_processor"]["image_mean"] = [0.1, 0.2, 0.3]
    (other / "processor_config.json").write_text(json.dumps(processor))
    values = a_recipe(models[0], save_image_rows(tmp_path)[0], data__eval_data_paths=None)
    for teacher, what in (
        ({"model_path": str(models[1])}, "is of type qwen3_vl, the model of type qwen2_5_vl"),
        ({"model_path": str(other)}, "has another processor than the model"),
        ({"model_path": str(models[0]), "precision": "bf16"}, "actor.teacher.precision: bf16, and images are prepared"),
    ):
        values["actor"] |= {"loss": "distill", "teacher": teacher}
        found = load_recipe(values)
        with pytest.raises(ConfigError, match=what):
            find_teacher(found, find_adapter(found))


def answered(values: dict[str, Any]) -> list[list[int]]:
    """What a model writes on the prompts of its rows, some with images and some without."""
    worker = SFTWorker(load_recipe(values), report=quiet)
    worker.setup()
    rows = next(iter(worker.prepared.evals.values()))
    every = [rows.row(index) for index in range(9)]
    # By length: one rank's batch has images in all prompts, the other's in none.
    samples = [
        *[one for one in every if len(one.fields[ENDS])][:2],
        *[one for one in every if not len(one.fields[ENDS])][:2],
    ]
    prompts = [Prompt(sample.prompt_ids, sample.fields) for sample in samples if sample.prompt_ids is not None]
    assert {bool(len(prompt.fields[ENDS])) for prompt in prompts} == {True, False}
    written = worker.generator().continuations(prompts, Sampling(max_new_tokens=6))
    worker.release()
    return written


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param("llava", marks=pytest.mark.slow), "qwen2_5_vl"])
def test_a_sharded_model_answers_as_a_whole_one(family: str, tmp_path: Path) -> None:
    """The vision tower runs while a prompt is read, on all ranks, whichever prompts have images."""
    directory = save_vision_model(family, tmp_path / "model")
    file, rows = save_image_rows(tmp_path, 9)
    values = a_recipe(directory, file, eval__generate=True)
    one = answered(values)
    assert run_ranks(answered, 2, values) == [one, one]
    # Plain transformers, one prompt after the other.
    processor = load_processor(str(directory), AutoConfig.from_pretrained(directory))
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float64)
    asked_of = [*[row for row in rows if row["images"]][:2], *[row for row in rows if not row["images"]][:2]]
    for row, answer in zip(asked_of, one, strict=True):
        *before, _ = row["messages"]
        asked = {**row, "messages": [*before, {"role": "assistant", "content": ""}]}
        inputs, _ = flat_vision.encoded(processor, asked, tmp_path)
        start = inputs["input_ids"].shape[1] - 2  # without the answer's end of turn and the line's end
        of_tokens = inputs["input_ids"].shape
        cut = {key: value[:, :start] if value.shape == of_tokens else value for key, value in inputs.items()}
        cut = {key: value.double() if value.is_floating_point() else value for key, value in cut.items()}
        made = model.generate(**cut, max_new_tokens=len(answer), do_sample=False, eos_token_id=-1, pad_token_id=0)
        assert made[0, start:].tolist() == answer
