"""Tiny vision-language models with random weights, of several families, each with its processor, in a directory."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

from shardtune.models.vision.processors import without_video

hf: Any = transformers  # its configs take what their declared types do not tell

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
IMAGE_SIZE = 28
PARTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ 'IMAGE' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer(*special: str, image: str, **named: str) -> PreTrainedTokenizerFast:
    """Each byte is a token, and so are the special ones; the template writes `image` for an image."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([PAD, START, END, *special, *named.values()])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=named,
    )
    made.chat_template = PARTS.replace("IMAGE", image)
    return made


def template(text: PreTrainedTokenizerFast) -> str:
    """The chat template of a tokenizer."""
    assert isinstance(text.chat_template, str)
    return text.chat_template


def _text(vocabulary: int, **changes: Any) -> dict[str, Any]:
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return sizes | changes


def _vision(**changes: Any) -> dict[str, Any]:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": IMAGE_SIZE,
        "patch_size": 14,
    }
    return sizes | changes


def _llava(vision: Any, pil: Any, strategy: str, extra: int) -> tuple[PreTrainedModel, Any]:
    text = tokenizer("<image>", image="<image>")
    image = text.convert_tokens_to_ids("<image>")
    config = hf.LlavaConfig(
        vision_config=vision,
        text_config=hf.LlamaConfig(**_text(len(text))),
        image_token_id=image,
        vision_feature_select_strategy=strategy,
        vision_feature_layer=-1 if strategy == "full" else -2,
        image_seq_length=4,
    )
    processor = hf.LlavaProcessor(
        pil,
        text,
        patch_size=14,
        vision_feature_select_strategy=strategy,
        chat_template=template(text),
        image_token="<image>",
        num_additional_image_tokens=extra,
    )
    return hf.LlavaForConditionalGeneration(config), processor


def llava() -> tuple[PreTrainedModel, Any]:
    """LLaVA with CLIP, whose last layer and class token it leaves out."""
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    return _llava(
        hf.CLIPVisionConfig(**_vision()), CLIPImageProcessorPil(size={"shortest_edge": IMAGE_SIZE}, crop_size=size),
        "default", 1,
    )  # fmt: skip


def llava_siglip() -> tuple[PreTrainedModel, Any]:
    """LLaVA with SigLIP."""
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    return _llava(
        hf.SiglipVisionConfig(**_vision(vision_use_head=False)), SiglipImageProcessorPil(size=size), "full", 0
    )


def _qwen_text() -> PreTrainedTokenizerFast:
    return tokenizer(
        "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
        image="<|vision_start|><|image_pad|><|vision_end|>",
    )  # fmt: skip


def _qwen_ids(text: PreTrainedTokenizerFast) -> dict[str, Any]:
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    return {key: text.convert_tokens_to_ids(token) for key, token in names.items()}


def _qwen_pixels(patch: int) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=2, size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
    )


def qwen2_5_vl() -> tuple[PreTrainedModel, Any]:
    """Qwen2.5-VL: images of any shape, positions of three dimensions."""
    text = _qwen_text()
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = hf.Qwen2_5_VLConfig(
        text_config=_text(len(text), rope_parameters=rope),
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        **_qwen_ids(text),
    )  # fmt: skip
    kind = without_video(Qwen2_5_VLProcessor)
    processor = kind(_qwen_pixels(14), text, chat_template=template(text))
    return hf.Qwen2_5_VLForConditionalGeneration(config), processor


def qwen3_vl() -> tuple[PreTrainedModel, Any]:
    """Qwen3-VL: features of earlier vision layers are added to the first layers of the language model."""
    text = _qwen_text()
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0, "mrope_interleaved": True}
    config = hf.Qwen3VLConfig(
        text_config=_text(len(text), rope_parameters=rope, head_dim=8),
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
        **_qwen_ids(text),
    )  # fmt: skip
    kind = without_video(Qwen3VLProcessor)
    processor = kind(_qwen_pixels(14), text, chat_template=template(text))
    return hf.Qwen3VLForConditionalGeneration(config), processor


def _rows_and_columns() -> list[str]:
    return [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]


def idefics3() -> tuple[PreTrainedModel, Any]:
    """Idefics3: large images are cut into tiles."""
    text = tokenizer(
        *_rows_and_columns(), "<global-img>", "<end_of_utterance>", "<fake_token_around_image>", "<image>",
        image="<image>",
    )  # fmt: skip
    pil = Idefics3ImageProcessorPil(
        size={"longest_edge": 2 * IMAGE_SIZE}, max_image_size={"longest_edge": IMAGE_SIZE}, do_image_splitting=True
    )
    processor = Idefics3Processor(pil, text, image_seq_len=1, chat_template=template(text))
    config = hf.Idefics3Config(
        vision_config=_vision(),
        text_config={"model_type": "llama", **_text(len(text))},
        scale_factor=2,
        image_token_id=text.convert_tokens_to_ids("<image>"),
        pad_token_id=text.pad_token_id,
    )
    return hf.Idefics3ForConditionalGeneration(config), processor


