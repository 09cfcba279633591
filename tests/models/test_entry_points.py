"""Sharding gathers the weights for every method of a root that uses them: each is one of its `entry_points`."""

from __future__ import annotations

from types import FunctionType

import pytest

from shardtune.models.action.acting import ActingRoot
from shardtune.models.action.vision_language_action import ActionRoot
from shardtune.models.adapter import AdapterRoot
from shardtune.models.language_model import LanguageRoot
from shardtune.models.whole_step_adapter import WholeStepRoot


@pytest.mark.parametrize("root", [AdapterRoot, WholeStepRoot, LanguageRoot, ActingRoot, ActionRoot])
def test_entry_points_are_the_methods_that_use_the_weights(root: type[AdapterRoot]) -> None:
    own = [kind for kind in root.__mro__ if issubclass(kind, AdapterRoot)]
    methods = {name: value for kind in own for name, value in vars(kind).items() if isinstance(value, FunctionType)}
    using = {name for name, method in methods.items() if "model" in method.__code__.co_names} - {"__init__", "forward"}
    assert using == set(root.entry_points)
    assert len(root.entry_points) == len(using)
