"""A vector for a text: `AutoModel` with pooling, saved as a directory of sentence-transformers.

Rows: {query, positive}, also with {negative} or {negatives: [texts]} (hard negatives). The loss is InfoNCE over all
rows of the step (van den Oord et al., 2018, arXiv:1807.03748): each query has its own document, and all others of the
step are wrong answers, whatever the micro-batches and ranks. With `matryoshka` it is computed for the first entries of
the vectors as well (Kusupati et al., 2022, arXiv:2205.13147).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.nn import functional
from transformers import AutoModel, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from shardtune.batch import Batch, LossSum, Sample
from shardtune.config import Recipe
from shardtune.data.encoder import Row, RowError
from shardtune.errors import ConfigError
from shardtune.models.adapter import TERM, Losses, WholeStepAdapter, WholeStepRoot
from shardtune.models.mixed_precision import compute_in
from shardtune.models.options import KEY
from shardtune.models.pretrained import settings_directory
from shardtune.models.tasks import sentence_transformers_files
from shardtune.models.tasks.columns import NEGATIVES, POSITIVE, QUERY, TEXT, as_text, has, list_of, text_of, value_of
from shardtune.models.tasks.encoder import PADDED
from shardtune.models.tasks.labels import training_rows
from shardtune.models.tasks.metrics import ranking
from shardtune.models.tasks.retrieval import ranks_of_right, text_number
from shardtune.models.tasks.task import Outputs, Record, TaskRoot, TextTask
from shardtune.parallel.fsdp2 import COMPUTE_DTYPE

AT = (1, 5, 10)
"""The k of recall@k."""
FULL = "full"
DEFAULTS = {"pooling": "mean", "normalize": True, "query_prompt": "", "document_prompt": ""}
"""Of options that a directory of sentence-transformers may set."""


class EmbeddingOptions(BaseModel):
    """Options of an embedding model.

    Attributes:
        pooling: mean: of a text's tokens; cls: the first token; last: the last one, as for decoders; null: that of a
            directory of sentence-transformers, otherwise mean.
        normalize: to length 1; scores are then cosines. null: as the directory has it, otherwise true.
        temperature: scores are divided by it.
        matryoshka: numbers of first entries that are to serve as shorter vectors.
        query_prompt, document_prompt: put before every query, and before every document; null: those of the directory.
        negatives: hard negatives of a row; null: as many as the first training row has. Rows may have fewer.
        mask_duplicates: a document with the same text as a query's own is no wrong answer to it.
    """

    model_config = ConfigDict(extra="forbid")

    pooling: Literal["mean", "cls", "last"] | None = None
    normalize: bool | None = None
    temperature: float = Field(0.05, gt=0)
    matryoshka: list[int] = []
    query_prompt: str | None = None
    document_prompt: str | None = None
    negatives: int | None = Field(None, ge=0)
    mask_duplicates: bool = True


class WholeStepTaskRoot(TaskRoot, WholeStepRoot):
    """A root whose forward returns outputs, of which it keeps records while a set is evaluated."""

    def __init__(self, task: Embedding, model: nn.Module) -> None:
        super().__init__(task, model)
        self._step_adapter = task

    def forward(self, batch: Batch) -> dict[str, torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = WholeStepRoot.forward(self, batch)
        self.keep(found, batch)
        return found


class Embedding(WholeStepAdapter, TextTask):
    """A text to a vector; trained on queries with their documents."""

    Options = EmbeddingOptions
    auto = AutoModel
    token_fields = ("query", "positive", "negatives")
    padding: ClassVar[Mapping[str, float]] = {"query": PADDED, "positive": PADDED, "negatives": PADDED}
    row_form = "{query, positive}, also with {negatives: [texts]}"

    def __init__(self, recipe: Recipe, tokenizer: Any = None) -> None:
        super().__init__(recipe, tokenizer)
        directory = settings_directory(recipe.actor.model.model_path)
        stored = {} if directory is None else sentence_transformers_files.options_of(directory)
        chosen = {name: value for name, value in dict(self.options).items() if value is not None}
        self.options = self.options.model_copy(update={**DEFAULTS, **stored, **chosen})

    # The model.

    def build_arguments(self) -> Mapping[str, Any]:
        """Without a pooling layer, which nothing would train."""
        kind = MODEL_MAPPING.get(type(self.config), None)
        takes = kind is not None and "add_pooling_layer" in inspect.signature(kind.__init__).parameters
        return {"add_pooling_layer": False} if takes else {}

    def configure(self, config: PreTrainedConfig) -> None:
        width = config.get_text_config().hidden_size
        sizes = self.options.matryoshka
        if any(not 0 < size < width for size in sizes) or len(set(sizes)) < len(sizes):
            raise ConfigError(
                f"{KEY}.matryoshka = {sizes}: each has to be a different number below {width}, the width of the model",
                where=self.recipe.where(f"{KEY}.matryoshka") or KEY,
                remedy=f"name sizes such as [{width // 2}, {width // 4}]; {width} itself is always trained",
            )

    def new_weights(self, model: nn.Module, missing: Sequence[str]) -> Collection[str]:
        return [name for name in missing if name.startswith("pooler.")]

    def may_be_idle(self, name: str) -> bool:
        """A pooling layer that the class of the model has in any case."""
        return name.startswith("pooler.")

    def saved_files(self) -> Mapping[str, object]:
        width, most = self.config.get_text_config().hidden_size, self.recipe.data.max_length
        return {**super().saved_files(), **sentence_transformers_files.files(self.options, width, self._most(most))}

    def _most(self, most: int) -> int:
        return min(most, self.max_positions or most)

    # Rows.

    @cached_property
    def negatives(self) -> int:
        """Hard negatives of a row."""
        if self.options.negatives is not None:
            return self.options.negatives
        for _, rows in training_rows(self.recipe, self.train_data):
            for row in rows:
                return len(self._negatives(row))
        return 0

    def found_options(self) -> Mapping[str, Any]:
        return {"negatives": self.negatives, **{name: getattr(self.options, name) for name in DEFAULTS}}

    def take_encoding_settings(self, settings: Mapping[str, Any]) -> None:
        super().take_encoding_settings(settings)
        vars(self)["negatives"] = settings["negatives"]

    def encode_text(self, row: Row) -> dict[str, Any]:
        query = text_of(row, QUERY, "the query", self.row_form)
        positive = text_of(row, POSITIVE, "its document", self.row_form)
        negatives = self._negatives(row)
        if len(negatives) > self.negatives:
            raise RowError(
                f"the row has {len(negatives)} hard negatives, and there is room for {self.negatives} "
                "(model.options.negatives; null: as many as the first training row has)"
            )
        options = self.options
        made = [self._ids(options.document_prompt + text) for text in negatives]
        together = np.full((self.negatives, max([1, *map(len, made)])), PADDED, np.int32)
        for place, ids in enumerate(made):
            together[place, : len(ids)] = ids
        numbers = np.zeros(1 + self.negatives, np.int64)
        numbers[: 1 + len(negatives)] = [text_number(text) for text in (positive, *negatives)]
        return {
            "query": self._ids(options.query_prompt + query),
            "positive": self._ids(options.document_prompt + positive),
            "negatives": together,
            "texts": numbers,
            "there": np.arange(1 + self.negatives) <= len(negatives),
        }

    def _ids(self, text: str) -> np.ndarray:
        return np.asarray(self.tokenizer(text, verbose=False)["input_ids"], np.int32)

    def _negatives(self, row: Row) -> list[str]:
        if not has(row, NEGATIVES):
            return []
        found = value_of(row, NEGATIVES, "hard negatives", self.row_form)
        return [as_text(one, "a negative") for one in ([found] if isinstance(found, str) else list_of(found, "these"))]

    def encode_target(self, row: Row, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def no_target(self, row: Row, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def encode_input(self, row: Row) -> Sample:
        """One text: a query, or under any other name a document."""
        is_query = has(row, QUERY)
        text = text_of(row, QUERY if is_query else (*TEXT, *POSITIVE), "the text", "{query} or {text}")
        prompt = self.options.query_prompt if is_query else self.options.document_prompt
        ids, nothing = self._ids(prompt + text), np.full((0, 1), PADDED, np.int32)
        return self._sample({"query": ids, "positive": ids[:0], "negatives": nothing})

    def weights(self, sample: Sample) -> Mapping[str, float]:
        return dict.fromkeys(self._terms, 1.0)

    @property
    def _terms(self) -> dict[str, int | None]:
        """The size of the vectors of each term of the loss; None: all entries."""
        sizes = self.options.matryoshka
        return {FULL: None, **{f"size_{size}": size for size in sizes}} if sizes else {TERM: None}

    # Loss.

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """`query` and `documents` (the positive one, then the hard negatives) of each row, not normalised."""
        documents = [self._vectors(model, batch["positive"])[:, None]]
        if self.negatives:
            ids = batch["negatives"][:, : self.negatives]
            there = batch["there"][:, 1:]
            ids = torch.where(there[..., None], ids, self._stand_in(ids))
            documents.append(self._vectors(model, ids.flatten(0, 1)).unflatten(0, ids.shape[:2]))
        return {
            "query": self._vectors(model, batch["query"]),
            "documents": torch.cat(documents, 1),
            "there": batch["there"],
            "texts": batch["texts"],
        }

    @staticmethod
    def _stand_in(ids: torch.Tensor) -> torch.Tensor:
        """A text of one token in the place of a negative that a row lacks, which has no part in the loss."""
        blank = torch.full_like(ids[:1, :1], PADDED)
        blank[..., 0] = 0
        return blank

    def _vectors(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """[texts, width] of ids [texts, longest]."""
        inputs = self.inputs(Batch(rows=(), fields={"ids": ids}), "ids")
        mask = inputs["attention_mask"]
        states = model(**inputs).last_hidden_state
        if self.options.pooling == "cls":
            return states[:, 0]
        if self.options.pooling == "last":
            return states[torch.arange(len(states), device=states.device), mask.sum(1) - 1]
        return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    def _scaled(self, vectors: torch.Tensor, size: int | None = None) -> torch.Tensor:
        first = vectors if size is None else vectors[..., :size]
        return functional.normalize(first, dim=-1) if self.options.normalize else first

    def step_loss(self, outputs: Outputs) -> Losses:
        there, texts = outputs["there"].flatten(), outputs["texts"].flatten()
        rows = torch.arange(len(outputs["query"]), device=there.device)
        own = rows * (1 + self.negatives)
        left_out = ~there.expand(len(rows), -1)
        if self.options.mask_duplicates:
            left_out = left_out | (texts == texts[own][:, None])
        left_out = left_out.scatter(1, own[:, None], False)
        losses = {}
        for term, size in self._terms.items():
            queries, documents = (self._scaled(outputs[name], size) for name in ("query", "documents"))
            scores = queries @ documents.flatten(0, 1).T / self.options.temperature
            total = functional.cross_entropy(scores.masked_fill(left_out, -torch.inf), own, reduction="sum")
            losses[term] = LossSum(total, len(rows))
        return losses

    def loss_of(self, outputs: Outputs, batch: Batch) -> Losses:
        return self.step_loss(outputs)

    def root(self, model: nn.Module) -> WholeStepTaskRoot:
        compute_in(model, COMPUTE_DTYPE[self.recipe.actor.model.precision])
        return WholeStepTaskRoot(self, model)

    # Metrics and predictions.

    def records(self, outputs: Outputs, batch: Batch) -> list[Record]:
        arrays = {name: tensor.float().cpu().numpy() for name, tensor in outputs.items() if tensor.is_floating_point()}
        arrays |= {name: tensor.cpu().numpy() for name, tensor in outputs.items() if name not in arrays}
        return [{name: array[row] for name, array in arrays.items()} for row in range(len(arrays["query"]))]

    def predicted_outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        return {"query": self._scaled(self._vectors(model, batch["query"]))}

    def prediction(self, record: Record) -> dict[str, Any]:
        return {"embedding": record["query"].tolist()}

    @property
    def set_metric_names(self) -> Sequence[str]:
        names = ("mrr", *(f"recall_at_{k}" for k in AT))
        return [f"{name}/{term}" if term not in (FULL, TERM) else name for term in self._terms for name in names]

    def set_metrics(self, records: Sequence[Record]) -> dict[str, float]:
        """Each query looks for its document among all different documents of the set, hard negatives included."""
        there = np.concatenate([one["there"] for one in records])
        texts, first = np.unique(np.concatenate([one["texts"] for one in records])[there], return_index=True)
        documents = np.concatenate([one["documents"] for one in records])[there][first]
        queries = np.stack([one["query"] for one in records])
        own = np.searchsorted(texts, np.array([one["texts"][0] for one in records]))
        found = {}
        for term, size in self._terms.items():
            asked, answers = (self._scaled(torch.from_numpy(each), size).numpy() for each in (queries, documents))
            scores = ranking(ranks_of_right(asked, answers, own), AT)
            found |= {f"{name}/{term}" if term not in (FULL, TERM) else name: value for name, value in scores.items()}
        return found

    def examples(self) -> Sequence[Row]:
        pairs = (("red fruit", "an apple"), ("yellow fruit", "a banana"), ("grey animal", "an elephant"))
        return [{"query": f"a {query}", "positive": document} for query, document in pairs]
