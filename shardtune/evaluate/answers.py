"""Generative evaluation: the rows to answer, the comparison with their references, and the file of answers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from shardtune.config import EvalConfig
from shardtune.config.shown import as_written
from shardtune.config.user_code import load_function
from shardtune.data.cache.dataset import TokenDataset
from shardtune.data.durable import write_text
from shardtune.errors import ConfigError, legible
from shardtune.evaluate.generate import Matcher, decoded
from shardtune.models.recipe_hooks import OF_ANSWERS

MANY_UNPARSED = 0.2
"""Share of answers without a match from which a warning is due: more often the pattern is wrong than the model."""
SHOWN = 3
SHOWN_LENGTH = 60


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, as a line of `samples/` has it.

    Attributes:
        row: its file and number.
        question: what was asked, without the chat template's tokens.
        prompt: as the model receives it.
        reference: the answer expected.
        answer: the model's.
        correct: None where the pattern does not match.
    """

    row: str
    question: str
    prompt: str
    reference: str | None
    answer: str
    correct: bool | None


def make_matcher(config: EvalConfig) -> Matcher:
    """The matcher of `eval.answer_pattern` and `eval.match`."""
    pattern = re.compile(config.answer_pattern) if config.answer_pattern else None
    match = config.match if config.match in ("exact", "numeric") else load_function(config.match, "eval.match")
    return Matcher(pattern, match)


def answered_rows(rows: TokenDataset, name: str, most: int | None) -> list[int]:
    """The rows with a question, at most the first `most` of them.

    Raises:
        ConfigError: there are none.
    """
    indices = [index for index in range(len(rows)) if rows.row(index).prompt_ids is not None]
    if not indices:
        raise ConfigError(
            "eval.generate is on, but no evaluation row has a question to answer",
            where=f"data.eval_data_paths{': ' + name if name else ''}",
            remedy="set eval.generate: false, or give rows with an assistant's answer",
        )
    return indices[:most] if most else indices


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to an evaluation set's questions, compared with their references."""

    all: Sequence[Answer]

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
        found: list[Answer] = []
        for index, answer in zip(indices, answers, strict=True):
            sample = rows.row(index)
            assert sample.prompt_ids is not None
            found.append(
                Answer(
                    row=rows.locate(index),
                    question=sample.question or "",
                    prompt=decoded(tokenizer, sample.prompt_ids),
                    reference=sample.reference,
                    answer=answer,
                    correct=matcher.correct(answer, sample.reference or ""),
                )
            )
        return cls(found)

    @property
    def samples(self) -> list[dict[str, object]]:
        """The answers as dicts."""
        return [asdict(answer) for answer in self.all]

    def metrics(self) -> dict[str, float]:
        """`eval_accuracy`, in which an answer without the pattern counts as wrong, and how many those are."""
        verdicts = [answer.correct for answer in self.all]
        accuracy = sum(verdict is True for verdict in verdicts) / len(verdicts)
        return dict(zip(OF_ANSWERS, (accuracy, float(verdicts.count(None))), strict=True))

    def warning(self, pattern: str | None) -> str:
        """The warning for a pattern that is missing from many answers; "" if it is not."""
        missed = [answer for answer in self.all if answer.correct is None]
        if len(missed) < MANY_UNPARSED * len(self.all):
            return ""
        distinct = dict.fromkeys(legible(answer.answer, SHOWN_LENGTH) for answer in missed)
        shown = "; ".join(f'"{text}"' for text in [text for text in distinct if text][:SHOWN]) or "empty ones"
        return (
            f"{len(missed)} of {len(self.all)} answers count as wrong because eval.answer_pattern, "
            f"{as_written(pattern)}, is not in them, such as {shown}. The model may not have learned this form "
            "yet; if these look right, mend the pattern, and if they are cut off, raise eval.max_new_tokens"
        )

    def keep(self, folder: Path, step: int, name: str) -> None:
        """Write the answers to `step_N[_name].jsonl`."""
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(sample, ensure_ascii=False) for sample in self.samples]
        file = folder / f"step_{step}{'_' + name if name else ''}.jsonl"
        write_text(file, "\n".join(lines) + "\n", durably=False)
