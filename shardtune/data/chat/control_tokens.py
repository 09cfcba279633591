"""Special tokens in a text."""

from __future__ import annotations

import re
from collections.abc import Iterable


def matching_any(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of these texts, of several the longest; nothing if there are none.

    Alternatives one after another would all be tried at each `<` of a text, and a tokenizer may have thousands. Here
    they share their beginnings: of `<a>`, `<b>` and `<b>c` it is `<(?:a>|b>(?:c)?)`.
    """
    tree: dict[str, dict] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_written(tree) or r"(?!)")


def _written(node: dict[str, dict]) -> str:
    branches = [re.escape(character) + _written(inner) for character, inner in node.items() if character]
    joined = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})" if branches else ""
    return f"(?:{joined})?" if joined and "" in node else joined
