"""A label for each word of a sentence: `AutoModelForTokenClassification`.

Rows: {tokens: [words], ner_tags: [labels]}; numbers or names, or -100 for a word without a label. The first token of a
word has its label; the others, and special tokens, have none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForTokenClassification

from shardtune.batch import IGNORED, Batch, LossSum, Sample
from shardtune.data.encoder import Row, RowError
from shardtune.models.tasks.classes import Classifier
from shardtune.models.tasks.columns import TAGS, TEXT, WORDS, column_of, has, list_of, text_of, value_of
from shardtune.models.tasks.encoder import PADDED
from shardtune.models.tasks.labels import index_of, is_no_label
from shardtune.models.tasks.metrics import F1_NAMES, entity_scores, f1_scores, installed
from shardtune.models.tasks.task import Outputs, Record
from shardtune.models.user_metrics import Prediction

ENTITY = re.compile(r"O|[BIES]-.+")
"""Labels of which entities are made."""


class TokenClassifier(Classifier):
    """A sentence, split into words, to a label for each."""

    auto = AutoModelForTokenClassification
    padding: ClassVar[Mapping[str, float]] = {"input_ids": PADDED, "token_type_ids": 0, "labels": IGNORED}
    row_form = "{tokens: [words], ner_tags: [a label for each]}"

    @property
    def libraries(self) -> Sequence[str]:  # pyright: ignore[reportIncompatibleVariableOverride] (depends on labels)
        return () if self._has_entities else ("sklearn",)

    @property
    def _has_entities(self) -> bool:
        """Whether the labels mark entities: B-PER, I-PER, O."""
        return all(ENTITY.fullmatch(label) for label in self.labels)

    def row_labels(self, row: Row) -> Iterable[object]:
        return [label for label in self._tags(row) if not is_no_label(label)]

    def _tags(self, row: Row) -> list[object]:
        """What stands for each word: its label, or -100 where nothing is to be learned."""
        return list_of(value_of(row, TAGS, "the labels of its words", self.row_form), "the labels")

    def beside(self, name: str) -> Sequence[str]:
        return (*super().beside(name), "labels")

    def columns(self, row: Row) -> Sequence[str | None]:
        return (column_of(row, WORDS), column_of(row, TAGS))

    def encode_text(self, row: Row) -> dict[str, Any]:
        return self.tokens(self._words(row), is_split_into_words=True)

    def encode_target(self, row: Row, fields: Mapping[str, Any]) -> dict[str, Any]:
        tags = self._tags(row)
        labels = [IGNORED if is_no_label(label) else index_of(label, self.labels) for label in tags]
        words = self._words(row)
        if len(words) != len(labels):
            raise RowError(f"the row has {len(words)} words and {len(labels)} labels")
        return {"labels": [IGNORED if place is None else labels[place] for place in self._firsts(words)]}

    def no_target(self, row: Row, fields: Mapping[str, Any]) -> dict[str, Any]:
        """In the place of labels the words' numbers: a word without a token, and what is cut off, gets no label."""
        words = self._words(row)
        return {"labels": [IGNORED if place is None else place for place in self._firsts(words)], "words": len(words)}

    def without_part(self, row: Row) -> Sequence[str]:
        read = None if has(row, WORDS) else column_of(row, TEXT)
        return [name for name in super().without_part(row) if name != read]

    def encode_input(self, row: Row) -> Sample:
        """A row without labels; of a text the words are what stands between blanks."""
        is_text = not has(row, WORDS) and has(row, TEXT)
        words = text_of(row, TEXT, "the text", self.row_form).split() if is_text else self._words(row)
        return super().encode_input({**row, WORDS[0]: words})

    def _words(self, row: Row) -> list[str]:
        words = list_of(value_of(row, WORDS, "its words", self.row_form), "the words")
        if not words or not all(isinstance(word, str) for word in words):
            raise RowError(f"the words are {words!r:.60}, not a list of texts")
        return words

    def _firsts(self, words: list[str]) -> list[int | None]:
        """For each token its word if it is the first of it, otherwise None."""
        places = self.tokenizer(words, is_split_into_words=True, verbose=False).word_ids()
        return [place if place != before else None for before, place in zip([None, *places], places, strict=False)]

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        return {"logits": model(**self.inputs(batch)).logits}

    def loss_of(self, outputs: Outputs, batch: Batch) -> LossSum:
        logits, labels = outputs["logits"].flatten(0, 1), batch["labels"].flatten()
        total = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return LossSum(total, int((labels != IGNORED).sum()))

    def predictions(self, model: nn.Module, batch: Batch) -> Iterator[Prediction]:
        chosen = batch["labels"] != IGNORED
        logits, labels = self.outputs(model, batch)["logits"][chosen], batch["labels"][chosen]
        yield Prediction(logits, labels, torch.ones(len(labels), device=labels.device))

    def records(self, outputs: Outputs, batch: Batch) -> list[Record]:
        guesses, labels = outputs["logits"].argmax(-1).cpu().numpy(), batch["labels"].cpu().numpy()
        words = batch.fields.get("words", [None] * len(labels))
        return [
            {"guesses": guess[label != IGNORED], "targets": label[label != IGNORED], "words": count}
            for guess, label, count in zip(guesses, labels, words, strict=True)
        ]

    @property
    def set_metric_names(self) -> Sequence[str]:
        if self._has_entities:
            return ("accuracy", "precision", "recall", "f1")
        return ("accuracy", *(F1_NAMES if installed(*self.libraries) else ()))

    def set_metrics(self, records: Sequence[Record]) -> dict[str, float]:
        guesses, targets = (np.concatenate([one[name] for one in records]) for name in ("guesses", "targets"))
        found = {"accuracy": float((guesses == targets).mean())}
        if self._has_entities:
            return found | entity_scores(
                *([self._names(one[key]) for one in records] for key in ("targets", "guesses"))
            )
        if installed(*self.libraries):
            scores = f1_scores(targets, guesses, len(self.labels))
            found |= {name: scores[name] for name in F1_NAMES}
        return found

    def _names(self, numbers: np.ndarray) -> list[str]:
        return [self.labels[number] for number in numbers]

    def prediction(self, record: Record) -> dict[str, Any]:
        labels: list[str | None] = [None] * int(record["words"])
        for word, label in zip(record["targets"], self._names(record["guesses"]), strict=True):
            labels[word] = label
        return {"labels": labels}

    def examples(self) -> Sequence[Row]:
        labels = self.labels
        return [
            {"tokens": ["word"] * (1 + number % 4), "ner_tags": [labels[number % len(labels)]] * (1 + number % 4)}
            for number in range(8)
        ]
