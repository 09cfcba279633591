"""Rows that are tokenised already: what is trained of them, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from shardtune.batch import Sample
from shardtune.data.cache.cache import build_dataset
from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.encoder import LengthLimit, RowError
from shardtune.data.row_formats import as_row, read_example
from shardtune.data.sources.resolve import resolve_sources
from shardtune.errors import DataError
from tests.data.chat.test_encoder import MULTI
from tests.data.chat.test_reasoning import MARKED

IDS = [5, 6, 7, 8]


def test_masks_of_transformers_train_what_the_conversation_trains(make_tokenizer: Any) -> None:
    """Tokens, marks and answers of a row that `apply_chat_template` made are those of the messages."""
    tokenizer, text = make_tokenizer(eos_token="<|im_end|>"), MARKED
    made = tokenizer.apply_chat_template(MULTI, chat_template=text, return_dict=True, return_assistant_tokens_mask=True)
    for train_on in ("assistant", "last_assistant"):
        encoder = ChatEncoder(tokenizer, text, train_on=train_on, with_prompts=True)
        of_messages, of_tokens = encoder.encode({"messages": MULTI}), encoder.encode(dict(made))
        assert of_tokens.input_ids.tolist() == of_messages.input_ids.tolist()
        assert of_tokens.loss_weights.tolist() == of_messages.loss_weights.tolist()
        assert of_tokens.prompt_ids is not None
        assert of_messages.prompt_ids is not None
        assert of_tokens.prompt_ids.tolist() == of_messages.prompt_ids.tolist()
        assert of_tokens.reference == of_messages.reference


@pytest.mark.parametrize(
    ("more", "weights"),
    [
        ({}, [0, 1, 1, 1]),
        ({"labels": [-100, 6, -100, 8]}, [0, 1, 0, 1]),
        ({"completion_mask": [0, 0, 1, 1], "assistant_masks": [False, True, True, False]}, [0, 0, 1, 0]),
        ({"loss_mask": "[1, 0, 1, 1.0]", "input_ids": "[5, 6, 7, 8]"}, [0, 0, 1, 1]),
        ({"loss_weights": [0, 0.5, 0, 2]}, [0, 0.5, 0, 2]),
        (
            {"labels": IDS, "attention_mask": [1, 1, 1, 1], "position_ids": [0, 1, 2, 3], "token_type_ids": [0] * 4},
            None,
        ),
        ({"labels": [-100, 6, 7, -100], "attention_mask": [1, 1, 1, 0]}, [0, 1, 1]),
        ({"attention_mask": [0, 1, 1, 1], "position_ids": [1, 0, 1, 2]}, [0, 1, 1]),
    ],
)
def test_what_is_trained(more: dict[str, Any], weights: list[float] | None, make_tokenizer: Any) -> None:
    row = {"input_ids": IDS, **more}
    sample = ChatEncoder(make_tokenizer(), None).encode(row)
    expected = [0, 1, 1, 1] if weights is None else weights
    assert sample.loss_weights.tolist() == expected
    first = more.get("attention_mask", [1]).index(1)
    assert sample.input_ids.tolist() == IDS[first : first + len(expected)]
    assert sample.input_ids.dtype == np.int32
    again = as_row(read_example(row))
    assert ChatEncoder(make_tokenizer(), None).encode(again).loss_weights.tolist() == expected


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": "abc"}, "input_ids is text, but not JSON"),
        ({"input_ids": [1.5, 2]}, r"input_ids is \[1\.5, 2\.0\], not a list of whole numbers"),
        ({"input_ids": [[1, 2]]}, "not a list of numbers"),
        ({"input_ids": [[1], [2, 3]]}, "not a list of numbers"),
        ({"input_ids": [3, -1]}, "input_ids has -1, which is no token"),
        ({"input_ids": [3, 99_999]}, "has 99,999, and the tokenizer's tokens go up to .* by another one"),
        ({"labels": [5, 6]}, "labels has 2 numbers, input_ids has 4"),
        ({"labels": [6, 7, 8, -100]}, r"labels has 6 where input_ids has 5 \(place 0\); they are shifted by one place"),
        ({"labels": [-100, 6, 1, -100]}, r"labels has 1 where input_ids has 7 \(place 2\): a label is"),
        ({"completion_mask": [0, 2, 1, 1]}, "completion_mask has 2; a mask has 0 and 1"),
        ({"loss_weights": [0, -1, 1, 1]}, "loss_weights has -1"),
        ({"attention_mask": [0, 0, 0, 0]}, "leaves out every token"),
        ({"attention_mask": [1, 0, 1, 1]}, r"attention_mask has 0 between tokens \(place 1\)"),
        ({"attention_mask": [1, 1, 1, 0], "labels": IDS}, "a target is left out by attention_mask"),
        ({"position_ids": [0, 1, 0, 1]}, "several documents in one row"),
        ({"seq_lengths": [2, 2]}, "several documents in one row"),
        ({"token_type_ids": [0, 0, 1, 1]}, "token_type_ids has other numbers than 0"),
        ({"images": ["a.png"]}, "this model takes text only"),
    ],
)
def test_what_is_refused(row: dict[str, Any], match: str, make_tokenizer: Any) -> None:
    with pytest.raises(RowError, match=match):
        ChatEncoder(make_tokenizer(), None).encode({"input_ids": IDS, **row})


@pytest.mark.parametrize(("length", "stride"), [(8, None), (9, None), (15, None), (16, 7), (40, 1), (40, 5), (23, 6)])
def test_each_target_is_in_one_window(length: int, stride: int | None) -> None:
    """Behind the tokens before it, as many as a window has room for, as the strided windows of tokenizers have them."""
    ids = np.arange(length, dtype=np.int32)
    weights = np.where(ids % 3 == 1, 0, ids + 1).astype(np.float32)
    fitted = LengthLimit(8, "split", stride).apply(Sample(ids, weights, ids[:2], "r", "q"))
    windows = [fitted] if isinstance(fitted, Sample) else fitted
    seen = np.zeros(length)
    for number, window in enumerate(windows):
        start = int(window.input_ids[0])
        assert start == number * (stride or 7)
        assert window.input_ids.tolist() == list(range(start, min(start + 8, length)))
        assert (window.prompt_ids is None) == (number > 0)
        seen[start : start + len(window.input_ids)] += window.loss_weights
    assert seen.tolist() == weights.tolist()
    assert windows[-1].input_ids[-1] == length - 1
    with pytest.raises(DataError, match="images or other fields cannot be split"):
        LengthLimit(4, "split").apply(Sample(ids, weights, fields={"a": ids}))


def test_windows_are_rows_of_the_cache(make_tokenizer: Any, data: Any, tmp_path: Any) -> None:
    """With as many processes as there are; counted, named by their row, and a quota of rows counts them."""
    file = tmp_path / "rows.jsonl"
    rows = [{"input_ids": [place % 40 for place in range(3 + 9 * number)]} for number in range(4)]
    rows.append({"input_ids": [7] * 30, "labels": [-100] * 28 + [7, 7]})
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    encoder = ChatEncoder(make_tokenizer(), None, max_length=8, on_too_long="split")

    def build(spec: object) -> Any:
        sources = resolve_sources(spec, data, report=lambda _: None)
        return build_dataset(sources, encoder, cache_dir=tmp_path / "cache", report=lambda _: None)

    built = build(str(file))
    assert built.lengths.tolist() == [3, 8, 5, 8, 8, 7, 8, 8, 8, 8, 2, 8, 2]
    assert [built.locate(index).rpartition(":")[2] for index in (0, 1, 2, 12)] == ["1", "2", "2", "5"]
    line = next(iter(built.report.lines()))
    assert re.search(r"4 of 5 rows split into windows of data.max_length \(12 windows\)", line)
    assert "row 3: 21 tokens in 3 windows" in line
    assert built.report.files[0].tally.split.first[-1] == (5, "30 tokens in 5 windows, 3 without a target")
    assert built.term_weights["ce"].sum() == sum(len(row["input_ids"]) - 1 for row in rows[:4]) + 2
    few = build({"path": str(file), "max_samples": 4})
    assert few.lengths.tolist() == [3, 8, 5, 8]
