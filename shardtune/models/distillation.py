"""Distillation: the distance of the model's distribution of each target to a teacher's, without holding all logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardtune.batch import PackedBatch
from shardtune.errors import ConfigError
from shardtune.models.language_head import AtHead
from shardtune.models.loss import PLAIN, LogitTransform, SharedVocabulary, accumulation_dtype
from shardtune.parallel.tensor_parallel import row_slice
from shardtune.parallel.weights import local

R = TypeVar("R")
TeacherLogits = Callable[[slice, bool], torch.Tensor]
"""Maps a range of a micro-batch's targets to the teacher's logits [rows, vocabulary], in the dtype of the sums; with
True, to this rank's part of the vocabulary."""


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The teacher's most probable tokens of some targets; its distribution is taken to be on these alone.

    Attributes:
        tokens: int64 [targets, k].
        log_p: [targets, k], the logarithms of their probabilities.
    """

    tokens: torch.Tensor
    log_p: torch.Tensor

    def of(self, chosen: torch.Tensor) -> TopTokens:
        """Those of some targets; `chosen` is bool [targets]."""
        return TopTokens(self.tokens[chosen], self.log_p[chosen])


@dataclass(frozen=True, slots=True)
class Distance:
    """`(1 - ce_share) * temperature^2 * D + ce_share * cross-entropy`, D between softmaxes of logits / temperature.

    With p of the teacher and q of the model, D is KL(p || q) (Hinton et al., arXiv:1503.02531), KL(q || p) (MiniLLM,
    arXiv:2306.08543), or their Jensen-Shannon divergence (GKD, arXiv:2306.13649, with beta 1/2). The square of the
    temperature keeps the gradient's size.

    Attributes:
        divergence: forward_kl | reverse_kl | jensen_shannon.
        temperature: of both softmaxes.
        ce_share: in [0, 1].
    """

    divergence: str = "forward_kl"
    temperature: float = 1.0
    ce_share: float = 0.0


class Teacher(Protocol):
    """A frozen model that computes micro-batches beside the one that is trained."""

    def compute(self, batch: PackedBatch, use: Callable[[TeacherLogits | TopTokens], R]) -> R:
        """Call a function while the teacher's logits of a micro-batch can be had; every rank calls it."""
        ...


@dataclass(slots=True)
class Distillation:
    """The training loss of a recipe with `actor.loss: distill`.

    Attributes:
        distance: what is minimised.
        teacher: set once it has its weights, before the first step.
    """

    distance: Distance
    teacher: Teacher | None = field(default=None, repr=False)

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Refused: a target's loss needs the teacher's outputs too."""
        raise ConfigError(
            "actor.loss: distill is for causal language models",
            where="actor.loss",
            remedy="leave it out, and compute the teacher in the loss of your own adapter",
        )

    def beside(self, batch: PackedBatch, losses: Callable[[Distilled], R]) -> R:
        """What a function returns for the loss of a micro-batch, called while the teacher's logits can be had."""
        assert self.teacher is not None, "the teacher is built with the model"
        return self.teacher.compute(batch, lambda logits: losses(Distilled(self.distance, logits)))


@dataclass(frozen=True, slots=True)
class Distilled:
    """The loss of the targets of one micro-batch, a `ChunkLoss`.

    Attributes:
        distance: what is minimised.
        teacher: the teacher's logits, or most probable tokens, of these targets.
    """

    distance: Distance
    teacher: TeacherLogits | TopTokens

    def of(self, chosen: torch.Tensor) -> Distilled:
        """The loss of those targets that this rank has, where ranks share sequences; `chosen` is bool [targets].

        A teacher that is computed has their logits alone already.
        """
        return replace(self, teacher=self.teacher.of(chosen)) if isinstance(self.teacher, TopTokens) else self

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
        """See `ChunkLoss`. Where one of the two vocabularies is padded further, D is that of the columns of both."""
        share, temperature = self.distance.ce_share, self.distance.temperature
        factor = scale * (1 - share) * temperature**2
        if isinstance(self.teacher, TopTokens):
            tokens, log_p = self.teacher.tokens[rows], self.teacher.log_p[rows].to(logits.dtype)
            distance, slope = _top_distance(logits / temperature, tokens, log_p / temperature, shared)
        else:
            ours, theirs = logits, self.teacher(rows, shared is not None)
            if shared is None:
                both = min(ours.shape[-1], theirs.shape[-1])
                ours, theirs = ours[:, :both], theirs[:, :both]
            distance, slope = _distance(self.distance, ours, theirs, shared)
        losses, grad = distance * factor, None
        if with_grad:
            grad = torch.zeros_like(logits)
            grad[:, : slope.shape[-1]] = slope.mul_(factor / temperature)
            grad = transform.backward_(grad, logits)
        if share:
            entropy, of_entropy = PLAIN.on_chunk(rows, logits, index, scale * share, transform, with_grad, shared)
            losses = losses + entropy
            grad = grad if grad is None or of_entropy is None else grad.add_(of_entropy)
        return losses, grad


