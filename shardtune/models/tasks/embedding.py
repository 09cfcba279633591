"""A vector for a text: `AutoModel` with pooling, saved as a directory of sentence-transformers.

Rows: {query, positive}, also with {negative} or {negatives: [texts]} (hard negatives). The loss is InfoNCE over all
rows of the step: each query has its own document, and all others of the step are wrong answers, whatever the
micro-batches and ranks. Or {sentence1, sentence2, score}: then it is CoSENT, by which pairs with higher scores are more
similar than others of the step. With `matryoshka` the loss is computed for the first entries of the vectors as well
(Kusupati et al., 2022, arXiv:2205.13147).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.nn import functional
from transformers import AutoModel, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from shardtune.batch import Batch, LossSum, Sample
from shardtune.config import Recipe
from shardtune.data.encoder import Row, RowError
from shardtune.data.row_formats import present
from shardtune.errors import ConfigError
from shardtune.models.adapter import TERM, Losses
from shardtune.models.mixed_precision import compute_in
from shardtune.models.options import KEY
from shardtune.models.pretrained import MODEL_PATH, settings_directory
from shardtune.models.tasks import sentence_transformers_files
from shardtune.models.tasks.columns import (
    NEGATIVES,
    POSITIVE,
    QUERY,
    SCORE,
    TEXT,
    as_text,
    column_of,
    has,
    list_of,
    number_of,
    text_of,
    value_of,
)
from shardtune.models.tasks.encoder import PADDED, require_tokens
from shardtune.models.tasks.labels import first_row
from shardtune.models.tasks.metrics import correlations, installed, ranking
from shardtune.models.tasks.retrieval import ranks_of_right, text_number
from shardtune.models.tasks.similarity import cosent, info_nce
from shardtune.models.tasks.task import Outputs, Record, TaskRoot, TextTask
from shardtune.models.whole_step_adapter import WholeStepAdapter, WholeStepRoot
from shardtune.parallel.precision import COMPUTE_DTYPE

AT = (1, 5, 10)
"""The k of recall@k."""
EMBEDDED = (*TEXT, *POSITIVE)
"""The columns of a text that is predicted as a document."""
CORRELATIONS = ("spearman", "pearson")
FULL = "full"
DEFAULTS = {"pooling": "mean", "normalize": True, "query_prompt": "", "document_prompt": ""}
"""Of options that a directory of sentence-transformers may set."""


class EmbeddingOptions(BaseModel):
    """Options of an embedding model.

    Attributes:
        loss: infonce: rows have a document for a query; cosent: rows have two texts and their score; null: as the first
            training row, by whether it has a score.
        pooling: mean: of a text's tokens; cls: the first token; last: the last one, as for decoders; null: that of a
            directory of sentence-transformers, otherwise mean.
        normalize: to length 1; scores are then cosines. null: false where the directory compares by dot product without
            it, otherwise true.
        temperature: scores are divided by it.
        matryoshka: numbers of first entries that are to serve as shorter vectors.
        query_prompt, document_prompt: put before every query, and before every document; null: those of the directory.
        negatives: hard negatives of a row; null: as many as the first training row has. Rows may have fewer.
        mask_duplicates: a document with the same text as a query's own is no wrong answer to it.
    """

    model_config = ConfigDict(extra="forbid")

    loss: Literal["infonce", "cosent"] | None = None
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
    row_form = "{query, positive}, also with {negatives: [texts]}; or {sentence1, sentence2, score}"

    def __init__(self, recipe: Recipe, tokenizer: Any = None) -> None:
        super().__init__(recipe, tokenizer)
        directory = self._base = settings_directory(recipe.actor.model.model_path)
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
        kind: Any = MODEL_MAPPING.get(type(config), None)
        with suppress(ImportError):  # a model whose package is not installed, which building it says
            if kind is not None and kind.main_input_name != "input_ids" and not config.is_encoder_decoder:
                raise self.not_of_text()
        if config.is_encoder_decoder:
            raise ConfigError(
                f"{self.recipe.actor.model.model_path} is an encoder-decoder, of which it is open what embeds a text",
                where=MODEL_PATH,
                remedy="give an encoder or a decoder",
            )
        if sentence_transformers_files.lowers_text(self._base) and not lowers(self.tokenizer):
            raise ConfigError(
                f"{self.recipe.actor.model.model_path} writes texts in small letters (do_lower_case), and its "
                "tokenizer does not",
                where=f"{self._base}/sentence_bert_config.json",
                remedy="give the tokenizer a normalizer Lowercase (tokenizer.json), or set do_lower_case: false there",
            )
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
        files = sentence_transformers_files.files(self.options, width, self._most(most), self._base)
        return {**super().saved_files(), **files}

    def notes(self) -> Sequence[str]:
        options = self.options
        prompts = {"queries": options.query_prompt, "documents": options.document_prompt}
        shown = [f"{prompt!r} before {name}" for name, prompt in prompts.items() if prompt]
        scale = "of length 1" if options.normalize else "of any length, compared by their dot product"
        return [*super().notes(), f"vectors: pooling {options.pooling}, {scale}{''.join(f', {one}' for one in shown)}"]

    def _most(self, most: int) -> int:
        return min(most, self.max_positions or most)

    # Rows.

    @cached_property
    def _first_row(self) -> Row:
        return first_row(self.recipe, self.train_data)

    @cached_property
    def scored(self) -> bool:
        """Whether rows are two texts and their score."""
        chosen = self.options.loss
        scored = has(self._first_row, SCORE) if chosen is None else chosen == "cosent"
        idle = {"negatives": bool(self.options.negatives), "mask_duplicates": not self.options.mask_duplicates}
        given = [f"{name}: {getattr(self.options, name)}" for name, is_given in idle.items() if scored and is_given]
        if given:
            raise ConfigError(
                f"{KEY}: {' and '.join(given)} is for queries with documents (loss: infonce), and rows have scores",
                where=self.recipe.where(KEY) or KEY,
                remedy="leave it out",
            )
        return scored

    @cached_property
    def negatives(self) -> int:
        """Hard negatives of a row."""
        if self.scored:
            return 0
        chosen = self.options.negatives
        return len(self._negatives(self._first_row)) if chosen is None else chosen

    @property
    def libraries(self) -> Sequence[str]:  # pyright: ignore[reportIncompatibleVariableOverride] (depends on rows)
        return ("scipy",) if self.scored else ()

    def found_options(self) -> Mapping[str, Any]:
        loss = "cosent" if self.scored else "infonce"
        return {"loss": loss, "negatives": self.negatives, **{name: getattr(self.options, name) for name in DEFAULTS}}

    def take_encoding_settings(self, settings: Mapping[str, Any]) -> None:
        super().take_encoding_settings(settings)
        vars(self)["scored"] = settings["loss"] == "cosent"
        vars(self)["negatives"] = settings["negatives"]

    def columns(self, row: Row) -> Sequence[str | None]:
        return (column_of(row, QUERY), column_of(row, POSITIVE), column_of(row, SCORE if self.scored else NEGATIVES))

    def encode_text(self, row: Row) -> dict[str, Any]:
        query = text_of(row, QUERY, "the query", self.row_form)
        positive = text_of(row, POSITIVE, "its document", self.row_form)
        negatives = self._negatives(row)
        if len(negatives) > self.negatives:
            raise RowError(
                f"the row has {len(negatives)} hard negatives, and there is room for {self.negatives}: "
                + ("rows with a score have none" if self.scored else "set model.options.negatives to the most of a row")
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
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        require_tokens(ids)
        return np.asarray(ids, np.int32)

    def _negatives(self, row: Row) -> list[str]:
        if not has(row, NEGATIVES):
            return []
        found = value_of(row, NEGATIVES, "hard negatives", self.row_form)
        return [as_text(one, "a negative") for one in ([found] if isinstance(found, str) else list_of(found, "these"))]

    def encode_target(self, row: Row, fields: Mapping[str, Any]) -> dict[str, Any]:
        if self.scored:
            return {"score": np.float64(number_of(value_of(row, SCORE, "the score", self.row_form), "the score"))}
        if self.options.loss is None and has(row, SCORE):
            raise RowError(
                f"the row has {column_of(row, SCORE)!r}, and the first training row has no score: with "
                "model.options.loss: cosent all rows have one, with infonce it is not read"
            )
        return {}

    def no_target(self, row: Row, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def without_part(self, row: Row) -> Sequence[str]:
        """All but the one text that a prediction is of."""
        read = (column_of(row, QUERY if has(row, QUERY) else EMBEDDED), column_of(row, SCORE))
        return [name for name, value in present(row).items() if value is not None and name not in read]

    def encode_input(self, row: Row) -> Sample:
        """One text: a query, or under any other name a document."""
        is_query = has(row, QUERY)
        text = text_of(row, QUERY if is_query else EMBEDDED, "the text", "{query} or {text}")
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
            **({"score": batch["score"]} if self.scored else {}),
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

    def _similarities(self, outputs: Outputs, size: int | None) -> torch.Tensor:
        """[rows] of each row's two texts."""
        queries, documents = (self._scaled(outputs[name], size) for name in ("query", "documents"))
        return (queries * documents[:, 0]).sum(-1)

    def step_loss(self, outputs: Outputs) -> Losses:
        count, temperature = len(outputs["query"]), self.options.temperature
        if self.scored:
            found = {term: self._similarities(outputs, size) / temperature for term, size in self._terms.items()}
            return {term: LossSum(cosent(one, outputs["score"]) * count, count) for term, one in found.items()}
        there, texts = outputs["there"].flatten(), outputs["texts"].flatten()
        rows = torch.arange(count, device=there.device)
        own = rows * (1 + self.negatives)
        left_out = ~there.expand(len(rows), -1)
        if self.options.mask_duplicates:
            left_out = left_out | (texts == texts[own][:, None])
        left_out = left_out.scatter(1, own[:, None], False)
        losses = {}
        for term, size in self._terms.items():
            queries, documents = (self._scaled(outputs[name], size) for name in ("query", "documents"))
            total = info_nce(queries / temperature, documents.flatten(0, 1), own, left_out)
            losses[term] = LossSum(total, count)
        return losses

    def loss_of(self, outputs: Outputs, batch: Batch) -> Losses:
        return self.step_loss(outputs)

    def root(self, model: nn.Module) -> WholeStepTaskRoot:
        compute_in(model, COMPUTE_DTYPE[self.recipe.actor.model.precision])
        return WholeStepTaskRoot(self, model)

    # Metrics and predictions.

    def records(self, outputs: Outputs, batch: Batch) -> list[Record]:
        numbers = {name: tensor for name, tensor in outputs.items() if tensor.is_floating_point()}
        wide = {name: tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for name, tensor in numbers.items()}
        arrays = {name: tensor.cpu().numpy() for name, tensor in {**outputs, **wide}.items()}
        return [{name: array[row] for name, array in arrays.items()} for row in range(len(arrays["query"]))]

    def predicted_outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        return {"query": self._scaled(self._vectors(model, batch["query"]))}

    def probed_outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        return {"query": self._vectors(model, batch["query"])}

    def prediction(self, record: Record) -> dict[str, Any]:
        return {"embedding": record["query"].tolist()}

    @property
    def set_metric_names(self) -> Sequence[str]:
        names = ("mrr", *(f"recall_at_{k}" for k in AT))
        if self.scored:
            names = CORRELATIONS if installed(*self.libraries) else ()
        return [name for term in self._terms for name in _of_term(term, dict.fromkeys(names, 0.0))]

    def set_metrics(self, records: Sequence[Record]) -> dict[str, float]:
        """Each query looks for its document among all different documents of the set, hard negatives included; or the
        correlation of similarities and scores."""
        if self.scored:
            return self._correlations(records) if installed(*self.libraries) else {}
        there = np.concatenate([one["there"] for one in records])
        texts, first = np.unique(np.concatenate([one["texts"] for one in records])[there], return_index=True)
        documents = np.concatenate([one["documents"] for one in records])[there][first]
        queries = np.stack([one["query"] for one in records])
        own = np.searchsorted(texts, np.array([one["texts"][0] for one in records]))
        found = {}
        for term, size in self._terms.items():
            asked, answers = (self._scaled(torch.from_numpy(each), size).numpy() for each in (queries, documents))
            scores = ranking(ranks_of_right(asked, answers, own), AT)
            found |= _of_term(term, scores)
        return found

    def _correlations(self, records: Sequence[Record]) -> dict[str, float]:
        outputs = {name: torch.from_numpy(np.stack([one[name] for one in records])) for name in ("query", "documents")}
        scores, found = np.array([one["score"] for one in records]), {}
        for term, size in self._terms.items():
            found |= _of_term(term, correlations(scores, self._similarities(outputs, size).numpy()))
        return found

    def examples(self) -> Sequence[Row]:
        pairs = (("red fruit", "an apple"), ("yellow fruit", "a banana"), ("grey animal", "an elephant"))
        return [{"query": f"a {query}", "positive": document} for query, document in pairs]


def lowers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer reads capital letters as small ones."""
    normalizer = tokenizer.backend_tokenizer.normalizer if isinstance(tokenizer, PreTrainedTokenizerFast) else None
    return normalizer is not None and normalizer.normalize_str("A") == "a"


def _of_term(term: str, scores: Mapping[str, float]) -> dict[str, float]:
    """Metrics under their names, for vectors that are cut with the size."""
    return {name if term in (FULL, TERM) else f"{name}/{term}": value for name, value in scores.items()}
