"""A sample of the architectures that `bench/zoo.py` tries, without LoRA: the numbers, the reloaded
`final/` and the answers of plain transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.zoo import BY_DOCUMENT, BY_LENGTH, CAUSAL, PACKED, SAME, WITHIN, tried

pytestmark = pytest.mark.lengthy

SAMPLE = {
    "gpt_oss": PACKED,
    "gemma2": PACKED,
    "deepseek_v3": PACKED,
    "qwen3_next": BY_DOCUMENT,
    "olmo_hybrid": BY_DOCUMENT,
    "lfm2_moe": BY_DOCUMENT,
    "nemotron_h": BY_DOCUMENT,
    "jamba": BY_DOCUMENT,
    "mamba": BY_DOCUMENT,
    "bart": BY_LENGTH,
    "stablelm": BY_LENGTH,
    "llama4_text": BY_LENGTH,
}


@pytest.mark.parametrize("family", SAMPLE)
def test_an_architecture_is_that_of_plain_transformers(family: str, tmp_path: Path) -> None:
    result = tried(CAUSAL, family, tmp_path, thorough=False)
    assert (result.how, result.answers) == (SAMPLE[family], SAME), result
    assert result.largest < WITHIN["fp64"]
