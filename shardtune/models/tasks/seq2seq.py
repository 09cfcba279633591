"""Text to text by an encoder-decoder (T5, BART and the like): `AutoModelForSeq2SeqLM`.

Rows: {source, target}, also under names such as {document, summary}. The loss is a mean over the tokens of all targets.
With `eval.generate` answers are written by beam or greedy search and compared with the targets by ROUGE.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.nn import functional
from transformers import AutoModelForSeq2SeqLM, LogitsProcessor, LogitsProcessorList

from shardtune.batch import IGNORED, Batch, LossSum
from shardtune.data.encoder import Row
from shardtune.errors import ConfigError
from shardtune.models.generation_settings import num_beams, one_text_each, stop_strings
from shardtune.models.pretrained import GENERATION, MODEL_PATH, settings_directory
from shardtune.models.tasks.columns import SOURCE, TARGET, column_of, text_of
from shardtune.models.tasks.encoder import PADDED
from shardtune.models.tasks.metrics import installed, rouge
from shardtune.models.tasks.task import Outputs, Record, TextTask
from shardtune.models.user_metrics import Prediction

ROUGE = ("rouge1", "rouge2", "rougeL")
FIRST = "decoder_start_token_id"
"""The setting of the token that every target begins from."""


class Seq2SeqOptions(BaseModel):
    """Options of an encoder-decoder.

    Attributes:
        source_prefix: put before every source, such as "summarize: ".
        num_beams: of a generated answer, also in the settings of generation that are written; 1: greedy; null: as the
            model's settings of generation have it.
    """

    model_config = ConfigDict(extra="forbid")

    source_prefix: str = ""
    num_beams: int | None = Field(None, ge=1)


class Draws(LogitsProcessor):
    """Makes the likeliest token [rows, vocabulary] a draw from the softmax (Gumbel-max), by its row's numbers alone: an
    answer is the same in any batch and on any rank.

    Args:
        batch: of the rows that are answered.
        temperature: by which logits are divided.
    """

    def __init__(self, batch: Batch, temperature: float) -> None:
        self._batch = batch
        self._temperature = temperature

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        numbers = self._batch.rand_like(f"token {input_ids.shape[1]}", scores.double())
        return scores.double() / self._temperature - (-numbers.clamp_min(1e-300).log()).log()


class Seq2Seq(TextTask):
    """A text to another text."""

    Options = Seq2SeqOptions
    auto = AutoModelForSeq2SeqLM
    token_fields = ("input_ids", "target")
    padding: ClassVar[Mapping[str, float]] = {"input_ids": PADDED, "token_type_ids": 0, "target": PADDED}
    row_form = "{source, target}"

    def new_weights(self, model: nn.Module, missing: Sequence[str]) -> Sequence[str]:
        """None: an encoder-decoder is whole."""
        return ()

    def saved_files(self) -> Mapping[str, object]:
        settings = self._generation
        return {**super().saved_files(), **({GENERATION: settings} if settings else {})}

    @cached_property
    def _generation(self) -> Mapping[str, int]:
        """Settings of generation in the place of those in the model's directory: what the recipe sets, and the token
        that targets begin from in training where the directory has it in its config alone."""
        model, beams = self.recipe.actor.model, self.options.num_beams
        directory = settings_directory(model.model_path)
        file = None if directory is None else directory / GENERATION
        stored = None if file is None or not file.is_file() else json.loads(file.read_text(encoding="utf-8"))
        lacks = stored is not None and stored.get(FIRST) is None
        first = self.config.to_dict().get(FIRST) if lacks or FIRST in model.config_overrides else None
        return {name: value for name, value in {"num_beams": beams, FIRST: first}.items() if value is not None}

    def columns(self, row: Row) -> Sequence[str | None]:
        return (column_of(row, SOURCE), column_of(row, TARGET))

    def encode_text(self, row: Row) -> dict[str, Any]:
        return self.tokens(self.options.source_prefix + text_of(row, SOURCE, "the text", self.row_form))

    def encode_target(self, row: Row, fields: Mapping[str, Any]) -> dict[str, Any]:
        target = text_of(row, TARGET, "the text to be written", self.row_form)
        return {"target": np.asarray(self.tokenizer(text_target=target, verbose=False)["input_ids"])}

    def no_target(self, row: Row, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"target": np.zeros(0, np.int64)}

    def weights(self, sample: Any) -> Mapping[str, float]:
        return {"loss": float(len(sample.fields["target"]))}

    @property
    def writes(self) -> bool:
        """Whether evaluation generates answers."""
        return self.recipe.eval.generate

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """`logits` [rows, tokens, vocabulary]: given labels, the model shifts them to the inputs of its decoder."""
        labels = self._labels(batch)
        try:
            return {"logits": model(**self._source(batch), labels=labels, use_cache=False).logits}
        except (ValueError, TypeError) as error:
            if self.config.to_dict().get(FIRST) is not None:
                raise
            raise ConfigError(
                f"{type(model).__name__} does not know what a target begins from: {str(error).splitlines()[0]}",
                where=f"{MODEL_PATH}: the config of {self.recipe.actor.model.model_path}",
                remedy=f"write {FIRST} into its config.json, for T5 the number of the padding token",
            ) from error

    def _source(self, batch: Batch) -> dict[str, torch.Tensor]:
        found = self.inputs(batch)
        found.pop("token_type_ids", None)
        return found

    def _labels(self, batch: Batch) -> torch.Tensor:
        return torch.where(batch["target"] == PADDED, IGNORED, batch["target"]).long()

    def loss_of(self, outputs: Outputs, batch: Batch) -> LossSum:
        labels = self._labels(batch).flatten()
        total = functional.cross_entropy(outputs["logits"].flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
        return LossSum(total, int((labels != IGNORED).sum()))

    def predictions(self, model: nn.Module, batch: Batch) -> Iterator[Prediction]:
        labels = self._labels(batch)
        chosen = labels != IGNORED
        logits = self.outputs(model, batch)["logits"][chosen]
        yield Prediction(logits, labels[chosen], torch.ones(len(logits), device=logits.device))

    def measured_outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        written = self.predicted_outputs(model, batch) if self.writes else {}
        return {**self.outputs(model, batch), **written}

    def predicted_outputs(self, model: Any, batch: Batch) -> Outputs:
        """`written` [rows, tokens], at most as many as the model has positions for; ranks keep step."""
        evaluation, positions = self.recipe.eval, self.max_positions
        most = evaluation.max_new_tokens if positions is None else min(evaluation.max_new_tokens, positions - 1)
        settings: dict[str, Any] = {"do_sample": False, **one_text_each(model), **self._generation}
        if evaluation.temperature and settings.get("num_beams", num_beams(model)) == 1:
            settings["logits_processor"] = LogitsProcessorList([Draws(batch, evaluation.temperature)])
        elif evaluation.temperature:
            settings |= {"do_sample": True, "temperature": evaluation.temperature}
        if stop_strings(model):
            settings["tokenizer"] = self.tokenizer
        written = model.generate(
            **self._source(batch),
            max_new_tokens=most,
            synced_gpus=dist.is_initialized() and dist.get_world_size() > 1,
            **settings,
        )
        return {"written": written}

    def probed_outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """None for a row without a target: its decoder has nothing to read."""
        return self.outputs(model, batch) if batch["target"].shape[-1] else {}

    def records(self, outputs: Outputs, batch: Batch) -> list[Record]:
        found: list[dict[str, Any]] = [{} for _ in batch["target"]]
        targets = batch["target"].cpu().numpy()
        if "logits" in outputs:
            right = (outputs["logits"].argmax(-1) == batch["target"]).sum(1).tolist()
            for one, each, target in zip(found, right, targets, strict=True):
                one |= {"right": each, "tokens": int((target != PADDED).sum())}
        if "written" in outputs:
            answers = self.tokenizer.batch_decode(outputs["written"].tolist(), skip_special_tokens=True)
            for one, answer, target in zip(found, answers, targets, strict=True):
                reference = self.tokenizer.decode(target[target != PADDED], skip_special_tokens=True)
                one |= {"text": answer.strip(), "reference": str(reference).strip()}
        return [*found]

    @property
    def libraries(self) -> Sequence[str]:  # pyright: ignore[reportIncompatibleVariableOverride] (depends on answers)
        return ("rouge_score",) if self.writes else ()

    @property
    def set_metric_names(self) -> Sequence[str]:
        written = ("exact_match", *(ROUGE if installed(*self.libraries) else ())) if self.writes else ()
        return ("token_accuracy", *written)

    def set_metrics(self, records: Sequence[Record]) -> dict[str, float]:
        found = {"token_accuracy": sum(one["right"] for one in records) / sum(one["tokens"] for one in records)}
        if not self.writes:
            return found
        references, answers = ([one[name] for one in records] for name in ("reference", "text"))
        found["exact_match"] = sum(map(str.__eq__, references, answers)) / len(records)
        return found | (rouge(references, answers) if installed(*self.libraries) else {})

    def notes(self) -> Sequence[str]:
        notes = super().notes()
        ends = self.config.to_dict().get("eos_token_id")
        ids = self.tokenizer(text_target="a", verbose=False)["input_ids"]
        if ends is None or {*ids} & {*(ends if isinstance(ends, list) else [ends])}:
            return notes
        return [
            *notes,
            f"the tokenizer appends no end token (eos_token_id {ends}) to a target: where rows do not have it either, "
            "the model does not learn where to stop",
        ]

    def prediction(self, record: Record) -> dict[str, Any]:
        return {"text": record["text"]}

    def examples(self) -> Sequence[Row]:
        return [{"source": "a word " * (1 + number % 3), "target": "word " * (1 + number % 2)} for number in range(8)]
