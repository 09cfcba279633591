"""A recipe as an OmegaConf config that can be turned back into the same recipe."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from shardtune.config.keys import KEYS
from shardtune.config.recipe_file import unresolved
from shardtune.config.schema import ACTOR, ACTOR_KEYS, OTHER_KEYS, Recipe, Spelling
from shardtune.config.tree import Tree, copied, get_value, set_value, take_value
from shardtune.config.values import escape_interpolation


def as_dict_config(recipe: Recipe) -> DictConfig:
    """A recipe's values as an OmegaConf config, in which nothing is interpolated.

    A key with two names has its value under both, and `actor.` may be left out. `load_recipe` turns an unchanged
    config back into the recipe, with the places where its values were given.
    """
    values = recipe.to_dict()
    for theirs, ours in OTHER_KEYS.items():
        set_value(values, theirs, get_value(values, ours))
    return RecipeConfig(escape_interpolation(values), recipe)


class RecipeConfig(DictConfig):
    """The values of a recipe, as workers and registered functions read them: `cfg.optim` is `cfg.actor.optim`.

    Args:
        values: of the recipe.
        recipe: with the places where the values were given, which error messages name.
    """

    def __init__(self, values: object, recipe: Recipe) -> None:
        super().__init__(values)
        vars(self)["_recipe"] = recipe  # an attribute, not a key
        vars(self)["_given"] = self._now()

    def _get_child(self, key: Any, *args: Any, **kwargs: Any) -> Any:
        """Every way of reading a key comes here; those of `actor` are found without it."""
        holder = self._holder(key)
        return super()._get_child(key, *args, **kwargs) if holder is self else holder._get_child(key, *args, **kwargs)

    def __setitem__(self, key: Any, value: Any) -> None:
        holder = self._holder(key)
        if holder is self:
            super().__setitem__(key, value)
        else:
            holder[key] = value

    def __setattr__(self, key: str, value: Any) -> None:
        holder = self._holder(key)
        if holder is self:
            super().__setattr__(key, value)
        else:
            holder[key] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> DictConfig:
        copy = super().__deepcopy__(memo)  # a DictConfig, whatever the class
        object.__setattr__(copy, "__class__", type(self))
        vars(copy).update(_recipe=self.__dict__["_recipe"], _given=self.__dict__["_given"])
        return copy

    def _holder(self, key: object) -> DictConfig:
        """The section that a key at the top is in: `actor`, for one of its keys."""
        if key not in ACTOR_KEYS or key in self.keys():
            return self
        actor = super()._get_child(ACTOR)
        return actor if isinstance(actor, DictConfig) else self

    @property
    def spelling(self) -> Spelling:
        """The names under which the keys of the recipe were given."""
        return self.__dict__["_recipe"].spelling

    def unchanged_recipe(self) -> Recipe | None:
        """The recipe; None if a value has been changed here."""
        return self.__dict__["_recipe"] if self._now() == self.__dict__["_given"] else None

    def places(self) -> dict[str, str]:
        """Where the values that have not been changed were given, by dotted key."""
        recipe, changed = self.__dict__["_recipe"], {OTHER_KEYS.get(name, name) for name in self._changed()}
        return {
            dotted: place for dotted in KEYS if (place := recipe.where(dotted)) is not None and dotted not in changed
        }

    def tree(self) -> Tree:
        """The values; of a key with two names, under the one whose value has been changed here, if one has."""
        values, changed = copied(self._now()), self._changed()
        for theirs, ours in OTHER_KEYS.items():
            if theirs not in changed:
                take_value(values, theirs)
            elif ours not in changed:
                take_value(values, ours)
        return values

    def _changed(self) -> set[str]:
        """The names of keys whose values have been changed here."""
        before, now = self.__dict__["_given"], self._now()
        return {name for name in (*KEYS, *OTHER_KEYS) if get_value(before, name) != get_value(now, name)}

    def _now(self) -> dict[str, object]:
        return unresolved(self)
