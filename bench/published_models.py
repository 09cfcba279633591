"""The configurations of models on the Hub that people fine-tune, as their config.json has them: sizes, no weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from published_processors import save_processor, save_rows
from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    SmolVLMConfig,
    WhisperConfig,
)

from shardtune.models.action.openvla import OpenVLAConfig


@dataclass(frozen=True)
class Published:
    """A model.

    Attributes:
        name: on the Hub.
        parameters: billions, as its page has them; plans are checked against them.
        config: makes its configuration.
        dtype: of its weights.
    """

    name: str
    parameters: float
    config: Callable[[], PreTrainedConfig]
    dtype: str = "bfloat16"

    def save(self, folder: Path) -> Path:
        """Write a directory with its config.json, and with its processor where it takes images; returns it."""
        directory = folder / self.name.replace("/", "--")
        if not directory.exists():
            config = self.config()
            config.dtype = self.dtype
            config.save_pretrained(directory)
            save_processor(self.name, config, directory)
        return directory

    def rows(self, folder: Path, length: int) -> Path | None:
        """Rows to plan with, of `length` tokens; None where lengths are enough."""
        return save_rows(self.name, self.config(), folder, length)


def _qwen3(width: int, layers: int, heads: int, inner: int, *, tied: bool, vocabulary: int = 151936) -> Qwen3Config:
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=tied,
    )


def _qwen3_30b_a3b() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=40960,
    )


def _llama(width: int, layers: int, heads: int, inner: int, *, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=128256,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        tie_word_embeddings=tied,
    )


def _gemma3_1b() -> Gemma3TextConfig:
    return Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        vocab_size=262144,
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        max_position_embeddings=32768,
    )


def _gemma3_4b() -> Gemma3Config:
    return Gemma3Config(
        architectures=["Gemma3ForConditionalGeneration"],
        text_config={
            "vocab_size": 262208,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 1024,
            "max_position_embeddings": 131072,
        },
        vision_config={
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 896,
            "patch_size": 14,
            "vision_use_head": False,
        },
        mm_tokens_per_image=256,
    )


def _mistral_7b() -> MistralConfig:
    return MistralConfig(
        architectures=["MistralForCausalLM"],
        vocab_size=32768,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        sliding_window=None,
        max_position_embeddings=32768,
    )


def _gpt_oss_20b() -> GptOssConfig:
    return GptOssConfig(
        architectures=["GptOssForCausalLM"],
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=24,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
        max_position_embeddings=131072,
    )


def _smollm3_3b() -> SmolLM3Config:
    return SmolLM3Config(
        architectures=["SmolLM3ForCausalLM"],
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=65536,
        tie_word_embeddings=True,
    )


def _smolvlm2_2b() -> SmolVLMConfig:
    return SmolVLMConfig(
        architectures=["SmolVLMForConditionalGeneration"],
        text_config={
            "model_type": "llama",
            "vocab_size": 49280,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 64,
            "max_position_embeddings": 8192,
        },
        vision_config={
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 384,
            "patch_size": 14,
        },
        image_token_id=49190,
        scale_factor=3,
    )


def _qwen25_vl_7b() -> Qwen2_5_VLConfig:
    return Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        text_config={
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128000,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
        },
        vision_config={
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        tie_word_embeddings=False,
    )


def _openvla_7b() -> OpenVLAConfig:
    return OpenVLAConfig(
        architectures=["OpenVLAForActionPrediction"],
        text_config={
            "model_type": "llama",
            "vocab_size": 32064,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
        },
    )


def _whisper_large_v3() -> WhisperConfig:
    return WhisperConfig(
        architectures=["WhisperForConditionalGeneration"],
        vocab_size=51866,
        num_mel_bins=128,
        d_model=1280,
        encoder_layers=32,
        decoder_layers=32,
        encoder_attention_heads=20,
        decoder_attention_heads=20,
        encoder_ffn_dim=5120,
        decoder_ffn_dim=5120,
    )


PUBLISHED: Mapping[str, Published] = {
    "qwen3-0.6b": Published("Qwen/Qwen3-0.6B", 0.6, lambda: _qwen3(1024, 28, 16, 3072, tied=True)),
    "qwen3-1.7b": Published("Qwen/Qwen3-1.7B", 1.7, lambda: _qwen3(2048, 28, 16, 6144, tied=True)),
    "qwen3-4b": Published("Qwen/Qwen3-4B", 4.0, lambda: _qwen3(2560, 36, 32, 9728, tied=True)),
    "qwen3-8b": Published("Qwen/Qwen3-8B", 8.2, lambda: _qwen3(4096, 36, 32, 12288, tied=False)),
    "qwen3-14b": Published("Qwen/Qwen3-14B", 14.8, lambda: _qwen3(5120, 40, 40, 17408, tied=False)),
    "qwen3-32b": Published("Qwen/Qwen3-32B", 32.8, lambda: _qwen3(5120, 64, 64, 25600, tied=False)),
    "qwen3-30b-a3b": Published("Qwen/Qwen3-30B-A3B", 30.5, _qwen3_30b_a3b),
    "llama-3.2-1b": Published("meta-llama/Llama-3.2-1B-Instruct", 1.24, lambda: _llama(2048, 16, 32, 8192, tied=True)),
    "llama-3.2-3b": Published("meta-llama/Llama-3.2-3B-Instruct", 3.21, lambda: _llama(3072, 28, 24, 8192, tied=True)),
    "llama-3.1-8b": Published(
        "meta-llama/Llama-3.1-8B-Instruct", 8.03, lambda: _llama(4096, 32, 32, 14336, tied=False)
    ),
    "gemma-3-1b": Published("google/gemma-3-1b-it", 1.0, _gemma3_1b),
    "gemma-3-4b": Published("google/gemma-3-4b-it", 4.3, _gemma3_4b),
    "mistral-7b": Published("mistralai/Mistral-7B-Instruct-v0.3", 7.25, _mistral_7b),
    "gpt-oss-20b": Published("openai/gpt-oss-20b", 20.9, _gpt_oss_20b),
    "smollm3-3b": Published("HuggingFaceTB/SmolLM3-3B", 3.08, _smollm3_3b),
    "smolvlm2-2.2b": Published("HuggingFaceTB/SmolVLM2-2.2B-Instruct", 2.25, _smolvlm2_2b),
    "qwen2.5-vl-7b": Published("Qwen/Qwen2.5-VL-7B-Instruct", 8.29, _qwen25_vl_7b),
    "openvla-7b": Published("openvla/openvla-7b", 7.54, _openvla_7b),
    "qwen3-embedding-0.6b": Published(
        "Qwen/Qwen3-Embedding-0.6B", 0.6, lambda: _qwen3(1024, 28, 16, 3072, tied=True, vocabulary=151669)
    ),
    "whisper-large-v3": Published("openai/whisper-large-v3", 1.54, _whisper_large_v3, "float16"),
}
"""By the beginning of the names of their recipes' files."""
