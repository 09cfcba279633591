"""New tokens that no row has are named before training."""

from __future__ import annotations

import numpy as np
import pytest

from shardtune.batch import Sample
from shardtune.models.new_tokens import add_new_tokens, notes_on_unseen
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
