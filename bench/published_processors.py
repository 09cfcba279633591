"""Processors and rows for planning the published models with images: the published sizes, tokens that are bytes.

A plan of such a model reads rows, because an image's tokens follow from its size by the processor's settings. These are
as the model's directory on the Hub has them; the words of the tokenizer do not matter for memory, its marks do.
"""

from __future__ import annotations

import json
import wave
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import PreTrainedConfig, WhisperFeatureExtractor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

from shardtune.data.robot.episode import Episode
from shardtune.data.robot.lerobot_writer import write_lerobot
from shardtune.models.vision.processors import without_video
from tests.support.tiny_openvla import PREPROCESSOR, make_tokenizer
from tests.support.vision import template, tokenizer
from tests.support.whisper_tokenizer import whisper_tokenizer

IMAGE = (1024, 768)
ROWS = 64
"""Of a step."""
EMBEDDING = "Embedding"
"""In the names of models whose rows are a query and a document."""


def _gemma3(config: Any) -> Any:
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    text = tokenizer(image="<start_of_image>", **named)
    config.image_token_id = text.convert_tokens_to_ids("<image_soft_token>")
    config.boi_token_index = text.convert_tokens_to_ids("<start_of_image>")
    config.eoi_token_index = text.convert_tokens_to_ids("<end_of_image>")
    pixels = Gemma3ImageProcessorPil(size={"height": 896, "width": 896})
    return Gemma3Processor(pixels, text, image_seq_length=256, chat_template=template(text))


def _smolvlm(config: Any) -> Any:
    named = {"fake_image_token": "<fake_token_around_image>", "image_token": "<image>"}
    named |= {"end_of_utterance_token": "<end_of_utterance>", "global_image_token": "<global-img>"}
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    text = tokenizer(*places, image="<image>", **named)
    config.image_token_id = text.convert_tokens_to_ids("<image>")
    pixels = SmolVLMImageProcessorPil(
        size={"longest_edge": 1536}, max_image_size={"longest_edge": 384}, do_image_splitting=True
    )
    return without_video(SmolVLMProcessor)(pixels, text, None, image_seq_len=81, chat_template=template(text))


def _qwen25_vl(config: Any) -> Any:
    marks = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    text = tokenizer(*marks, image="<|vision_start|><|image_pad|><|vision_end|>")
    start, end, image, video = (text.convert_tokens_to_ids(mark) for mark in marks)
    config.vision_start_token_id, config.vision_end_token_id = start, end
    config.image_token_id, config.video_token_id = image, video
    pixels = Qwen2VLImageProcessorPil(
        patch_size=14, merge_size=2, size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}
    )
    return without_video(Qwen2_5_VLProcessor)(pixels, text, chat_template=template(text))


_PROCESSORS: Mapping[str, Callable[[Any], Any]] = {
    "gemma3": _gemma3,
    "smolvlm": _smolvlm,
    "qwen2_5_vl": _qwen25_vl,
}


def save_processor(name: str, config: PreTrainedConfig, directory: Path) -> None:
    """Write what a model needs to read rows beside its config.json; where lengths are enough, nothing.

    Args:
        name: of the model, on the Hub.
        config: of it; tokens of the processor are entered.
        directory: of the model.
    """
    if config.model_type == "openvla":
        side = 224
        sizes = {"input_sizes": [[3, side, side]] * 2, "tvf_crop_params": [{"output_size": [side, side]}] * 2}
        resize = [{**each, "size": [side, side]} for each in PREPROCESSOR["tvf_resize_params"]]
        content = {**PREPROCESSOR, **sizes, "tvf_resize_params": resize}
        (directory / "preprocessor_config.json").write_text(json.dumps(content))
        make_tokenizer().save_pretrained(directory)
    elif config.model_type == "whisper":
        WhisperFeatureExtractor(feature_size=128).save_pretrained(directory)
        whisper_tokenizer().save_pretrained(directory)
    elif EMBEDDING in name:
        tokenizer(image="").save_pretrained(directory)
    elif config.model_type in _PROCESSORS:
        _PROCESSORS[config.model_type](config).save_pretrained(directory)
        config.save_pretrained(directory)


def save_rows(name: str, config: PreTrainedConfig, folder: Path, length: int) -> Path | None:
    """Rows of a step: chats over an image, texts with an answer, sounds of 30 seconds, frames of an episode.

    Args:
        name: of the model, on the Hub.
        config: of it.
        folder: to write to.
        length: tokens that texts have at least.

    Returns None where lengths are enough.
    """
    if config.model_type == "openvla":
        file = folder / "robot"
        if not file.exists():
            frames = np.zeros((ROWS, 256, 256, 3), np.uint8)
            states, actions = np.zeros((ROWS, 7), np.float32), np.linspace(-1, 1, ROWS * 7, dtype=np.float32)
            write_lerobot(file, [Episode({"top": frames}, states, actions.reshape(ROWS, 7), "lift the red cup")], fps=5)
        return file
    row: dict[str, Any]
    count = ROWS
    if config.model_type == "whisper":
        with wave.open(str(folder / "a.wav"), "wb") as sound:
            sound.setparams((1, 2, 16000, 0, "NONE", ""))
            sound.writeframes(bytes(2 * 16000 * 30))
        row = {"audio": str(folder / "a.wav"), "text": "a" * 400}
    elif EMBEDDING in name:
        row, count = {"query": "q" * length, "positive": "p" * length}, 1024
    elif config.model_type in _PROCESSORS:
        Image.new("RGB", IMAGE).save(folder / "image.png")
        chat = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "a" * length}]
        row = {"messages": chat, "images": ["image.png"]}
    else:
        return None
    file = folder / f"{name.replace('/', '--')}_{length}.jsonl"
    file.write_text((json.dumps(row) + "\n") * count)
    return file
