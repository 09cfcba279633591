"""The tasks by name, imported when a recipe names them."""

from __future__ import annotations

from importlib import import_module

from shardtune.models.adapter import Adapter

CLASSES = {
    "sequence_classifier": "sequence_classifier:SequenceClassifier",
    "token_classifier": "token_classifier:TokenClassifier",
    "regression": "regression:Regression",
    "embedding": "embedding:Embedding",
    "reranker": "reranker:Reranker",
    "seq2seq": "seq2seq:Seq2Seq",
}
"""Module of this package, and class, by `actor.model.model_type`; `shardtune.config.model_names` describes them."""


def task_class(name: str) -> type[Adapter] | None:
    """The adapter class of a task; None where no task has the name."""
    if name not in CLASSES:
        return None
    module, _, kind = CLASSES[name].partition(":")
    return vars(import_module(f"shardtune.models.tasks.{module}"))[kind]
