"""Loads the initial weights of a module on its ranks, from the source that its class declares."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import peft
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import install_all_output_capturing_hooks

from shardtune.checkpoint.module_weights import Supply, in_files, load_plain
from shardtune.checkpoint.random_init import initialised_by_class
from shardtune.engine.nn import BaseHuggingFaceTrainModule, BaseTrainModule, LoraTrainModule
from shardtune.errors import ModelError
from shardtune.models.adapter import WeightSource
from shardtune.models.lora.attach import adapter_config, base_tensors, is_adapted
from shardtune.models.lora.init import initialise_adapter
from shardtune.parallel.meta_init import init_empty_weights, materialise
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.torch_private.modules import remove_forward_hooks, set_parameter
from shardtune.training.build.initial_weights import directory_of, own_buffers, split_source
from shardtune.training.build.model import build_empty, load_initial_weights

logger = logging.getLogger(__name__)


def load_first_weights(module: BaseTrainModule, prefix: str, ranks: Ranks, dtype: torch.dtype, seed: int) -> list[str]:
    """Load the initial weights of a sharded module; every rank calls it.

    Args:
        prefix: of the names that the class sees.
        dtype: of floating parameters in memory.
        seed: of random initialisation.

    Returns:
        Notes for the user, a sentence each.

    Raises:
        ModelError: there are none, or they do not fit.
    """
    empty_base = any(base.tensor.is_meta for base in base_tensors(module))
    empty_adapter = is_adapted(module) and any(parameter.is_meta for parameter in module.parameters())
    source = module.materialization_source() if empty_base or _overrides_source(module) else None
    notes: list[str] = []
    if source is None and empty_base and not isinstance(module, PreTrainedModel):
        raise ModelError(
            f"{type(module).__name__.removeprefix('FSDP')} was made without weights, and its class names no "
            "source of them",
            where="materialization_source()",
            remedy="return a state dict, functions that make its tensors, or a path; or make the module outside of "
            "init_empty_weights()",
        )
    overridden = overrides_input_hook(module)
    if source is not None and (overridden or "weight_mapping" in vars(module)):
        supplies = _renamed(module, prefix, _supplies(source, ranks, seed), changing=overridden)
        kept, notes = own_buffers(module, supplies)
        supplies |= kept
        materialise(module, dtype=dtype, device=ranks.device)
        load_plain(
            module,
            supplies,
            where="materialization_source()",
            remedy="let preprocess_input_named_parameters return the module's own names",
        )
    else:
        notes = load_initial_weights(
            source,
            module,
            module,
            build=_again(module),
            seed=seed,
            dtype=dtype,
            ranks=ranks,
            device=ranks.device,
            by_class=True,
            may_lack=partial(_new_heads, module, seed),
        )
    if empty_adapter and not isinstance(adapter_config(module), peft.LoraConfig):
        raise ModelError(
            f"{type(module).__name__.removeprefix('FSDP')} has an adapter without values that is no LoRA",
            where="init_empty_weights()",
            remedy="give it the adapter outside of init_empty_weights(), or use LoRA",
        )
    if empty_adapter:
        initialise_adapter(module, seed)
    return notes


def _new_heads(module: BaseTrainModule, seed: int, directory: Path, missing: Sequence[str]) -> set[str]:
    """Which missing tensors are new, and initialised by the model's class; other files are incomplete, or foreign.

    New is what the module has beside the class that the files were saved from; if they were saved from another class,
    what it has beside the base model (`model.` of a Llama), as a reward model begun from a causal one.
    """
    if not isinstance(module, PreTrainedModel):
        return set()
    file = directory / "config.json"
    declared = (json.loads(file.read_text()).get("architectures") or []) if file.is_file() else []
    models = [
        kind
        for kind in type(module).__mro__
        if issubclass(kind, PreTrainedModel) and not issubclass(kind, BaseTrainModule)
    ]
    saved = next((kind for kind in models if kind.__name__ in declared), None)
    if saved is None and module.base_model is module:
        saved = models[0]
    if saved is not None:
        with init_empty_weights():
            known = {base.name for base in base_tensors(saved(copy.deepcopy(module.config)))}
        added = set(missing) - known
    else:
        added = {name for name in missing if not name.startswith(f"{module.base_model_prefix}.")}
    pattern = build_empty(_again(module), seed)[0] if is_adapted(module) else module
    return added & initialised_by_class(pattern)


def undo_parting(module: nn.Module) -> None:
    """Undo what accelerate's `init_empty_weights` does to a module, before it goes to ranks.

    It makes another parameter at each registration, so what a model of transformers ties inside it is apart afterwards;
    and it leaves `requires_grad` among the attributes of the one before, from where a pickle would restore it over a
    later freeze.
    """
    for parameter in module.parameters():
        vars(parameter).pop("requires_grad", None)
    if not isinstance(module, PreTrainedModel):
        return
    places = {base.name: base for base in base_tensors(module)}
    for name, source in module.all_tied_weights_keys.items():
        shared = places[source].tensor
        if shared.is_meta and places[name].tensor.is_meta and isinstance(shared, nn.Parameter):
            owner, _, key = places[name].own_name.rpartition(".")
            set_parameter(module.get_submodule(owner), key, shared)


def forget_recorders(module: nn.Module) -> None:
    """Remove the hooks by which transformers records hidden states: they cannot be pickled.

    A model that has been called with `output_hidden_states` has them; the next such call makes them anew.
    """
    for part in module.modules():
        remove_forward_hooks(part, lambda hook: hook.__module__ == install_all_output_capturing_hooks.__module__)
        vars(part).pop("_output_capturing_hooks_installed", None)


def _again(module: BaseTrainModule) -> Callable[[], nn.Module]:
    """The same model without memory and without an adapter, if transformers can build it."""

    def build() -> nn.Module:
        kind: type = next(base for base in type(module).__mro__ if base.__module__.startswith("transformers."))
        return kind(copy.deepcopy(module.config))

    return build


def _overrides_source(module: BaseTrainModule) -> bool:
    """Whether the user's class overrides the source of weights."""
    return type(module).materialization_source not in (
        BaseTrainModule.materialization_source,
        BaseHuggingFaceTrainModule.materialization_source,
    )


