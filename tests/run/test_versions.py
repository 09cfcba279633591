"""The versions that manifests and reports name."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest

from shardtune.run import versions
from shardtune.run.directory import environment


def test_a_package_without_metadata_has_no_version_and_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the sources of a checkout that is not installed."""
    assert environment()["shardtune"] == version("shardtune")

    def of_others(name: str) -> str:
        if name == "shardtune":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(versions, "version", of_others)
    assert environment()["shardtune"] == "not installed"
    assert environment()["numpy"] == version("numpy")
