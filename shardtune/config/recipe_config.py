"""A recipe as an OmegaConf config that can be turned back into the same recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from shardtune.config.keys import KEYS
from shardtune.config.recipe_file import unresolved
from shardtune.config.tree import get_value

if TYPE_CHECKING:
    from shardtune.config.schema import Recipe


class RecipeConfig(DictConfig):
    """The values of a recipe, as workers and registered functions read them.

    Args:
        values: of the recipe.
        recipe: with the places where the values were given, which error messages name.
    """

    def __init__(self, values: object, recipe: Recipe) -> None:
        super().__init__(values)
        vars(self)["_recipe"] = recipe  # an attribute, not a key
        vars(self)["_given"] = self._now()

    def unchanged_recipe(self) -> Recipe | None:
        """The recipe; None if a value has been changed here."""
        return self.__dict__["_recipe"] if self._now() == self.__dict__["_given"] else None

    def places(self) -> dict[str, str]:
        """Where the values that have not been changed were given, by dotted key."""
        recipe, before, now = self.__dict__["_recipe"], self.__dict__["_given"], self._now()
        return {
            dotted: place
            for dotted in KEYS
            if (place := recipe.where(dotted)) is not None and get_value(before, dotted) == get_value(now, dotted)
        }

    def _now(self) -> dict[str, object]:
        return unresolved(self)
