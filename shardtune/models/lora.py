"""Low-rank adapters: PEFT's own layers, put into a model before it has memory, and the names of what is below them.

The model keeps its class and is changed in place. Adapted modules become layers of PEFT, so a parameter `q.weight` is
called `q.base_layer.weight` from then on; `base_tensors` tells the old names, under which weight files hold them.
Modules that are trained in full beside the adapter (`modules_to_save`) stay as they are and just go on being trained.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import peft
import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import MultiheadAttention, ParamWrapper
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardtune.config import LoraConfig
from shardtune.errors import ConfigError
from shardtune.models.nf4 import NF4Linear, to_nf4

ADAPTER = "default"
"""PEFT's name for an adapter that is the only one."""
ALL_LINEAR = "all-linear"
SECTION = "actor.model.lora"
CONFIG_FILE = "adapter_config.json"
LINEAR = (nn.Linear, Conv1D)
ADAPTABLE = (*LINEAR, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
CLASSIFIERS = ("score", "classifier")
"""Heads of transformers' sequence classifiers."""
# Of an adapter's config: what would change the forward pass in ways that are not covered here.
UNSUPPORTED = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "monteclora_config",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)


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


def attach_adapter(model: nn.Module, config: LoraConfig) -> list[str]:
    """Freeze a model and give it an adapter, in place, on the meta device; to be called before it is sharded.

    Args:
        model: any module; a model of transformers keeps what it can do.
        config: the recipe's `actor.model.lora`.

    Returns:
        What a user should know: what was left out, and what comes along.

    Raises:
        ConfigError: a name matches nothing, or PEFT cannot adapt what it matches.
    """
    notes: list[str] = []
    if config.adapter_path is not None:
        made = stored_config(Path(config.adapter_path))
        made.lora_dropout = config.dropout
        trained = _trained_in_full(model, made.modules_to_save or (), notes)
        made.modules_to_save = None  # PEFT would train a copy, and keep the original for nothing
        names = None
    else:
        trained = _trained_in_full(model, config.modules_to_save, notes)
        made, names = _fresh_config(model, config, trained, notes)
    _inject(made, model)
    _check_reach(model, names)
    made.modules_to_save = sorted(trained) or None
    made.init_lora_weights = config.init  # pyright: ignore[reportAttributeAccessIssue] (PEFT declares fewer names)
    for name in trained:
        model.get_submodule(name).requires_grad_(True)
    return notes


