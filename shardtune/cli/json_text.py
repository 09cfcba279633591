"""What a command prints as JSON: for any parser, and for a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from shardtune.errors import CONTROL


def json_text(value: object, *, indent: int | None = None) -> str:
    """A value as JSON: numbers that are not finite are null, characters that control a terminal are escaped.

    What JSON has no form for, such as a date, is written as text; of bytes, such as an image's, their number.
    """
    text = json.dumps(_finite(value), ensure_ascii=False, default=_as_text, indent=indent)
    return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _as_text(value: object) -> str:
    return f"<{len(value):,} bytes>" if isinstance(value, bytes | bytearray | memoryview) else str(value)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
