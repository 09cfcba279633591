"""PEFT's LoraConfig of an adapter: from a recipe, with names checked against the model, or from a directory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from copy import deepcopy
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from shardtune.config import LoraConfig
from shardtune.config.parameter_patterns import is_pattern
from shardtune.config.saved_lora import ALL_LINEAR
from shardtune.errors import ConfigError
from shardtune.models.lora.choice import SECTION, chosen, in_layers, own_values
from shardtune.models.lora.linear_layers import LINEAR, lost_when_loaded, uncalled, unlike_linear
from shardtune.parallel import peft_names as peft

CONFIG_FILE = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
PREFIX = "base_model.model."
"""PEFT's prefix of the names of the model's own modules."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
ADAPTABLE = (*LINEAR, nn.Embedding, *CONVOLUTIONS)
CLASSIFIERS = ("score", "classifier")
"""Heads of transformers' sequence classifiers."""
KEEPING_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Initialisers of PEFT that leave the base weights as they are."""
SUBTRACTING = ("pissa", "olora")
"""Those that take what they begin with out of the base weights, always alike; PEFT does so again when it loads."""
MICA = "mica"
"""The initialiser beside which PEFT trains one of the factors alone, when it continues the adapter, too."""
DECOMPOSING = (*SUBTRACTING, MICA)
"""Initialisers that decompose the base weight."""
# Of an adapter's config: what would change the forward pass in ways that are not covered here.
UNSUPPORTED = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)


def fresh_config(
    model: nn.Module, config: LoraConfig, trained: Collection[str], notes: list[str]
) -> tuple[peft.LoraConfig, list[str]]:
    """PEFT's config of a new adapter, and the full names of the modules that it is for."""
    kind = class_name(model)
    made = peft.LoraConfig(
        r=config.r,
        lora_alpha=_whole(config.alpha),  # pyright: ignore[reportArgumentType]
        lora_dropout=config.dropout,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        task_type=peft.TaskType.CAUSAL_LM if kind.endswith("ForCausalLM") else None,
        init_lora_weights=MICA if config.init == MICA else True,  # others are drawn once there is memory
    )
    names = targeted(model, made, config, trained, notes)
    if config.target_modules == ALL_LINEAR and not config.target_parameters:
        notes += _left_out(model)
    for ending in config.target_parameters:
        _check_parameter(model, ending)
    made.target_parameters = [name for ending in config.target_parameters for name in _trained(model, ending, notes)]
    made.target_parameters = made.target_parameters or None
    made.target_modules = as_target(model, names)
    made.exclude_modules = config.exclude_modules or None
    if isinstance(made.target_modules, list) and len(in_layers(config, names)) == len(names):
        # Otherwise PEFT would refuse them or leave out a module that is named in full; the names alone say the same.
        made.layers_to_transform, made.layers_pattern = config.layers_to_transform, config.layers_pattern or None
    notes += _parted(model, names)
    parameters = [
        name
        for name, _ in model.named_parameters()
        if any(ends(name, ending) for ending in made.target_parameters or ())
    ]
    ranks = own_values("rank_pattern", config.rank_pattern, [*names, *parameters])
    scales = own_values("alpha_pattern", config.alpha_pattern, [*names, *parameters])
    made.rank_pattern = {name: int(rank) for name, rank in ranks.items()}
    made.alpha_pattern = {name: _whole(scale) for name, scale in scales.items()}
    return made, names


def targeted(
    model: nn.Module, made: peft.LoraConfig, config: LoraConfig, trained: Collection[str], notes: list[str]
) -> list[str]:
    """The full names of the modules that get an adapter, by the recipe's keys for them."""
    targets = config.target_modules
    if targets == ALL_LINEAR:
        names = chosen(model, config, dict.fromkeys(_all_linear(model, trained, notes), False))
    elif isinstance(targets, str) and is_pattern(targets):
        names = chosen(model, config, dict.fromkeys(_matched(model, targets, notes), False))
        _check_apart(names, trained)
    else:
        endings = [targets] if isinstance(targets, str) else targets
        found = [
            name
            for ending in endings
            for name in without_frozen(model, _ending(model, ending), ending, "target_modules", notes)
        ]
        names = chosen(model, config, {name: name in endings for name in found})
        _check_apart(names, trained)
    return _not_renamed(model, made, names, everything=targets == ALL_LINEAR, notes=notes)


def _whole(number: float) -> float:
    """A whole number as one, as in PEFT's files."""
    return int(number) if number == int(number) else number


