"""Modules under the paths by which the documentation once named them: importing one gives the module itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

FORMER_PATHS = {
    "shardtune.conformance": "shardtune.verify.pytest",
    "shardtune.data.robot.statistics": "shardtune.data.action_statistics",
    "shardtune.data.template": "shardtune.data.chat.template",
    "shardtune.environment": "shardtune.models.action.environment",
    "shardtune.environments": "shardtune.evaluate.environments",
    "shardtune.models.acting": "shardtune.models.action.acting",
    "shardtune.models.action_policy": "shardtune.models.action.policy",
    "shardtune.models.actions": "shardtune.models.action.tokens",
    "shardtune.models.processors": "shardtune.models.vision.processors",
}
"""By the former path of a module or package; what lies in a package has moved with it."""


def present_path(name: str) -> str | None:
    """Where the module of a former path is today; None for any other name."""
    for former, present in FORMER_PATHS.items():
        if name == former or name.startswith(f"{former}."):
            return present + name.removeprefix(former)
    return None


class _Alias(Loader):
    """Loads a module by importing it under its present path."""

    def __init__(self, present: str) -> None:
        self._present = present
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._present)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module ran when it was imported; its spec, which the import system has replaced, is its own again."""
        module.__spec__ = self._spec


class FormerPaths(MetaPathFinder):
    """Finds the modules of `FORMER_PATHS`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        present = present_path(fullname)
        found = None if present is None else find_spec(present)
        if present is None or found is None:
            return None
        spec = ModuleSpec(fullname, _Alias(present), origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations  # for `pytest --pyargs`, which looks there
        return spec


def install() -> None:
    """Let the former paths be imported."""
    # In front: a package under its former path has the present one's folder, in which others would find its modules.
    sys.meta_path.insert(0, FormerPaths())
