"""Token cross-entropy without ever holding all logits, and the router's balance loss; always as sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from shardtune.models.head_gradient import HELD_BYTES, HeadGradient, SlopeOfBlock
from shardtune.parallel.half_products import add_converted, factors_in_bf16, lacks_half_products
from shardtune.parallel.second_derivatives import refuse_second_derivatives
from shardtune.parallel.tensor_parallel import Slice, row_slice
from shardtune.parallel.weights import local

LOGITS_PER_CHUNK = {"cpu": 3 * 2**21, "cuda": 2**26}
"""Logits in memory at a time (24 and 256 MiB in fp32), for any rows and vocabulary; a GPU needs many to be busy. On a
CPU glibc returns blocks of 32 MiB to the system whenever they are freed."""
KERNEL_ROWS = 64
"""Multiples of rows for which products are compiled."""


def chunk_rows(device: torch.device, vocabulary: int) -> int:
    """Number of targets whose logits are computed at a time.

    With a vocabulary of 151,936 a CPU takes 3 * 2^21 // 151936 = 41 rows: 60 targets are rows 0:41 and 41:82, where
    slicing ends the second chunk at row 60.
    """
    return max(1, LOGITS_PER_CHUNK.get(device.type, LOGITS_PER_CHUNK["cpu"]) // vocabulary)


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """A model's transform of its head's output before the softmax, as its config declares it.

    Attributes:
        scale: factor on the logits (Cohere's `logit_scale`, one over Granite's `logits_scaling`).
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma's `final_logit_softcapping`).
    """

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def backward_(self, grad: torch.Tensor, transformed: torch.Tensor) -> torch.Tensor:
        """The gradient with respect to the head's output from that with respect to the transformed logits, in place."""
        if self.softcap is not None:
            grad.mul_(1 - (transformed / self.softcap).square())
        if self.scale != 1.0:
            grad.mul_(self.scale)
        return grad


