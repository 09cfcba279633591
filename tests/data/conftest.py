"""A small byte-level tokenizer that knows the special tokens of all template styles, and ways to read a sample back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from shardtune.data.encoder import FrameOptions, RowError
from shardtune.data.sources.resolve import resolve_sources

_SPECIAL = """<pad> <s> </s> <|im_start|> <|im_end|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>
<|eom_id|> <|python_tag|> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS]
[/TOOL_RESULTS] <bos> <eos> <start_of_turn> <end_of_turn> <|user|> <|assistant|> <|system|> <|end|> <|endoftext|>
<|tool_call|> <|/tool_call|> <|tool_response|> <|tool|> <|/tool|> <｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>
<｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜>
<｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>"""
CORPUS = [
    "Hi there Hello! What is two and two? It is 4. Weather in Oslo? It is 3 degrees. Be brief.",
    '{"name": "get_weather", "arguments": {"city": "Oslo"}} assistant\n user\n system\n tool\n\n {"temp": 3}',
]


@dataclass
class Data:
    """The recipe's `data` keys that sources need."""

    cache_dir: Any
    columns: dict[str, str] = field(default_factory=dict)
    transform: str | None = None
    on_bad_row: str = "fail"
    quarantine: str | None = None


@pytest.fixture(scope="session")
def backend() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=_SPECIAL.split(), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer(backend: Tokenizer) -> Callable[..., PreTrainedTokenizerFast]:
    """Makes a tokenizer with the given special tokens (`eos_token="</s>"`)."""

    def make(**special: str) -> PreTrainedTokenizerFast:
        return PreTrainedTokenizerFast(tokenizer_object=backend, **special)

    return make


@pytest.fixture(scope="session")
def trained() -> Callable[..., list[str]]:
    """The texts of the runs of trained tokens of a sample; a run ends where the weight changes."""

    def read(tokenizer: PreTrainedTokenizerFast, sample: Any) -> list[str]:
        weights = sample.loss_weights
        cuts = np.flatnonzero(np.diff(weights)) + 1
        runs = np.split(np.arange(len(weights)), cuts)
        return [tokenizer.decode(sample.input_ids[run]) for run in runs if weights[run[0]] > 0]

    return read


@pytest.fixture
def data(tmp_path: Path) -> Data:
    return Data(cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def read(data) -> Callable[..., list[Any]]:
    """All rows of what a recipe names; a `RowError` is raised."""

    def run(spec: Any, chunk: int = 1, observations: int = 1, **options: Any) -> list[Any]:
        frames = FrameOptions(chunk, observations)
        sources = resolve_sources(spec, data, frames=frames, report=lambda text: None, **options)
        rows = [row for source in sources for file in source.files for _, row in source.rows(file)]
        for row in rows:
            if isinstance(row, RowError):
                raise row
        return rows

    return run
