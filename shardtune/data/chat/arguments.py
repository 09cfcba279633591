"""Arguments of a chat template: values that a recipe or a row gives it, such as `enable_thinking` or a date."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping
from datetime import date
from typing import Any

from jinja2 import meta
from transformers.utils.chat_template_utils import _compile_jinja_template

from shardtune.data.messages import excerpt

DATE = "strftime_now"
"""The function with which templates print today's date; as an argument it is a date, 2025-01-31."""
# A template that prints today's date would render the same row differently tomorrow.
FIXED_DATE = date(2025, 1, 1)
_GIVEN = {
    *("messages", "tools", "add_generation_prompt"),
    *("chat_template", "conversation", "conversations", "continue_final_message", "return_assistant_tokens_mask"),
    *("tokenize", "return_dict", "return_tensors"),
}
"""Names that the arguments of `apply_chat_template` have, and that mean nothing as arguments of a template."""
_DATE_CALL = re.compile(r"strftime_now\(\s*(\"[^\"]*\"|'[^']*')\s*\)")

Arguments = Mapping[str, Any]


def variables(text: str) -> frozenset[str]:
    """The names that a template looks up and does not define itself."""
    found = meta.find_undeclared_variables(_compile_jinja_template(text).environment.parse(text))
    return frozenset({*found, DATE} if DATE in text else found)  # functions of the environment are not among them


def fault(given: Arguments, reads: Iterable[str], special: Iterable[str]) -> str | None:
    """Why a template cannot take arguments; None where it takes all of them.

    Args:
        given: by name.
        reads: `variables` of the template.
        special: names of special tokens, which a template reads besides.
    """
    known = sorted(set(reads) - _GIVEN - set(special))
    for name, value in given.items():
        if name in _GIVEN:
            return f"{name!r} is no argument for the template: it comes from the row"
        if name not in reads:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it reads {', '.join(known) or 'none'}"
            return f"the chat template does not read the argument {name!r}: {hint}"
        if name == DATE and _date(value) is None:
            return f"{DATE} is {excerpt(value)}, not the date that the template is to print, as 2025-01-31"
        if not _is_plain(value):
            return f"the argument {name!r} is {excerpt(value)}, which is no text, number, truth value, list or mapping"
    return None


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(one) for name, one in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _date(value: object) -> date | None:
    try:
        return date.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None


def with_date(text: str, value: object = None) -> str:
    """The template with `strftime_now` giving a fixed date, by default `FIXED_DATE`, in the formats that it uses."""
    if DATE not in text:
        return text
    fixed = _date(value) or FIXED_DATE
    formats = sorted({call[1:-1] for call in _DATE_CALL.findall(text)})
    cases = "".join(f"{{%- if format == {known!r} %}}{fixed.strftime(known)}{{% else %}}" for known in formats)
    body = cases + fixed.isoformat() + "{% endif %}" * len(formats)
    return f"{{% macro strftime_now(format) %}}{body}{{% endmacro +%}}{text}"


def with_defaults(text: str, given: Arguments) -> str:
    """The template that renders, given no arguments, as this one does with them; other values may still be given.

    Worked example: with `enable_thinking: false` it begins with
    `{%- if enable_thinking is not defined %}{%- set enable_thinking = false %}{%- endif %}` and a line break, which
    transformers and those who read templates like it leave out behind a block.
    """
    opening = ""
    for name, value in given.items():
        if name == DATE:
            continue
        lacking = f"{name} is not defined" + (f" or {name} is none" if name == "documents" else "")
        opening += f"{{%- if {lacking} %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}\n"
    if text.startswith(opening):  # the template of a directory that training wrote
        return text
    return opening + (with_date(text, given[DATE]) if DATE in given else text)


def _literal(value: object) -> str:
    """A value as Jinja writes it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(name)}: {_literal(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return repr(value)
