"""An action model as a stranger writes it after RLinf's guide; its classes share nothing with this package.

`your_package` stands for the packages that the guide imports from; its base model derives from LLaVA of transformers.
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
PACKAGE = """\
import numpy as np
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


class YourLogitsProcessor(LogitsProcessor):
    def __init__(self, n_action_bins):
        self.first = 32000 - n_action_bins

    def __call__(self, input_ids, scores):
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, self.first : 32000] = scores[:, self.first : 32000]
        return allowed


class YourBaseModel(LlavaForConditionalGeneration):
    config_class = YourModelConfig

    def get_action_stats(self, unnorm_key):
        return self.config.norm_stats[unnorm_key]["action"]


class ValueHead(torch.nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.out = torch.nn.Linear(hidden_size, 1)

    def forward(self, hidden_states):
        return torch.cat([self.out(layers[-1][:, -1:]) for layers in hidden_states], dim=1)
"""


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


def statistics(dimensions: int = 7) -> dict[str, object]:
    low, high = [-1.0] * dimensions, [1.0] * dimensions
    return {"action": {"q01": low, "q99": high, "mask": [True] * dimensions}}


@contextmanager
def your_package(folder: Path) -> Iterator[None]:
    """`your_package` can be imported from a folder; what it registers with transformers is gone afterwards."""
    package = folder / "your_package"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "modeling.py").write_text(PACKAGE)
    (package / "configuration.py").write_text("from your_package.modeling import YourModelConfig\n")
    (package / "processing.py").write_text("from your_package.modeling import YourImageProcessor, YourProcessor\n")
    mappings = (IMAGE_PROCESSOR_MAPPING, PROCESSOR_MAPPING)
    kept = [dict(mapping._extra_content) for mapping in mappings]
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == "your_package"]:
            del sys.modules[name]
        CONFIG_MAPPING._extra_content.pop("your_model", None)
        for mapping, content in zip(mappings, kept, strict=True):
            mapping._extra_content = content


def save_model(folder: Path) -> None:
    """The directory that the printed functions load; `your_package` has to be importable."""
    modeling: Any = importlib.import_module("your_package.modeling")

    torch.manual_seed(0)
    config = modeling.YourModelConfig(
        text_config={
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        },
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


def write_frames(file: Path, episodes: int = 4, frames: int = 4) -> None:
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
                "instruction": f"go to {number % 3}",
                "action": action,
                "episode_index": number // frames,
                "frame_index": number % frames,
            }
        )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
