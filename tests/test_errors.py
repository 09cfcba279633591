"""Errors of a disk that is full, read-only or broken, wherever they come from."""

from __future__ import annotations

import errno
import os

import pytest

from shardtune.errors import ConfigError, disk_error, disk_errors


def failing() -> None:
    try:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    except OSError as error:
        raise RuntimeError("a package's own words") from error


def test_the_cause_is_found_below_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        failing()
    found = disk_error(caught.value)
    assert found is not None
    assert found.what == "a file cannot be written: Read-only file system"
    assert found.where is not None
    assert "test_errors.py" in found.where, "without the name of a file it is the line"
    assert found.remedy is not None
    assert "mount" in found.remedy


def test_packages_in_rust_have_it_in_their_text() -> None:
    found = disk_error(Exception("Error while serializing: I/O error: No space left on device (os error 28)"))
    assert found is not None
    assert "No space left on device" in found.what
    assert disk_error(Exception("no such file (os error 2)")) is None


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "gone", "f"), ValueError("x"), ConfigError("y")])
def test_others_stay_what_they_are(error: Exception) -> None:
    assert disk_error(error) is None
    with pytest.raises(type(error)), disk_errors():
        raise error
