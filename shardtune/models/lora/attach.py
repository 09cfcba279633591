"""Low-rank adapters: PEFT's own layers, injected into a model on the meta device, and the names of the base weights.

The model keeps its class and is changed in place. Adapted modules become layers of PEFT, so a parameter `q.weight` is
called `q.base_layer.weight` from then on; `base_tensors` gives the original names, which are those of weight files.
Modules that are trained in full beside the adapter (`modules_to_save`) are not replaced.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardtune.config import LoraConfig
from shardtune.config.parameter_patterns import is_pattern
from shardtune.errors import ConfigError
from shardtune.models.lora.config import (
    CONVOLUTIONS,
    DECOMPOSING,
    MICA,
    PICKLED,
    PREFIX,
    SECTION,
    SUBTRACTING,
    WEIGHTS,
    as_target,
    class_name,
    ends,
    fresh_config,
    head_of,
    is_frozen,
    is_inside,
    join,
    stored_config,
    targeted,
    trained_in_full,
)
from shardtune.models.lora.methods import inject_other, is_other, other_config, stored_other_config
from shardtune.models.lora.nf4 import NF4Linear, to_nf4
from shardtune.models.new_tokens import KEY as ROWS
from shardtune.models.new_tokens import check_rows, trained_rows
from shardtune.parallel import peft_names as peft
from shardtune.parallel.torch_private.modules import contents, own_persistent_buffers

ADAPTER = "default"
"""PEFT's name for an adapter that is the only one."""

if TYPE_CHECKING:

    class AdaptedLayer(peft.BaseTunerLayer, nn.Module):
        """A layer of PEFT: each is both, though `BaseTunerLayer` itself is no module."""

    class AdaptedByLora(peft.LoraLayer, nn.Module):
        """A layer of a LoRA."""


@dataclass(frozen=True, slots=True)
class BaseTensor:
    """A parameter or persistent buffer that the model had before it was adapted.

    Attributes:
        name: its original name, as in weight files.
        own_name: its name in the adapted model.
        tensor: the parameter or buffer; of a layer in NF4 its codes.
        layer: the NF4 layer it belongs to, if any.
    """

    name: str
    own_name: str
    tensor: torch.Tensor
    layer: NF4Linear | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor in weight files."""
        layer = self.layer
        return tuple(self.tensor.shape) if layer is None else (layer.out_features, layer.in_features)


def attach_adapter(
    model: nn.Module,
    config: LoraConfig,
    new_ids: Sequence[int] = (),
    afresh: Sequence[str] = (),
    *,
    seed: int = 0,
    compute: torch.dtype = torch.float32,
) -> list[str]:
    """Freeze a model and inject an adapter, in place, on the meta device, before the model is sharded.

    Args:
        model: any module; a model of transformers keeps its class and methods.
        config: the recipe's `actor.model.lora`.
        new_ids: ids of tokens whose embeddings are trained beside the adapter.
        afresh: modules without pretrained weights; beside a fresh adapter they are trained in full.
        seed: of the values of a method other than LoRA, which has them from the start.
        compute: the dtype of the computation.

    Returns:
        Notes for the user: modules that are not adapted, and others that are trained too.

    Raises:
        ConfigError: a name matches nothing, or PEFT cannot adapt what it matches.
    """
    notes: list[str] = []
    if is_other(config):
        return _attach_other(model, config, new_ids, afresh, seed, compute)
    if config.load_from is not None:
        made = stored_config(Path(config.load_from))
        made.lora_dropout = config.dropout
        trained = trained_in_full(model, _stored_whole(model, made, Path(config.load_from)), notes)
        meant = _meant(model, config, made, trained)
        made.modules_to_save = None  # PEFT would train a copy and keep the original in memory
        names, init = None, made.init_lora_weights
        made.init_lora_weights = MICA if init == MICA else True  # the model is on the meta device
        check_rows(made.trainable_token_indices, trained_rows(model, new_ids, _inside(model, trained)), config)
    else:
        init = config.init
        trained = trained_in_full(model, [*config.modules_to_save, *_to_train(model, config, afresh, notes)], notes)
        made, names = fresh_config(model, config, trained, notes)
        meant = None
        made.trainable_token_indices = trained_rows(model, new_ids, _inside(model, trained)) or None
        if names and any(name in names for name in made.trainable_token_indices or ()):
            raise ConfigError(
                "an embedding is adapted whole and by the rows of new tokens",
                where=f"{SECTION}.target_modules, {ROWS}",
                remedy=f"leave embedding and head out of target_modules, or name them in {SECTION}.modules_to_save",
            )
    thawed = [parameter for name in trained for parameter in _to_thaw(model.get_submodule(name))]
    _inject(made, model)
    _check_reach(model, names)
    _check_meant(model, config, meant)
    notes += _check_beginning(model, init, "init" if config.load_from is None else "load_from")
    notes += _not_for_peft(trained)
    for _, wrapper in token_rows(model):
        wrapper.token_adapter.trainable_tokens_original.clear()  # PEFT's copy, for taking rows out of a merged weight
    made.modules_to_save = sorted(trained) or None
    made.init_lora_weights = init  # pyright: ignore[reportAttributeAccessIssue] (PEFT declares fewer names)
    for parameter in thawed:
        parameter.requires_grad_(True)
    return notes


def _attach_other(
    model: nn.Module,
    config: LoraConfig,
    new_ids: Sequence[int],
    afresh: Sequence[str],
    seed: int,
    compute: torch.dtype,
) -> list[str]:
    """`attach_adapter` with another method than LoRA."""
    if new_ids:
        raise ConfigError(
            "the embeddings of new tokens are trained beside LoRA alone",
            where=f"{ROWS}, {SECTION}.peft",
            remedy=f"name embedding and head in {SECTION}.modules_to_save of a LoRA, or leave one of them out",
        )
    notes: list[str] = []
    if config.load_from is not None:
        made, names = stored_other_config(Path(config.load_from)), None
        trained = trained_in_full(model, _stored_whole(model, made, Path(config.load_from)), notes)
        meant = _meant(model, config, made, trained)
    else:
        trained = trained_in_full(model, [*config.modules_to_save, *_to_train(model, config, afresh, notes)], notes)
        names = targeted(model, peft.LoraConfig(), config, trained, notes)
        made = other_config(model, config, names, as_target(model, names))
        meant = None
    thawed = [parameter for name in trained for parameter in _to_thaw(model.get_submodule(name))]
    vars(made)["modules_to_save"] = None  # PEFT would train a copy and keep the original in memory
    inject_other(made, model, seed, compute)
    _check_reach(model, names)
    _check_meant(model, config, meant)
    vars(made)["modules_to_save"] = sorted(trained) or None
    for parameter in thawed:
        parameter.requires_grad_(True)
    return notes


def _to_thaw(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module that is trained in full, without what its own code has frozen inside it."""
    whole = is_frozen(module)
    return [parameter for parameter in module.parameters() if whole or parameter.requires_grad]


