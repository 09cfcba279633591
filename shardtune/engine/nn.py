"""Modules whose methods an engine runs on all ranks: what a user's class inherits from.

A class defines its computations in methods of its own, and overrides hooks; `TrainEngine` does the rest. Inside a
method everything is PyTorch: call `self(...)`, take a loss, call its `backward()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self, cast

import peft
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel, ProcessorMixin

from shardtune.batch import IGNORED
from shardtune.errors import ModelError
from shardtune.models.adapter import WeightSource
from shardtune.models.lora.attach import ADAPTER, lora_layers
from shardtune.models.lora.init import merged
from shardtune.models.vision.processors import load_processor
from shardtune.parallel.clipping import check_max_norm, clip_factor
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.sequence_parallel import TokenShare
from shardtune.parallel.weights import Weights
from shardtune.training.build.unwritten import check_written, unwritten_is_nan


class AutoProcessor:
    """Loads processors as transformers' class of this name, without the video part that needs torchvision."""

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | Path, *, use_fast: bool | None = None, trust_remote_code: bool = False
    ) -> ProcessorMixin:
        """The processor of a directory or Hub name; any other argument is a TypeError.

        Args:
            pretrained_model_name_or_path: the directory or Hub name.
            use_fast: accepted as printed in RLite's document. Images go through Pillow in either case, and through
                torchvision where the processor has no other backend.
            trust_remote_code: run Python code that comes with the processor.
        """
        path = str(pretrained_model_name_or_path)
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        return load_processor(path, config, trust_remote_code=trust_remote_code)


@contextmanager
def naming_own_processor() -> Iterator[None]:
    """Inside, an error by which transformers' processor lacks torchvision names the one that does without."""
    try:
        yield
    except Exception as error:
        lacks = any(sign in str(error) for sign in ("video processor", "orchvision"))
        if lacks and find_spec("torchvision") is None:
            error.add_note(
                "torchvision is not installed, which transformers' AutoProcessor needs here; "
                "shardtune.nn.AutoProcessor loads the same processor without it"
            )
        raise


ENTERING, RANK_CONTEXT, CROSSED = "_shardtune_entering", "_shardtune_rank_context", "_shardtune_crossed"


@dataclass(frozen=True, slots=True)
class RankContext:
    """The place of a module among the ranks, and this rank's part of a call.

    Attributes:
        ranks: of its engine.
        weights: of the module.
        share: by how much a loss of this rank counts; the shares of all ranks with data add up to 1, unless the method
            weighs its samples itself.
        idle: whether the rank has no samples in this call and computes on another's, for nothing.
        tokens: which tokens are this rank's, in a call with NeedParallel(type="seq").
    """

    ranks: Ranks
    weights: Weights
    share: float = 1.0
    idle: bool = False
    tokens: TokenShare | None = None


class _Scaling(Protocol):
    """State that the forward pass of `_Scaled` saves for the backward pass."""

    factor: float
    dtype: torch.dtype


