"""Secrets in text that others read: tokens and passwords are replaced before it is printed, logged or published."""

from __future__ import annotations

import os
import re

HIDDEN = "***"
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|glpat-[A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{16}"
    r"|wandb_v1_\w{16,})"
)
_IN_URL = re.compile(r"(?<=://)[^/\s@:]*:[^/\s@]+(?=@)")
_IN_QUERY = re.compile(r"(?i)(?<=[?&])((?:[\w-]*(?:token|key|secret|signature|password))=)[^&\s#'\"]+")
_VARIABLE = re.compile(r"(?i)(?:^|_)(?:token|key|secret|password|passwd|credentials)$")
_SHORTEST = 8


def without_secrets(text: str, *known: str | None) -> str:
    """Text without what looks like a secret, and without the values of environment variables that hold one.

    Those are the variables whose names end with TOKEN, KEY, SECRET, PASSWORD or CREDENTIALS.

    Args:
        text: any.
        known: further secrets.
    """
    values = [value for name, value in os.environ.items() if _VARIABLE.search(name) and not os.path.isabs(value)]
    for value in sorted({*values, *(one for one in known if one)}, key=len, reverse=True):
        if len(value) >= _SHORTEST:
            text = text.replace(value, HIDDEN)
    text = _IN_URL.sub(HIDDEN, _TOKEN.sub(HIDDEN, text))
    return _IN_QUERY.sub(rf"\1{HIDDEN}", text)
