"""Action models as strangers write them after RLinf's guide; their classes share nothing with this package.

`your_package` stands for the packages that the guide imports from. There are two: `PLAIN`, built as OpenVLA is (a
vision tower whose last block is never called, its features before the text, a language model of transformers inside,
and a processor that knows no token for an image), and `LLAVA`, whose classes derive from LLaVA's of transformers.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

KEY, VOCABULARY, SIDE = "your_action_key", 32000, 28
LOGITS_PROCESSOR = """

class YourLogitsProcessor(LogitsProcessor):
    def __init__(self, n_action_bins):
        self.first = 32000 - n_action_bins

    def __call__(self, input_ids, scores):
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, self.first : 32000] = scores[:, self.first : 32000]
        return allowed
"""
PLAIN = (
    """\
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, BatchFeature, GenerationMixin, LlamaConfig, LogitsProcessor
from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor
from transformers.modeling_outputs import CausalLMOutputWithPast


class YourModelConfig(PreTrainedConfig):
    model_type = "your_model"
    sub_configs = {"text_config": LlamaConfig}

    def __init__(self, text_config=None, patch=14, blocks=3, n_action_bins=256, norm_stats=None, **kwargs):
        self.text_config = LlamaConfig(**text_config) if isinstance(text_config, dict) else text_config or LlamaConfig()
        self.patch, self.blocks, self.n_action_bins, self.norm_stats = patch, blocks, n_action_bins, norm_stats
        super().__init__(**kwargs)


class YourImageProcessor(BaseImageProcessor):
    model_input_names = ["pixel_values"]

    def __init__(self, side=28, **kwargs):
        super().__init__(**kwargs)
        self.side = side

    def __call__(self, images, **kwargs):
        made = [np.asarray(image.convert("RGB").resize((self.side, self.side)), np.float32) for image in images]
        return BatchFeature({"pixel_values": torch.from_numpy(np.stack(made).transpose(0, 3, 1, 2) / 127.5 - 1)})


class YourProcessor(ProcessorMixin):
    def __init__(self, image_processor=None, tokenizer=None, **kwargs):
        super().__init__(image_processor, tokenizer, **kwargs)

    def __call__(self, text, images, padding=True):
        words = self.tokenizer(text, padding=padding, return_tensors="pt")
        return BatchFeature({**words, **self.image_processor(images)})


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class YourBaseModel(PreTrainedModel, GenerationMixin):
    config_class = YourModelConfig
    _supports_sdpa = _supports_flash_attn = True

    def __init__(self, config):
        super().__init__(config)
        width = config.text_config.hidden_size
        self.patches = nn.Conv2d(3, width, config.patch, config.patch)
        self.vision_tower = nn.ModuleList(Block(width) for _ in range(config.blocks))
        self.language_model = AutoModelForCausalLM.from_config(config.text_config)
        self.post_init()

    def get_input_embeddings(self):
        return self.language_model.get_input_embeddings()

    def get_output_embeddings(self):
        return self.language_model.get_output_embeddings()

    def get_action_stats(self, unnorm_key):
        return self.config.norm_stats[unnorm_key]["action"]

    def forward(self, input_ids, attention_mask, pixel_values=None, labels=None, past_key_values=None, **kwargs):
        embeddings = self.get_input_embeddings()(input_ids)
        if past_key_values is None or past_key_values.get_seq_length() == 0:
            seen = self.patches(pixel_values.to(self.patches.weight.dtype)).flatten(2).transpose(1, 2)
            for block in self.vision_tower[:-1]:  # as OpenVLA takes the features of the last block but one
                seen = block(seen)
            embeddings = torch.cat([seen, embeddings], dim=1)
        patches = (pixel_values.shape[-1] // self.config.patch) ** 2
        mask = torch.cat([attention_mask.new_ones(len(attention_mask), patches), attention_mask], dim=1)
        out = self.language_model(
            inputs_embeds=embeddings,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(0)[:, -embeddings.shape[1] :],
            past_key_values=past_key_values,
            **kwargs,
        )
        logits = out.logits[:, -input_ids.shape[1] :]
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])
        return CausalLMOutputWithPast(loss, logits, out.past_key_values, out.hidden_states)

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, **kwargs):
        if past_key_values is not None and past_key_values.get_seq_length():
            input_ids = input_ids[:, -1:]
        passed = ("attention_mask", "pixel_values", "use_cache", "output_hidden_states")
        given = {name: kwargs[name] for name in passed if name in kwargs}
        return {"input_ids": input_ids, "past_key_values": past_key_values, **given}