def _to_train(model: nn.Module, config: LoraConfig, afresh: Sequence[str], notes: list[str]) -> list[str]:
    """The modules with random weights that are trained in full: frozen, they would be noise."""
    named = [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules
    adapted = {name for ending in named for name, _ in model.named_modules() if ends(name, ending)}
    if isinstance(config.target_modules, str) and is_pattern(config.target_modules):
        adapted = {name for name, _ in model.named_modules() if re.fullmatch(config.target_modules, name)}
    found = [
        name
        for name in afresh
        if not any(is_inside(other, [name]) for other in adapted)
        and (is_frozen(model) or not is_frozen(model.get_submodule(name)))
    ]
    if found:
        notes.append(
            f"{', '.join(found)} begins with random weights, so it is trained in full and saved with the adapter; to "
            "leave it as it begins: actor.model.freeze"
        )
    return found


def _inside(model: nn.Module, names: Collection[str]) -> set[nn.Module]:
    return {child for name in names for child in model.get_submodule(name).modules()}


def keep_in_nf4(model: nn.Module, dtype: torch.dtype) -> str:
    """Replace the frozen linear layers of an adapted model on the meta device by NF4 layers; returns a note.

    As in QLoRA, the head, embeddings, norms and biases are not quantised.

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
    return peft.is_imported() and any(isinstance(module, peft.BaseTunerLayer) for module in model.modules())


def detach_adapter(model: nn.Module) -> None:
    """Remove the adapter from a model; the base weights are left as they are."""
    for name, layer in [*lora_layers(model), *token_rows(model)]:
        below: nn.Module = layer.token_adapter.base_layer if isinstance(layer, peft.TrainableTokensWrapper) else layer
        while is_adapted_layer(below):
            below = below.get_submodule("base_layer")
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, below)
    del vars(model)["peft_config"]


def adapter_config(model: nn.Module) -> peft.PeftConfig:
    """PEFT's description of a model's adapter."""
    return vars(model)["peft_config"][ADAPTER]


def saved_whole(config: peft.PeftConfig) -> Collection[str]:
    """The modules that are trained in full beside an adapter; configs of some methods have no such key."""
    return getattr(config, "modules_to_save", None) or ()


def _stored_whole(model: nn.Module, config: peft.PeftConfig, directory: Path) -> list[str]:
    """The modules that a stored adapter has in full. For PEFT `norm` is the end of `input_layernorm` as well.

    PEFT writes `classifier` and `score` for every classifier, whichever of them its class has: a name that neither the
    model nor the adapter's file has is left out.
    """
    endings = list(saved_whole(config))
    modules = [name for name, module in model.named_modules() if next(module.parameters(), None) is not None]
    further = [
        name for name in modules if name.endswith(tuple(endings)) and not any(ends(name, ending) for ending in endings)
    ]
    absent = [ending for ending in endings if not any(ends(name, ending) for name in modules)]
    stored = _stored_names(directory) if further or absent else ()
    unknown = [ending for ending in absent if not any(f".{ending}." in key for key in stored)]
    also = [name for name in further if any(key.startswith(f"{PREFIX}{name}.") for key in stored)]
    return [ending for ending in endings if ending not in unknown] + also


def _stored_names(directory: Path) -> Collection[str]:
    """The names of the tensors of an adapter; none where its file cannot be read, which loading it reports."""
    try:
        if not (directory / WEIGHTS).is_file():
            return torch.load(directory / PICKLED, map_location="meta", weights_only=True, mmap=True).keys()
        with safe_open(directory / WEIGHTS, "pt") as file:
            return list(file.keys())
    except (OSError, RuntimeError, ValueError, SafetensorError, UnpicklingError):
        return ()


def lora_layers(model: nn.Module) -> Iterator[tuple[str, AdaptedLayer]]:
    """PEFT's layers by name, the outermost of nested ones only."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if is_adapted_layer(module) and module not in inside:
            inside.update(module.modules())
            yield name, module


def token_rows(model: nn.Module) -> list[tuple[str, peft.TrainableTokensWrapper]]:
    """PEFT's wrappers of embeddings and heads that are trained by rows, with their names."""
    if not peft.is_imported():
        return []
    return [(name, module) for name, module in model.named_modules() if isinstance(module, peft.TrainableTokensWrapper)]


def base_tensors(model: nn.Module) -> Iterator[BaseTensor]:
    """The parameters (shared ones under each name) and persistent buffers of the base model."""
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
        if not _wraps(module):
            yield from _below(child, join(own, key), join(name, key))
        elif key in ("base_layer", "token_adapter"):
            yield from _below(child, join(own, key), name)


def _wraps(module: nn.Module) -> bool:
    return peft.is_imported() and isinstance(module, (peft.BaseTunerLayer, peft.TrainableTokensWrapper))


def trainable_patterns(
    parameters: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size] = MappingProxyType({})
) -> list[tuple[str, int, int]]:
    """A summary of what is trained: (name with numbers as *, tensors, parameters), in the model's order.

    `layers.0.q.weight` and `layers.1.q.weight`, 64 numbers each, become ("layers.*.q.weight", 2, 128). As patterns of
    `actor.model.freeze` or `actor.optim.groups` they match the names that they represent.

    Args:
        parameters: by name; frozen ones are left out.
        shapes: of whole parameters, by name, where this rank's part has another shape.
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
            # On tied weights, Conv1D's layout, patterns for parameters: the notes above cover what matters.
            warnings.simplefilter("ignore")
            peft.inject_adapter_in_model(made, model, ADAPTER, low_cpu_mem_usage=True)
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"PEFT cannot adapt {class_name(model)} so: {str(error).splitlines()[0]}",
            where=SECTION,
            remedy="choose other modules, or leave out what the message names",
        ) from error


def _check_reach(model: nn.Module, names: Collection[str] | None) -> None:
    """Refuse an adapter on other modules than intended, or on ones that do not work when sharded."""
    adapted = {name for name, layer in lora_layers(model) if not isinstance(layer, peft.ParamWrapper)}
    if names is not None and adapted != set(names):
        raise ConfigError(
            f"PEFT adapts other modules than those named: {', '.join(sorted(adapted ^ set(names))[:3])}",
            where=f"{SECTION}.target_modules",
            remedy="name them otherwise",
        )
    unsupported = [name for name, layer in lora_layers(model) if isinstance(layer, peft.MultiheadAttention)]
    if unsupported:
        raise ConfigError(
            f"{unsupported[0]} is an nn.MultiheadAttention, whose adapter would be merged and removed in every forward",
            where=f"{SECTION}.target_modules",
            remedy="leave it out",
        )


def _meant(model: nn.Module, config: LoraConfig, stored: peft.PeftConfig, trained: Sequence[str]) -> list[str] | None:
    """The modules that a recipe targets in its own words, beside those of the stored adapter that it starts from.

    Args:
        model: not adapted yet.
        config: the recipe's; where it names no modules, they are those of the stored adapter.
        stored: PEFT's description of that adapter.
        trained: the modules that it has in full.

    Returns:
        Their full names; None where the recipe has no words of its own.

    Raises:
        ConfigError: it names other modules to be trained in full.
    """
    given = config.model_fields_set
    if "modules_to_save" in given and sorted(config.modules_to_save) != sorted(saved_whole(stored)):
        _check_same("modules_to_save", config, trained_in_full(model, config.modules_to_save, []), trained)
    targets = vars(stored)["target_modules"]
    targets = targets if isinstance(targets, str) else sorted(targets or ())
    own = config.target_modules if isinstance(config.target_modules, str) else sorted(config.target_modules)
    if "target_modules" not in given or own == targets:
        return None
    return targeted(model, peft.LoraConfig(), config, trained, [])


def _check_meant(model: nn.Module, config: LoraConfig, meant: Collection[str] | None) -> None:
    """Refuse a stored adapter on other modules than the recipe's own words mean."""
    if meant is not None:
        adapted = [name for name, layer in lora_layers(model) if not isinstance(layer, peft.ParamWrapper)]
        _check_same("target_modules", config, meant, adapted)


