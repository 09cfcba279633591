"""The names of keys in messages: those that the user wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from shardtune.config.schema.key_names import ACTOR, ACTOR_KEYS, short_key
from shardtune.errors import ShardtuneError

_KEY = re.compile(rf"(?<![\w./$-])(?:runner|{ACTOR}|data|eval)(?:\.[A-Za-z_]\w*)+")


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a user writes keys.

    Attributes:
        written: present key, long -> the name under which it was given last.
        long: whether keys that were not given are named with `actor.`.
    """

    written: Mapping[str, str] = field(default_factory=dict)
    long: bool = True

    def of(self, key: str) -> str:
        """A key, or a name below one, as the user writes it."""
        parts = key.split(".")
        for end in range(len(parts), 0, -1):
            name = ".".join(parts[:end])
            if name in self.written:
                return ".".join([self.written[name], *parts[end:]])
        return short_key(key) if not self.long and len(parts) > 1 and parts[1] in ACTOR_KEYS else key

    def in_text(self, text: str) -> str:
        """A message in which every key is named as the user writes it."""
        return _KEY.sub(lambda found: self.of(found[0]), text)

    def respell(self, error: ShardtuneError) -> None:
        """Name the keys in an error as the user writes them; a place in a file stays, and what quotes the user."""
        error.what = self.in_text(error.what)
        error.remedy = error.remedy and self.in_text(error.remedy)
        if error.where and _KEY.match(error.where):
            error.where = self.in_text(error.where)
        error.args = (error.what, error.where, error.remedy)

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Respells an error that passes."""
        try:
            yield
        except ShardtuneError as error:
            self.respell(error)
            raise
