"""A score for a query and a document (a cross-encoder): `AutoModelForSequenceClassification` with one output.

Rows: {query, document, label} with a label between 0 and 1; or {query, positive, negatives: [texts]}, whose positive
document is to be scored above all others of the row.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from shardtune.batch import Batch, LossSum, Sample
from shardtune.data.encoder import Row, RowError
from shardtune.models.adapter import TERM
from shardtune.models.tasks.columns import (
    NEGATIVES,
    POSITIVE,
    QUERY,
    SCORE,
    as_text,
    column_of,
    has,
    list_of,
    number_of,
    text_of,
    value_of,
)
from shardtune.models.tasks.encoder import PADDED
from shardtune.models.tasks.labels import first_row
from shardtune.models.tasks.metrics import correlations, installed, place_among_equal, ranking
from shardtune.models.tasks.retrieval import text_number
from shardtune.models.tasks.task import PARTS, Outputs, Record, TextTask

BINARY = "binary cross-entropy"
AT = (1, 3, 10)
"""The k of recall@k."""


class RerankerOptions(BaseModel):
    """Options of a reranker.

    Attributes:
        loss: of a row with negatives: listwise, cross-entropy over its documents; or pointwise, binary cross-entropy of
            each document, as for rows with a label.
    """

    model_config = ConfigDict(extra="forbid")

    loss: Literal["listwise", "pointwise"] = "listwise"


class Reranker(TextTask):
    """A query and a document to a score."""

    Options = RerankerOptions
    auto = AutoModelForSequenceClassification
    libraries = ("scipy",)
    padding: ClassVar[Mapping[str, float]] = {"input_ids": PADDED, "token_type_ids": 0, "labels": -1.0}
    row_form = "{query, document, label}, or {query, positive, negatives: [texts]}"

    def configure(self, config: PreTrainedConfig) -> None:
        config.id2label, config.label2id = {0: "LABEL_0"}, {"LABEL_0": 0}

    def notes(self) -> Sequence[str]:
        """With the loss that the first training row has."""
        row, loss = first_row(self.recipe, self.train_data), self.options.loss
        if not row:
            return super().notes()
        if has(row, NEGATIVES):
            how = "cross-entropy over the documents of a row" if loss == "listwise" else f"{BINARY} of each document"
            return [*super().notes(), f"loss: {loss}, {how}"]
        unused = f". model.options.loss: {loss} is for rows with negatives, and the first training row has none"
        given = "loss" in self.options.model_fields_set and loss == "listwise"
        return [*super().notes(), f"loss: pointwise, {BINARY} of each document with its label{unused if given else ''}"]

    def columns(self, row: Row) -> Sequence[str | None]:
        target = column_of(row, NEGATIVES) or column_of(row, SCORE)
        return (column_of(row, QUERY), column_of(row, POSITIVE), target)

    def encode_text(self, row: Row) -> dict[str, Any]:
        query, documents = text_of(row, QUERY, "the query", self.row_form), self._documents(row)
        made = [self.tokens(query, document) for document in documents]
        longest = max(len(one["input_ids"]) for one in made)
        ids, kinds = np.full((len(made), longest), PADDED, np.int32), np.zeros((len(made), longest), np.int8)
        parts = np.zeros_like(kinds)
        for place, one in enumerate(made):
            length = len(one["input_ids"])
            ids[place, :length], kinds[place, :length] = one["input_ids"], one["token_type_ids"]
            parts[place, :length] = one.get(PARTS, 0)
        found = {"input_ids": ids, "token_type_ids": kinds, "query": np.int64(text_number(query))}
        return {**found, PARTS: parts} if any(PARTS in one for one in made) else found

    def _documents(self, row: Row) -> list[str]:
        first = text_of(row, POSITIVE, "the document", self.row_form)
        if not has(row, NEGATIVES):
            return [first]
        found = value_of(row, NEGATIVES, "other documents", self.row_form)
        others = [found] if isinstance(found, str) else list_of(found, "the negatives")
        return [first, *(as_text(one, "a negative") for one in others)]

    def encode_target(self, row: Row, fields: Mapping[str, Any]) -> dict[str, Any]:
        count = len(fields["input_ids"])
        if has(row, NEGATIVES):
            if count < 2:
                raise RowError("the row has no negatives: their list is empty")
            return {"labels": np.array([1.0] + [0.0] * (count - 1)), "listwise": self.options.loss == "listwise"}
        label = number_of(value_of(row, SCORE, "1: the document answers the query, 0: not", self.row_form), "the label")
        if not 0 <= label <= 1:
            raise RowError(f"the label is {label:g}, not a number between 0 and 1: divide it in data.transform")
        return {"labels": np.array([label]), "listwise": False}

    def no_target(self, row: Row, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"labels": np.zeros(len(fields["input_ids"])), "listwise": False}

    def weights(self, sample: Sample) -> Mapping[str, float]:
        return {TERM: 1.0 if sample.fields["listwise"] else float(len(sample.fields["labels"]))}

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """`scores` [rows, documents], -inf where a row has fewer."""
        there = batch["labels"] >= 0
        flat = Batch(rows=(), fields={name: batch[name][there] for name in ("input_ids", "token_type_ids")})
        found = model(**self.inputs(flat)).logits.squeeze(-1)
        scores = found.new_full(there.shape, -torch.inf)
        return {"scores": scores.masked_scatter(there, found)}

    def loss_of(self, outputs: Outputs, batch: Batch) -> LossSum:
        scores, labels, listwise = outputs["scores"], batch["labels"], batch["listwise"].bool()
        alone = (labels >= 0) & ~listwise[:, None]
        pointwise = functional.binary_cross_entropy_with_logits(
            scores[alone], labels[alone].to(scores.dtype), reduction="sum"
        )
        among = scores[listwise]
        first = torch.zeros(len(among), dtype=torch.long, device=among.device)
        total = pointwise + functional.cross_entropy(among, first, reduction="sum")
        return LossSum(total, int(alone.sum()) + len(among))

    def records(self, outputs: Outputs, batch: Batch) -> list[Record]:
        columns = [outputs["scores"].double(), batch["labels"], batch["query"], batch["input_ids"]]
        found = []
        for scores, labels, query, ids in zip(*(column.tolist() for column in columns), strict=True):
            there = [place for place, label in enumerate(labels) if label >= 0]
            found.append(
                {
                    "query": query,
                    "scores": [scores[place] for place in there],
                    "labels": [labels[place] for place in there],
                    "pairs": [tuple(one for one in ids[place] if one != PADDED) for place in there],
                }
            )
        return found

    @property
    def set_metric_names(self) -> Sequence[str]:
        scores = ("spearman",) if installed(*self.libraries) else ()
        return ("accuracy", "mrr", *(f"recall_at_{k}" for k in AT), *scores)

    def set_metrics(self, records: Sequence[Record]) -> dict[str, float]:
        """Documents of one query belong together, in whatever rows they are; a query without a right one, or with one
        document, has no part in `mrr` and recall, which are NaN where all are like that. A document that a query has
        several times is one, right if it is so once; its scores differ by rounding, and the first one is used. Of
        documents with equal scores it is the mean place."""
        found: defaultdict[int, dict[tuple[int, ...], float]] = defaultdict(dict)
        right: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)
        pairs = []
        for one in records:
            documents = found[one["query"]]
            for score, label, ids in zip(one["scores"], one["labels"], one["pairs"], strict=True):
                pairs.append((documents.setdefault(ids, score), label))
                right[one["query"]] |= {ids} if label > 0.5 else set()
        ranks = []
        for query, documents in found.items():
            if right[query] and len(documents) > 1:
                ranks.append(_place(documents, right[query]))
        accuracy = sum((score > 0) == (label > 0.5) for score, label in pairs) / len(pairs)
        places = ranking(ranks, AT) if ranks else dict.fromkeys(("mrr", *(f"recall_at_{k}" for k in AT)), float("nan"))
        metrics = {"accuracy": accuracy, **places}
        if installed(*self.libraries):
            scores, labels = np.array(pairs).T
            metrics["spearman"] = correlations(labels, scores)["spearman"]
        return metrics

    def prediction(self, record: Record) -> dict[str, Any]:
        scores = record["scores"]
        return {"score": scores[0]} if len(scores) == 1 else {"scores": scores}

    def examples(self) -> Sequence[Row]:
        return [
            {"query": "a word " * (1 + number % 3), "positive": "a word", "negatives": ["word"] * (1 + number % 2)}
            for number in range(8)
        ]


def _place(documents: Mapping[tuple[int, ...], float], right: Collection[tuple[int, ...]]) -> float:
    """The place of the first right document of a query by its score; NaN where one of the scores is."""
    if any(math.isnan(score) for score in documents.values()):
        return math.nan
    best = max(documents[ids] for ids in right)
    equal = [ids in right for ids, score in documents.items() if score == best]
    return place_among_equal(sum(score > best for score in documents.values()), equal.count(False), equal.count(True))