def keep_in_nf4(model: nn.Module, dtype: torch.dtype) -> str:
    """Put the frozen linear layers of an adapted model into NF4, before it has memory; returns what was done, in words.

    As QLoRA does, the head, embeddings, norms and biases stay as they are.

    Args:
        dtype: of the computation.
    """
    head = _head(model)
    kept = {head} if head is not None else set()
    for _, layer in lora_layers(model):
        kept |= {child for name, child in layer.named_children() if name != "base_layer"}
    before = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    names = to_nf4(model, kept, dtype)
    if not names:
        raise ConfigError(
            f"{_class_name(model)} has no frozen linear layer to keep in NF4",
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
    for name, layer in list(lora_layers(model)):
        below = layer
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


def base_tensors(model: nn.Module) -> Iterator[BaseTensor]:
    """The parameters (shared ones under each name) and persistent buffers of a model without its adapter."""
    yield from _below(model, "", "")


def _below(module: nn.Module, own: str, name: str) -> Iterator[BaseTensor]:
    layer = module if isinstance(module, NF4Linear) else None
    persistent = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
    for key, tensor in {**module._parameters, **persistent}.items():
        if tensor is not None:
            then = "weight" if layer is not None and key == "packed" else key
            packed = layer if then != key else None
            yield BaseTensor(_join(name, then), _join(own, key), tensor, packed)
    for key, child in module._modules.items():
        if child is None:
            continue
        if not isinstance(module, LoraLayer):
            yield from _below(child, _join(own, key), _join(name, key))
        elif key == "base_layer":
            yield from _below(child, _join(own, key), name)


def trainable_patterns(named: Iterator[tuple[str, torch.Tensor]]) -> list[tuple[str, int, int]]:
    """What is trained, in few lines: (name with numbers as *, tensors, parameters), in the model's order.

    Args:
        named: parameters by name; the frozen ones are passed over.
    """
    found: dict[str, tuple[int, int]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            pattern = re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name).replace(f".{ADAPTER}", "")
            tensors, numbers = found.get(pattern, (0, 0))
            found[pattern] = tensors + 1, numbers + parameter.numel()
    return [(pattern, *counts) for pattern, counts in found.items()]


def stored_config(directory: Path) -> peft.LoraConfig:
    """The LoRA config of a directory that PEFT can load.

    Raises:
        ConfigError: it holds none, or one that asks for more than LoRA, rsLoRA and DoRA.
    """
    key = f"{SECTION}.adapter_path"
    if not (directory / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{directory} holds no {CONFIG_FILE}, so it is no adapter",
            where=key,
            remedy="give a directory as PEFT's save_pretrained (or a LoRA run's final/) has it",
        )
    try:
        found = peft.PeftConfig.from_pretrained(str(directory))
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{directory / CONFIG_FILE} cannot be read: {error}", where=key) from error
    if not isinstance(found, peft.LoraConfig):
        raise ConfigError(f"{directory} holds an adapter of type {found.peft_type}, not LoRA", where=key)
    defaults = peft.LoraConfig()
    changed = [name for name in UNSUPPORTED if vars(found)[name] not in (vars(defaults)[name], None)]
    changed += ["bias"] if found.bias != "none" else []
    if changed:
        raise ConfigError(
            f"the adapter in {directory} uses {', '.join(changed)}, which is not supported",
            where=key,
            remedy="train it with PEFT, or start a fresh adapter",
        )
    found.inference_mode = False
    return found


# What is adapted.


def _fresh_config(
    model: nn.Module, config: LoraConfig, trained: Collection[str], notes: list[str]
) -> tuple[peft.LoraConfig, list[str]]:
    """PEFT's config of a new adapter, and the full names of the modules that it is for."""
    kind = _class_name(model)
    made = peft.LoraConfig(
        r=config.r,
        lora_alpha=int(config.alpha) if config.alpha.is_integer() else config.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=config.dropout,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        target_parameters=list(config.target_parameters) or None,
        task_type=peft.TaskType.CAUSAL_LM if kind.endswith("ForCausalLM") else None,
        init_lora_weights="mica" if config.init == "mica" else True,  # others are drawn once there is memory
    )
    asked = config.target_modules
    if asked == ALL_LINEAR:
        names = _all_linear(model, trained, notes)
    else:
        names = [name for ending in ([asked] if isinstance(asked, str) else asked) for name in _ending(model, ending)]
        _check_apart(names, trained)
    names = _not_renamed(model, made, names, everything=asked == ALL_LINEAR, notes=notes)
    if asked == ALL_LINEAR and not config.target_parameters:
        notes += _left_out(model)
    for ending in config.target_parameters:
        _check_parameter(model, ending)
    made.target_modules = _as_target(model, names)
    return made, names


def _all_linear(model: nn.Module, trained: Collection[str], notes: list[str]) -> list[str]:
    """Linear layers that are no head, are called as modules and are not trained in full."""
    head = _head(model)
    attention = [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, LINEAR) or module is head or _is_inside(name, trained):
            continue
        if not _is_inside(name, attention):
            found.append(name)
    if attention:
        notes.append(
            f"LoRA leaves out {len(attention)} modules of class nn.MultiheadAttention ({attention[0]}, …), which use "
            "their matrices without calling them as layers"
        )
    if not found:
        raise ConfigError(
            f"{_class_name(model)} has no linear layer to adapt",
            where=f"{SECTION}.target_modules: {ALL_LINEAR}",
            remedy="name the modules to adapt (embeddings and convolutions can be), or parameters in target_parameters",
        )
    return found


def _ending(model: nn.Module, ending: str) -> list[str]:
    """The modules whose name is `ending`, or ends with it after a dot."""
    named = dict(model.named_modules())
    found = [name for name in named if _ends(name, ending)]
    where = f"{SECTION}.target_modules"
    if not found:
        known = sorted({name.rpartition(".")[2] for name, module in named.items() if isinstance(module, ADAPTABLE)})
        raise ConfigError(
            f"{where}: no module of {_class_name(model)} is called {ending!r}",
            where=where,
            remedy=f"use {ALL_LINEAR}, or of {', '.join(known)}",
        )
    for name in found:
        owner = next(
            (o for o, m in named.items() if isinstance(m, nn.MultiheadAttention) and _is_inside(name, [o])), None
        )
        if not isinstance(named[name], ADAPTABLE) or owner is not None:
            what = "inside an nn.MultiheadAttention" if owner is not None else f"a {_class_name(named[name])}"
            raise ConfigError(
                f"{where}: {name} is {what}, which cannot be adapted",
                where=where,
                remedy="name linear layers, embeddings or convolutions, or train it in full: "
                f"{SECTION}.modules_to_save",
            )
    return found


def _check_apart(names: Collection[str], trained: Collection[str]) -> None:
    both = [name for name in names if _is_inside(name, trained)]
    if both:
        raise ConfigError(
            f"{both[0]} is both adapted and trained in full",
            where=f"{SECTION}.target_modules, {SECTION}.modules_to_save",
            remedy="leave it out of one of them",
        )


def _not_renamed(
    model: nn.Module, made: peft.LoraConfig, names: list[str], *, everything: bool, notes: list[str]
) -> list[str]:
    """Without the modules that PEFT, when it loads the adapter, would take for fused experts by their names."""
    if not isinstance(model, PreTrainedModel):
        return names
    trial = deepcopy(made)
    trial.target_modules = list(names)
    convert_peft_config_for_transformers(trial, model, None)
    assert trial.target_modules is not None
    taken = [name for name in names if name not in trial.target_modules]
    if not taken:
        return names
    what = f"{len(taken)} linear layers ({taken[0]}, …) whose names PEFT takes for fused experts' in this kind of model"
    if everything:
        notes.append(f"LoRA leaves out {what}")
        return [name for name in names if name in trial.target_modules]
    raise ConfigError(
        f"{SECTION}.target_modules names {what}",
        where=f"{SECTION}.target_modules",
        remedy=f"leave them out; experts are adapted by {SECTION}.target_parameters",
    )


def _left_out(model: nn.Module) -> list[str]:
    """A note on parameters of three dimensions that no convolution has: experts, stacked."""
    stacked = [
        _join(prefix, name)
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and not isinstance(module, ADAPTABLE)
    ]
    if not stacked:
        return []
    endings = sorted({".".join(name.split(".")[-2:]) for name in stacked})
    return [
        f"LoRA leaves out {len(stacked)} stacked parameters, which are no linear layers; to adapt them: "
        f"{SECTION}.target_parameters: [{', '.join(endings)}]"
    ]


def _check_parameter(model: nn.Module, ending: str) -> None:
    key = f"{SECTION}.target_parameters"
    found = [parameter for name, parameter in model.named_parameters() if _ends(name, ending)]
    if found and all(parameter.ndim in (2, 3) for parameter in found):
        return
    stacked = sorted({n.rpartition(".")[2] for n, p in model.named_parameters() if p.ndim == 3})
    raise ConfigError(
        f"{key}: {ending!r} {'has not two or three dimensions' if found else 'matches no parameter'}",
        where=key,
        remedy=f"parameters of three dimensions here: {', '.join(stacked) or 'none'}",
    )


def _as_target(model: nn.Module, names: list[str]) -> list[str] | str:
    """Names as PEFT takes them: a list matches endings, so where that is ambiguous a regular expression."""
    chosen = set(names)
    others = [name for name, _ in model.named_modules() if name and name not in chosen]
    if any(other.endswith(f".{name}") for other in others for name in chosen):
        return "|".join(re.escape(name) for name in names)
    return names


def _inject(made: peft.LoraConfig, model: nn.Module) -> None:
    try:
        with warnings.catch_warnings():
            # Of tied weights, of Conv1D's layout, of patterns for parameters: what matters is said in our own notes.
            warnings.simplefilter("ignore")
            peft.inject_adapter_in_model(made, model, ADAPTER, low_cpu_mem_usage=True)
    except (ValueError, TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise ConfigError(
            f"PEFT cannot adapt {_class_name(model)} so: {str(error).splitlines()[0]}",
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


def _trained_in_full(model: nn.Module, endings: Collection[str], notes: list[str]) -> list[str]:
    """The modules of `modules_to_save` by their full names, and those that share weights with them."""
    named = dict(model.named_modules())
    found: list[str] = []
    for ending in endings:
        matching = [name for name in named if _ends(name, ending)]
        if not matching or not any(True for name in matching for _ in named[name].parameters()):
            raise ConfigError(
                f"{SECTION}.modules_to_save: no module with parameters of {_class_name(model)} is called {ending!r}",
                where=f"{SECTION}.modules_to_save",
                remedy=f"modules at the top are {', '.join(name for name, _ in model.named_children())}",
            )
        found += [name for name in matching if name not in found]
    moved = {id(parameter) for name in found for parameter in named[name].parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        if id(parameter) in moved and not _is_inside(owner, found):
            notes.append(f"{owner} shares its weights with one of {', '.join(found)}, so it is trained and saved too")
            found.append(owner)
    return [name for name in found if not any(_is_inside(name, [other]) for other in found if other != name)]


def _head(model: nn.Module) -> nn.Module | None:
    """The last layer of a model of transformers, which turns hidden states into logits or classes."""
    if not isinstance(model, PreTrainedModel):
        return None
    if _class_name(model).endswith("Classification"):
        return next((child for name, child in model.named_children() if name in CLASSIFIERS), None)
    return model.get_output_embeddings()


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, LoraLayer)


def _class_name(module: nn.Module) -> str:
    return type(module).__name__


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")


def _is_inside(name: str, owners: Collection[str]) -> bool:
    return any(name == owner or name.startswith(f"{owner}.") for owner in owners)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
