"""Methods of PEFT other than LoRA, by their own configs: which ones are trained here, and how they begin.

PEFT's layers begin with values that it draws when it makes them. On the meta device they would be lost, so the weights
of the model are replaced meanwhile by one number that is none, which takes no memory. So what a method draws is the
same on every rank; one that computes its beginning from the weights comes out as not a number and is refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from shardtune.config import LoraConfig
from shardtune.errors import ConfigError
from shardtune.models.lora.choice import SECTION
from shardtune.models.lora.config import class_name, ends, read_config
from shardtune.parallel import peft_names as peft
from shardtune.parallel.torch_private.modules import contents, set_parameter

KEY = f"{SECTION}.peft"
TYPE = "peft_type"
TRAINED = (
    "BOFT",
    "C3A",
    "FOURIERFT",
    "GLORA",
    "GRALORA",
    "HIRA",
    "HRA",
    "IA3",
    "LOHA",
    "LOKR",
    "MISS",
    "OFT",
    "PEANUT",
    "RANDLORA",
    "ROAD",
    "WAVEFT",
)
"""Those that tests compare with PEFT in a plain loop: trained, saved, loaded by PEFT and merged."""
OURS = (
    "base_model_name_or_path",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "modules_to_save",
    "revision",
    "target_modules",
    "task_type",
)
"""Keys of configs that are keys of the section, or are not for users."""


def is_other(config: LoraConfig) -> bool:
    """Whether a recipe's adapter is of another method than LoRA."""
    if config.load_from is not None:
        return not isinstance(read_config(Path(config.load_from)), peft.LoraConfig)
    return bool(config.peft)


def other_config(
    model: nn.Module, config: LoraConfig, names: Sequence[str], target: list[str] | str
) -> peft.PeftConfig:
    """PEFT's config of a new adapter by `lora.peft`.

    Args:
        model: that is adapted.
        config: the recipe's LoRA section.
        names: of the modules that are adapted.
        target: the same as PEFT takes it.

    Raises:
        ConfigError: the method is none that is trained here, or its config has other keys or values.
    """
    given = dict(config.peft)
    kind = _config_class(str(given.pop(TYPE)))
    known = [field.name for field in dataclasses.fields(kind) if field.init and field.name not in OURS]
    for key in given:
        if key in OURS:
            place = f"{SECTION}.{key}" if key in LoraConfig.model_fields else "model.model_path"
            raise ConfigError(f"{KEY} has {key}", where=KEY, remedy=f"give it as {place}, or leave it out")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=3) or known
            raise ConfigError(
                f"{KEY}: {kind.__name__} has no key {key}", where=KEY, remedy=f"keys are {', '.join(near)}"
            )
    inside = given.get("feedforward_modules")
    if isinstance(inside, list):  # PEFT compares them with the targets as they stand
        given["feedforward_modules"] = [name for name in names if any(ends(name, str(ending)) for ending in inside)]
    task = peft.TaskType.CAUSAL_LM if class_name(model).endswith("ForCausalLM") else None
    try:
        made = kind(**given, task_type=task)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{KEY}: {error}", where=KEY, remedy=f"see PEFT's {kind.__name__}") from error
    vars(made)["target_modules"] = target
    return made


def stored_other_config(directory: Path) -> peft.PeftConfig:
    """The config of a directory that PEFT can load, of a method other than LoRA.

    Raises:
        ConfigError: the method is none that is trained here.
    """
    found = read_config(directory)
    _config_class(_name(found))
    found.inference_mode = False
    return found


def _config_class(name: str) -> type[peft.PeftConfig]:
    """The config of a method by its name, in any case, with or without Config."""
    word = name.upper().removesuffix("CONFIG").replace("-", "_")
    types = {kind.value: kind for kind in peft.PeftType}
    if word in TRAINED:
        return peft.PEFT_TYPE_TO_CONFIG_MAPPING[types[word]]
    if word == "LORA":
        raise ConfigError(
            f"{KEY} is for other methods than LoRA", where=KEY, remedy=f"set the keys of {SECTION} itself"
        )
    if word not in types:
        near = difflib.get_close_matches(word, TRAINED, n=3) or TRAINED
        raise ConfigError(f"{KEY}: PEFT has no method {name}", where=KEY, remedy=f"methods are {', '.join(near)}")
    tuner = peft.PEFT_TYPE_TO_TUNER_MAPPING.get(types[word])
    if tuner is None or not issubclass(tuner, peft.BaseTuner):
        why = "changes the model's inputs or attention, for which rows are not prepared here"
    elif types[word] == peft.PeftType.ADALORA:
        why = "changes ranks between steps, by code that PEFT leaves to the training loop"
    elif tuner.uses_shared_state:
        why = "has tensors that several layers share outside of them"
    else:
        why = "is not among the methods that are compared with PEFT"
    raise ConfigError(
        f"{KEY}: {word} is not trained here: it {why}", where=KEY, remedy=f"use LoRA, or one of {', '.join(TRAINED)}"
    )


def inject_other(made: peft.PeftConfig, model: nn.Module, seed: int, compute: torch.dtype) -> None:
    """Put a method's layers into a model, with the values that they begin with, alike on all ranks.

    Args:
        made: the config.
        model: changed in place; its own parameters are left as they are.
        seed: of what is drawn: `torch.manual_seed(seed)` and PEFT on a whole model give the same.
        compute: the dtype of the computation, which buffers of the layers get.

    Raises:
        ConfigError: PEFT refuses the model, or the values would depend on its weights.
    """
    before = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    try:
        with without_weights(model), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(made, model, "default")
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"PEFT cannot adapt {class_name(model)} so: {str(error).splitlines()[0]}",
            where=KEY,
            remedy="choose other modules, or leave out what the message names",
        ) from error
    own = [module for layer in model.modules() if isinstance(layer, peft.BaseTunerLayer) for module in _parts(layer)]
    for module in own:
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise ConfigError(
                    f"{KEY}: {_name(made)} begins from the weights of the model, which have no values yet",
                    where=KEY,
                    remedy="use other settings of it, or LoRA",
                )
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(compute)
    after = {
        name.replace(".base_layer", ""): parameter.shape
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    if any(after.get(name) != shape for name, shape in before.items()):
        raise ConfigError(f"{KEY}: {_name(made)} changes the model's own weights", where=KEY, remedy="use LoRA")


def _name(config: peft.PeftConfig) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


def _parts(layer: object) -> Iterator[nn.Module]:
    assert isinstance(layer, nn.Module)
    yield from (child for name, child in layer.named_children() if name != "base_layer")


@contextmanager
def without_weights(model: nn.Module) -> Iterator[None]:
    """Inside, each parameter is not a number, of the same shape and without memory."""
    held: dict[nn.Parameter, nn.Parameter] = {}
    for _, parameter in model.named_parameters():
        none = torch.full((), torch.nan, dtype=torch.float32).expand(parameter.shape)
        held[nn.Parameter(none, requires_grad=parameter.requires_grad)] = parameter
    _exchange(model, {parameter: none for none, parameter in held.items()})
    try:
        yield
    finally:
        for none, parameter in held.items():
            parameter.requires_grad_(none.requires_grad)
        _exchange(model, held)


def _exchange(model: nn.Module, other: Mapping[nn.Parameter, nn.Parameter]) -> None:
    for module in list(model.modules()):
        for key, parameter in contents(module)[0].items():
            if parameter is not None and parameter in other:
                set_parameter(module, key, other[parameter])
