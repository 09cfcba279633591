"""The same training in plain PyTorch: one process, all rows of a step at once, torch's own optimizer and clipping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from shardtune.batch import Batch, LossSum, PackedBatch, Sample
from shardtune.batch.seeds import derive_seed
from shardtune.models.adapter import Adapter, named
from shardtune.models.causal_lm import CausalLM
from shardtune.models.language_model import LanguageModel
from shardtune.parallel.torch_private.graph import outside_transforms
from shardtune.training.step import ROW_DRAWS
from shardtune.verify.masks import Weigh
from shardtune.verify.trial import Trajectory, copies

CLIP = 1.0


def train_plainly(
    adapter: Adapter,
    model: nn.Module,
    steps: Sequence[Mapping[int, Sample]],
    weigh: Weigh,
    *,
    seed: int,
    lr: float,
    momentum: float,
    decay: float,
) -> Trajectory:
    """Train a model on the given rows of each step.

    The denominators are sums of the rows' own weights; nothing is sharded, accumulated or packed.

    Args:
        adapter: defines the loss.
        model: a plain module with the initial weights; trained in place.
        steps: the rows of each, by number.
        weigh: a row to its weight in each loss term.
        seed: of the rows' random numbers.
        lr: of SGD.
        momentum: of SGD.
        decay: of weights with two dimensions or more.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=lr,
        momentum=momentum,
    )
    losses, norms = [], []
    for number, samples in enumerate(steps):
        optimizer.zero_grad()
        weights = [weigh(sample) for sample in samples.values()]
        terms = {term for row in weights for term in row}
        denominators = {term: sum(row.get(term, 0.0) for row in weights) for term in terms}
        key = derive_seed(seed, number, ROW_DRAWS)
        found = _whole_loss(adapter, model, samples, denominators, weigh, key)
        loss = torch.stack([found[term].total / denominators[term] for term in terms if denominators[term]]).sum()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return Trajectory(losses, norms, copies({**dict(model.named_parameters()), **dict(model.named_buffers())}))


@contextmanager
def rounding_as_bf16(model: nn.Module, seed: int) -> Iterator[None]:
    """Inside, the weights and outputs of a model's innermost modules have random errors of the size of bf16's rounding.

    What is computed of them keeps its precision: a loss that sums in bf16 has errors beyond these.

    Args:
        model: with parameters in full precision, which stay what they are.
        seed: of the errors.
    """
    draws = torch.Generator().manual_seed(seed)

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        with outside_transforms():
            errors = torch.rand(tensor.shape, generator=draws, dtype=torch.float64) * 2 - 1
        return tensor + (tensor.detach() * errors.to(tensor) * torch.finfo(torch.bfloat16).eps / 2)

    kept: dict[nn.Parameter, torch.Tensor] = {}

    def before(module: nn.Module, _: object) -> None:
        for parameter in module.parameters(recurse=False):
            with outside_transforms():  # a tensor made in one is of no use after it
                kept[parameter] = parameter.data
                parameter.data = rounded(parameter.data)

    def after(module: nn.Module, _: object, output: object) -> object:
        for parameter in module.parameters(recurse=False):
            with outside_transforms():
                parameter.data = kept.pop(parameter)
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            return rounded(output)
        return output

    inner = [module for module in model.modules() if not any(True for _ in module.children())]
    hooks = [
        handle
        for module in inner
        for handle in (module.register_forward_pre_hook(before), module.register_forward_hook(after))
    ]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def _whole_loss(
    adapter: Adapter,
    model: nn.Module,
    samples: Mapping[int, Sample],
    weights: Mapping[str, float],
    weigh: Weigh,
    key: int,
) -> Mapping[str, LossSum]:
    """The loss of all rows of a step: of one batch of them, or for language models of each row alone."""
    if not isinstance(adapter, LanguageModel):
        batch = adapter.collate(list(samples.values()), list(samples), weights)
        return named(adapter.loss(model, replace(batch, key=key)))
    totals: dict[str, torch.Tensor] = {}
    for row, sample in samples.items():
        batch = replace(adapter.collate([sample], [row], weigh(sample)), key=key)
        for term, total in _row_loss(adapter, model, sample, batch).items():
            totals[term] = totals[term] + total if term in totals else total
    return {term: LossSum(total, weights[term]) for term, total in totals.items()}


def _row_loss(adapter: LanguageModel, model: nn.Module, sample: Sample, batch: Batch) -> dict[str, torch.Tensor]:
    """The loss of one row: the cross-entropy of the model's own logits, where the adapter has no other terms."""
    if not isinstance(adapter, CausalLM) or len(batch.weights) > 1:
        return {term: loss.total for term, loss in named(adapter.loss(model, batch)).items()}
    ids = torch.from_numpy(sample.input_ids.astype(np.int64))
    scale = torch.from_numpy(sample.loss_weights.astype(np.float64))[1:]
    places = torch.arange(len(ids) - 1)
    assert isinstance(batch, PackedBatch)
    logits = adapter.reference_logits(model, batch, places)
    each = F.cross_entropy(logits, ids[1:], reduction="none")
    return dict.fromkeys(batch.weights, (each * scale).sum())
