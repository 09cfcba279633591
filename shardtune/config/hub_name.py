"""Names on the Hub with a revision, as the Hub's own paths have it: `owner/name@v1.0`."""

from __future__ import annotations

import re
from pathlib import Path

_WITH_REVISION = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?(?::[\w.-]+)?)@(?P<revision>\w[\w./-]*)"
)


def split_revision(path: str) -> tuple[str, str | None]:
    """A name, and the branch, tag or commit behind its @; a path that exists, and any other, is returned as it is.

    Worked example: `Qwen/Qwen3-0.6B@refs/pr/7` is `Qwen/Qwen3-0.6B` and `refs/pr/7`; of a data set with a
    configuration, `owner/name:main@v2`, the name is `owner/name:main`.
    """
    found = _WITH_REVISION.fullmatch(path)
    if found is None or Path(path).exists():
        return path, None
    return found["name"], found["revision"]
