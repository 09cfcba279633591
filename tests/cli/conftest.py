"""A user's directory for tests of commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from tests.support.workspace import make_workspace


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's directory, which is the working directory of a file's tests."""
    folder = make_workspace(tmp_path_factory.mktemp("user") / "work")
    with chdir(folder):
        yield folder
