"""New tokens that no row has, or whose rows are not trained, are named before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from shardtune.batch import Sample
from shardtune.config import load_recipe
from shardtune.errors import ConfigError
from shardtune.models.new_tokens import add_new_tokens, check_frozen_rows, notes_on_unseen
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.training import model_config, quiet, recipe, save_model, save_rows
from tests.support.tiny_run import make_tokenizer


class Rows:
    def __init__(self, texts: list[str]) -> None:
        self.tokenizer = make_tokenizer()
        add_new_tokens(self.tokenizer, ["<call>", "<done>", "<never>"])
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def row(self, index: int) -> Sample:
        ids = np.array(self.tokenizer(self._texts[index])["input_ids"], np.int32)
        return Sample(ids, np.ones(len(ids), np.float32))


@pytest.mark.parametrize(
    ("tokens", "note"),
    [
        ([], None),
        (["<call>", "<done>"], None),
        (["<never>", "<call>"], "'<never>' is in none of the 3 training rows, and without a row its embedding is not"),
    ],
)
def test_a_token_that_no_row_has_is_named(tokens: list[str], note: str | None) -> None:
    rows = Rows(["a", "b <call> c", "d <done>"])
    notes = notes_on_unseen(rows.tokenizer, tokens, rows)
    assert notes == [] if note is None else note in notes[0]


def test_of_many_rows_the_first_are_read() -> None:
    rows = Rows(["a"] * 1000 + ["<call> <done>"])
    (note,) = notes_on_unseen(rows.tokenizer, ["<call>", "<done>"], rows)
    assert "'<call>', '<done>' are in none of the first 1,000 training rows" in note
    assert "their embeddings are not trained" in note


LORA = {"is_lora": True, "lora": {"r": 2, "target_modules": ["q_proj"]}}


@pytest.mark.parametrize(
    ("tokens", "keys", "said"),
    [
        (["<call>"], {}, None),
        (["<call>"], {"freeze": ["embed_tokens"]}, "the rows of 1 new token from training in the embedding: they stay"),
        (
            ["<call>", "<done>"],
            {"freeze": ["lm_head"]},
            "the rows of 2 new tokens from training in the head: they stay",
        ),
        (["<call>", "<done>"], {"freeze": ["self_attn"]}, None),
        (["<call>", "<done>"], LORA, None),
    ],
)
def test_rows_that_are_not_trained_are_said(
    tmp_path: Path, tokens: list[str], keys: dict[str, Any], said: str | None
) -> None:
    notes = notes_of(tmp_path, tokens, keys)
    assert any(said in note for note in notes) if said else not any("new token" in note for note in notes)


@pytest.mark.parametrize("keys", [{"freeze": ["embed_tokens"]}, {**LORA, "freeze": ["embed_tokens"]}])
def test_tokens_that_would_be_all_alike_are_refused(tmp_path: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the rows of 2 new tokens from training in the embedding: rows that are"):
        notes_of(tmp_path, ["<call>", "<done>"], keys)


def notes_of(folder: Path, tokens: list[str], keys: dict[str, Any]) -> list[str]:
    model = save_model("mistral", folder / "model", tie_word_embeddings=False)
    values = recipe(model, save_rows(folder / "rows.jsonl", 4))
    values["actor"]["model"] |= keys
    values["actor"]["tokenizer"] = {"new_tokens": tokens}
    worker = SFTWorker(load_recipe(values), report=quiet)
    try:
        worker.setup()
        return [note for note in worker.notes if "training rows" not in note]
    finally:
        worker.release()


def test_a_head_that_predicts_new_tokens_has_to_be_trained() -> None:
    """As that of a model whose actions are tokens."""
    model = AutoModelForCausalLM.from_config(model_config("mistral", 40, tie_word_embeddings=False))
    model.get_output_embeddings().requires_grad_(False)
    assert len(check_frozen_rows(model, ["<0>", "<1>"], predicted=False)) == 1
    with pytest.raises(ConfigError, match="all alike"):
        check_frozen_rows(model, ["<0>", "<1>"], predicted=True)
