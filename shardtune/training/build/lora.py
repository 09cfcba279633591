"""Applies a recipe's LoRA section to a model: before sharding, and when weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardtune.batch.seeds import derive_seed
from shardtune.checkpoint.hf_load import MayLack, lacking_weights
from shardtune.checkpoint.module_weights import in_files
from shardtune.checkpoint.peft_directory import check_adapter, load_adapter
from shardtune.config import ActorConfig, LoraConfig, ModelConfig, Recipe
from shardtune.errors import ConfigError
from shardtune.models.adapter import WeightSource
from shardtune.models.lora.attach import attach_adapter, base_tensors, is_adapted, keep_in_nf4, lora_layers
from shardtune.models.lora.config import ALL_LINEAR, CONFIG_FILE, SECTION, ends, is_frozen, is_inside, stored_config
from shardtune.models.lora.init import changes_base, initialise_adapter
from shardtune.models.lora.methods import is_other
from shardtune.models.new_tokens import KEY, check_known, grow_embeddings, token_ids
from shardtune.parallel.buffers import statistical_norms
from shardtune.parallel.precision import COMPUTE_DTYPE
from shardtune.training.build.initial_weights import directory_of


def new_ids(recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """The ids of the tokens that a recipe adds."""
    tokens = recipe.actor.added_tokens
    if not tokens:
        return []
    if tokenizer is None:
        raise ConfigError(
            f"{KEY} = {tokens}, and there is no tokenizer",
            where=KEY,
            remedy="give actor.tokenizer.tokenizer_model, or leave them out",
        )
    return token_ids(tokenizer, tokens)


def adapt(
    model: nn.Module,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase | None,
    source: Callable[[], WeightSource] = lambda: None,
    new_parts: Sequence[str] = (),
    may_lack: MayLack | None = None,
) -> list[str]:
    """Add the new embeddings and the adapter that the recipe configures, if any; before sharding.

    Args:
        source: returns the source of the initial weights; called only with an adapter.
        new_parts: modules that are trained in full beside the adapter, see `Adapter.new_parts`.
        may_lack: which tensors of a model of transformers begin afresh, of those that its files lack; None: none do.

    Returns:
        Notes for the user.
    """
    config = recipe.actor.model
    ids = new_ids(recipe, tokenizer)
    _refuse_adapted(model, config)
    _check_names(model, new_parts)
    notes = grow_embeddings(model, ids)
    if not config.is_lora:
        return notes
    if notes:
        call = f"base.resize_token_embeddings({max(ids) + 1})"
        notes.append(f"to load the adapter with PEFT, call {call} before PeftModel.from_pretrained")
    empty = all(base.tensor.is_meta for base in base_tensors(model) if isinstance(base.tensor, nn.Parameter))
    afresh: list[str] = []
    bare: list[str] = []
    if config.lora.load_from is None:
        afresh = _drawn(model, source(), may_lack, bare) if empty else _not_in_files(model, config.model_path)
    elif not is_other(config.lora):
        check_known(stored_config(Path(config.lora.load_from)).trainable_token_indices, tokenizer, config.lora)
    lora, compute = _with_parts(config.lora, new_parts), COMPUTE_DTYPE[config.precision]
    notes += attach_adapter(model, lora, ids, afresh, seed=derive_seed(recipe.runner.seed, "lora"), compute=compute)
    left = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if still := [name for name in bare if name in left]:
        notes.append(
            f"{', '.join(still)}: a parameter that begins as the constructor makes it, and is not trained, as beside "
            "an adapter whole modules are; to train it, put it into a module of its own"
        )
    if config.lora.load_from is not None:
        _check_parts(model, config.lora.load_from, new_parts)
    notes += _keep_statistics(model)
    if config.lora.base_dtype == "nf4":
        if changes_base(model):
            raise ConfigError(
                f"the adapter in {config.lora.load_from} began as a part of the base weights, of which NF4 would "
                "round what is left once more",
                where=f"{SECTION}.base_dtype: nf4",
                remedy=f"set {SECTION}.base_dtype: bf16",
            )
        if not empty:
            raise ConfigError(
                "a model in memory keeps its own weights, which NF4 would replace",
                where=f"{SECTION}.base_dtype: nf4",
                remedy="save it and give its directory as actor.model.model_path",
            )
        notes.append(keep_in_nf4(model, COMPUTE_DTYPE[config.precision]))
    return notes


def _refuse_adapted(model: nn.Module, config: ModelConfig) -> None:
    """Refuse a model with layers of PEFT: a run that did not add them itself could not read its own `final/`."""
    if not is_adapted(model):
        return
    layers = ", ".join(name for name, _ in islice(lora_layers(model), 2))
    raise ConfigError(
        f"{type(model).__name__} has layers of PEFT already: {layers}",
        where=f"actor.model.is_lora: {str(config.is_lora).lower()}",
        remedy="make the model without them: actor.model.is_lora: true adds them to it. Its r, alpha and "
        f"target_modules are keys of {SECTION}, and {SECTION}.load_from is for an adapter that is trained already",
    )


def check_frozen(model: nn.Module, config: ModelConfig) -> None:
    """Refuse a module that the recipe names for the adapter, or to be trained in full, and freezes as a whole.

    Args:
        model: adapted, and frozen where the recipe says so.
        config: of the recipe.

    Raises:
        ConfigError: nothing of such a module is trained.
    """
    if not config.is_lora or not config.freeze:
        return
    targets = config.lora.target_modules
    named = [] if targets == ALL_LINEAR else [targets] if isinstance(targets, str) else targets
    for key, endings in (("target_modules", named), ("modules_to_save", config.lora.modules_to_save)):
        for ending in endings:
            parts = [module for name, module in model.named_modules() if ends(name, ending)]
            parameters = [parameter for part in parts for parameter in part.parameters()]
            if parameters and not any(parameter.requires_grad for parameter in parameters):
                raise ConfigError(
                    f"{SECTION}.{key} names {ending}, and actor.model.freeze freezes all of it",
                    where=f"{SECTION}.{key}, actor.model.freeze",
                    remedy="leave it out of one of them",
                )


def _with_parts(lora: LoraConfig, new_parts: Sequence[str]) -> LoraConfig:
    """The settings of an adapter beside which these modules are trained in full; a stored adapter has its own."""
    added = [] if lora.load_from is not None else [name for name in new_parts if name not in lora.modules_to_save]
    return lora.model_copy(update={"modules_to_save": [*lora.modules_to_save, *added]}) if added else lora


def _check_names(model: nn.Module, new_parts: Sequence[str]) -> None:
    """Refuse anything but names of submodules."""
    if isinstance(new_parts, str):
        raise ConfigError(
            f"new_parts is {new_parts!r}, not a tuple of names", where="new_parts", remedy=f"({new_parts!r},)"
        )
    known = dict(model.named_modules())
    for name in new_parts:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise ConfigError(
                f"new_parts names {name!r}, which is no submodule of {type(model).__name__}",
                where="new_parts",
                remedy=f"did you mean {near[0]!r}?" if near else "give names of named_modules()",
            )


def _check_parts(model: nn.Module, load_from: str, new_parts: Sequence[str]) -> None:
    """Refuse a stored adapter without a module that is to be trained beside it."""
    for name in new_parts:
        if is_frozen(model.get_submodule(name)):
            raise ConfigError(
                f"the adapter in {load_from} has no {name}",
                where=f"{SECTION}.load_from",
                remedy=f"begin with one that was trained with actor.model.add_{name}, or leave that key out",
            )


def _drawn(model: nn.Module, source: WeightSource, may_lack: MayLack | None, bare: list[str]) -> list[str]:
    """Modules with random weights while others are loaded from a file, for example a new head.

    Args:
        bare: extended by the names of parameters that begin anew as well, are to be trained, and lie in no such module.
    """
    if may_lack is not None and isinstance(model, PreTrainedModel) and isinstance(source, str | Path):
        new = set(lacking_weights(model, directory_of(source), may_lack))
        return _outermost(model, {name: name in new for name, _ in model.named_parameters()}) if new else []
    if not isinstance(source, Mapping) or all(value is None for value in source.values()):
        return []
    random = {
        name: source[max(owners, key=len)] is None
        for name, _ in model.named_parameters(remove_duplicate=False)
        if (owners := [key for key in source if not key or is_inside(name, [key])])
    }
    found = _outermost(model, random)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    bare += [name for name, begins in random.items() if begins and name in trained and not is_inside(name, found)]
    return found


def _not_in_files(model: nn.Module, model_path: str | None) -> list[str]:
    """Modules that a user's `from_pretrained` drew, as the base's files lack them, for example a value head.

    Files whose names are not those of the model's tensors show nothing.
    """
    if model_path is None or not any(Path(model_path).glob("*.safetensors")):
        return []
    stored = in_files(Path(model_path)).keys()
    if not stored <= model.state_dict(keep_vars=True).keys():
        return []
    named = list(model.named_parameters(remove_duplicate=False))
    read = {parameter for name, parameter in named if name in stored}  # tied ones are stored under one of their names
    return _outermost(model, {name: parameter not in read for name, parameter in named})


def _outermost(model: nn.Module, chosen: Mapping[str, bool]) -> list[str]:
    """The modules of which all parameters are chosen, without those inside of another."""
    found: list[str] = []
    for name, _ in model.named_modules():
        inside = [value for parameter, value in chosen.items() if name and parameter.startswith(f"{name}.")]
        if inside and all(inside) and not is_inside(name, found):
            found.append(name)
    return found


def _keep_statistics(model: nn.Module) -> list[str]:
    """Keep the running statistics of a frozen base's norms fixed: an adapter does not store them."""
    frozen = {
        name: norm
        for name, norm in statistical_norms(model).items()
        if not any(parameter.requires_grad for parameter in norm.parameters())
    }
    for norm in frozen.values():
        norm.register_forward_pre_hook(_in_evaluation)
    if not frozen:
        return []
    return [f"{len(frozen)} batch norms of the frozen base ({next(iter(frozen))}, …) keep their running statistics"]


