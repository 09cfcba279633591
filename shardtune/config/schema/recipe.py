"""The recipe as a whole, and its forms: a dict, YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import PrivateAttr

from shardtune.config.schema.actor import ActorConfig
from shardtune.config.schema.data import DataConfig
from shardtune.config.schema.evaluation import EvalConfig
from shardtune.config.schema.key_names import ACTOR, present_key
from shardtune.config.schema.runner import RunnerConfig
from shardtune.config.schema.section import key, section
from shardtune.config.schema.short_form import ShortForm
from shardtune.config.schema.spelling import Spelling
from shardtune.config.tree import set_value
from shardtune.config.values import Text, escape_interpolation


class Recipe(ShortForm):
    """A validated recipe: defaults filled in, interpolation resolved, paths absolute."""

    plugins: list[Text] = key([], "Your files or modules, imported in every process before anything else.")
    runner: RunnerConfig = section(RunnerConfig, "The run: how long, how often, where to.")
    actor: ActorConfig = section(ActorConfig, "The model and how it is trained.")
    data: DataConfig = section(DataConfig, "The rows and how they become tokens.")
    eval: EvalConfig = section(EvalConfig, "Evaluation by generated answers, and by episodes in a simulator.")

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _notes: list[str] = PrivateAttr(default_factory=list)
    _references: dict[str, object] = PrivateAttr(default_factory=dict)
    _spelling: Spelling = PrivateAttr(default_factory=Spelling)

    def __eq__(self, other: object) -> bool:
        """Equal when every key is, wherever the values were given."""
        return isinstance(other, Recipe) and self.to_dict() == other.to_dict()

    def where(self, dotted: str) -> str | None:
        """Where a key was given (`recipe.yaml:12` or the override's text); None for a default."""
        return self._origins.get(present_key(dotted))

    @property
    def spelling(self) -> Spelling:
        """The names under which the keys were given; for messages."""
        return self._spelling

    @property
    def notes(self) -> Sequence[str]:
        """What of the given configuration has no effect, and why; for the first screen."""
        return tuple(self._notes)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts, lists and scalars, every key present."""
        return self.model_dump(mode="python")

    @property
    def references(self) -> Mapping[str, object]:
        """The keys whose values come from environment variables, dotted -> the value with its `${oc.env:…}`."""
        return self._references

    def to_stored(self) -> dict[str, Any]:
        """As `to_dict`, but as `references` has them: for files and logs, which others may read."""
        values = self.to_dict()
        for dotted, written in self._references.items():
            set_value(values, dotted, written)
        return values

    def to_yaml(self, *, as_given: bool = False) -> str:
        """The recipe as YAML that loads back to an equal one, in the same environment: `references` stay.

        Args:
            as_given: leave `actor` out where the given recipe does. Stored recipes always have it.
        """
        from shardtune.config.yaml_text import yaml_text

        values = escape_interpolation(self.to_dict())
        assert isinstance(values, dict)
        for dotted, written in self._references.items():
            set_value(values, dotted, written)
        if as_given and not self._spelling.long:
            values |= values.pop(ACTOR)
        return yaml_text(values)
