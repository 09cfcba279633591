"""Low-rank adapters: PEFT's own layers, put into a model before it has memory, and the names of what is below them.

The model keeps its class and is changed in place. Adapted modules become layers of PEFT, so a parameter `q.weight` is
called `q.base_layer.weight` from then on; `base_tensors` tells the old names, under which weight files hold them.
Modules that are trained in full beside the adapter (`modules_to_save`) stay as they are and just go on being trained.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import peft
import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import MultiheadAttention, ParamWrapper
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.utils.other import TrainableTokensWrapper
from torch import nn

from shardtune.config import LoraConfig
from shardtune.errors import ConfigError
from shardtune.models.lora.config import (
    SECTION,
    class_name,
    ends,
    fresh_config,
    head_of,
    is_inside,
    join,
    stored_config,
    trained_in_full,
)
from shardtune.models.lora.nf4 import NF4Linear, to_nf4
from shardtune.models.new_tokens import KEY as ROWS
from shardtune.models.new_tokens import check_rows, trained_rows
from shardtune.parallel.torch_private import contents, own_persistent_buffers

ADAPTER = "default"
"""PEFT's name for an adapter that is the only one."""
WRAPPING = (LoraLayer, TrainableTokensWrapper, TrainableTokensLayer)


@dataclass(frozen=True, slots=True)
class BaseTensor:
    """A parameter or persistent buffer that the model had before it was adapted.

    Attributes:
        name: then, which is its name in weight files.
        own_name: now.
        tensor: the parameter or buffer; of a layer in NF4 its codes.
        layer: the NF4 layer it belongs to, if any.
    """

    name: str
    own_name: str
    tensor: torch.Tensor
    layer: NF4Linear | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor, as weight files have it."""
        layer = self.layer
        return tuple(self.tensor.shape) if layer is None else (layer.out_features, layer.in_features)


def attach_adapter(
    model: nn.Module, config: LoraConfig, new_ids: Sequence[int] = (), afresh: Sequence[str] = ()
) -> list[str]:
    """Freeze a model and give it an adapter, in place, on the meta device; to be called before it is sharded.

    Args:
        model: any module; a model of transformers keeps what it can do.
        config: the recipe's `actor.model.lora`.
        new_ids: of tokens whose embeddings are trained, beside the adapter.
        afresh: modules without pretrained weights, which a fresh adapter has trained in full.

    Returns:
        What a user should know: what was left out, and what comes along.

    Raises:
        ConfigError: a name matches nothing, or PEFT cannot adapt what it matches.
    """
    notes: list[str] = []
    if config.adapter_path is not None:
        made = stored_config(Path(config.adapter_path))
        made.lora_dropout = config.dropout
        trained = trained_in_full(model, made.modules_to_save or (), notes)
        made.modules_to_save = None  # PEFT would train a copy, and keep the original for nothing
        names, begun = None, made.init_lora_weights
        made.init_lora_weights = True  # there is no memory yet
        check_rows(made.trainable_token_indices, trained_rows(model, new_ids, _inside(model, trained)), config)
    else:
        begun = config.init
        trained = trained_in_full(model, [*config.modules_to_save, *_to_train(model, config, afresh, notes)], notes)
        made, names = fresh_config(model, config, trained, notes)
        made.trainable_token_indices = trained_rows(model, new_ids, _inside(model, trained)) or None
        if names and any(name in names for name in made.trainable_token_indices or ()):
            raise ConfigError(
                "an embedding is adapted whole and by the rows of new tokens",
                where=f"{SECTION}.target_modules, {ROWS}",
                remedy=f"leave embedding and head out of target_modules, or name them in {SECTION}.modules_to_save",
            )
    _inject(made, model)
    _check_reach(model, names)
    for _, wrapper in token_rows(model):
        wrapper.token_adapter.trainable_tokens_original.clear()  # PEFT's copy, for taking rows out of a merged weight
    made.modules_to_save = sorted(trained) or None
    made.init_lora_weights = begun  # pyright: ignore[reportAttributeAccessIssue] (PEFT declares fewer names)
    for name in trained:
        model.get_submodule(name).requires_grad_(True)
    return notes


def _to_train(model: nn.Module, config: LoraConfig, afresh: Sequence[str], notes: list[str]) -> list[str]:
    """Of modules that begin with random weights, those that are trained in full: frozen they would be noise."""
    named = [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules
    adapted = {name for ending in named for name, _ in model.named_modules() if ends(name, ending)}
    found = [name for name in afresh if not any(is_inside(other, [name]) for other in adapted)]
    if found:
        notes.append(
            f"{', '.join(found)} begins with random weights, so it is trained in full and saved with the adapter; to "
            "leave it as it begins: actor.model.freeze"
        )
    return found


def _inside(model: nn.Module, names: Collection[str]) -> set[nn.Module]:
    return {child for name in names for child in model.get_submodule(name).modules()}


def keep_in_nf4(model: nn.Module, dtype: torch.dtype) -> str:
    """Put the frozen linear layers of an adapted model into NF4, before it has memory; returns what was done, in words.

    As QLoRA does, the head, embeddings, norms and biases stay as they are.

    Args:
        dtype: of the computation.
    """
    head = head_of(model)
    kept = {head} if head is not None else set()
    for _, layer in lora_layers(model):
        kept |= {child for name, child in layer.named_children() if name != "base_layer"}
    before = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    names = to_nf4(model, kept, dtype)
    if not names:
        raise ConfigError(
            f"{class_name(model)} has no frozen linear layer to keep in NF4",
            where=f"{SECTION}.base_dtype: nf4",
            remedy=f"set {SECTION}.base_dtype: bf16",
        )
    inside = sum(layer.in_features * layer.out_features for layer in model.modules() if isinstance(layer, NF4Linear))
    return f"{len(names)} linear layers of the base model in NF4, {inside / before:.0%} of its frozen parameters"


def is_adapted(model: nn.Module) -> bool:
    """Whether a model has an adapter."""
    return any(isinstance(module, LoraLayer) for module in model.modules())


def detach_adapter(model: nn.Module) -> None:
    """Take the adapter out of a model again; what was below it is left as it is."""
    for name, layer in [*lora_layers(model), *token_rows(model)]:
        below = layer.token_adapter.base_layer if isinstance(layer, TrainableTokensWrapper) else layer
        while isinstance(below, LoraLayer):
            below = below.base_layer
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, below)
    del vars(model)["peft_config"]


def adapter_config(model: nn.Module) -> peft.LoraConfig:
    """PEFT's description of a model's adapter."""
    return vars(model)["peft_config"][ADAPTER]


def lora_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """PEFT's layers by name, each a `LoraLayer`, the outermost of nested ones only."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if _is_layer(module) and module not in inside:
            inside.update(module.modules())
            yield name, module


