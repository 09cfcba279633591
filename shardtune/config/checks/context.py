"""What the checks of a recipe share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from shardtune.config.layers import Merged
from shardtune.config.schema import Recipe
from shardtune.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Context:
    """A recipe, the keys that were given, and the keys whose values are passed as objects."""

    recipe: Recipe
    given: Merged
    in_memory: Collection[str]

    def problem(self, key: str, what: str, remedy: str) -> ConfigError:
        return ConfigError(what, where=self.recipe.where(key), remedy=remedy)

    def idle(self, section: str, given: Mapping[str, object], why: str, remedy: str) -> Iterator[ConfigError]:
        """One message for all keys of a section that have no effect; none where none is given."""
        keys = [f"{section}.{name}" for name in given]
        if keys:
            have = "has" if len(keys) == 1 else "have"
            yield self.problem(keys[0], f"{enumerated(keys)} {have} no effect {why}", remedy)

    @property
    def has_eval_data(self) -> bool:
        data = self.recipe.data
        return data.eval_data_paths is not None or data.eval_split > 0 or "data.eval_data_paths" in self.in_memory

    @property
    def evaluates(self) -> bool:
        """Whether there are rows, episodes or tasks to evaluate on."""
        evaluation = self.recipe.eval
        return self.has_eval_data or evaluation.environment is not None or bool(evaluation.harness)


def enumerated(names: Collection[str]) -> str:
    """Names in a sentence: a, b and c."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
