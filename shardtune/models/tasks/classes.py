"""What classifiers share: their labels, from the recipe, the training rows or the model's own config."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict
from transformers import PreTrainedConfig

from shardtune.data.encoder import Row
from shardtune.errors import ConfigError
from shardtune.models.tasks.labels import LABELS, labels_of_rows, place_of
from shardtune.models.tasks.task import TextTask

NAMED = 20
"""Labels that the first lines of a run name."""


class LabelOptions(BaseModel):
    """Options of a classifier.

    Attributes:
        labels: in the order of the model's outputs, which rows have by name or by place; null: those of a trained
            classifier, otherwise all that the training rows have, numbers by size and texts by alphabet.
    """

    model_config = ConfigDict(extra="forbid")

    labels: list[str | int] | None = None


class Classifier(TextTask):
    """A task whose model has an output for each label."""

    Options = LabelOptions

    @abstractmethod
    def row_labels(self, row: Row) -> Iterable[object]:
        """The labels of a row."""

    @cached_property
    def labels(self) -> list[str]:
        """In the order of the model's outputs."""
        if self._found is not None:
            return self._found
        stored = self._stored
        if self.options.labels is not None:
            return self._given([str(one) for one in self.options.labels], stored)
        if self.recipe.data.train_data_paths is None and self.train_data is None:  # there is only a model
            return stored or self._output_names
        read = labels_of_rows(self.recipe, self.train_data, self.row_labels, self.label_form)
        if stored is None:
            return self._numbered(read)
        unknown = [str(label) for label in read if place_of(label, stored) is None]
        if unknown:
            raise self._other_labels(f"the training rows have the label {unknown[0]!r}", stored, LABELS)
        return stored

    def _numbered(self, read: Sequence[int | str]) -> list[str]:
        """The labels of the rows, for a new head or one whose outputs have numbers for names, as `LABEL_10`.

        Rows may name its outputs so, or have some of their numbers; otherwise theirs are the names of all its outputs.
        """
        found, outputs = [str(label) for label in read], self._output_names
        if not self.has_trained_head or (len(found) == len(outputs) and not {*found} <= {*outputs}):
            return found
        return outputs if all(place_of(label, outputs) is not None for label in read) else found

    def _given(self, given: list[str], stored: list[str] | None) -> list[str]:
        where = self.recipe.where(LABELS) or LABELS
        if len(set(given)) < max(2, len(given)):
            raise ConfigError(
                f"{LABELS} = {given} has fewer than two, or one twice", where=where, remedy="name each once"
            )
        if stored is not None and given != stored:
            raise self._other_labels(f"{LABELS} = {given}", stored, where)
        return given

    def _other_labels(self, what: str, stored: list[str], where: str) -> ConfigError:
        return ConfigError(
            f"{what}; those of the classifier in {self.recipe.actor.model.model_path} are {', '.join(stored)}",
            where=where,
            remedy="begin from the model without its head, or rename the labels of the rows by data.transform",
        )

    @property
    def label_form(self) -> str:
        """What `row_labels` depends on."""
        return type(self).__name__

    _found: list[str] | None = None

    @cached_property
    def _stored(self) -> list[str] | None:
        """The labels of a classifier that is trained further; None for a base model."""
        if not self.has_trained_head:
            return None
        names = self._output_names
        return None if names == [f"LABEL_{number}" for number in range(len(names))] else names

    @property
    def _output_names(self) -> list[str]:
        """The names of its outputs in the config."""
        return [str(name) for _, name in sorted((self.loaded_config.id2label or {}).items(), key=_place)]

    def configure(self, config: PreTrainedConfig) -> None:
        config.id2label = dict(enumerate(self.labels))
        config.label2id = {label: number for number, label in enumerate(self.labels)}

    def found_options(self) -> Mapping[str, Any]:
        return {"labels": self.labels}

    def notes(self) -> Sequence[str]:
        return [
            *super().notes(),
            f"labels: {', '.join(self.labels[:NAMED])}{', …' if len(self.labels) > NAMED else ''}",
        ]

    def take_encoding_settings(self, settings: Mapping[str, Any]) -> None:
        super().take_encoding_settings(settings)
        self._found = list(settings["labels"])


def _place(name: tuple[int | str, str]) -> int:
    """The number of an output, which an override may have as text."""
    return int(name[0])
