"""A configuration of verl with the defaults of the trainer that it is of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardtune.config.foreign import rules
from shardtune.config.foreign.conversion import Conversion
from shardtune.config.foreign.values import whole
from shardtune.config.foreign.verl_keys import OF_FSDP_TRAINER, OF_SFT_TRAINER

_OLDER = ("model.partial_pretrain", "model.fsdp_config", "model.strategy", "data.prompt_key", "data.multiturn")
"""Keys that `fsdp_sft_trainer` alone has."""


@dataclass(frozen=True, slots=True)
class Source:
    """A configuration of verl.

    Attributes:
        c: its conversion.
        is_older: whether it is of `fsdp_sft_trainer`, and not of `sft_trainer`.
    """

    c: Conversion
    is_older: bool

    @classmethod
    def of(cls, c: Conversion) -> Source:
        """Recognise the trainer by the keys."""
        return cls(c, not c.has("model.path") and not c.has("engine") and any(c.has(name) for name in _OLDER))

    @property
    def defaults(self) -> Mapping[str, object]:
        """The values of keys that are not given, where others are not ours."""
        return OF_FSDP_TRAINER if self.is_older else OF_SFT_TRAINER

    def get(self, name: str) -> object:
        """The value of a key, or its default."""
        return self.c.get(name, self.defaults.get(name))

    def origin(self, name: str) -> str:
        """The comment of a line: the key, or that it is a default."""
        return rules.origin(self.c, name)

    @property
    def sequence_key(self) -> str:
        """The key of the ranks that share a sequence."""
        return "ulysses_sequence_parallel_size" if self.is_older else "engine.ulysses_sequence_parallel_size"

    @property
    def sequence(self) -> int:
        """The ranks that share a sequence."""
        return max(1, whole(self.c.get(self.sequence_key)) or 1)

    @property
    def adapts(self) -> bool:
        """Whether LoRA is trained."""
        return self.c.has("model.lora_adapter_path") or (whole(self.c.get("model.lora_rank")) or 0) > 0
