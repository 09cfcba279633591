"""Part c, a vision-language model: images, pixels and tokens a second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from gpu_parts.records import Check, Facts, Part, Setting
from shardtune.config import load_recipe
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.training import quiet, recipe
from tests.support.vision import save_image_rows, template, tokenizer

hf: Any = transformers
SIDE = 384


def save_llava(folder: Path, small: bool) -> Path:
    """LLaVA: SigLIP So400m at 384 pixels and a Llama of 1.1B; tiny for a trial."""
    if (folder / "config.json").exists():
        return folder
    text = tokenizer("<image>", image="<image>")
    side, width, layers, heads = (56, 32, 2, 4) if small else (SIDE, 1152, 27, 16)
    vision = hf.SiglipVisionConfig(
        hidden_size=width, intermediate_size=2 * width if small else 4304, num_hidden_layers=layers,
        num_attention_heads=heads, image_size=side, patch_size=14, vision_use_head=False,
    )  # fmt: skip
    width, inner, layers, heads = (32, 64, 2, 4) if small else (2048, 5632, 22, 32)
    language = hf.LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=4, vocab_size=512 if small else 32_000, max_position_embeddings=8192, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    config = hf.LlavaConfig(
        vision_config=vision, text_config=language, image_token_id=text.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy="full", vision_feature_layer=-1, image_seq_length=(side // 14) ** 2,
    )  # fmt: skip
    processor = hf.LlavaProcessor(
        SiglipImageProcessorPil(size={"height": side, "width": side}), text, patch_size=14,
        vision_feature_select_strategy="full", chat_template=template(text), image_token="<image>",
        num_additional_image_tokens=0,
    )  # fmt: skip
    config.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def measure(setting: Setting) -> Facts:
    """Chats over no, one or two images, 16 rows to a step, four at a time."""
    work = setting.work("vision")
    directory = save_llava(work / "model", setting.small)
    file = work / "rows.jsonl"
    if not file.exists():
        save_image_rows(work, 24 if setting.small else 240)
    rows, steps = (2, 2) if setting.small else (16, 12)
    at_once = min(rows, 4)
    made = recipe(
        directory, file, runner__device=setting.device, runner__max_steps=steps + 3,
        actor__model__model_type="vision_language", actor__model__precision="bf16", actor__model__from_scratch=True,
        actor__micro_batch_size=at_once, actor__global_batch_size=rows, data__num_workers=0 if setting.small else 8,
    )  # fmt: skip
    worker = SFTWorker(load_recipe(made), report=quiet)
    worker.setup()
    for _ in range(3):
        worker.run_training()
    rates, waits = [], []
    for _ in range(steps):
        began = time.perf_counter()
        line = worker.run_training()
        rates.append(line["train/tokens"] / (time.perf_counter() - began))
        waits.append(line["perf/data_wait"] / (time.perf_counter() - began))
    peak = torch.cuda.max_memory_allocated() / 1e9 if setting.device == "cuda" else None
    worker.release()
    waited = statistics.median(waits)
    return {"tokens/s": statistics.median(rates), "peak GB": peak, "share of waiting for images": waited}


def checks(setting: Setting) -> Sequence[Check]:
    return [Check("LLaVA 1.5B full, bf16", measure, 150.0)]


PART = Part("Throughput: a vision-language model", checks, ("tokens/s", "peak GB", "share of waiting for images"))
