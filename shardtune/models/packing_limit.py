"""Models whose packed rows are computed as each alone only up to some length, which the packing probe cannot see: it
computes the first tokens of two rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

BLOCKS = "attention is to chosen blocks of tokens (index_topk_blocks)"


@dataclass(frozen=True, slots=True)
class PackingLimit:
    """Up to where packing is exact.

    Attributes:
        tokens: of the longest row.
        reason: why not beyond.
    """

    tokens: int
    reason: str

    @classmethod
    def of(cls, config: PreTrainedConfig) -> PackingLimit | None:
        """The least limit of a model's config; None: there is none."""
        limits = _limits(config.get_text_config().to_dict())
        return min((cls(*limit) for limit in limits), key=lambda limit: limit.tokens, default=None)


def _limits(values: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    # transformers takes LongRoPE's short or long factors for a forward as a whole, by its largest position: a row of
    # 100 tokens has the short ones by itself, and the long ones if it is packed with a row of 5,000.
    rotary = values.get("rope_parameters") or {}
    for one in (rotary, *(of_a_kind for of_a_kind in rotary.values() if isinstance(of_a_kind, Mapping))):
        if one.get("rope_type") == "longrope":
            yield one["original_max_position_embeddings"], "longrope's factors depend on a forward's longest row"
    # Some layers see less than a whole row, by masks or indices that attention over packed rows leaves out.
    if values.get("attention_chunk_size"):
        yield values["attention_chunk_size"], "attention is within chunks (attention_chunk_size)"
    if values.get("index_topk"):
        yield values["index_topk"], "attention is to chosen tokens (index_topk)"
    if values.get("index_topk_blocks") and values.get("index_block_size"):
        yield values["index_topk_blocks"] * values["index_block_size"], BLOCKS
