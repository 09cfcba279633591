"""Models whose packed rows are computed as each alone only up to some length, which the packing probe cannot see: it
computes the first tokens of two rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig


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
    # Layers of Llama 4 and MiniMax M3 see less than a whole row, by masks that attention over packed rows leaves out.
    chunk, blocks, size = (values.get(key) for key in ("attention_chunk_size", "index_topk_blocks", "index_block_size"))
    if chunk:
        yield chunk, "attention is within chunks (attention_chunk_size)"
    if blocks and size:
        yield blocks * size, "attention is to chosen blocks (index_topk_blocks)"
