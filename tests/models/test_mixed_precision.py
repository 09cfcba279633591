"""In half precision torch's layers in a user's model take inputs of any floating dtype, and nothing else is cast."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from transformers import (
    LlamaConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
    PreTrainedModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from shardtune.models.mixed_precision import cast_for_layers, compute_in


class Routed(PreTrainedModel):
    """A model of transformers whose router stays in fp32."""

    config_class = LlamaConfig
    _keep_in_fp32_modules_strict = {"router"}  # noqa: RUF012 (as transformers declares it)

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.inside, self.router = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.post_init()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x, self.inside(x), self.router(x)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_layers_cast_their_inputs_but_those_that_are_kept_in_fp32(half: torch.dtype) -> None:
    model = Routed(LlamaConfig(hidden_size=4, num_attention_heads=2))
    model.inside.to(half)
    cast_for_layers(model, half)
    given, inside, routed = model(torch.ones(2, 3))
    assert (given.dtype, inside.dtype, routed.dtype) == (torch.float32, half, torch.float32)


def test_a_batch_norm_with_statistics_gets_its_inputs_as_they_are() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3).to(torch.bfloat16))
    cast_for_layers(model, torch.bfloat16)
    third = torch.full((4, 3), 1 / 3)
    found = model(third)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(model[0].running_mean, torch.full((3,), 0.1 / 3), rtol=1e-6, atol=0)


def test_full_precision_changes_nothing() -> None:
    model = nn.Linear(3, 3)
    cast_for_layers(model, torch.float32)
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.ones(2, 3, dtype=torch.float64))


COMPUTED = {"weight_norm": weight_norm, "spectral_norm": spectral_norm, "orthogonal": orthogonal}


@pytest.mark.parametrize("cast", [cast_for_layers, compute_in])
@pytest.mark.parametrize("name", COMPUTED)
def test_weights_that_are_computed_with_buffers_are_computed_in_full_precision(
    name: str, cast: Callable[[nn.Module, torch.dtype], None]
) -> None:
    """Of parameters that half precision holds, so that all that is rounded are weights, inputs and outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(COMPUTED[name](nn.Linear(4, 3)), nn.Linear(3, 1))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    x = torch.randn(5, 4).bfloat16().float()
    exact = model(x)
    buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    cast(model, torch.bfloat16)
    found = model(x)
    torch.testing.assert_close(found.float(), exact, rtol=2**-6, atol=2**-7)
    assert {key: buffer.dtype for key, buffer in model.named_buffers()} == dict.fromkeys(buffers, torch.float32)
    found.float().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_an_encoder_that_generate_calls_by_itself_takes_inputs_in_fp32(half: torch.dtype) -> None:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8, "max_source_positions": 10}
    marks = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(vocab_size=9, max_target_positions=8, **sizes, **heads, **marks)
    model = WhisperForConditionalGeneration(config).to(half)
    model.generation_config.update(begin_suppress_tokens=None, suppress_tokens=None)
    heard = torch.randn(2, 8, 20)
    expected = model.generate(heard.to(half), max_new_tokens=4)
    compute_in(model, half)
    assert torch.equal(model.generate(heard, max_new_tokens=4), expected)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_a_table_of_positions_is_that_of_from_pretrained_during_forwards(half: torch.dtype, tmp_path: Path) -> None:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 8}
    M2M100ForConditionalGeneration(M2M100Config(vocab_size=9, **sizes, **heads)).save_pretrained(tmp_path)
    own = M2M100ForConditionalGeneration.from_pretrained(tmp_path, dtype=half)
    model = M2M100ForConditionalGeneration.from_pretrained(tmp_path)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(half)
    compute_in(model, half)
    ids = torch.tensor([[3, 4, 5, 2]])
    assert torch.equal(model(ids, labels=ids).logits, own(ids, labels=ids).logits.float())
    assert torch.equal(model.generate(ids, max_new_tokens=3), own.generate(ids, max_new_tokens=3))
    assert all(buffer.dtype == torch.float32 for buffer in model.buffers() if buffer.is_floating_point())


class Taking(PreTrainedModel):
    """A user's class that takes more than a config."""

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__(config)
        self.layer = nn.Linear(width, 1)
        self.post_init()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_a_class_that_takes_more_than_a_config_keeps_its_buffers() -> None:
    model = Taking(LlamaConfig(hidden_size=4, num_attention_heads=2), 3).bfloat16()
    compute_in(model, torch.bfloat16)
    assert model(torch.ones(2, 3)).dtype == torch.float32