def overrides_input_hook(module: BaseTrainModule) -> bool:
    """Whether the hook for tensors of the source is the user's; LoraTrainModule's own only maps names."""
    hook = type(module).preprocess_input_named_parameters
    return hook not in (
        BaseTrainModule.preprocess_input_named_parameters,
        LoraTrainModule.preprocess_input_named_parameters,
    )


def _supplies(source: WeightSource, ranks: Ranks, seed: int) -> dict[str, Supply]:
    if isinstance(source, str | Path):
        return in_files(directory_of(source))
    _, supplies = split_source(source, ranks, seed)
    return supplies


def _renamed(module: BaseTrainModule, prefix: str, supplies: dict[str, Supply], *, changing: bool) -> dict[str, Supply]:
    """Supplies by the module's names, as its class renames and changes them.

    Args:
        changing: the hook may also change values. What it does to a tensor without values does not show that (it may
            write in place, or return such a tensor at once), so it is called again with each whole tensor.
    """
    places = {base.own_name: base.name for base in base_tensors(module)}
    names = set(places.values())
    found: dict[str, Supply] = {}
    unknown: list[str] = []
    for name, supply in supplies.items():
        given, changed = module.preprocess_input_named_parameters(name, _without_values(supply))
        own = given.removeprefix(prefix)
        place = places.get(own, own if own in names else None)
        if place is None:
            unknown.append(given)
        elif changing:
            found[place] = Supply(_changing(module, name, supply), (tuple(changed.shape), changed.dtype))
        else:
            found[place] = supply
    if unknown:
        logger.warning("%d tensors have no place in the module, left out: %s", len(unknown), ", ".join(unknown[:5]))
    return found


def _without_values(supply: Supply) -> torch.Tensor:
    if supply.form is None:  # a function's, which makes the same tensor whenever it is called
        return supply.full().to("meta")
    shape, dtype = supply.form
    return torch.empty(shape, dtype=dtype, device="meta")


def _changing(module: BaseTrainModule, name: str, supply: Supply) -> Callable[[], torch.Tensor]:
    # A copy, as the hook may write into it, and the source may be a state dict of the user's.
    return lambda: module.preprocess_input_named_parameters(name, supply.full().clone())[1]