def logits_of(at: AtHead) -> TeacherLogits:
    """The logits of what enters a head, computed when they are needed."""
    acc, head, transform = accumulation_dtype(at.hidden.dtype), at.head, at.transform
    if not (isinstance(head, nn.Linear) and type(head) is nn.Linear):
        return lambda rows, _: transform((at.hidden[rows] if head is None else head(at.hidden[rows])).to(acc))
    part = row_slice(head.weight) if isinstance(head.weight, DTensor) else None
    weight, bias = head.weight if part is None else part.rows, head.bias

    def logits(rows: slice, only_part: bool) -> torch.Tensor:
        hidden = at.hidden[rows]
        if part is not None and not only_part:
            return transform(head(hidden).to(acc))
        if hidden.is_cuda and hidden.dtype != acc:
            found = torch.mm(hidden, weight.t(), out_dtype=acc)
        else:
            found = hidden.to(acc) @ weight.to(acc).t()
        return transform(found if bias is None else found + local(bias).to(acc))

    return logits


def _distance(
    distance: Distance, ours: torch.Tensor, theirs: torch.Tensor, shared: SharedVocabulary | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """D of each row, [rows, 1], and its gradient with respect to our logits divided by the temperature.

    With x the divided logits: forward, `dD/dx = q - p`. Backward and Jensen-Shannon, D is a mean over q of some g, and
    `dD/dx = q * (g - sum(q * g))`, where g is log(q / p), or half of log(q / m) with m = (p + q) / 2.
    """
    log_q, log_p = (_log_softmax(logits / distance.temperature, shared) for logits in (ours, theirs))
    q = log_q.exp()
    if distance.divergence == "forward_kl":
        p = log_p.exp()
        return _total(p * (log_p - log_q), shared), q.sub_(p)
    if distance.divergence == "reverse_kl":
        apart = log_q.sub_(log_p)
        found = _total(q * apart, shared)
        return found, q.mul_(apart.sub_(found))
    log_m = torch.logaddexp(log_p, log_q).sub_(math.log(2))
    apart = log_q.sub_(log_m)
    ours_to_mean = _total(q * apart, shared)
    theirs_to_mean = _total(log_p.exp() * (log_p - log_m), shared)
    return (ours_to_mean + theirs_to_mean) / 2, q.mul_(apart.sub_(ours_to_mean)).div_(2)


def _top_distance(
    logits: torch.Tensor, tokens: torch.Tensor, log_p: torch.Tensor, shared: SharedVocabulary | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(p || q) with p on some tokens [rows, k] alone, and its gradient, as `_distance`."""
    log_q, log_p = _log_softmax(logits, shared), log_p.log_softmax(-1)
    p = log_p.exp()
    at_tokens = log_q.gather(1, tokens) if shared is None else shared.at(log_q, tokens)
    distance = (p * (log_p - at_tokens)).sum(-1, keepdim=True)
    slope = log_q.exp_()
    slope = slope.scatter_add_(1, tokens, -p) if shared is None else shared.add_at(slope, tokens, -p)
    return distance, slope


def _log_softmax(logits: torch.Tensor, shared: SharedVocabulary | None) -> torch.Tensor:
    if shared is None:
        return logits.log_softmax(-1)
    logits = logits - shared.largest(logits)
    return logits - shared.sum(logits.exp().sum(-1, keepdim=True)).log()


def _total(parts: torch.Tensor, shared: SharedVocabulary | None) -> torch.Tensor:
    """The sum of each row over the whole vocabulary, [rows, 1]."""
    found = parts.sum(-1, keepdim=True)
    return found if shared is None else shared.sum(found)