def _in_evaluation(module: nn.Module, _inputs: object) -> None:
    module.training = False


def check_stored(model: nn.Module, config: ModelConfig) -> None:
    """Compare the adapter that training starts from with an adapted model, by names and shapes."""
    if config.is_lora and config.lora.load_from is not None:
        check_adapter(model, config.lora.load_from)


def frozen_dtype(config: ModelConfig) -> torch.dtype | None:
    """The dtype of the base weights of an adapter, if it differs from that of the trained ones."""
    if not config.is_lora or config.lora.base_dtype == "auto":
        return None
    return COMPUTE_DTYPE[config.precision]


def keeps_base(model: nn.Module, actor: ActorConfig) -> bool:
    """Whether a model has an adapter over the weights of its files as they are: none is changed, no row is added."""
    return is_adapted(model) and not changes_base(model) and not actor.added_tokens


def begin_adapter(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Initialise an adapter's weights, after the base model's are loaded; every rank calls it."""
    if not config.is_lora:
        return
    if config.lora.load_from is None or changes_base(model):
        initialise_adapter(model, seed)
    if config.lora.load_from is not None:
        load_adapter(model, config.lora.load_from)


def from_elsewhere(model: nn.Module) -> frozenset[str]:
    """The names of parameters that checkpoints leave out: frozen ones, which training starts from and never changes."""
    return frozenset(
        base.own_name
        for base in base_tensors(model)
        if isinstance(base.tensor, nn.Parameter) and not base.tensor.requires_grad
    )


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter and not a model."""
    return (directory / CONFIG_FILE).is_file()