def _all_linear(model: nn.Module, trained: Collection[str], notes: list[str]) -> list[str]:
    """Linear layers that are no head, are called as modules, share no weight, and are neither frozen nor trained in
    full."""
    head, shared, all_frozen = head_of(model), _shared(model), is_frozen(model)
    attention = [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    found, frozen = [], []
    others: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, LINEAR) or module is head or is_inside(name, trained):
            continue
        if is_frozen(module) and not all_frozen:
            frozen.append(name)
            continue
        if not shared.isdisjoint(module.parameters(recurse=False)):
            notes.append(f"LoRA leaves out {name}, which shares its weight: merged, the two would differ")
            continue
        unfit = "" if is_inside(name, attention) else unlike_linear(module) or uncalled(model, name)
        if unfit:
            others.setdefault(unfit, []).append(name)
        elif not is_inside(name, attention):
            found.append(name)
    notes += [f"LoRA leaves out {len(names)} modules ({names[0]}, …): each is {what}" for what, names in others.items()]
    if attention:
        notes.append(
            f"LoRA leaves out {len(attention)} modules of class nn.MultiheadAttention ({attention[0]}, …), which use "
            "their matrices without calling them as layers"
        )
    if frozen:
        notes.append(
            f"LoRA leaves out {len(frozen)} linear layers that requires_grad_(False) has frozen ({frozen[0]}, …); to "
            f"adapt them, name them in {SECTION}.target_modules"
        )
    if not found:
        raise ConfigError(
            f"{class_name(model)} has no linear layer to adapt"
            + (f": requires_grad_(False) has frozen {len(frozen)} ({frozen[0]}, …)" if frozen else ""),
            where=f"{SECTION}.target_modules: {ALL_LINEAR}",
            remedy="name the modules to adapt (embeddings and convolutions can be), or parameters in target_parameters",
        )
    return found


def is_frozen(module: nn.Module) -> bool:
    """Whether a module has parameters, and `requires_grad_(False)` has frozen all of them."""
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def without_frozen(model: nn.Module, names: list[str], ending: str, key: str, notes: list[str]) -> list[str]:
    """Of the modules that an ending matches, those that the model's code has not frozen, as it does with a teacher.

    All of them where every one is frozen, or the whole model: then the ending can mean nothing else.

    Args:
        names: of the modules.
        ending: that matches them; a full name is always kept.
        key: of the recipe's LoRA section, for the note.
        notes: for the user, extended here.
    """
    frozen = [name for name in names if name != ending and is_frozen(model.get_submodule(name))]
    if not frozen or len(frozen) == len(names) or is_frozen(model):
        return names
    notes.append(
        f"LoRA leaves out {len(frozen)} of the modules called {ending}, which requires_grad_(False) has frozen "
        f"({frozen[0]}, …); to take them, write their full names in {SECTION}.{key}"
    )
    return [name for name in names if name not in frozen]


def _trained(model: nn.Module, ending: str, notes: list[str]) -> list[str]:
    """The ending of parameters, or the full names of those that are not frozen where only some of them are."""
    found = {name: parameter for name, parameter in model.named_parameters() if ends(name, ending)}
    trained = [name for name, parameter in found.items() if parameter.requires_grad]
    if ending in found or len(trained) in (0, len(found)):
        return [ending]
    frozen = [name for name in found if name not in trained]
    notes.append(
        f"LoRA leaves out {len(frozen)} of the parameters called {ending}, which requires_grad_(False) has frozen "
        f"({frozen[0]}, …)"
    )
    return trained


