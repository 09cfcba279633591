"""The pytest options of the conformance kit."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shardtune", "conformance of an adapter (--pyargs shardtune.verify.pytest)")
    group.addoption("--adapter", metavar="file.py:Class", help="the adapter to check, or a recipe that names one")
    group.addoption("--recipe", metavar="recipe.yaml", help="whose model, options and training rows are taken")
