"""Modules keep their former paths: one module under both names, whichever is imported first."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from shardtune.former_paths import FORMER_PATHS


@pytest.mark.parametrize("former", FORMER_PATHS)
def test_a_former_path_is_the_module_itself(former: str):
    module = import_module(former)
    present = import_module(FORMER_PATHS[former])
    assert module is present
    assert module.__name__ == FORMER_PATHS[former]
    assert module.__spec__ is not None
    assert module.__spec__.name == FORMER_PATHS[former]


def test_what_lies_in_a_package_is_not_loaded_twice():
    code = (
        "from shardtune.environments.point2d import Point2d as former\n"
        "from shardtune.evaluate.environments.point2d import Point2d\n"
        "from shardtune.environment import Environment\n"
        "print(former is Point2d, issubclass(Point2d, Environment), Point2d.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "shardtune.evaluate.environments.point2d"]


def test_a_wrong_name_is_an_ordinary_error():
    with pytest.raises(ModuleNotFoundError, match=r"shardtune\.environments\.nowhere"):
        import_module("shardtune.environments.nowhere")
