"""The inputs of cost formulas: the sizes of a model, the keys of a recipe, a rank's share of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardtune.config.rank_layout import Layout
from shardtune.parallel.cost.experts import Experts

COMPUTE_BYTES: Mapping[str, int] = {"bf16": 2, "pure_bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
MASTER_BYTES: Mapping[str, int] = {"bf16": 4, "pure_bf16": 2, "fp16": 4, "fp32": 4, "fp64": 8}
SUM_BYTES: Mapping[str, int] = {"bf16": 4, "pure_bf16": 4, "fp16": 4, "fp32": 4, "fp64": 8}
MOMENT_BYTES: Mapping[str, float] = {"bf16": 2, "int8": 1 + 4 / 256}
"""Of moments that are not kept as gradients are summed; int8 has a scale in fp32 for each 256 numbers."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder that its costs depend on: gated feed-forward layers, RMS norms, grouped-query attention.

    Attributes:
        width: of hidden states.
        layers: decoder layers.
        heads: of queries.
        kv_heads: of keys and values.
        head_size: of one head.
        intermediate: width inside a feed-forward layer, or inside one expert.
        vocabulary: tokens.
        tied: whether the head is the embedding.
        biased: whether queries, keys and values have biases (Qwen2).
        head_norms: whether queries and keys are normalised head by head (Qwen3, Gemma 3).
        experts: of a layer; 0 where the feed-forward layer is dense.
        experts_per_token: that a token is sent to, the most of any layer.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    biased: bool = False
    head_norms: bool = False
    experts: int = 0
    experts_per_token: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """From the values of a `config.json` of transformers.

        Raises:
            KeyError: it lacks a size, or names experts and not how many a token is sent to.
        """
        heads = config["num_attention_heads"]
        experts = Experts.of(config)
        inside = None if experts is None else config.get("moe_intermediate_size")
        return cls(
            width=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=inside or config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings")),
            biased=bool(config.get("attention_bias", config.get("model_type") == "qwen2")),
            head_norms=str(config.get("model_type")).startswith(("qwen3", "gemma3")),
            experts=0 if experts is None else experts.number,
            experts_per_token=0 if experts is None else max(experts.per_token),
        )

    @property
    def query_width(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def attention(self) -> int:
        """Parameters of a layer's matrices and biases of attention."""
        biases = self.query_width + 2 * self.kv_width if self.biased else 0
        return self.width * (2 * self.query_width + 2 * self.kv_width) + biases

    @property
    def key_value(self) -> int:
        """Parameters of a layer's projections to keys and values."""
        return 2 * self.kv_width * (self.width + (1 if self.biased else 0))

    @property
    def feed_forward(self) -> int:
        """Parameters of a layer's feed-forward matrices, or of one expert's."""
        return 3 * self.width * self.intermediate

    @property
    def norms(self) -> int:
        """Parameters of a layer that are not cut among tensor ranks: of norms, and of a router."""
        return (2 + self.experts) * self.width + (2 * self.head_size if self.head_norms else 0)

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.width

    @property
    def unit(self) -> int:
        """Parameters of a layer."""
        return self.attention + self.feed_forward * max(1, self.experts) + self.norms

    @property
    def outside(self) -> int:
        """Parameters outside of layers: the embedding, the head, the last norm."""
        return self.embedding * (1 if self.tied else 2) + self.width

    @property
    def parameters(self) -> int:
        return self.layers * self.unit + self.outside

    @property
    def multiplied(self) -> int:
        """Parameters that a token is multiplied with: the head, and of experts those that it is sent to."""
        active = self.attention + self.feed_forward * max(1, self.experts_per_token) + self.norms
        return self.layers * active + self.embedding


@dataclass(frozen=True, slots=True)
class Setting:
    """How a model is trained: the keys of a recipe that change what a step costs.

    Attributes:
        layout: of the ranks.
        precision: bf16 | pure_bf16 | fp16 | fp32 | fp64.
        reduce: last | every micro-batch.
        reshard_after_forward: free a unit's weights between forward and backward.
        prefetch: how many units ahead weights are gathered.
        gradient_checkpointing: compute each layer again in the backward pass; selective: but for its matrix products.
        cpu_offload: keep weights, gradients and moments in host memory.
        state_dtype: how moments are kept: fp32 (that is, as gradients are summed) | bf16 | int8.
    """

    layout: Layout
    precision: str = "bf16"
    reduce: Literal["last", "every"] = "last"
    reshard_after_forward: bool = True
    prefetch: int = 1
    gradient_checkpointing: bool | str = False
    cpu_offload: bool = False
    state_dtype: str = "fp32"

    @property
    def compute(self) -> int:
        """Bytes of a number that is multiplied."""
        return COMPUTE_BYTES[self.precision]

    @property
    def master(self) -> int:
        """Bytes of a weight that is kept."""
        return MASTER_BYTES[self.precision]

    @property
    def sums(self) -> int:
        """Bytes of a number that is summed."""
        return SUM_BYTES[self.precision]

    @property
    def moment(self) -> float:
        """Bytes of a number of each of the optimizer's two moments."""
        return MOMENT_BYTES.get(self.state_dtype, self.sums)

    @property
    def shards(self) -> int:
        """Ranks among which the weights of a copy are sharded."""
        return self.layout.shard * self.layout.sequence


@dataclass(frozen=True, slots=True)
class Work:
    """What a rank computes in a step. Ranks that share rows (sequence, tensor) have the same.

    Attributes:
        tokens: of a micro-batch.
        micro_batches: of the step.
        targets: of a micro-batch.
        length: mean length of a row.
    """

    tokens: float
    micro_batches: int
    targets: float
    length: float

    @classmethod
    def of(cls, step_tokens: int, layout: Layout, most: int, length: int, trained: float = 1.0) -> Work:
        """A step's tokens dealt to ranks, at most `most` to a micro-batch."""
        each = step_tokens / layout.num_data_ranks
        micro_batches = max(1, math.ceil(each / most))
        tokens = each / micro_batches
        return cls(tokens, micro_batches, tokens * trained, min(length, tokens))


@dataclass(frozen=True, slots=True)
class Parts:
    """The parameters that a rank works with, which are those that FSDP2 shards further.

    Attributes:
        unit: of a layer, without experts that are spread.
        outside: of what is outside of layers.
        experts: of a layer's experts that are spread, this rank's; 0 where they are a part of the unit.
        embedding: of the embedding that are other tensor ranks'; its gradient is whole on each until it is reduced.
        layers: of the model.
    """

    unit: float
    outside: float
    experts: float
    embedding: float
    layers: int

    @property
    def dense(self) -> float:
        return self.layers * self.unit + self.outside

    @property
    def all(self) -> float:
        return self.dense + self.layers * self.experts

    @classmethod
    def of(cls, shape: ModelShape, layout: Layout) -> Parts:
        """Matrices, the embedding among them, are cut among tensor ranks; norms and a router are not."""
        tensor = layout.tensor
        repeated = shape.key_value if tensor > shape.kv_heads else 0  # every rank has all keys and values
        attention = (shape.attention - repeated) / tensor + repeated
        feed_forward = shape.feed_forward / tensor if not shape.experts else shape.experts * shape.feed_forward
        spread = layout.expert > 1
        unit = attention + shape.norms + (0 if spread else feed_forward)
        outside = (shape.outside - shape.width) / tensor + shape.width
        elsewhere = 0 if shape.tied else shape.embedding * (1 - 1 / tensor)
        return cls(unit, outside, feed_forward / layout.expert if spread else 0, elsewhere, shape.layers)
