"""The pattern of a tokenizer's special tokens finds what a search for each of them finds."""

from __future__ import annotations

import random
import re

from shardtune.data.chat.control_tokens import matching_any


def test_the_longest_of_several_is_found() -> None:
    texts = ["<a>", "<b>", "<b>c", "[INST]", "<|im_end|>", "(?:x)", "é\n"]
    assert matching_any(texts).findall("<a><b>c<b> [INST] <|im_end|(?:x)é\n<|im_end|>") == [
        "<a>", "<b>c", "<b>", "[INST]", "(?:x)", "é\n", "<|im_end|>",
    ]  # fmt: skip
    assert matching_any([]).findall("<a>") == []


def test_thousands_of_tokens_are_those_of_a_list_of_alternatives() -> None:
    texts = [f"<unused{number}>" for number in range(3000)] + ["<unused1", "<unu"]
    plain = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
    draw = random.Random(0)
    text = "".join(draw.choice(["<unused", "<unu", ">", "1", "29", "x"]) for _ in range(2000))
    assert matching_any(texts).findall(text) == plain.findall(text) != []
