"""Processors without torchvision: loaded, saved under their own names, sent to processes; refused ones."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.utils import is_torchvision_available

from shardtune.data.encoder import RowError
from shardtune.errors import ModelError
from shardtune.models.vision import processors
from shardtune.models.vision.processors import applied_images, image_text, load_processor, without_video
from shardtune.models.vision.vision_language import VisionLanguage
from tests.support.tiny_architectures import tiny_config
from tests.support.tiny_vision import VISION, make_processor
from tests.support.vision import FAMILIES, save_vision_model


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_processor_comes_back_from_its_directory(family: str, tmp_path: Path) -> None:
    """With its settings (`image_seq_len` of SmolVLM is none of its parts'), under the name that transformers knows."""
    folder = save_vision_model(family, tmp_path)
    _, made = FAMILIES[family]()
    loaded: Any = load_processor(str(folder), AutoConfig.from_pretrained(folder))
    named = json.loads((folder / "processor_config.json").read_text())["processor_class"]
    assert named == type(made).__name__ == type(loaded).__name__
    assert loaded.tokenizer.backend == "tokenizers"  # which is saved with it; that of images is another
    copied = pickle.loads(pickle.dumps(loaded))
    images = [Image.new("RGB", (70, 50), (200, 30, 90)), Image.new("RGB", (30, 60))]
    text = f"a{made.image_token}b {made.image_token}"
    wanted = made(images=[images], text=[text], return_tensors="pt")
    for other in (loaded, copied):
        got = other(images=[images], text=[text], return_tensors="pt")
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[key], wanted[key]) for key in wanted)


def test_a_class_without_video_is_made_once() -> None:
    assert without_video(Qwen2_5_VLProcessor) is without_video(Qwen2_5_VLProcessor)
    assert without_video(PaliGemmaProcessor) is PaliGemmaProcessor


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "family",
    ["gemma4", "idefics2", "janus", "llava_next_video", "llava_onevision", "minicpmv4_6", "mllama", "video_llava"],
)
def test_a_row_of_two_images_is_the_processors_own(family: str, tmp_path: Path) -> None:
    """`image_text` compares all tensors of a row of two images.

    These classes pass the part for videos by position or read its settings; replace image tokens in a call of their
    own; or let an image's tokens or mask depend on the row.
    """
    made = make_processor(family)
    made.save_pretrained(tmp_path)
    config: Any = PreTrainedConfig()
    config.model_type = family
    loaded = load_processor(str(tmp_path), config)
    assert type(loaded).__name__ == type(made).__name__
    images = image_text(loaded)
    assert images.token_type_ids(np.array([0, images.tokenizer.get_vocab()[images.image_token]])).tolist() == [0, 1]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # ERNIE's processor
def test_inputs_that_follow_the_text_have_the_kinds_of_its_tokens() -> None:
    """ERNIE 4.5-VL computes positions from them, and has other kinds for its experts."""
    images = image_text(make_processor("ernie4_5_vl_moe"))
    assert images.one_row
    shown = [Image.new("RGB", (32, 32))]
    text = images.expand(f"a{images.image_token}", [shown[0].size]).text
    ids = np.array(images.tokenizer(text, add_special_tokens=False)["input_ids"])
    made = images.of_row({}, ids, shown)
    assert made.keys() == {"image_grid_thw", "mm_token_type_ids", "moe_mm_token_type_ids", "pixel_values"}
    assert made["mm_token_type_ids"][0].tolist() == images.token_type_ids(ids).tolist()


def test_kinds_of_tokens_that_a_processor_names_and_does_not_return() -> None:
    """Cosmos 3 Edge's model needs them for its positions."""
    processor = make_processor("cosmos3_edge")
    assert image_text(processor).token_types is None
    adapter = VisionLanguage(tiny_config("cosmos3_edge", VISION["cosmos3_edge"]["config"]), processor)
    assert adapter.images.token_types == "mm_token_type_ids"


