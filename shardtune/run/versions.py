"""Versions of installed packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version(package: str) -> str:
    """The version of a package; "not installed" of one that is missing, or is imported from its sources alone."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
