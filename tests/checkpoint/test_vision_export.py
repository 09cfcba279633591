"""What training leaves of a vision-language model, loaded in a fresh process by transformers and PEFT alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig

import shardtune
from shardtune.models.vision.processors import load_processor
from shardtune.run.run import Run
from tests.support.vision import save_image_rows, save_vision_model

BY_AUTO_PROCESSOR = {"llava", "llava_siglip", "gemma3", "idefics3"}
"""The families whose own processor class works without torchvision."""
OFFICIAL = {
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "smolvlm": "SmolVLMProcessor",
    "internvl": "InternVLProcessor",
}
FAMILIES = [
    pytest.param(("llava", "qwen2_5_vl"), id="some"),
    pytest.param(
        ("idefics3", "llava_siglip", "gemma3", "smolvlm", "internvl", "qwen3_vl"), id="others", marks=pytest.mark.slow
    ),
]
ELSEWHERE = """\
import json
import sys
import peft
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

torch.set_num_threads(1)


def answer(how, directory, image, text, inputs):
    if how == "adapter":
        base = json.load(open(directory + "/adapter_config.json"))["base_model_name_or_path"]
        model = AutoModelForImageTextToText.from_pretrained(base, attn_implementation="eager")
        model = peft.PeftModel.from_pretrained(model, directory).eval()
    else:
        model = AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager").eval()
    if how != "model":
        processor = AutoProcessor.from_pretrained(directory)
        processor.image_processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
        turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
        shown = processor.apply_chat_template(turns, add_generation_prompt=True)
        inputs = dict(processor(images=[[Image.open(image).convert("RGB")]], text=[shown], return_tensors="pt"))
    with torch.no_grad():
        return inputs, model(**inputs).logits


for line in sys.stdin:
    jobs, found = json.loads(line)
    torch.save([answer(*job) for job in torch.load(jobs)], found)
    assert "shardtune" not in sys.modules
    print("answered", flush=True)
"""
TEXT = "what is it?"


def trained(folder: Path, family: str, **model: Any) -> Run:
    """A family's tiny model, trained for two steps."""
    directory = save_vision_model(family, folder / "model")
    file, _ = save_image_rows(folder, 6)
    return shardtune.train(
        {
            "runner": {"max_steps": 2, "logger": {"log_path": str(folder / "runs"), "logger_backends": ["jsonl"]}},
            "actor": {
                "micro_batch_size": 3,
                "global_batch_size": 3,
                "model": {
                    "model_type": "vision_language", "model_path": str(directory), "precision": "fp32", **model,
                },
                "optim": {"lr": 1e-2},
            },
            "data": {"train_data_paths": str(file), "num_workers": 0, "cache_dir": str(folder / "cache")},
        },
        "runner.logger.experiment_name=run",
    )  # fmt: skip


def question(processor: Any, image: Path) -> dict[str, torch.Tensor]:
    """The inputs of a question about an image, by a processor."""
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": TEXT}]}]
    text = processor.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return dict(processor(images=[[Image.open(image).convert("RGB")]], text=[text], return_tensors="pt"))


@torch.no_grad()
def own_logits(run: Run, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the trained model in memory, from the last checkpoint's full precision."""
    model: Any = run.worker("latest").inner_model
    model.set_attn_implementation("eager")
    return model.eval()(**inputs).logits


@dataclass(frozen=True)
class Job:
    """A question for a fresh process.

    Attributes:
        how: whole: model and processor of the directory; model: the model alone, on `inputs`; adapter: PEFT's model
            over the base that it names, and the processor.
        directory: what is loaded.
        image: what is asked about.
        inputs: what this process makes of the question.
    """

    how: str
    directory: Path
    image: Path
    inputs: dict[str, torch.Tensor]


Answers = Callable[..., list[tuple[dict[str, torch.Tensor], torch.Tensor]]]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    """Gives inputs and logits of each job, computed in one fresh process without this package."""
    folder = tmp_path_factory.mktemp("elsewhere")
    with (
        (folder / "errors").open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", ELSEWHERE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        to, back = process.stdin, process.stdout

        def answers(*jobs: Job) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            told, found = folder / "jobs.pt", folder / "found.pt"
            torch.save([(job.how, str(job.directory), str(job.image), TEXT, job.inputs) for job in jobs], told)
            print(json.dumps([str(told), str(found)]), file=to, flush=True)
            assert back.readline() == "answered\n", (folder / "errors").read_text()[-3000:]
            return torch.load(found)

        yield answers


def assert_same_inputs(found: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
    assert found.keys() == inputs.keys()
    assert not [name for name, tensor in inputs.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize("families", FAMILIES)
def test_others_load_the_final_directory_and_compute_the_same_bits(
    families: Sequence[str], elsewhere: Answers, tmp_path: Path
) -> None:
    jobs, logits = [], []
    for family in families:
        run = trained(tmp_path / family, family)
        final, image = run.dir / "final", tmp_path / family / "images" / "1_0.png"
        config = AutoConfig.from_pretrained(final)
        inputs = question(load_processor(str(tmp_path / family / "model"), config), image)
        if family not in BY_AUTO_PROCESSOR:  # its class, which needs torchvision, is named as transformers has it
            assert json.loads((final / "processor_config.json").read_text())["processor_class"] == OFFICIAL[family]
            assert_same_inputs(question(load_processor(str(final), config), image), inputs)
        jobs.append(Job("whole" if family in BY_AUTO_PROCESSOR else "model", final, image, inputs))
        logits.append(own_logits(run, inputs))
    for job, own, (inputs, found) in zip(jobs, logits, elsewhere(*jobs), strict=True):
        assert_same_inputs(inputs, job.inputs)
        assert torch.equal(found, own)


@pytest.mark.slow
def test_an_adapter_loads_over_its_base_and_merges(elsewhere: Answers, tmp_path: Path) -> None:
    run = trained(tmp_path, "llava", is_lora=True, lora={"r": 4, "alpha": 12.0, "dropout": 0.0})
    model, image = tmp_path / "model", tmp_path / "images" / "1_0.png"
    inputs = question(load_processor(str(model), AutoConfig.from_pretrained(model)), image)
    own = own_logits(run, inputs)
    merged = run.export(tmp_path / "merged", merge=True, check=False)
    places = {"base": model, "adapter": run.dir / "final", "merged": merged}
    jobs = [Job("adapter" if name == "adapter" else "whole", place, image, inputs) for name, place in places.items()]
    found = dict(zip(places, elsewhere(*jobs), strict=True))
    for made, _ in found.values():
        assert_same_inputs(made, inputs)
    furthest = {name: float((logits - own).abs().max()) for name, (_, logits) in found.items()}
    assert furthest["base"] > 1e-3
    assert furthest["adapter"] < 1e-5
    assert furthest["merged"] < 1e-5