class _Scaled(torch.autograd.Function):
    """The same number with a scaled gradient."""

    @staticmethod
    def forward(ctx: _Scaling, local: torch.Tensor, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor, ctx.dtype = factor, local.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: _Scaling, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (grads[0] * ctx.factor).to(ctx.dtype), None, None


class _Summing(Protocol):
    """State that the forward pass of `_SummedOverRanks` saves for the backward pass."""

    group: dist.ProcessGroup


class _SummedOverRanks(torch.autograd.Function):
    """The sum over ranks; each rank's part gets the sum of the gradients that come back on all of them."""

    @staticmethod
    def forward(ctx: _Summing, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: _Summing, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return cast(torch.Tensor, _SummedOverRanks.apply(grads[0], ctx.group)), None


class BaseTrainModule(nn.Module):
    """What a module has to be so that an engine can run its methods on all ranks; each hook has a default.

    A class that does not define `on_weights_materialized` has nothing to bind an optimizer in: it is frozen.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        places = [place for place, base in enumerate(cls.__mro__) if issubclass(base, BaseTrainModule)]
        models = [place for place, base in enumerate(cls.__mro__) if base in (PreTrainedModel, nn.Module)]
        own = cls.__mro__.index(BaseTrainModule)
        if any(place < own for place in models) and places:
            raise ModelError(
                f"{cls.__name__} names its model before {BaseTrainModule.__name__}, whose methods would not be found",
                where=f"class {cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)})",
                remedy="name the train module first: class MyModel(nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM)",
            )

    # Hooks.

    def materialization_source(self) -> WeightSource:
        """Where the first weights come from: a state dict, functions that make its tensors, or a path.

        None: the values that the module has; for a model of transformers without values, its own initialiser's.
        """
        return None

    @property
    def non_split_modules(self) -> set[type[nn.Module]]:
        """Classes of modules that are gathered as one. Empty: as transformers declares, else the repeated blocks."""
        return set()

    @property
    def tensor_plan(self) -> Mapping[str, str]:
        """How tensor ranks share the module: names, with `*` for numbers, to styles of transformers.

        By default as the models of transformers in it declare.
        """
        return {
            f"{name}.{pattern}": style
            for name, part in pretrained_parts(self)
            for pattern, style in part.tp_plan.items()
        }

    def on_weights_materialized(self) -> None:
        """Called on each rank once the weights are there: the place to make an optimizer."""

    def preprocess_input_named_parameters(self, name: str, param: torch.Tensor) -> tuple[str, torch.Tensor]:
        """What a tensor of the source is here: its name in `state_dict()`, and its values.

        Called first with a tensor without values, to learn the name and the form.
        """
        return name, param

    def postprocess_output_named_parameters(
        self, name: str, param: DTensor, full_state_dict: dict[str, DTensor]
    ) -> tuple[str, torch.Tensor]:
        """What a tensor of the module is to others: its name, and its values whole. Every rank is called alike."""
        return name, param.full_tensor()

    # What a method can use.

    @property
    def ranks(self) -> Ranks:
        """The ranks of the engine, seen from this one: `rank`, `data_rank`, `sum`, `gather`, …"""
        return self._rank_context().ranks

    @property
    def device(self) -> torch.device:
        """The engine's device; a printed "cuda" means the same."""
        if RANK_CONTEXT in vars(self):
            return self.ranks.device
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    def mean_over_ranks(self, total: torch.Tensor, weight: float | torch.Tensor) -> torch.Tensor:
        """The mean of which each rank has a part: sum of totals over sum of weights, exact in value and gradient.

        Args:
            total: a sum over what this rank has (for example of token losses).
            weight: how many that are.

        Returns:
            The same number on every rank; its `backward()` gives the gradient of the mean over all ranks.
        """
        rank_context = self._rank_context()
        counted = 0.0 if rank_context.idle else 1.0
        sums = torch.stack(
            [total.detach().double() * counted, torch.as_tensor(weight, device=total.device).double() * counted]
        )
        if rank_context.ranks.mesh is not None:
            dist.all_reduce(sums)  # ranks that share matrices bring the same to both sums
        mean, tensor = sums[0] / sums[1], rank_context.ranks.layout.tensor
        # Ranks that share sequences without sharing this one's tokens have the same rows, and bring them all.
        whole = float(sums[1]) / tensor
        factor = counted / (whole * rank_context.share) if rank_context.share and whole else 0.0
        return _Scaled.apply(total, mean.to(total.dtype) if whole else total.detach() * 0, factor)

    def next_tokens(self, input_ids: torch.Tensor, ignore_index: int = IGNORED) -> torch.Tensor:
        """The token after each: the targets of a language model, across the borders between ranks that share sequences.

        Args:
            input_ids: int64 [samples, tokens of this rank]; or labels, in the same form.
            ignore_index: for the last token, after which there is none.
        """
        rank_context = self._rank_context()
        vars(self)[CROSSED] = True
        following = input_ids.new_full((input_ids.shape[0], 1), ignore_index)
        if rank_context.tokens is not None:
            group = rank_context.tokens.ranks.get_group()
            first = input_ids[:, :1].contiguous()
            firsts = [torch.empty_like(first) for _ in range(rank_context.tokens.ranks.size())]
            dist.all_gather(firsts, first, group=group)
            here = rank_context.tokens.ranks.get_local_rank()
            following = firsts[here + 1] if here + 1 < len(firsts) else following
        return torch.cat([input_ids[:, 1:], following], dim=1)

    def sum_over_sequence(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that share sequences: of a sequence's tokens each has a part.

        Worked example: `logps.sum(1)` of a preference loss is, on each of two ranks, the sum over its half of the
        tokens; `self.sum_over_sequence(logps.sum(1))` is the whole one on both, and its gradient reaches all tokens.

        Args:
            part: sums over this rank's tokens, of any shape, the same on all ranks.

        Returns:
            The same shape, the same numbers on every rank that shares the sequences; `part` itself where a call does
            not divide tokens.
        """
        tokens = self._rank_context().tokens
        return part if tokens is None else _SummedOverRanks.apply(part, tokens.ranks.get_group())

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale the gradient so that its norm over all ranks is at most `max_norm`; returns the norm before that.

        Raises:
            ModelError: `max_norm` is no number above 0.
        """
        check_max_norm(max_norm, type(self).__name__)
        weights = self._rank_context().weights
        norm = weights.gradient_norm()
        weights.scale_gradients(clip_factor(max_norm, norm))
        return norm

    # How it is called.

    def __call__(self, *args: object, **kwargs: object) -> Any:
        vars(self)[ENTERING] = True
        return super().__call__(*args, **kwargs)

    def _rank_context(self) -> RankContext:
        rank_context = vars(self).get(RANK_CONTEXT)
        if rank_context is None:
            raise ModelError(
                f"{type(self).__name__} is not built: there are no ranks yet",
                remedy="use this in a method that an engine calls, after engine.build()",
            )
        return rank_context


def set_rank_context(module: BaseTrainModule, rank_context: RankContext) -> None:
    """Set a module's rank context, and from now on refuse `self.forward(...)` in its methods."""
    vars(module)[RANK_CONTEXT] = rank_context
    vars(module)["forward"] = _guarded(module, module.forward)


def crosses_borders(module: BaseTrainModule) -> bool:
    """Whether the current or last call used `next_tokens`."""
    return bool(vars(module).get(CROSSED))


@contextmanager
def in_call(module: BaseTrainModule, share: float, idle: bool, tokens: TokenShare | None) -> Iterator[None]:
    """Inside, the module computes this rank's part of a call; arguments as `RankContext` has them."""
    before = vars(module)[RANK_CONTEXT]
    vars(module)[CROSSED] = False
    vars(module)[RANK_CONTEXT] = replace(before, share=share, idle=idle, tokens=tokens)
    try:
        yield
    finally:
        vars(module)[RANK_CONTEXT] = before


def _guarded(module: BaseTrainModule, forward: Callable[..., object]) -> Callable[..., object]:
    @wraps(forward)
    def guarded(*args: object, **kwargs: object) -> object:
        if not vars(module).pop(ENTERING, False):
            raise ModelError(
                "self.forward(...) does not gather the weights, of which each rank has a part",
                where=type(module).__name__.removeprefix("FSDP"),
                remedy="call self(...)",
            )
        return forward(*args, **kwargs)

    return guarded


class BaseHuggingFaceTrainModule(BaseTrainModule):
    """The same for models of transformers: `class MyModel(nn.BaseHuggingFaceTrainModule, Qwen2ForCausalLM)`."""

    _no_split_modules: set[str] | list[str] | None  # the model's

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, *args: Any, **kwargs: Any) -> Self:
        """As transformers' own. Inside `init_empty_weights()` no weights are read: the ranks read their parts."""
        model: Any = cls
        if not nn.Linear(1, 1).weight.is_meta:
            with unwritten_is_nan():
                model = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)  # pyright: ignore
            check_written(model[0] if kwargs.get("output_loading_info") else model)
            return model
        dtype = kwargs.pop("dtype", kwargs.pop("torch_dtype", "auto"))
        attention = kwargs.pop("attn_implementation", None)
        config = kwargs.pop("config", None)
        if config is None:
            config, unknown = model.config_class.from_pretrained(
                pretrained_model_name_or_path, return_unused_kwargs=True, **kwargs
            )
        else:
            unknown = kwargs
        if unknown:
            raise ModelError(
                f"from_pretrained without weights has no use for {', '.join(sorted(unknown))}",
                where=f"{cls.__name__}.from_pretrained inside init_empty_weights()",
                remedy="leave it out; dtype and attn_implementation, and settings of the config, are taken",
            )
        chosen = (config.dtype or torch.float32) if dtype == "auto" else dtype
        chosen = getattr(torch, chosen) if isinstance(chosen, str) else chosen
        made = model._from_config(config, dtype=chosen, **({"attn_implementation": attention} if attention else {}))
        made.name_or_path = str(pretrained_model_name_or_path)
        return made

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: transformers' rules for names on disk cover the model, to which the class only adds methods."""
        return False

    # transformers reads the source of a class's module to decide these, which is not in a user's module.

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return _model_class(cls)._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return _model_class(cls)._can_set_experts_implementation()

    def materialization_source(self) -> WeightSource:
        """The name or path that the model was made from; None for one made from a config alone."""
        return str(self.name_or_path) or None

    @property
    def non_split_modules(self) -> set[type[nn.Module]]:
        """As the model declares (`_no_split_modules`)."""
        names = set(self._no_split_modules or ())
        return {type(module) for module in self.modules() if type(module).__name__ in names}

    @property
    def tensor_plan(self) -> Mapping[str, str]:
        """As the model declares."""
        return self.tp_plan  # pyright: ignore[reportAttributeAccessIssue, reportReturnType]


def pretrained_parts(module: nn.Module) -> Iterator[tuple[str, PreTrainedModel]]:
    """The models of transformers in a module, by name, without those inside one another; itself has the name ""."""
    if isinstance(module, PreTrainedModel):
        yield "", module
        return
    for key, child in module.named_children():
        yield from ((f"{key}.{name}" if name else key, part) for name, part in pretrained_parts(child))


def _model_class(kind: type) -> type[PreTrainedModel]:
    """The class that is no train module: transformers' own, or what a user's model derives from it."""
    return next(
        base for base in kind.__mro__ if issubclass(base, PreTrainedModel) and not issubclass(base, BaseTrainModule)
    )


class Fsdp2TrainModule(BaseTrainModule):
    """A user-defined module for the executors fsdp2, fsdp1 and ddp."""


class HuggingFaceFsdp2TrainModule(BaseHuggingFaceTrainModule):
    """A model of transformers for the executors fsdp2, fsdp1 and ddp."""


class LoraTrainModule(HuggingFaceFsdp2TrainModule):
    """A model of transformers with an adapter of PEFT, for engines whose exports have the adapter merged.

    Give it the adapter before the engine is made: `module.add_adapter(LoraConfig(...))`, or
    `peft.get_peft_model(module, LoraConfig(...))`, which may be passed to the engine instead of the module.
    """

    def preprocess_input_named_parameters(self, name: str, param: torch.Tensor) -> tuple[str, torch.Tensor]:
        """The name below the adapter of a weight that was saved without one; by `weight_mapping`, where that is set."""
        return vars(self).get("weight_mapping", {}).get(name, name), param

    def postprocess_output_named_parameters(
        self, name: str, param: DTensor, full_state_dict: dict[str, DTensor]
    ) -> tuple[str, torch.Tensor]:
        """Base weights with the adapter's part added, scaled as the adapter is: alpha / r, and rsLoRA's and DoRA's."""
        own = name.removeprefix(PEFT_PREFIX)
        layers = dict(lora_layers(self))
        owner, _, key = own.rpartition(".base_layer.")
        if owner not in layers:
            return own, param.full_tensor()
        wide = torch.float64 if param.dtype == torch.float64 else torch.float32
        return f"{owner}.{key}", dict(merged(layers[owner], wide).named_parameters())[key].detach()

    def _init_lora_B_as_zeros(self) -> None:
        """Initialise the adapter without effect; PEFT's initialiser does so already."""
        with torch.no_grad():
            for name, param in self.named_parameters():
                if "lora_B" in name:
                    param.zero_()


PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the names of the model that it wraps."""


def unwrapped(module: nn.Module) -> tuple[BaseTrainModule, str]:
    """The train module, bare or inside a model of PEFT, and the prefix of its names.

    Raises:
        ModelError: it is none.
    """
    prefix = ""
    if isinstance(module, peft.PeftModel):
        inner = module.get_base_model()
        kept = {key: value for key, value in vars(module).items() if key == "weight_mapping"}
        if list(module.peft_config) != [ADAPTER]:
            raise ModelError(
                f"the model has the adapters {', '.join(module.peft_config)}",
                where="TrainEngine(module)",
                remedy=f"give it one, named {ADAPTER!r}",
            )
        vars(inner).update(kept)
        module, prefix = inner, PEFT_PREFIX
    if not isinstance(module, BaseTrainModule):
        raise ModelError(
            f"{type(module).__name__} is no train module",
            where="TrainEngine(module)",
            remedy="class MyModel(shardtune.nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM), or "
            "class MyModel(shardtune.nn.Fsdp2TrainModule) for a module of your own",
        )
    return module, prefix