IDENTITY = LogitTransform()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are taken in: fp32 for half precision, otherwise the dtype itself."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The loss of a target t with logits x: `L - sum_v q_v x_v + z L^2`, where L = logsumexp(x).

    Attributes:
        smoothing: the part of q that is spread evenly over the vocabulary, the rest is on t (arXiv:1512.00567,
            section 7; as `F.cross_entropy(label_smoothing=...)`).
        z: weight of the z-loss, which draws the normaliser L towards 0 (PaLM, arXiv:2204.02311, section 5).
        by_probability: multiply by the probability of t, as a constant: dynamic fine-tuning (arXiv:2508.05629, eq. 9).
    """

    smoothing: float = 0.0
    z: float = 0.0
    by_probability: bool = False

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Losses [n] of logits [n, vocabulary] and targets [n]."""
        losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=self.smoothing)
        if self.by_probability:
            losses = losses * losses.detach().neg().exp()
        return losses + self.z * logits.logsumexp(-1).square() if self.z else losses

    def on_chunk(
        self,
        rows: slice,
        logits: torch.Tensor,
        index: torch.Tensor,
        scale: torch.Tensor,
        transform: LogitTransform,
        with_grad: bool,
        shared: SharedVocabulary | None,
        scored: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `ChunkLoss`; `scored` [2, rows, 1] is overwritten with each target's normaliser and final weight."""
        largest = logits.amax(-1, keepdim=True) if shared is None else shared.largest(logits)
        at_target = logits.gather(1, index) if shared is None else shared.at(logits, index)
        vocabulary = logits.shape[-1] if shared is None else shared.size
        if self.smoothing:
            whole = logits.sum(-1, keepdim=True) if shared is None else shared.sum(logits.sum(-1, keepdim=True))
            at_target = (1 - self.smoothing) * at_target + self.smoothing / vocabulary * whole
        # A soft cap's gradient needs the logits once more; without one their memory is reused for their gradient.
        powers = (logits - largest if transform.softcap is not None else logits.sub_(largest)).exp_()
        sums = powers.sum(-1, keepdim=True) if shared is None else shared.sum(powers.sum(-1, keepdim=True))
        normalizer = sums.log() + largest
        losses = normalizer - at_target
        if self.by_probability:
            scale = scale * losses.neg().exp()
        if self.z:
            losses += self.z * normalizer.square()
        losses = losses * scale
        if scored is not None:
            scored[0], scored[1] = normalizer, scale
        if not with_grad:
            return losses, None
        # d loss / d x_v = scale * (softmax_v * (1 + 2 z L) - q_v), where q_v is smoothing / vocabulary for every token
        # and 1 - smoothing more at the target. Of 3 tokens with target 1 and no smoothing: scale * (p0, p1 - 1, p2).
        factor = scale * (1 + 2 * self.z * normalizer) if self.z else scale
        grad, at_targets = powers.mul_(factor / sums), -(1 - self.smoothing) * scale
        grad = grad.scatter_add_(1, index, at_targets) if shared is None else shared.add_at(grad, index, at_targets)
        if self.smoothing:
            grad -= scale * (self.smoothing / vocabulary)
        return losses, grad if transform is IDENTITY else transform.backward_(grad, logits)

    def slope_of_block(self, transform: LogitTransform, vocabulary: int) -> SlopeOfBlock:
        """The same gradient for some tokens of a vocabulary, from normalisers that are known."""

        def slope(
            logits: torch.Tensor, index: torch.Tensor, here: torch.Tensor, normalizer: torch.Tensor, scale: torch.Tensor
        ) -> torch.Tensor:
            logits = logits if transform is IDENTITY else transform(logits)
            powers = (logits - normalizer if transform.softcap is not None else logits.sub_(normalizer)).exp_()
            grad = powers.mul_(scale * (1 + 2 * self.z * normalizer) if self.z else scale)
            grad = grad.scatter_add_(1, index, -(1 - self.smoothing) * scale * here)
            if self.smoothing:
                grad -= scale * (self.smoothing / vocabulary)
            return grad if transform is IDENTITY else transform.backward_(grad, logits)

        return slope


PLAIN = CrossEntropy()
TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Logits [n, vocabulary] and targets int64 [n] to losses [n]."""


class ChunkLoss(Protocol):
    """The loss of the targets of a chunk with its gradient, computed while the chunk's logits exist."""

    def on_chunk(
        self,
        rows: slice,
        logits: torch.Tensor,
        index: torch.Tensor,
        scale: torch.Tensor,
        transform: LogitTransform,
        with_grad: bool,
        shared: SharedVocabulary | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weighted loss of each target, [rows, 1], and the gradient of their sum with respect to the head's output.

        Args:
            rows: the chunk's among the targets of the micro-batch.
            logits: [rows, vocabulary], after the transform; they may be overwritten.
            index: [rows, 1], the targets.
            scale: [rows, 1], their weights.
            transform: of the head's output.
            with_grad: whether the gradient is needed; otherwise it is None.
            shared: this rank's part of the vocabulary; None: `logits` has all of it.
        """
        ...


class SharedVocabulary:
    """Reductions over logits of which each tensor-parallel rank has a part of the vocabulary.

    Worked example: a vocabulary of 10 on two ranks. Rank 0 has tokens 0 to 4, rank 1 tokens 5 to 9. For the targets
    [7, 2] `_place` is, on rank 1, the columns [2, 0] with `here` = [True, False] (7 - 5 = 2; 2 - 5 is outside, so the
    column is clamped to 0 and not used), and on rank 0 the columns [0, 2] with [False, True]. `at` sums both ranks'
    values, of which exactly one per target is not 0.

    Args:
        part: this rank's rows of the head.
    """

    def __init__(self, part: Slice) -> None:
        self._part = part
        self._group = part.ranks.get_group()

    def largest(self, logits: torch.Tensor) -> torch.Tensor:
        """[rows, 1]: the largest logit of the whole vocabulary."""
        lowest = torch.finfo(logits.dtype).min
        found = logits.amax(-1, keepdim=True) if logits.shape[-1] else logits.new_full((len(logits), 1), lowest)
        dist.all_reduce(found, dist.ReduceOp.MAX, self._group)
        return found

    def sum(self, parts: torch.Tensor) -> torch.Tensor:
        """The sum of [rows, 1] over all parts of the vocabulary, in place."""
        dist.all_reduce(parts, group=self._group)
        return parts

    def at(self, logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """[rows, 1]: the logits of the targets [rows, 1]."""
        place, here = self._place(logits, index)
        found = logits.gather(1, place) if logits.shape[-1] else logits.new_zeros(index.shape)
        return self.sum(found.where(here, 0.0))

    def add_at(self, grad: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Add values [rows, 1] at those targets that are here, in place."""
        place, here = self._place(grad, index)
        return grad.scatter_add_(1, place, values.where(here, 0.0)) if grad.shape[-1] else grad

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """[rows, 1]: the lowest token id among those with the largest logit, as `argmax` on whole logits."""
        largest = self.largest(logits)
        found = torch.full_like(largest, self._part.total, dtype=torch.int64)
        if logits.shape[-1]:
            first = logits.argmax(-1, keepdim=True)
            found = (first + self._part.start).where(logits.gather(1, first) == largest, found)
        dist.all_reduce(found, dist.ReduceOp.MIN, self._group)
        return found

    @property
    def size(self) -> int:
        return self._part.total

    def _place(self, logits: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The columns of the targets in this rank's logits, and whether they are there (0 where they are not)."""
        place = index - self._part.start
        here = (place >= 0) & (place < logits.shape[-1])
        return place.where(here, 0), here


PLAIN_LOSS = "compute this loss by torch.nn.functional.cross_entropy of the model's logits"
"""What has second derivatives where the functions here have none."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Weighted sum of the cross-entropy of `transform(hidden @ weight.T + bias)`, chunk by chunk.

    The gradients are computed in the forward pass, while a chunk's logits exist, and only scaled in the backward pass:
    three matrix products per chunk, as with stored logits. The head's gradient is summed over chunks in fp32 and
    rounded once. Where it is large, it is computed in the backward pass, some rows at a time (`head_gradient.py`).
    """

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, targets, target_weights, transform, loss, count_correct, with_grad, part, each
    ):
        # needs_input_grad covers the inputs only; whether a graph is recorded has to be passed as an argument.
        needs_hidden, needs_weight, needs_bias = (need and with_grad for need in ctx.needs_input_grad[:3])
        shared = None if part is None else SharedVocabulary(part)
        acc = torch.promote_types(hidden.dtype, torch.float32)
        later = needs_weight and type(loss) is CrossEntropy and weight.numel() * acc.itemsize > HELD_BYTES
        needs_weight = needs_weight and not later
        scored = torch.empty(2, len(hidden) if later else 0, 1, dtype=acc, device=hidden.device)
        total, correct = (torch.zeros((), dtype=kind, device=hidden.device) for kind in (acc, torch.int64))
        grad_hidden = torch.empty(hidden.shape, dtype=acc, device=hidden.device) if needs_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=acc, device=hidden.device) if needs_weight else None
        grad_bias = torch.zeros(bias.shape, dtype=acc, device=hidden.device) if needs_bias else None
        # Products of half-precision numbers are exact in fp32, in which they are summed: on a GPU by the kernel, on a
        # CPU by converting the factors, the head once, which its instructions for bf16 take as they were.
        mixed = hidden.is_cuda and hidden.dtype != acc
        multiply = partial(torch.mm, out_dtype=acc) if mixed else torch.mm
        head = weight if mixed or weight is None else weight.to(acc)
        # By the whole vocabulary: all tensor-parallel ranks need the same number of chunks.
        whole = hidden.shape[-1] if weight is None else weight.shape[0]
        chunk = chunk_rows(hidden.device, whole if part is None else part.total)
        # The gradient is rounded to half precision; on a CPU that has its products these too, compiled by rows.
        halves = not hidden.is_cuda and hidden.dtype == torch.bfloat16 and weight is not None and with_grad
        halves &= not lacks_half_products(hidden.device, hidden.dtype)
        most = min(chunk, len(hidden)) + KERNEL_ROWS
        grads, states = (hidden.new_empty((most if halves else 0, size)) for size in (whole, hidden.shape[1]))
        # All chunks share one block of memory: on a CPU fresh pages cost a third of the product's time.
        block = hidden.new_empty((0 if mixed or head is None else min(chunk, len(hidden)), whole), dtype=acc)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            inputs, into = (hidden[rows], None) if mixed else (hidden[rows].to(acc), block[: len(hidden[rows])])
            with factors_in_bf16(hidden.device, hidden.dtype):
                logits = hidden[rows].to(acc, copy=True) if head is None else multiply(inputs, head.t(), out=into)
            if bias is not None:
                logits += bias.to(acc)
            if transform is not IDENTITY:
                logits = transform(logits)
            index, scale = targets[rows, None], target_weights[rows, None].to(acc)
            if count_correct:
                likeliest = logits.argmax(-1, keepdim=True) if shared is None else shared.likeliest(logits)
                correct += ((likeliest == index) & (scale > 0)).sum()
            needs_grad = needs_hidden or needs_weight or needs_bias
            given = (scored[:, rows],) if later else ()
            losses, grad = loss.on_chunk(rows, logits, index, scale, transform, needs_grad, shared, *given)
            total += losses.sum()
            if each is not None:
                each[rows] = losses[:, 0]
            if grad is None:
                continue
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            if head is None:
                if grad_hidden is not None:
                    grad_hidden[rows] = grad
                continue
            if halves:
                number, filled = len(index), -(-len(index) // KERNEL_ROWS) * KERNEL_ROWS
                grads[:number], grads[number:filled] = grad, 0
                states[:number], states[number:filled] = hidden[rows], 0
                grad, inputs = grads[:filled], states[:filled]
            grad = grad.to(inputs.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = multiply(grad, weight if halves and weight is not None else head)[: len(index)]
            if grad_weight is not None and (mixed or halves):
                add_converted(grad_weight, multiply(grad.t(), inputs))
            elif grad_weight is not None:
                grad_weight.addmm_(grad.t(), inputs)
        if part is not None and grad_hidden is not None:
            dist.all_reduce(grad_hidden, group=part.ranks.get_group())  # each rank's is from its part of the head only
        ctx.of_weight = None
        if later and weight is not None:
            slope = loss.slope_of_block(transform, whole if part is None else part.total)
            ctx.of_weight = HeadGradient(slope, 0 if part is None else part.start, chunk * len(weight))
        kept = (hidden, weight, bias, targets, *scored) if later else ()
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias, *kept)
        ctx.dtypes = (hidden.dtype, *(None if each is None else each.dtype for each in (weight, bias)))
        ctx.mark_non_differentiable(correct)
        return total, correct

    @staticmethod
    def backward(ctx, grad_total, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            refuse_second_derivatives("the cross-entropy of a language model's head", PLAIN_LOSS)
        held, kept = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
        grads = [
            None if grad is None else grad.mul_(grad_total.to(grad.dtype)).to(dtype)
            for grad, dtype in zip(held, ctx.dtypes, strict=True)
        ]
        if ctx.of_weight is not None:
            grads[1] = ctx.of_weight.compute(*kept, grad_total)
        return *grads, None, None, None, None, None, None, None, None


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    targets: torch.Tensor,
    target_weights: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    transform: LogitTransform = IDENTITY,
    loss: ChunkLoss = PLAIN,
    count_correct: bool = False,
    each: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum over targets of the loss of a linear head, with the number of correct arg-maxes.

    Args:
        hidden: [targets, width], any floating dtype; half precision is summed in fp32.
        weight: [vocabulary, width], of the same dtype; under tensor parallelism a DTensor, sharded by rows. None:
            `hidden` has logits.
        targets: int64 [targets].
        target_weights: float32 [targets].
        bias: [vocabulary] or None; sharded like the weight.
        transform: of the logits.
        loss: of a target.
        count_correct: also count the targets that have the largest logit (otherwise the count is 0).
        each: float [targets], overwritten with the weighted loss of each target, without a graph; None: not wanted.

    Returns:
        (total, correct): the sum as a scalar with a graph in fp32 (fp64 for fp64 inputs), and an int64 scalar.
    """
    part = row_slice(weight) if isinstance(weight, DTensor) else None
    if part is not None:
        weight, bias = part.rows, None if bias is None else local(bias)
    settings = (transform, loss, count_correct, torch.is_grad_enabled(), part, each)
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, target_weights, *settings)


def head_cross_entropy(
    hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    vocabulary: int,
    targets: torch.Tensor,
    target_weights: torch.Tensor,
    *,
    transform: LogitTransform = IDENTITY,
    token_loss: TokenLoss = PLAIN,
    count_correct: bool = False,
    each: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `linear_cross_entropy`, for a head that is no single matrix or for another loss.

    Each chunk is recomputed in the backward pass.

    Args:
        hidden: [targets, width].
        head: maps [rows, width] to logits [rows, vocabulary].
        vocabulary: the number of logits, which sets the rows of a chunk.
        token_loss: of the transformed logits, in the dtype of the sums; not called without rows.
    """
    acc = accumulation_dtype(hidden.dtype)

    def chunk_sum(
        rows: torch.Tensor, index: torch.Tensor, scale: torch.Tensor, into: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = transform(head(rows).to(acc))
        losses = token_loss(logits, index) if rows.shape[0] else logits.sum(-1)
        correct = ((logits.argmax(-1) == index) & (scale > 0)).sum() if count_correct else index.new_zeros(())
        losses = losses * scale.to(acc)
        if into is not None:
            into.copy_(losses.detach())
        return losses.sum(), correct

    total = hidden.new_zeros((), dtype=acc)
    correct = targets.new_zeros(())
    chunk = chunk_rows(hidden.device, vocabulary)
    # Without targets the head runs on an empty chunk: its weights must have a gradient on every rank or on none.
    for start in range(0, max(1, hidden.shape[0]), chunk):
        part = slice(start, start + chunk)
        arguments = (hidden[part], targets[part], target_weights[part])
        # Bound and not an argument: `checkpoint` refuses tensors that change afterwards.
        of_part = partial(chunk_sum, into=None if each is None else each[part])
        with set_checkpoint_early_stop(False):  # early stop would raise an exception inside the user's `token_loss`
            part_total, part_correct = checkpoint(of_part, *arguments, use_reentrant=False)
        total, correct = total + part_total, correct + part_correct
    return total, correct


def router_balance(
    router_logits: tuple[torch.Tensor, ...],
    cu_seqlens: torch.Tensor,
    document_weights: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """The sum over documents of the load-balancing loss of Switch Transformer (arXiv:2101.03961, eqs. 4 to 6).

    It is a product of two token means, so the loss of a batch is not the mean of its rows' losses. It is therefore
    computed per document, over all layers together as transformers does, and averaged over documents.

    Worked example: documents of 2 and 1 tokens are packed into 3, so `document` is [0, 0, 1]; with 2 layers and 4
    experts `chosen` and `probability` are [2, 4], and their rows are divided by 2 * 2 and 1 * 2 routings.

    Args:
        router_logits: per layer [tokens, experts].
        cu_seqlens: int32 [documents + 1].
        document_weights: float32 [documents].
        top_k: experts per token.
    """
    lengths = cu_seqlens.diff().long()
    num_documents = lengths.numel()
    num_tokens, num_experts = router_logits[0].shape
    acc = accumulation_dtype(router_logits[0].dtype)
    document = torch.repeat_interleave(
        torch.arange(num_documents, device=lengths.device), lengths, output_size=num_tokens
    )
    chosen = torch.zeros(num_documents, num_experts, dtype=acc, device=lengths.device)
    probability = torch.zeros_like(chosen)
    for logits in router_logits:
        routing = logits.to(acc).softmax(-1)
        picks = torch.zeros_like(routing).scatter_(1, routing.topk(top_k, dim=-1).indices, 1.0)
        chosen = chosen.index_add(0, document, picks.detach())
        probability = probability.index_add(0, document, routing)
    rows = (lengths * len(router_logits)).to(acc)[:, None]
    balance = num_experts * ((chosen / rows) * (probability / rows)).sum(-1)
    return (balance * document_weights.to(acc)).sum()
