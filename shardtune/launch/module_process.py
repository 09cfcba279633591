"""How this package starts its own modules in new processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PACKAGE_ROOT = str(Path(__file__).parents[2])
"""The directory that the package is imported from."""


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module.

    With `-P` the working directory is not on Python's path: by default it is the first place that every `import` looks
    at, so a file there named like an installed package would be executed instead.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """The variables of such a process. In the package's own checkout, which need not be installed, it is found too."""
    found = os.environ.get("PYTHONPATH")
    if os.getcwd() != PACKAGE_ROOT or PACKAGE_ROOT in (found or "").split(os.pathsep):
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (found, PACKAGE_ROOT)))}


def leave_out_working_directory() -> None:
    """Take the working directory, which `python -m` puts first, off the path of this process."""
    here = os.getcwd()
    if sys.path[:1] != [here]:
        return
    del sys.path[0]
    if here == PACKAGE_ROOT and here not in sys.path:  # not installed: later imports need it
        sys.path.append(here)