def test_images_side_by_side_are_a_bad_row_where_they_are_written_in_another_way() -> None:
    images = image_text(make_processor("idefics2"))
    token = images.image_token
    assert len(images.expand(f"{token}a{token}", [(32, 32), (40, 64)]).images) == 2
    with pytest.raises(RowError, match="two images follow each other"):
        images.expand(f"{token}{token}", [(32, 32), (40, 64)])


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("family", ["qwen3_vl", "glm4v"])
def test_images_side_by_side_are_a_bad_row_where_the_model_takes_them_for_one(family: str) -> None:
    """The model's own forward failed, in the step of the first such row."""
    images = VisionLanguage(tiny_config(family, VISION[family]["config"]), make_processor(family)).images
    token, sizes = images.image_token, [(32, 32), (40, 64)]
    for text in (f"{token} {token}", f"<vs>{token}<ve><vs>{token}<ve>"):
        assert len(images.expand(text, sizes).images) == 2
    with pytest.raises(RowError, match="without a token in between, which the model takes for one"):
        images.expand(f"{token}{token}", sizes)
    others = VisionLanguage(tiny_config("llava", VISION["llava"]["config"]), make_processor("llava")).images
    assert len(others.expand(others.image_token * 2, sizes).images) == 2


@pytest.mark.parametrize("family", ["llava_onevision", "internvl"])
def test_a_token_of_a_video_in_a_text_is_a_bad_row(family: str) -> None:
    """As for the processor, which raises an error; it was trained as if it were a word."""
    processor: Any = make_processor(family)
    images = image_text(processor)
    for before in ("", images.image_token):
        given = {"images": [[Image.new("RGB", (32, 32))]]} if before else {}
        with pytest.raises(ValueError, match="no videos were passed"):
            processor(text=[f"{before}a<video>b"], return_tensors="pt", **given)
        with pytest.raises(RowError, match="the text contains '<video>', which the model takes for a video"):
            images.expand(f"{before}a<video>b", [(32, 32)] * bool(before))
    assert images.expand("a < video >b", []).text == "a < video >b"


def test_an_image_without_a_token_is_a_bad_row() -> None:
    images = image_text(make_processor("lighton_ocr"))
    with pytest.raises(RowError, match="an image of 300 x 12 is too small or too narrow: LightOnOcrProcessor makes no"):
        images.expand(images.image_token, [(300, 12)])


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_processors_with_ways_of_their_own_are_applied_to_whole_rows() -> None:
    """PaliGemma writes a begin token and a line's end around the text; ShieldGemma 2 writes its own text."""
    with pytest.raises(ModelError, match=r"cannot be followed row by row \(its input_ids"):
        image_text(make_processor("paligemma"))
    assert applied_images(make_processor("paligemma")).one_row
    with pytest.raises(ModelError, match=r"cannot be followed row by row"):
        applied_images(make_processor("shieldgemma2"))


def test_a_directory_without_a_processor(tmp_path: Path) -> None:
    folder = save_vision_model("llava", tmp_path)
    config = AutoConfig.from_pretrained(folder)
    for name in ("processor_config.json", "preprocessor_config.json"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(ModelError) as caught:
        load_processor(str(folder), config)
    assert "save_pretrained" in str(caught.value.remedy)


@pytest.mark.parametrize("installed", [False, True])
def test_a_processor_that_needs_torchvision(installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4's image processor has no Pillow backend. An error where torchvision is there has another remedy."""
    if installed:
        monkeypatch.setattr(processors, "is_torchvision_available", lambda: True)
    elif is_torchvision_available():
        pytest.skip("torchvision is installed")
    folder = save_vision_model("llava", tmp_path)
    file = folder / "processor_config.json"
    content = json.loads(file.read_text())
    content["image_processor"]["image_processor_type"] = "Llama4ImageProcessorFast"
    file.write_text(json.dumps(content))
    if installed:
        content["image_processor"] |= {"image_processor_type": "CLIPImageProcessorFast", "size": "torchvision"}
        file.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="orchvision") as caught:
        load_processor(str(folder), AutoConfig.from_pretrained(folder))
    assert ("pip install torchvision" in str(caught.value.remedy)) is not installed