def smolvlm() -> tuple[PreTrainedModel, Any]:
    """SmolVLM: as Idefics3, with a processor that also takes videos."""
    named = {"fake_image_token": "<fake_token_around_image>", "image_token": "<image>"}
    named |= {"end_of_utterance_token": "<end_of_utterance>", "global_image_token": "<global-img>"}
    text = tokenizer(*_rows_and_columns(), image="<image>", **named)
    pil = SmolVLMImageProcessorPil(
        size={"longest_edge": 2 * IMAGE_SIZE}, max_image_size={"longest_edge": IMAGE_SIZE}, do_image_splitting=True
    )
    processor = without_video(SmolVLMProcessor)(pil, text, None, image_seq_len=1, chat_template=template(text))
    config = hf.SmolVLMConfig(
        vision_config=_vision(),
        text_config={"model_type": "llama", **_text(len(text))},
        scale_factor=2,
        image_token_id=text.convert_tokens_to_ids("<image>"),
        pad_token_id=text.pad_token_id,
    )
    return hf.SmolVLMForConditionalGeneration(config), processor


def gemma3() -> tuple[PreTrainedModel, Any]:
    """Gemma 3: the tokens of an image see each other in both directions."""
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    text = tokenizer(image="<start_of_image>", **named)
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    processor = Gemma3Processor(
        Gemma3ImageProcessorPil(size=size), text, image_seq_length=4, chat_template=template(text)
    )
    config = hf.Gemma3Config(
        text_config=hf.Gemma3TextConfig(**_text(len(text), head_dim=8, sliding_window=512)),
        vision_config=_vision(vision_use_head=False),
        mm_tokens_per_image=4,
        image_token_index=text.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_index=text.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=text.convert_tokens_to_ids("<end_of_image>"),
    )
    model = hf.Gemma3ForConditionalGeneration(config)
    # As the config makes it, the projector is zero and images change nothing.
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.3)
    return model, processor


def internvl() -> tuple[PreTrainedModel, Any]:
    """InternVL: images are cut into tiles of one size."""
    named = {"start_image_token": "<img>", "end_image_token": "</img>"}
    named |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    text = tokenizer(image="<IMG_CONTEXT>", **named)
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    pil = GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, min_patches=1, max_patches=2)
    processor = without_video(InternVLProcessor)(pil, text, image_seq_length=1, chat_template=template(text))
    config = hf.InternVLConfig(
        vision_config=_vision(image_size=[IMAGE_SIZE, IMAGE_SIZE], patch_size=[14, 14]),
        text_config={"model_type": "qwen2", **_text(len(text))},
        image_token_id=text.convert_tokens_to_ids("<IMG_CONTEXT>"),
        downsample_ratio=0.5,
        image_seq_length=1,
    )
    return hf.InternVLForConditionalGeneration(config), processor


FAMILIES: dict[str, Callable[[], tuple[PreTrainedModel, Any]]] = {
    "llava": llava,
    "llava_siglip": llava_siglip,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "idefics3": idefics3,
    "smolvlm": smolvlm,
    "gemma3": gemma3,
    "internvl": internvl,
}


def save_vision_model(family: str, folder: Path, *, seed: int = 0) -> Path:
    """A model of a family with its processor, as `save_pretrained` writes them."""
    torch.manual_seed(seed)
    model, processor = FAMILIES[family]()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def save_image_rows(folder: Path, count: int = 24, *, every: int = 3) -> tuple[Path, list[dict[str, Any]]]:
    """Chats over images of several sizes; of `every` rows one has none, and one has two images in two turns."""
    draw = random.Random(3)
    rows: list[dict[str, Any]] = []
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        images, turns = [], []
        for turn in range(1 + (number % every == 1)):
            place = ""
            if number % every:
                size = (draw.randrange(30, 90), draw.randrange(30, 90))
                pixels = np.random.default_rng(number * 2 + turn).integers(0, 255, (*size[::-1], 3), np.uint8)
                name = f"images/{number}_{turn}.png"
                Image.fromarray(pixels).save(folder / name)
                images.append(name)
                place = "<image>"
            words = "".join(draw.choice("abcdef ") for _ in range(draw.randrange(1, 12)))
            turns.append({"role": "user", "content": f"{words}{place}{words}?" if turn else f"{place}{words}?"})
            turns.append({"role": "assistant", "content": "a" + words[::-1] + "b"})
        rows.append({"messages": turns, "images": images})
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file, rows
