"""Forwards of a model of transformers on this rank's tokens, with attention over those of all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from shardtune.errors import DataError, ParallelError
from shardtune.models.mixers import STATE, Mixers
from shardtune.models.packed_attention import DOCUMENTS, check_no_dropout
from shardtune.models.packing_probe import AGREEMENT
from shardtune.parallel.fp32_compute import in_fp32
from shardtune.parallel.generation import CACHES
from shardtune.parallel.sequence_parallel import TokenShare
from shardtune.parallel.torch_private.operations import tree_map

WHERE = "build(sequence_parallel_size=…)"
Arguments = dict[str, object]
"""Arguments of a model's forward, by name."""
REFUSED = ("attention_mask", "labels", *CACHES)


class SequenceForward:
    """Lets ranks share the sequences of a model.

    Args:
        model: of transformers, sharded or not.
        ranks: those that share sequences.
        rings: whether keys and values go from rank to rank, instead of heads for tokens.

    Raises:
        ParallelError: the model's attention cannot be replaced, or has dropout that a ring does not have.
    """

    def __init__(self, model: nn.Module, ranks: DeviceMesh, *, rings: bool) -> None:
        self._model, self._ranks, self.rings = check_shareable(model), ranks, rings
        self._own = self._model.config._attn_implementation or "eager"
        if rings:
            values = self._model.config.get_text_config().to_dict()
            check_no_dropout(values, WHERE, lambda name: f"set {name}=0.0 in the model's config")

    def share(self, num_tokens: int) -> TokenShare:
        """This rank's share of this many tokens: neighbours, as a method's own code may look at the next token."""
        if self.rings:
            return TokenShare.in_ring((0, num_tokens), self._ranks, in_order=True)
        return TokenShare.of(num_tokens, self._ranks)

    @contextmanager
    def sharing(self, share: TokenShare) -> Iterator[None]:
        """Inside, the model takes this rank's tokens and returns their logits."""
        model = self._model
        mine = min(share.length, share.num_tokens - share.start)
        called = inspect.signature(type(model).forward)

        def enter(module: nn.Module, args: tuple[object, ...], kwargs: Arguments) -> tuple[tuple[()], Arguments]:
            bound = called.bind_partial(module, *args, **kwargs).arguments
            given = {**{k: v for k, v in bound.items() if k not in ("self", "kwargs")}, **bound.get("kwargs", {})}
            return (), _arguments(given, share, mine)

        def leave(_module: nn.Module, _args: object, _kwargs: object, output: object) -> object:
            return tree_map(lambda leaf: _trimmed(leaf, share.length, mine), output)

        model.set_attn_implementation(DOCUMENTS)
        # Before FSDP's hook, which casts the arguments of that time.
        handles = [
            model.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
            model.register_forward_hook(leave, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            model.set_attn_implementation(self._own)

    @torch.no_grad()
    def probe_assumptions(self, device: torch.device, dtype: torch.dtype) -> None:
        """Compare the logits of some tokens with the model's own forward on all of them; every rank calls it.

        In half precision both are computed in fp32, as a state that ends at a rank's first token may change logits by
        less than half precision rounds; in half precision itself where the model's code takes nothing else.

        Raises:
            ParallelError: they differ: the model mixes tokens in layers other than attention.
        """
        model, was_training = self._model, self._model.training
        model.eval()
        apart, computed = in_fp32(partial(self._apart, device), dtype)
        model.train(was_training)
        if not apart < AGREEMENT[computed]:
            raise ParallelError(
                f"{_kind(model)} gives other logits when ranks share its sequences (by {apart:.1e}): it has layers "
                "that look at other tokens than by attention",
                where=WHERE,
                remedy="leave sequence_parallel_size out",
            )

    def _apart(self, device: torch.device) -> float:
        """The largest difference of any rank's logits, relative to the largest logit of all."""
        tokens = 4 * self._ranks.size() + 1
        rows = int(self._model.config.get_text_config().vocab_size)
        input_ids = (torch.arange(2 * tokens, device=device) * 7919 % rows).view(2, tokens)
        whole = self._model(input_ids=input_ids, use_cache=False)[0]
        share = self.share(tokens)
        part = slice(share.start, share.start + share.length)
        with self.sharing(share):
            mine = self._model(input_ids=input_ids[:, part])[0]
        apart = (mine.double() - whole[:, part].double()).abs().max() / whole.double().abs().max().clamp(min=1e-9)
        apart = apart.float()  # not every device has doubles
        dist.all_reduce(apart, dist.ReduceOp.MAX, group=self._ranks.get_group())  # all ranks refuse it, or none
        return float(apart)


def check_shareable(model: nn.Module) -> PreTrainedModel:
    """The model, if ranks can share its sequences."""
    if isinstance(model, PreTrainedModel):
        takes = inspect.signature(model.base_model.forward).parameters
        hands_down = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
        mixers = Mixers.of(model)
        if len(mixers):
            raise ParallelError(
                f"ranks cannot share the sequences of {_kind(model)}: {STATE.format(mixers.names)}",
                where=WHERE,
                remedy="leave it out",
            )
        if "position_ids" in takes and hands_down and model._can_set_attn_implementation():
            return model
    raise ParallelError(
        f"ranks cannot share the sequences of {_kind(model)}: its attention cannot be replaced",
        where=WHERE,
        remedy="leave it out, or use a causal language model of transformers",
    )


def _arguments(given: Arguments, share: TokenShare, mine: int) -> Arguments:
    """The model's arguments for the arguments of the user's call."""
    refused = [name for name in REFUSED if given.get(name) is not None]
    if refused:
        raise DataError(
            f"{refused[0]} cannot be given where ranks share sequences",
            where='a method called with NeedParallel(…, type="seq")',
            remedy="take targets = self.next_tokens(input_ids) and the loss from the logits"
            if refused[0] == "labels"
            else "leave it out; pad on the right, and ignore the padding's targets",
        )
    name = "inputs_embeds" if given.get("inputs_embeds") is not None else "input_ids"
    tokens = given[name]
    if not isinstance(tokens, torch.Tensor) or tokens.shape[1] != mine:
        number = f"{tokens.shape[1]} tokens" if isinstance(tokens, torch.Tensor) else f"a {type(tokens).__name__}"
        raise DataError(
            f"the model is called with {number}, this rank has {mine} of {share.num_tokens}",
            where='a method called with NeedParallel(…, type="seq")',
            remedy="call it with the tokens that the method got",
        )
    rows, missing = tokens.shape[0], share.length - mine
    padded = F.pad(tokens, (0, missing) if tokens.ndim == 2 else (0, 0, 0, missing))
    device = tokens.device
    positions = torch.arange(share.start, share.start + share.length, device=device).clamp(max=share.num_tokens - 1)
    ends = torch.arange(rows + 1, device=device, dtype=torch.int32) * share.num_tokens
    return {
        **given,
        name: padded,
        "position_ids": positions.expand(rows, -1),
        "use_cache": False,
        "token_share": share,
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": share.num_tokens,
        "max_length_k": share.num_tokens,
    }


def _trimmed(leaf: object, length: int, mine: int) -> object:
    if isinstance(leaf, torch.Tensor) and leaf.ndim > 1 and leaf.shape[1] == length:
        return leaf[:, :mine]
    return leaf


def _kind(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")
