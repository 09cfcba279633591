"""What a preview shows of a row: the trained part, wherever it is, with the weights of its tokens."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from shardtune.batch import Sample
from shardtune.run.display import CONTEXT_TOKENS, PREVIEW_TOKENS, TARGET_TOKENS, trained_text
from tests.support.tiny_run import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def sample(tokenizer: PreTrainedTokenizerFast, *parts: tuple[str, float]) -> Sample:
    """A row of these texts, a token per letter, with the weight of each."""
    pieces = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in parts]
    weights = [np.full(len(ids), weight, np.float32) for ids, (_, weight) in zip(pieces, parts, strict=True)]
    return Sample(np.concatenate(pieces).astype(np.int32), np.concatenate(weights))


def test_the_trained_part_is_shown_whatever_comes_before(tokenizer: PreTrainedTokenizerFast) -> None:
    """A definition of tools that is longer than a preview, two answers with a long result between them, and an end."""
    row = sample(
        tokenizer, ("a" * 3000, 0), ("first answer", 1), ("b" * 2000, 0), ("second answer", 1), ("c" * 1000, 0)
    )
    shown = trained_text(row, tokenizer, color=False).plain
    near = CONTEXT_TOKENS
    assert shown == (
        f"{'a' * near} … {3000 - 2 * near:,} tokens … {'a' * near}⟦first answer⟧{'b' * near} … {2000 - 2 * near:,} "
        f"tokens … {'b' * near}⟦second answer⟧{'c' * near} … {1000 - near:,} more tokens"
    )


def test_a_short_row_is_shown_whole_and_so_is_the_beginning_of_one_without_targets(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    row = sample(tokenizer, ("a" * (PREVIEW_TOKENS - 3), 0), ("yes", 1))
    assert trained_text(row, tokenizer, color=False).plain == "a" * (PREVIEW_TOKENS - 3) + "⟦yes⟧"
    nothing = sample(tokenizer, ("a" * (PREVIEW_TOKENS + 5), 0))
    assert trained_text(nothing, tokenizer, color=False).plain == "a" * PREVIEW_TOKENS + " … 5 more tokens"


def test_of_a_very_long_answer_beginning_and_end_are_shown(tokenizer: PreTrainedTokenizerFast) -> None:
    row = sample(tokenizer, ("?", 0), ("x" * TARGET_TOKENS * 2, 1), ("end", 1))
    shown = trained_text(row, tokenizer, color=False).plain
    assert shown.startswith(f"?⟦{'x' * (TARGET_TOKENS * 3 // 4)}⟧ … {TARGET_TOKENS + 3:,} tokens … ⟦xx")
    assert shown.endswith("xend⟧")


def test_weights_are_shades(tokenizer: PreTrainedTokenizerFast) -> None:
    row = sample(tokenizer, ("?", 0), ("half", 0.5), ("whole", 1))
    assert trained_text(row, tokenizer, color=False).plain == "?⟦0.5× half⟧⟦whole⟧"
    colored = trained_text(row, tokenizer, color=True)
    assert colored.plain == "?halfwhole"
    assert [str(span.style) for span in colored.spans] == ["dim", "bold rgb(0,140,0)", "bold green"]