def token_rows(model: nn.Module) -> list[tuple[str, TrainableTokensWrapper]]:
    """PEFT's wrappers of embeddings and heads of which single rows are trained, by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, TrainableTokensWrapper)]


def base_tensors(model: nn.Module) -> Iterator[BaseTensor]:
    """The parameters (shared ones under each name) and persistent buffers of a model without its adapter."""
    yield from _below(model, "", "")


def _below(module: nn.Module, own: str, name: str) -> Iterator[BaseTensor]:
    layer = module if isinstance(module, NF4Linear) else None
    parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    for key, tensor in {**parameters, **own_persistent_buffers(module)}.items():
        then = "weight" if layer is not None and key == "packed" else key
        packed = layer if then != key else None
        yield BaseTensor(join(name, then), join(own, key), tensor, packed)
    for key, child in contents(module)[2].items():
        if child is None:
            continue
        if not isinstance(module, WRAPPING):
            yield from _below(child, join(own, key), join(name, key))
        elif key in ("base_layer", "token_adapter"):
            yield from _below(child, join(own, key), name)


def trainable_patterns(
    parameters: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size] = MappingProxyType({})
) -> list[tuple[str, int, int]]:
    """What is trained, in few lines: (name with numbers as *, tensors, parameters), in the model's order.

    Read as a regular expression, in `actor.model.freeze` or `actor.optim.groups`, each finds the names it stands for.

    Args:
        parameters: by name; the frozen ones are passed over.
        shapes: of whole parameters, by name, where a rank's part has another.
    """
    found: dict[str, tuple[int, int]] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            pattern = re.sub(r"^\d+(?=\.)", ".*", re.sub(r"(?<=\.)\d+(?=\.)", "*", name))
            tensors, numbers = found.get(pattern, (0, 0))
            found[pattern] = tensors + 1, numbers + shapes.get(name, parameter.shape).numel()
    return [(pattern, *counts) for pattern, counts in found.items()]


def _inject(made: peft.LoraConfig, model: nn.Module) -> None:
    try:
        with warnings.catch_warnings():
            # Of tied weights, of Conv1D's layout, of patterns for parameters: what matters is said in our own notes.
            warnings.simplefilter("ignore")
            peft.inject_adapter_in_model(made, model, ADAPTER, low_cpu_mem_usage=True)
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"PEFT cannot adapt {class_name(model)} so: {str(error).splitlines()[0]}",
            where=SECTION,
            remedy="choose other modules, or leave out what the message names",
        ) from error


def _check_reach(model: nn.Module, names: Collection[str] | None) -> None:
    """What is adapted is what was meant, where that is known, and works when it is sharded."""
    adapted = {name for name, layer in lora_layers(model) if not isinstance(layer, ParamWrapper)}
    if names is not None and adapted != set(names):
        raise ConfigError(
            f"PEFT adapts other modules than asked for: {', '.join(sorted(adapted ^ set(names))[:3])}",
            where=f"{SECTION}.target_modules",
            remedy="name them otherwise",
        )
    unheard = [name for name, layer in lora_layers(model) if isinstance(layer, MultiheadAttention)]
    if unheard:
        raise ConfigError(
            f"{unheard[0]} is an nn.MultiheadAttention, whose adapter would be merged and taken out in every forward",
            where=f"{SECTION}.target_modules",
            remedy="leave it out",
        )


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, LoraLayer)
