"""Log-probabilities and entropies of tokens, chunk by chunk: neither all logits nor their softmax in memory at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch.overrides import handle_torch_function, has_torch_function

from shardtune.batch import IGNORED
from shardtune.errors import ModelError
from shardtune.models.loss import LogitTransform, accumulation_dtype, chunk_rows
from shardtune.parallel.second_derivatives import refuse_second_derivatives


class TokenScores(NamedTuple):
    """What a model's distribution says of tokens.

    Attributes:
        log_probs: of the targets, in nats, fp32 (fp64 from fp64); 0 where there is no target.
        entropy: of the whole distribution, in nats; 0 where there is no target.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Distribution:
    """From a head's output to logits: the model's own transform, then the temperature of sampling."""

    transform: LogitTransform
    temperature: float


PLAIN_LOG_PROBS = "compute them by torch.log_softmax of the model's logits"
"""What has second derivatives where the functions here have none."""


class _Scores(torch.autograd.Function):
    """Log-probabilities and entropies of targets; a chunk's logits are computed once more in the backward pass.

    With p = softmax(x) of logits x, target t and entropy H: d log p_t / d x_v = [v = t] - p_v, and
    d H / d x_v = -p_v (log p_v + H).
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, distribution, with_entropy):
        log_probs, entropies, normalizers = (
            torch.zeros(len(hidden), dtype=accumulation_dtype(hidden.dtype), device=hidden.device) for _ in range(3)
        )
        logits_of = _Logits(hidden, weight, bias, distribution)
        for rows in logits_of.chunks():
            logits = logits_of(rows)[1]
            normalizer = logits.logsumexp(-1)
            log_probs[rows] = logits.gather(1, targets[rows, None])[:, 0] - normalizer
            normalizers[rows] = normalizer
            if with_entropy:
                entropies[rows] = torch.special.entr((logits - normalizer[:, None]).exp_()).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers, entropies)
        ctx.distribution = distribution
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    def backward(ctx, for_log_probs, for_entropies):  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            refuse_second_derivatives("the log-probability of tokens", PLAIN_LOG_PROBS)
        hidden, weight, bias, targets, normalizers, entropies = ctx.saved_tensors
        logits_of = _Logits(hidden, weight, bias, ctx.distribution)
        grads = _Grads(logits_of, *ctx.needs_input_grad[:3])
        for rows in logits_of.chunks():
            transformed, logits = logits_of(rows)
            chances = (logits - normalizers[rows, None]).exp_()
            grad = torch.zeros_like(chances)
            if for_entropies is not None:
                grad += (torch.special.entr(chances) - chances * entropies[rows, None]) * for_entropies[rows, None]
            if for_log_probs is not None:
                grad -= chances * for_log_probs[rows, None]
                grad.scatter_add_(1, targets[rows, None], for_log_probs[rows, None])
            grad /= ctx.distribution.temperature
            grads.add(rows, ctx.distribution.transform.backward_(grad, transformed))
        return grads.hidden, grads.weight, grads.bias, None, None, None


class _Logits:
    """The logits of some rows, in the dtype of sums, from a linear head's input, or from logits themselves."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, distribution: _Distribution
    ) -> None:
        self.acc = accumulation_dtype(hidden.dtype)
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self._distribution = distribution
        # Products of half-precision numbers are exact in fp32, in which they are summed: as `linear_cross_entropy`.
        self.mixed = hidden.is_cuda and hidden.dtype != self.acc
        self.head = weight if weight is None or self.mixed else weight.to(self.acc)

    def chunks(self) -> list[slice]:
        vocabulary = self.hidden.shape[-1] if self.weight is None else len(self.weight)
        step = chunk_rows(self.hidden.device, vocabulary)
        return [slice(start, start + step) for start in range(0, len(self.hidden), step)]

    def inputs(self, rows: slice) -> torch.Tensor:
        return self.hidden[rows] if self.mixed and self.head is not None else self.hidden[rows].to(self.acc)

    def multiply(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (partial(torch.mm, out_dtype=self.acc) if self.mixed else torch.mm)(left, right)

    def __call__(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits after the model's transform, and those over the temperature."""
        logits = self.inputs(rows)
        if self.head is not None:
            logits = self.multiply(logits, self.head.t())
        if self.bias is not None:
            logits = logits + self.bias.to(self.acc)
        logits, temperature = self._distribution.transform(logits), self._distribution.temperature
        return logits, logits if temperature == 1.0 else logits / temperature


class _Grads:
    """The gradients of what a head's logits come from, summed over chunks in the dtype of sums and rounded once."""

    def __init__(self, logits_of: _Logits, of_hidden: bool, of_weight: bool, of_bias: bool) -> None:
        self._logits_of = logits_of
        hidden, acc = logits_of.hidden, logits_of.acc
        self._hidden = torch.empty_like(hidden) if of_hidden else None
        self._weight, self._bias = (
            torch.zeros(tensor.shape, dtype=acc, device=tensor.device) if needed and tensor is not None else None
            for tensor, needed in ((logits_of.weight, of_weight), (logits_of.bias, of_bias))
        )

    def add(self, rows: slice, grad: torch.Tensor) -> None:
        """Add those of a chunk, from that with respect to the head's output."""
        of = self._logits_of
        if self._bias is not None:
            self._bias += grad.sum(0)
        if of.head is None:
            if self._hidden is not None:
                self._hidden[rows] = grad.to(self._hidden.dtype)
            return
        inputs = of.inputs(rows)
        grad = grad.to(inputs.dtype)
        if self._hidden is not None:
            self._hidden[rows] = of.multiply(grad, of.head).to(self._hidden.dtype)
        if self._weight is not None:
            self._weight += of.multiply(grad.t(), inputs)

    @property
    def hidden(self) -> torch.Tensor | None:
        return self._hidden

    @property
    def weight(self) -> torch.Tensor | None:
        return None if self._weight is None else self._weight.to(self._logits_of.hidden.dtype)

    @property
    def bias(self) -> torch.Tensor | None:
        return None if self._bias is None else self._bias.to(self._logits_of.hidden.dtype)


def log_probs(logits: torch.Tensor, targets: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    """The log-probability of each target, from logits.

    Args:
        logits: [..., vocabulary]; half precision is computed in fp32.
        targets: int64 [...], the token that each position predicts; -100: none.
        temperature: of sampling, by which the logits are divided.

    Returns:
        [...], in nats; 0 where there is no target.
    """
    return _scores(logits, None, None, targets, _Distribution(LogitTransform(), temperature), with_entropy=False)[0]


def entropy(logits: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    """The entropy [...] in nats of the distributions of logits [..., vocabulary]; logits of -inf count nothing."""
    tokens = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return log_probs_and_entropy(logits, tokens, temperature=temperature).entropy


def log_probs_and_entropy(logits: torch.Tensor, targets: torch.Tensor, *, temperature: float = 1.0) -> TokenScores:
    """Both `log_probs` and `entropy`, with gradients, from one pass; both are 0 where there is no target."""
    return _scores(logits, None, None, targets, _Distribution(LogitTransform(), temperature))


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """The log-probability of each target, from a language model's last hidden states, without ever holding all logits.

    In a method of an engine: `linear_log_probs(self.model(ids).last_hidden_state, self.lm_head.weight, targets)`. Some
    tokens' logits exist at a time, and are computed once more in the backward pass; positions without a target cost
    nothing.

    Args:
        hidden: [..., width], the head's input; half precision is summed in fp32.
        weight: [vocabulary, width], the head's.
        targets: int64 [...], the token that each position predicts (`self.next_tokens(labels)`); -100: none.
        bias: [vocabulary], the head's, or None.
        temperature: of sampling, by which the logits are divided.
        scale: factor on the logits, where the model has one (Cohere's `logit_scale`, one over Granite's
            `logits_scaling`).
        softcap: of the logits, where the model has one (Gemma's `final_logit_softcapping`).

    Returns:
        [...], in nats; 0 where there is no target.
    """
    tensors = (hidden, weight, targets, bias)
    if has_torch_function(tensors):  # an engine gives the weight whole, of which this rank has a part
        settings = {"temperature": temperature, "scale": scale, "softcap": softcap}
        return handle_torch_function(linear_log_probs, tensors, *tensors, **settings)
    distribution = _Distribution(LogitTransform(scale, softcap), temperature)
    return _scores(hidden, weight, bias, targets, distribution, with_entropy=False).log_probs


def linear_log_probs_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
) -> TokenScores:
    """As `linear_log_probs`, with the entropy of each position's distribution, both with gradients."""
    tensors = (hidden, weight, targets, bias)
    if has_torch_function(tensors):
        settings = {"temperature": temperature, "scale": scale, "softcap": softcap}
        return handle_torch_function(linear_log_probs_and_entropy, tensors, *tensors, **settings)
    return _scores(hidden, weight, bias, targets, _Distribution(LogitTransform(scale, softcap), temperature))


def _scores(
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    distribution: _Distribution,
    *,
    with_entropy: bool = True,
) -> TokenScores:
    if targets.shape != hidden.shape[:-1]:
        what = "logits" if weight is None else "hidden states"
        raise ModelError(
            f"{what} of shape {list(hidden.shape)} do not belong to targets of shape {list(targets.shape)}",
            where="log_probs",
            remedy="give one target for each position: targets = self.next_tokens(labels)",
        )
    if distribution.temperature <= 0:
        raise ModelError(f"the temperature is {distribution.temperature}", where="log_probs", remedy="give one above 0")
    counted = targets != IGNORED
    settings = (distribution, with_entropy)
    if weight is None:
        found = _Scores.apply(hidden.flatten(0, -2), None, None, targets.clamp(min=0).flatten(), *settings)
        return TokenScores(*(values.view(targets.shape).where(counted, 0.0) for values in found))
    # Without a target on this rank, too: all ranks have to reduce the weight's gradient.
    found = _Scores.apply(hidden[counted], weight, bias, targets[counted], *settings)
    zeros = torch.zeros(targets.shape, dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
    return TokenScores(*(zeros.masked_scatter(counted, values) for values in found))
