"""What training leaves of a vision-language model, loaded in a fresh process by transformers and PEFT alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import shardtune
from shardtune.models.processors import load_processor
from shardtune.run import Run
from tests.models.vision import save_image_rows, save_vision_model

BY_AUTO_PROCESSOR = {"llava", "llava_siglip", "gemma3", "idefics3"}
"""The families whose own processor class works without torchvision."""
OFFICIAL = {
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "smolvlm": "SmolVLMProcessor",
    "internvl": "InternVLProcessor",
}
FAMILIES = [
    "llava", "idefics3", "qwen2_5_vl",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("llava_siglip", "gemma3", "smolvlm", "internvl", "qwen3_vl")),
]  # fmt: skip
ELSEWHERE = """\
import sys
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

how, directory, asked, found = sys.argv[1:]
torch.set_num_threads(1)
with open(asked, "rb") as file:
    question = torch.load(file)
if how == "adapter":
    import json, peft
    base = json.load(open(directory + "/adapter_config.json"))["base_model_name_or_path"]
    model = AutoModelForImageTextToText.from_pretrained(base, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(model, directory).eval()
else:
    model = AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager").eval()
inputs = question["inputs"]
if how != "model":
    processor = AutoProcessor.from_pretrained(directory)
    image = Image.open(question["image"]).convert("RGB")
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question["text"]}]}]
    text = processor.apply_chat_template(turns, add_generation_prompt=True)
    inputs = dict(processor(images=[[image]], text=[text], return_tensors="pt"))
with torch.no_grad():
    logits = model(**inputs).logits
assert "shardtune" not in sys.modules
torch.save({"inputs": inputs, "logits": logits}, found)
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
    model: Any = run.worker("latest").inner_model()
    model.set_attn_implementation("eager")
    return model.eval()(**inputs).logits


def elsewhere(how: str, directory: Path, folder: Path, image: Path, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Inputs and logits of the same question in a fresh process, without this package.

    Args:
        how: whole: model and processor; model: the model, on the inputs given; adapter: PEFT over the base model.
    """
    asked, found = folder / f"{how}-asked.pt", folder / f"{how}-found.pt"
    torch.save({"inputs": inputs, "image": str(image), "text": TEXT}, asked)
    command = [sys.executable, "-c", ELSEWHERE, how, str(directory), str(asked), str(found)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(found)


def assert_same_inputs(found: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
    assert found.keys() == inputs.keys()
    assert not [name for name, tensor in inputs.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize("family", FAMILIES)
def test_others_load_the_final_directory_and_compute_the_same_bits(family: str, tmp_path: Path) -> None:
    run = trained(tmp_path, family)
    final, image = run.dir / "final", tmp_path / "images" / "1_0.png"
    before = load_processor(str(tmp_path / "model"), run.worker().inner_model().config)
    inputs = question(before, image)
    named = json.loads((final / "processor_config.json").read_text())["processor_class"]
    if family in BY_AUTO_PROCESSOR:
        found = elsewhere("whole", final, tmp_path, image, inputs)
    else:  # of its class's name, which transformers can build where torchvision is installed
        assert named == OFFICIAL[family]
        found = elsewhere("model", final, tmp_path, image, inputs)
        found["inputs"] = question(load_processor(str(final), run.worker().inner_model().config), image)
    assert_same_inputs(found["inputs"], inputs)
    assert torch.equal(found["logits"], own_logits(run, inputs))


def test_an_adapter_loads_over_its_base_and_merges(tmp_path: Path) -> None:
    run = trained(tmp_path, "llava", is_lora=True, lora={"r": 4, "alpha": 12.0, "dropout": 0.0})
    image = tmp_path / "images" / "1_0.png"
    worker = run.worker()
    inputs = question(load_processor(str(tmp_path / "model"), worker.inner_model().config), image)
    own = own_logits(run, inputs)
    base = elsewhere("whole", tmp_path / "model", tmp_path, image, inputs)["logits"]
    assert float((own - base).abs().max()) > 1e-3
    adapted = elsewhere("adapter", run.dir / "final", tmp_path, image, inputs)
    assert_same_inputs(adapted["inputs"], inputs)
    assert float((adapted["logits"] - own).abs().max()) < 1e-5
    merged = elsewhere("whole", run.export(tmp_path / "merged", merge=True), tmp_path, image, inputs)
    assert_same_inputs(merged["inputs"], inputs)
    assert float((merged["logits"] - own).abs().max()) < 1e-5
