"""Tiny encoders with tokenizers, and rows for each task by name."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

WORDS = [
    *("a", "an", "the", "red", "green", "blue", "small", "large", "cat", "dog", "bird", "tree", "house", "runs"),
    *("sings", "sleeps", "where", "who", "what", "far", "near"),
]
SIZES: dict[str, Any] = {"vocab_size": len(WORDS) + 4, "pad_token_id": 0}


def save_tokenizer(folder: Path, *, pair: bool = True) -> None:
    """A token for each word, between marks, or before an end mark."""
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: number for number, word in enumerate([*marks, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    single = "[CLS] $A [SEP]" if pair else "$A [SEP]"
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"] if pair else ["input_ids", "attention_mask"]
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **names, eos_token="[SEP]", model_input_names=inputs)
    made.save_pretrained(folder)


def save_encoder(folder: Path) -> Path:
    """A BERT that was trained to fill masks, so without a head of any task."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2, **SIZES,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_t5(folder: Path) -> Path:
    """An encoder-decoder."""
    torch.manual_seed(0)
    config = T5Config(
        d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0, eos_token_id=3,
        decoder_start_token_id=0, **SIZES,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(folder)
    save_tokenizer(folder, pair=False)
    return folder


def text(draw: random.Random, most: int = 7) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))


def rows(task: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of a task, of different lengths."""
    draw = random.Random(seed)
    found: list[dict[str, Any]] = []
    for number in range(count):
        words = draw.choices(WORDS, k=draw.randint(1, 6))
        found.append(
            {
                "sequence_classifier": {"text": text(draw), "label": draw.choice(["bad", "fine", "good"])},
                "regression": {"sentence1": text(draw), "sentence2": text(draw), "score": round(draw.random(), 3)},
                "token_classifier": {"tokens": words, "ner_tags": draw.choices(["O", "B-X", "I-X"], k=len(words))},
                "embedding": {
                    "query": text(draw),
                    "positive": text(draw),
                    "negatives": [text(draw) for _ in range(2 - (number % 3 == 1))],
                },
                "reranker": {
                    "query": text(draw),
                    "positive": text(draw),
                    "negatives": [text(draw) for _ in range(1 + number % 2)],
                },
                "seq2seq": {"source": text(draw), "target": text(draw)},
            }[task]
        )
    return found


def write(path: Path, content: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    return str(path)