"""
    + LOGITS_PROCESSOR
)
LLAVA = (
    """\
import torch
from transformers import CLIPImageProcessorPil, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
from transformers import LogitsProcessor


class YourModelConfig(LlavaConfig):
    model_type = "your_model"
    n_action_bins: int = 256
    norm_stats: dict | None = None


class YourImageProcessor(CLIPImageProcessorPil):
    pass


class YourProcessor(LlavaProcessor):
    pass


class YourBaseModel(LlavaForConditionalGeneration):
    config_class = YourModelConfig

    def get_action_stats(self, unnorm_key):
        return self.config.norm_stats[unnorm_key]["action"]
"""
    + LOGITS_PROCESSOR
)
TEXT = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """32,000 tokens: four special ones, bytes, and the rest never used but for actions."""
    words = ["<pad>", "<s>", "</s>", "<image>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<filler_{number}>" for number in range(len(words), VOCABULARY)]
    backend = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<s>", "</s>", "<image>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", extra_special_tokens=["<image>"]
    )


def statistics(dimensions: int = 7) -> dict[str, dict[str, list[float]]]:
    low, high = [-1.0] * dimensions, [1.0] * dimensions
    return {"action": {"q01": low, "q99": high, "mask": [True] * dimensions}}


@contextmanager
def your_package(folder: Path, text: str) -> Iterator[None]:
    """`your_package` can be imported from a folder; what it registers with transformers is gone afterwards."""
    package = folder / "your_package"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "modeling.py").write_text(text)
    (package / "configuration.py").write_text("from your_package.modeling import YourModelConfig\n")
    (package / "processing.py").write_text("from your_package.modeling import YourImageProcessor, YourProcessor\n")
    mappings = (IMAGE_PROCESSOR_MAPPING, PROCESSOR_MAPPING)
    kept = [dict(mapping._extra_content) for mapping in mappings]
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        forget("your_package")
        CONFIG_MAPPING._extra_content.pop("your_model", None)
        for mapping, content in zip(mappings, kept, strict=True):
            mapping._extra_content = content


def forget(package: str) -> None:
    """The next import of a package runs its code again."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def save_plain(folder: Path) -> None:
    """The directory that the printed functions load, of `PLAIN`."""
    modeling: Any = importlib.import_module("your_package.modeling")
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = modeling.YourModelConfig(text_config=TEXT, norm_stats={KEY: statistics()}, **special)
    modeling.YourBaseModel(config).double().save_pretrained(folder)
    modeling.YourProcessor(modeling.YourImageProcessor(), make_tokenizer()).save_pretrained(folder)


def save_llava(folder: Path) -> None:
    """The same of `LLAVA`."""
    modeling: Any = importlib.import_module("your_package.modeling")
    torch.manual_seed(0)
    config = modeling.YourModelConfig(
        text_config=TEXT,
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": 14,
        },
        image_token_index=3,
        norm_stats={KEY: statistics()},
    )
    modeling.YourBaseModel(config).double().save_pretrained(folder)
    images = modeling.YourImageProcessor(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, do_convert_rgb=True
    )
    processor = modeling.YourProcessor(
        images, make_tokenizer(), patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    processor.save_pretrained(folder)


def write_frames(file: Path, episodes: int = 3, frames: int = 4) -> None:
    """A table of frames: an image, an instruction and an action each."""
    random = np.random.default_rng(0)
    rows = []
    for number in range(episodes * frames):
        image = file.parent / f"frame_{number}.png"
        Image.fromarray(random.integers(0, 255, (SIDE, SIDE, 3), np.uint8)).save(image)
        action = random.uniform(-1, 1, 7).round(3).tolist()
        rows.append(
            {
                "observation.image": image.name,
                "instruction": "go on" + " and on" * (number % 3),
                "action": action,
                "episode_index": number // frames,
                "frame_index": number % frames,
            }
        )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
