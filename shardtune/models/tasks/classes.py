"""What classifiers share: their labels, from the recipe, the training rows or the model's own config."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict
from transformers import PreTrainedConfig

from shardtune.data.encoder import Row
from shardtune.errors import ConfigError
from shardtune.models.tasks.labels import LABELS, labels_of_rows
from shardtune.models.tasks.task import TextTask


class LabelOptions(BaseModel):
    """Options of a classifier.

    Attributes:
        labels: in the order of the model's outputs; null: those of a trained classifier, otherwise all that the
            training rows have, numbers by size and texts by alphabet.
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
        if self.options.labels is not None:
            given = [str(one) for one in self.options.labels]
            if len(set(given)) < max(2, len(given)):
                raise ConfigError(
                    f"{LABELS} = {given} has fewer than two, or one twice",
                    where=self.recipe.where(LABELS) or LABELS,
                    remedy="name each once",
                )
            return given
        stored = self._stored
        if stored is not None and self.recipe.data.train_data_paths is None and self.train_data is None:
            return stored
        read = labels_of_rows(self.recipe, self.train_data, self.row_labels, type(self).__name__)
        if stored is None:
            return read
        unknown = [label for label in read if label not in stored]
        if unknown:
            raise ConfigError(
                f"the training rows have the label {unknown[0]!r}; those of the classifier in "
                f"{self.recipe.actor.model.model_path} are {', '.join(stored)}",
                where=LABELS,
                remedy="begin from the model without its head, or rename the labels by data.transform",
            )
        return stored

    _found: list[str] | None = None

    @cached_property
    def _stored(self) -> list[str] | None:
        """The labels of a classifier that is trained further; None for a base model."""
        config = self.loaded_config
        heads = [name for name in config.architectures or [] if name.endswith(self.auto_suffix)]
        if not heads or self.recipe.actor.model.from_scratch:
            return None
        names = [str(name) for _, name in sorted((config.id2label or {}).items())]
        return None if names == [f"LABEL_{number}" for number in range(len(names))] else names

    @property
    def auto_suffix(self) -> str:
        """How the names of the classes of such models end."""
        return self.auto.__name__.removeprefix("AutoModel")

    def configure(self, config: PreTrainedConfig) -> None:
        config.id2label = dict(enumerate(self.labels))
        config.label2id = {label: number for number, label in enumerate(self.labels)}

    def found_options(self) -> Mapping[str, Any]:
        return {"labels": self.labels}

    def take_encoding_settings(self, settings: Mapping[str, Any]) -> None:
        super().take_encoding_settings(settings)
        self._found = list(settings["labels"])