def _shared(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that have several names."""
    names = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    return {parameter for parameter, count in names.items() if count > 1}


def _parted(model: nn.Module, names: list[str]) -> list[str]:
    """Notes on adapted layers of a plain module whose weight has other names; models of transformers are untied."""
    if isinstance(model, PreTrainedModel):
        return []
    notes, named = [], list(model.named_parameters(remove_duplicate=False))
    for layer in names:
        for own in model.get_submodule(layer).parameters(recurse=False):
            others = [name for name, parameter in named if parameter is own and name.rpartition(".")[0] != layer]
            if others:
                notes.append(
                    f"LoRA on {layer} does not reach {', '.join(others)}, the same weight under another name: a merged "
                    "export has both, and is to be loaded into a module in which they are two weights"
                )
    return notes


def _matched(model: nn.Module, pattern: str, notes: list[str]) -> list[str]:
    """The linear layers whose whole names a regular expression matches, as in PEFT."""
    named = {name: module for name, module in model.named_modules() if re.fullmatch(pattern, name)}
    found = [name for name, module in named.items() if isinstance(module, LINEAR)]
    where = f"{SECTION}.target_modules"
    if not found:
        layers = [name for name, module in model.named_modules() if isinstance(module, LINEAR)]
        raise ConfigError(
            f"{where}: {pattern} matches the whole name of no linear layer of {class_name(model)}",
            where=where,
            remedy=f"names look like {', '.join(layers[:3])}",
        )
    found = without_frozen(model, found, pattern, "target_modules", notes)
    _check_adaptable(model, found)
    return found


def _ending(model: nn.Module, ending: str) -> list[str]:
    """The modules whose name is `ending`, or ends with it after a dot."""
    named = dict(model.named_modules())
    found = [name for name in named if ends(name, ending)]
    where = f"{SECTION}.target_modules"
    if not found:
        known = sorted({name.rpartition(".")[2] for name, module in named.items() if isinstance(module, ADAPTABLE)})
        raise ConfigError(
            f"{where}: no module of {class_name(model)} is called {ending}",
            where=where,
            remedy=f"use {ALL_LINEAR}, or of {', '.join(known)}",
        )
    _check_adaptable(model, found)
    return found


def _check_adaptable(model: nn.Module, names: Sequence[str]) -> None:
    where, modules = f"{SECTION}.target_modules", dict(model.named_modules())
    attention = [name for name, module in modules.items() if isinstance(module, nn.MultiheadAttention)]
    for name in names:
        inside = any(name != owner and is_inside(name, [owner]) for owner in attention)
        what = "inside an nn.MultiheadAttention" if inside else _obstacle(modules[name]) or uncalled(model, name)
        if what:
            raise ConfigError(
                f"{where}: {name} is {what}, which cannot be adapted",
                where=where,
                remedy="name linear layers, embeddings or convolutions, or train it in full: "
                f"{SECTION}.modules_to_save",
            )


def _obstacle(module: nn.Module) -> str:
    """Why a module cannot be adapted, in words; empty if it can."""
    if not isinstance(module, ADAPTABLE):
        return f"a {class_name(module)}"
    if isinstance(module, LINEAR):
        return unlike_linear(module)
    if isinstance(module, CONVOLUTIONS):
        # PEFT's factor is a convolution with the kernel, stride and padding of the module, but nothing else of it.
        others = {"dilation": set(module.dilation) - {1}, "groups": module.groups > 1}
        others["padding_mode"] = module.padding_mode != "zeros"
        return next((f"a {class_name(module)} with {name}" for name, present in others.items() if present), "")
    return ""


def _check_apart(names: Collection[str], trained: Collection[str]) -> None:
    both = [name for name in names if is_inside(name, trained)]
    if both:
        raise ConfigError(
            f"{both[0]} is both adapted and trained in full",
            where=f"{SECTION}.target_modules, {SECTION}.modules_to_save",
            remedy="leave it out of one of them",
        )


def _not_renamed(
    model: nn.Module, made: peft.LoraConfig, names: list[str], *, everything: bool, notes: list[str]
) -> list[str]:
    """Without the modules that PEFT, when it loads the adapter, would take for fused experts by their names, or would
    not find."""
    if not isinstance(model, PreTrainedModel):
        return names
    trial = deepcopy(made)
    trial.target_modules = list(names)
    peft.convert_peft_config_for_transformers(trial, model, None)
    remaining = set(trial.target_modules or ()) - lost_when_loaded(made, model, names)
    taken = [name for name in names if name not in remaining]
    if not taken:
        return names
    what = f"{len(taken)} linear layers ({taken[0]}, …) whose names PEFT takes for others' in this kind of model"
    if everything:
        notes.append(f"LoRA leaves out {what}")
        return [name for name in names if name in remaining]
    raise ConfigError(
        f"{SECTION}.target_modules names {what}",
        where=f"{SECTION}.target_modules",
        remedy=f"leave them out; experts are adapted by {SECTION}.target_parameters",
    )


def _left_out(model: nn.Module) -> list[str]:
    """Notes on parameters of three dimensions that no convolution has (experts, stacked), and on matrices of modules
    that are no linear layer (routers)."""
    layers = (*ADAPTABLE, nn.MultiheadAttention)
    found = [
        (join(prefix, name), parameter.ndim)
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim in (2, 3) and not isinstance(module, layers)
    ]
    notes = []
    for ndim, what in ((3, "stacked parameters, which are no linear layers"), (2, "matrices outside linear layers")):
        names = [name for name, dims in found if dims == ndim]
        if names:
            endings = sorted({".".join(name.split(".")[-2:]) for name in names})
            notes.append(
                f"LoRA leaves out {len(names)} {what}; to adapt them: "
                f"{SECTION}.target_parameters: [{', '.join(endings)}]"
            )
    return notes


def _check_parameter(model: nn.Module, ending: str) -> None:
    key = f"{SECTION}.target_parameters"
    found = [parameter for name, parameter in model.named_parameters() if ends(name, ending)]
    if found and all(parameter.ndim in (2, 3) for parameter in found):
        return
    stacked = sorted({n.rpartition(".")[2] for n, p in model.named_parameters() if p.ndim == 3})
    raise ConfigError(
        f"{key}: {ending} {'has not two or three dimensions' if found else 'matches no parameter'}",
        where=key,
        remedy=f"parameters of three dimensions here: {', '.join(stacked) or 'none'}",
    )


def as_target(model: nn.Module, names: list[str]) -> list[str] | str:
    """Names as PEFT takes them: a list matches endings, so where that is ambiguous a regular expression."""
    chosen = set(names)
    others = [name for name, _ in model.named_modules() if name and name not in chosen]
    if any(other.endswith(f".{name}") for other in others for name in chosen):
        return "|".join(re.escape(name) for name in names)
    return names


def trained_in_full(model: nn.Module, endings: Collection[str], notes: list[str]) -> list[str]:
    """The modules of `modules_to_save` by their full names, and those that share weights with them."""
    named = dict(model.named_modules())
    found: list[str] = []
    for ending in endings:
        matching = [name for name in named if ends(name, ending)]
        if not matching or not any(True for name in matching for _ in named[name].parameters()):
            raise ConfigError(
                f"{SECTION}.modules_to_save: no module with parameters of {class_name(model)} is called {ending}",
                where=f"{SECTION}.modules_to_save",
                remedy=f"modules at the top are {', '.join(name for name, _ in model.named_children())}",
            )
        matching = without_frozen(model, matching, ending, "modules_to_save", notes)
        found += [name for name in matching if name not in found]
    moved = {id(parameter) for name in found for parameter in named[name].parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        if id(parameter) in moved and not is_inside(owner, found):
            notes.append(f"{owner} shares its weights with one of {', '.join(found)}, so it is trained and saved too")
            found.append(owner)
    return [name for name in found if not any(is_inside(name, [other]) for other in found if other != name)]


def head_of(model: nn.Module) -> nn.Module | None:
    """The last layer of a model of transformers, which turns hidden states into logits or classes."""
    if not isinstance(model, PreTrainedModel):
        return None
    if class_name(model).endswith("Classification"):
        return next((child for name, child in model.named_children() if name in CLASSIFIERS), None)
    return model.get_output_embeddings()


def read_config(directory: Path) -> peft.PeftConfig:
    """The config of a directory that PEFT can load, of any method."""
    key = f"{SECTION}.load_from"
    if not (directory / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{directory} holds no {CONFIG_FILE}, so it is no adapter",
            where=key,
            remedy="give a directory as PEFT's save_pretrained (or a LoRA run's final/) has it",
        )
    try:
        return peft.PeftConfig.from_pretrained(str(directory))
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{directory / CONFIG_FILE} cannot be read: {error}", where=key) from error


def stored_config(directory: Path) -> peft.LoraConfig:
    """The LoRA config of a directory that PEFT can load.

    Raises:
        ConfigError: it holds none, or one that uses more than LoRA, rsLoRA and DoRA.
    """
    key = f"{SECTION}.load_from"
    found = read_config(directory)
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
    if found.init_lora_weights not in KEEPING_BASE and found.init_lora_weights not in SUBTRACTING:
        raise ConfigError(
            f"the adapter in {directory} began as {found.init_lora_weights!r}, which changed the base weights in a way "
            "that cannot be repeated",
            where=f"{key}: {CONFIG_FILE}, init_lora_weights",
            remedy="save it with PEFT once more, as save_pretrained(…, path_initial_model_for_weight_conversion=…)",
        )
    if found.init_lora_weights not in DECOMPOSING:
        found.init_lora_weights = True
    found.inference_mode = False
    return found


def class_name(module: nn.Module) -> str:
    return type(module).__name__


def ends(name: str, ending: str) -> bool:
    """Whether a module's name is `ending`, or ends with it after a dot."""
    return name == ending or name.endswith(f".{ending}")


def is_inside(name: str, owners: Collection[str]) -> bool:
    return any(name == owner or name.startswith(f"{owner}.") for owner in owners)


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
