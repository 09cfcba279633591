"""How many experts the layers of a model have, and how many of them a token is sent to, by its config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NUMBER = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts",
)  # fmt: skip
_SWITCHES = ("is_moe", "enable_moe_block")
"""Keys that are false where all layers are dense, whatever number of experts is named."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a mixture's layers.

    Attributes:
        number: of a layer, those that all tokens pass through left out.
        per_token: that a token is sent to, in each layer.
    """

    number: int
    per_token: tuple[int, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Experts | None:
        """From the values of a `config.json` of transformers; None where it names no experts.

        Raises:
            KeyError: it names experts, but not how many of those with weights a token is sent to.
        """
        number = next(filter(None, map(config.get, _NUMBER)), 0)
        if not number or any(config.get(key) is False for key in _SWITCHES):
            return None
        per_token = next(filter(None, map(config.get, _PER_TOKEN)), None)
        if per_token is None or config.get("zero_expert_num"):  # as many as the router leaves (LongCat)
            raise KeyError(" or ".join(_PER_TOKEN))
        in_layers = per_token if isinstance(per_token, Sequence) else [per_token]
        return cls(number, tuple(in_layers[: config.get("num_hidden_layers")]))

    @property
    def mean(self) -> float:
        """The experts that a token is sent to, as a mean over layers."""
        return sum(self.per_token) / len(self.per_token)
