"""The versions that manifests and reports name."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from shardtune.run.versions import installed_version

ROOT = Path(__file__).resolve().parents[2]


def test_a_package_without_metadata_has_no_version_and_is_no_error() -> None:
    assert installed_version("torch") == version("torch")
    assert installed_version("no-such-package") == "not installed"


def test_the_version_of_sources_that_are_not_installed(tmp_path: Path) -> None:
    """A copy of the package on the path of an interpreter that has not installed it."""
    (tmp_path / "shardtune").symlink_to(ROOT / "shardtune")
    code = (
        f"import sys; sys.path = [{str(tmp_path)!r}, *(path for path in sys.path if path != {str(ROOT)!r})]; "
        "sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in getattr(finder, '__module__', '')]; "
        "import importlib.metadata as metadata; "
        "real = metadata.Distribution.from_name.__func__; "
        "metadata.Distribution.from_name = classmethod("
        "lambda cls, name: (_ for _ in ()).throw(metadata.PackageNotFoundError(name)) if name == 'shardtune' "
        "else real(cls, name)); "
        "from shardtune.run.directory import environment; print(environment()['shardtune'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.strip() == "not installed"
