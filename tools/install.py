"""Installs shardtune for its developers, with pinned versions, into the environment whose Python runs this.

    .venv/bin/python tools/install.py constraints.txt

uv installs in a third of pip's time. It does not read pip's settings (indexes, certificates), so it is given them here.
Where uv cannot be had, or ends with an error, pip installs.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping

WHAT = ("-e", ".[dev]")
AS_UV_HAS_THEM = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
}
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def settings(listed: str) -> dict[str, str]:
    """pip's settings as variables for uv.

    Args:
        listed: by `pip config list`: a line `global.index-url='…'` for each, or `:env:.index-url='…'`, which counts
            where both are there. Several values of one are separated by blanks or lines.
    """
    found: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        variable = AS_UV_HAS_THEM.get(name.rpartition(".")[2])
        if variable is not None:
            found[variable] = " ".join(str(ast.literal_eval(value)).split())
    if "UV_FIND_LINKS" in found:
        found["UV_FIND_LINKS"] = found["UV_FIND_LINKS"].replace(" ", ",")
    return found


def with_uv(constraints: str) -> bool:
    """Install with uv; returns whether that worked."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True)
    if listed.returncode or subprocess.run([*PIP, "install", "--quiet", "-c", constraints, "uv"]).returncode:
        return False
    environment: Mapping[str, str] = {
        "UV_INDEX_STRATEGY": "unsafe-best-match",  # pip's: the newest version of any index
        **settings(listed.stdout),
        **os.environ,
    }
    uv = (sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable)
    return subprocess.run([*uv, "-c", constraints, *WHAT], env=environment).returncode == 0


def main(constraints: str) -> int:
    if with_uv(constraints):
        return 0
    print("uv did not install everything: pip does", file=sys.stderr, flush=True)
    return subprocess.run([*PIP, "install", "-c", constraints, *WHAT]).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
