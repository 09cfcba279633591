"""What is shown of a row (the trained part, wherever it is, with its weights), of evaluations, and at the end."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from shardtune.batch import Sample
from shardtune.run.display import (
    CONTEXT_TOKENS,
    PREVIEW_TOKENS,
    TARGET_TOKENS,
    Display,
    field_text,
    shown_path,
    trained_text,
)
from shardtune.training.run_summary import adapters_in_brief
from tests.support.tiny_run import make_tokenizer


def test_the_tensors_of_an_adapter_are_one_line() -> None:
    layer, tower = "model.layers.*.self_attn", "tower.blocks.*.attn"
    trained = [(f"{layer}.{name}.lora_{part}.default.weight", 2, 8) for name in ("q_proj", "v_proj") for part in "AB"]
    trained += [
        (f"{tower}.qkv.lora_A.default.weight", 1, 3),
        (f"{tower}.qkv.lora_magnitude_vector.default.weight", 1, 1),
    ]
    trained += [("lm_head.lora_embedding_A.default", 1, 5), ("model.norm.weight", 1, 4)]
    trained += [("model.visual.merger.mlp.*.lora_A.default.weight", 2, 6)]
    assert adapters_in_brief(trained) == [
        ("model.layers.*: LoRA on q_proj, v_proj", 8, 32),
        ("tower.blocks.*: LoRA on qkv", 2, 4),
        ("LoRA on lm_head, mlp.*", 3, 11),
        ("model.norm.weight", 1, 4),
    ]


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


def shown_by(terminal: bool) -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, no_color=True, width=80, soft_wrap=True, highlight=False)
    return Display(console), out


def test_evaluations_for_a_reader() -> None:
    display, out = shown_by(False)
    metrics = {"eval/loss": 6.07, "eval/perplexity": 432.0, "eval/token_accuracy": 0.0, "eval/eval_accuracy": 0.0}
    display.evaluated(0, {**metrics, "eval/unparsed": 500.0})
    display.evaluated(1200, {**metrics, "eval/eval_accuracy": 0.994, "eval/unparsed": 0.0})
    display.evaluated(1200, {"eval/a/loss": 1.0, "eval/a/eval_accuracy": 0.5, "eval/a/unparsed": 2.0, "eval/own": 3.0})
    display.evaluated(0, {"eval/own": 3.0})
    assert out.getvalue().splitlines() == [
        "before training: 0.0 % right  loss 6.0700",
        "step 1,200: eval 99.4 % right  loss 6.0700  token_accuracy 0.0000",
        "step 1,200: eval a/loss 1.0000  a 50.0 % right  a/unparsed 2  own 3.0000",
        "before training: own 3.0000",
    ]


def test_the_end_without_an_evaluation_has_one_empty_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    display, out = shown_by(False)
    display.summary(tmp_path / "run", {}, {}, [], answers=False)
    assert out.getvalue().startswith("\nnext:\n")
    assert ("for other software" in out.getvalue(), "vLLM" in out.getvalue()) == (True, False)


@pytest.mark.parametrize("terminal", [False, True])
def test_the_end_shows_questions_answers_and_what_to_do_next(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (run := tmp_path / "runs" / "my run").mkdir(parents=True)
    samples = [
        {"question": "What is\n1+1?", "prompt": "<|im_start|>user", "answer": "2", "reference": "2", "correct": True},
        {"question": "And 2+2?", "prompt": "…", "answer": "\ufffd\x11\x00=\ufffd", "reference": "4", "correct": None},
        {"question": "And 3?", "prompt": "…", "answer": "", "reference": None, "correct": False},
    ]
    display, out = shown_by(terminal)
    display.summary(run, {"eval/loss": 2.0}, {"eval/loss": 1.0}, samples, answers=True)
    shown = out.getvalue().replace("\x1b[1m", "").replace("\x1b[2m", "").replace("\x1b[0m", "")
    told = shown[shown.index("answers:") :].splitlines()
    assert [line.rstrip() for line in told] == [
        "answers:",
        "  What is 1+1?",
        "    2  [right]",
        "  And 2+2?",
        "    ·=·  [no answer found]",
        "    expected: 4",
        "  And 3?",
        "    (nothing)  [wrong]",
        "",
        "next:",
        "  shardtune generate 'runs/my run' --prompt \"…\"",
        "  shardtune chat 'runs/my run'",
        "  shardtune eval 'runs/my run'",
        "  shardtune export 'runs/my run' my-model",
    ]
    assert "runs/my run/final, loaded and evaluated afresh" in shown
    display, out = shown_by(terminal)
    display.summary(run, {}, {}, [], answers=False)
    assert "shardtune export" in out.getvalue()
    assert "shardtune eval" not in out.getvalue()
    assert shown_path(tmp_path.parent / "elsewhere") == str(tmp_path.parent / "elsewhere")


@pytest.mark.parametrize(("terminal", "whole"), [(True, False), (False, True)])
def test_words_are_not_cut_on_a_terminal_and_lines_not_in_a_log(terminal: bool, whole: bool) -> None:
    display, out = shown_by(terminal)
    message = "word " * 30 + "end"
    display.report(message)
    lines = out.getvalue().splitlines()
    assert (lines == [message]) == whole
    assert max(map(len, lines)) <= 80 or whole
    assert " ".join(line.strip() for line in lines) == message


def test_after_a_rollback_no_time_is_announced_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardtune.run.display.PLAIN_SECONDS", 0.0)
    display, out = shown_by(False)
    display.started(4, 10)
    for step in (5, 6, 4):
        display.stepped(step, {})
    assert ["to go" in line for line in out.getvalue().splitlines()] == [False, True, False]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([1.5, math.nan, -2.0], "x float32 [3] from -2 to 1.5 and 1 nan"),
        ([math.nan] * 2, "x float32 [2] and 2 nan"),
        ([1.0, 2.0], "x float32 [2] from 1 to 2"),
        ([], "x float32 [0]"),
    ],
)
def test_missing_values_of_a_field_are_counted(values: list[float], shown: str) -> None:
    assert field_text("x", np.array(values, np.float32)) == shown
