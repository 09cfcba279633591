"""Generative evaluation: which rows are answered, which answers are right, and where they are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from shardtune.config import EvalConfig
from shardtune.config.user_code import load_function
from shardtune.data.cache.dataset import TokenDataset
from shardtune.errors import ConfigError
from shardtune.evaluate.generate import Matcher

MANY_UNPARSED = 0.2
"""From this share of answers on without a match it is said: more often the pattern is wrong than the model."""
SHOWN = 3


def make_matcher(config: EvalConfig) -> Matcher:
    """What decides whether an answer is right, by `eval.answer_pattern` and `eval.match`."""
    pattern = re.compile(config.answer_pattern) if config.answer_pattern else None
    match = config.match if config.match in ("exact", "numeric") else load_function(config.match, "eval.match")
    return Matcher(pattern, match)


def answered_rows(rows: TokenDataset, name: str, most: int | None) -> list[int]:
    """The rows with a question, the first `most` of them.

    Raises:
        ConfigError: there is none.
    """
    wanted = [index for index in range(len(rows)) if rows.row(index).prompt_ids is not None]
    if not wanted:
        raise ConfigError(
            "eval.generate is on, but no evaluation row has a question to answer",
            where=f"data.eval_data_paths{': ' + name if name else ''}",
            remedy="set eval.generate: false, or give rows with an assistant's answer",
        )
    return wanted[:most] if most else wanted


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to an evaluation set's questions, each with a verdict.

    Attributes:
        samples: row, prompt, reference, answer, and whether it is correct (None: the pattern is not in it).
    """

    samples: list[dict[str, Any]]

    @classmethod
    def judge(
        cls,
        rows: TokenDataset,
        indices: Sequence[int],
        answers: Sequence[str],
        matcher: Matcher,
        tokenizer: PreTrainedTokenizerBase,
    ) -> Answers:
        """Compare answers with the rows' references."""
        samples = []
        for index, answer in zip(indices, answers, strict=True):
            sample = rows.row(index)
            assert sample.prompt_ids is not None
            samples.append(
                {
                    "row": rows.locate(index),
                    "prompt": tokenizer.decode(sample.prompt_ids),
                    "reference": sample.reference,
                    "answer": answer,
                    "correct": matcher.correct(answer, sample.reference or ""),
                }
            )
        return cls(samples)

    def metrics(self) -> dict[str, float]:
        """`eval_accuracy`, in which an answer without the pattern counts as wrong, and how many those are."""
        verdicts = [sample["correct"] for sample in self.samples]
        return {
            "eval_accuracy": sum(verdict is True for verdict in verdicts) / len(verdicts),
            "unparsed": float(sum(verdict is None for verdict in verdicts)),
        }

    def warning(self, pattern: str | None) -> str:
        """What to say where the pattern is missing from many answers; "" where it is not."""
        missed = [sample for sample in self.samples if sample["correct"] is None]
        if len(missed) < MANY_UNPARSED * len(self.samples):
            return ""
        shown = "; ".join(repr(sample["answer"][:60]) for sample in missed[:SHOWN])
        return (
            f"{len(missed)} of {len(self.samples)} answers count as wrong because eval.answer_pattern {pattern!r} is "
            f"not in them, such as {shown}. Mend the pattern if these look right; if they are cut off, raise "
            "eval.max_new_tokens"
        )

    def keep(self, folder: Path, step: int, name: str) -> None:
        """Write all of them as `step_N[_name].jsonl`."""
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(sample, ensure_ascii=False) for sample in self.samples]
        file = folder / f"step_{step}{'_' + name if name else ''}.jsonl"
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