def _check_same(key: str, config: LoraConfig, meant: Collection[str], stored: Collection[str]) -> None:
    for name in sorted({*meant} ^ {*stored}):
        what = "leaves out" if name in stored else "means"
        has = "has" if name in stored else "does not have"
        raise ConfigError(
            f"{SECTION}.{key} {what} {name}, which the adapter in {config.load_from} {has}",
            where=f"{SECTION}.{key}",
            remedy="leave it out: with load_from, the adapter's own modules are used",
        )


def _not_for_peft(trained: Collection[str]) -> list[str]:
    """Notes on modules trained in full for which PEFT, which goes by the ends of names, takes parts of its layers."""
    return [
        f"PEFT cannot load {name} beside LoRA, as it takes each {part} for it by the end of the name: continue and "
        "evaluate the adapter here, export with --merge, or give the module another name"
        for name in trained
        for part in ("lora_dropout", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
        if part.endswith(name)
    ]


def _check_beginning(model: nn.Module, init: bool | str, key: str) -> list[str]:
    """Refuse an initialiser that a layer cannot have; returns a note on embeddings, which PEFT begins in its usual way.

    Args:
        model: adapted, on the meta device or not.
        init: PEFT's name of the initialiser.
        key: of the recipe's LoRA section, that has chosen it.
    """
    if isinstance(init, bool):
        return []
    where, usual, others = f"{SECTION}.{key}", list[str](), False
    begun = where if key == "load_from" else f"{where}: {init}"
    for name, layer in lora_layers(model):
        assert is_lora_layer(layer)
        base = layer.get_base_layer()
        embeds, weight = isinstance(base, nn.Embedding), base.get_parameter("weight")
        if init == "olora" and isinstance(base, Conv1D):
            what = f"PEFT's olora takes the weight of {name} (Conv1D) for its transpose"
        elif (embeds and init.startswith(SUBTRACTING)) or (isinstance(base, CONVOLUTIONS) and init != "gaussian"):
            what = f"PEFT does not initialise {name} ({class_name(base)}) by {init}"
        elif init.startswith(DECOMPOSING) and layer.r[ADAPTER] > min(weight.shape):
            raise ConfigError(
                f"the adapter of {name} has the rank {layer.r[ADAPTER]}, and its weight {list(weight.shape)} has "
                f"{min(weight.shape)} parts at most",
                where=begun,
                remedy=f"lower {SECTION}.r, or that of this layer (rank_pattern) to {min(weight.shape)}, or leave init "
                "out",
            )
        else:
            usual += [name] if embeds and init != MICA else []
            others |= not embeds or init == MICA
            continue
        raise ConfigError(
            what,
            where=begun,
            remedy=f"leave the module out of {SECTION}.target_modules, or use another init",
        )
    if usual and not others:
        raise ConfigError(
            f"{where}: {init} has no effect on embeddings, and no other module is adapted ({usual[0]})",
            where=begun,
            remedy="leave it out",
        )
    return [f"LoRA on {', '.join(usual)} begins as by init: true; PEFT has no {init} for embeddings"] if usual else []


def is_adapted_layer(module: nn.Module) -> TypeGuard[AdaptedLayer]:
    wraps = peft.is_imported() and isinstance(module, peft.BaseTunerLayer)
    return wraps and not isinstance(module, peft.TrainableTokensLayer)


def is_lora_layer(module: nn.Module) -> TypeGuard[AdaptedByLora]:
    return peft.is_imported() and isinstance(module, peft.LoraLayer)
