"""The memory of a rank."""

from __future__ import annotations

from dataclasses import dataclass

from shardtune.parallel.cost.shape import ModelShape, Parts, Setting, Work

LOGITS_PER_CHUNK = 2**26
"""Of the head on a GPU, see `loss.py`."""
LOGIT_COPIES = 3
"""Of a chunk's logits at once: they, what replaces them, and the half-precision gradient."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a rank at the step's fullest moment, on the device unless noted otherwise.

    Attributes:
        weights: its shards, as they are kept.
        moments: the optimizer's two.
        gradients: after the reduction, its shards.
        gathered: weights in compute precision that are whole at one time.
        unreduced: gradients that wait for their reduction, and the head's.
        activations: that the backward pass needs, and one chunk of logits.
        host: bytes in host memory (`cpu_offload`).
    """

    weights: float
    moments: float
    gradients: float
    gathered: float
    unreduced: float
    activations: float
    host: float = 0.0

    @property
    def lasting(self) -> float:
        return self.weights + self.moments + self.gradients

    @property
    def device(self) -> float:
        return self.lasting + self.gathered + self.unreduced + self.activations


def memory(shape: ModelShape, setting: Setting, work: Work) -> Memory:
    """The memory of a rank."""
    parts, ranks = Parts.of(shape, setting.layout), setting.layout.num_ranks
    own = parts.dense / setting.shards + parts.layers * parts.experts * setting.layout.expert / ranks
    weights, gradients, moments, host = setting.master * own, setting.sums * own, 2 * setting.moment * own, 0.0
    if setting.cpu_offload:
        weights, moments, gradients, host = 0.0, 0.0, 0.0, weights + gradients + moments
    if waiting_gradients(shape, setting, work):
        gradients = 0.0  # until they are reduced, whole gradients stand in for the shards
    unreduced, active = max(_moments(shape, parts, setting, work), key=sum)
    return Memory(weights, moments, gradients, gathered(parts, setting), unreduced, active, host)


def waiting_gradients(shape: ModelShape, setting: Setting, work: Work) -> float:
    """Bytes of gradients that wait, whole and in full precision, for the step's last micro-batch."""
    if setting.reduce == "every" or work.micro_batches == 1 or setting.layout.num_ranks == 1:
        return 0.0
    parts = Parts.of(shape, setting.layout)
    return setting.sums * (parts.all + parts.embedding)


def gathered(parts: Parts, setting: Setting, *, buffers: bool = True) -> float:
    """Bytes of weights that are whole at one time, at most: the outermost unit's, a layer's and the next ones'.

    One rank has no FSDP2: it keeps weights that compute beside those in full precision.

    Args:
        parts: of the model.
        setting: of the recipe.
        buffers: count what arrives once more, from which it is copied into weights.
    """
    compute = setting.compute
    if setting.layout.num_ranks == 1:
        return compute * parts.all if compute != setting.master else 0.0
    if not setting.reshard_after_forward:
        return compute * parts.all
    layers = min(1 + setting.prefetch, parts.layers) * (2 if buffers else 1)
    return compute * (parts.outside + layers * (parts.unit + parts.experts))


Moment = tuple[float, float]
"""Bytes of unreduced gradients, and of activations."""


def _moments(shape: ModelShape, parts: Parts, setting: Setting, work: Work) -> tuple[Moment, Moment, Moment]:
    """At the loss, inside the last layer's backward pass, and at the end of it, when the outermost unit is reduced."""
    alone = setting.layout.num_ranks == 1
    whole = waiting_gradients(shape, setting, work)
    head = head_gradient(shape, setting)
    logits = min(LOGITS_PER_CHUNK, work.targets / setting.layout.sequence * shape.vocabulary)
    chunk = LOGIT_COPIES * 4 * logits / setting.layout.tensor
    active = activations(shape, setting, work)
    # A reduction holds its input in full precision beside the gradients that were copied into it.
    each = setting.compute + (0 if alone else setting.sums)
    root = setting.compute * (parts.outside + parts.embedding)
    backward = root + each * (parts.unit + parts.experts)
    end = root + (0 if alone else setting.sums) * parts.outside
    return (whole + head, active + chunk), (whole + backward, active), (whole + end, 0.0)


def head_gradient(shape: ModelShape, setting: Setting) -> float:
    """Bytes of the head's gradient, which the loss's forward pass makes and its backward pass returns."""
    return setting.sums * shape.embedding / setting.layout.tensor


def layer_activations(shape: ModelShape, setting: Setting) -> float:
    """Bytes per token that one layer keeps for its backward pass.

    A norm keeps its input in at least fp32, what it has normalised and its result; attention its queries, keys, values,
    result and a sum per head; a gated feed-forward layer the gate before and after its activation, the other half and
    their product. Norms are not cut among tensor ranks.
    """
    compute, tensor = setting.compute, setting.layout.tensor
    ring = setting.layout.rings(shape.heads, shape.kv_heads)
    repeated = tensor if ring else max(tensor, setting.layout.sequence)
    kv = max(shape.kv_width, shape.head_size * repeated)
    norms = 2 * shape.width * norm_bytes(setting)
    attention = compute * (2 * shape.query_width + 2 * kv) + 4 * shape.heads
    if shape.head_norms:
        attention += norm_bytes(setting) * (shape.query_width + kv)
    if shape.experts:
        inside = shape.experts_per_token * compute * (4 * shape.intermediate + 2 * shape.width)
        return norms + attention / tensor + inside
    return norms + (attention + compute * 4 * shape.intermediate) / tensor


def selected_activations(shape: ModelShape, setting: Setting) -> float:
    """Bytes per token that a layer keeps with selective checkpointing: its input, the results of its matrix products
    and that of attention."""
    kv = max(shape.kv_width, shape.head_size * setting.layout.tensor)
    inside = 2 * shape.query_width + 2 * kv + 2 * shape.intermediate * max(1, shape.experts_per_token)
    return setting.compute * (3 * shape.width + inside / setting.layout.tensor)


def norm_bytes(setting: Setting) -> int:
    """Per number of a norm's input."""
    return max(4, setting.compute) + 2 * setting.compute


def activations(shape: ModelShape, setting: Setting, work: Work) -> float:
    """Bytes that a micro-batch keeps from its forward to its backward pass."""
    tokens = work.tokens / setting.layout.sequence
    layer = layer_activations(shape, setting)
    if setting.gradient_checkpointing == "selective":
        layers = shape.layers * selected_activations(shape, setting) + layer
    elif setting.gradient_checkpointing:
        layers = shape.layers * setting.compute * shape.width + layer
    else:
        layers = shape.layers * layer
    at_head = shape.width * (work.targets / setting.layout.sequence) * (setting.compute + setting.sums)
    return tokens * (layers + shape.width * norm_bytes(setting)) + at_head
