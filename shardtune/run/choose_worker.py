"""Chooses a run's worker: the one that the recipe names or its model type is registered for, otherwise `SFTWorker`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

from pydantic import BaseModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardtune.config import ModelConfig, Recipe
from shardtune.config.model_names import (
    BUILT_IN,
    is_declared,
    is_registered,
    missing_methods,
    registered,
    registered_adapter,
    registered_worker,
)
from shardtune.config.recipe_config import as_dict_config
from shardtune.config.user_code import code_hashes, import_plugins, load_function, names_in
from shardtune.config.values import ENVIRONMENTS, FUNCTION_IN_FILE, LOSSES
from shardtune.errors import ConfigError
from shardtune.models.action.check_length import check_stored_length
from shardtune.models.registered_functions import require_known
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.build_dataloader import check_build_dataloader
from shardtune.training.worker.sft_trainer import SFTTrainer
from shardtune.training.worker.worker_class import check_worker_names

MODEL_TYPE, WORKER = "actor.model.model_type", "actor.worker"
READS_MODEL = {"get_model", "super", "cfg", "recipe"}
"""Names by which a method of a worker's gets at the recipe's model."""
BUILT_IN_WORKERS: Mapping[str, type[FSDPSftWorker]] = {"sft_trainer": SFTTrainer}
"""Names that a recipe may use in place of file.py:Class."""


@dataclass(frozen=True, slots=True)
class Objects:
    """In-memory objects that replace what a recipe names."""

    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    train_data: object = None
    eval_data: object = None

    @property
    def any(self) -> bool:
        """Whether there is one; they are not compared, as tables and tensors compare element by element."""
        return any(value is not None for value in (self.model, self.tokenizer, self.train_data, self.eval_data))

    def keys(self) -> list[str]:
        """The recipe keys that they replace."""
        given = {
            "actor.model.model_path": self.model is not None,
            "data.train_data_paths": self.train_data is not None,
            "data.eval_data_paths": self.eval_data is not None,
        }
        return [key for key, present in given.items() if present]


NOTHING = Objects()


def make_worker(
    recipe: Recipe, objects: Objects = NOTHING, *, training: bool = True, report: Callable[[str], None] = print
) -> FSDPSftWorker:
    """Create the worker of a recipe.

    Args:
        recipe: of the run; its plugins are imported.
        objects: in memory; for `SFTWorker` and its subclasses.
        training: False for a worker that only evaluates and answers.
        report: receives messages while the data is prepared.
    """
    kind = worker_class(recipe)
    check_signatures(kind)
    if issubclass(kind, SFTWorker):
        _check_loader(recipe, kind)
        return kind(
            recipe,
            model=objects.model,
            tokenizer=objects.tokenizer,
            train_data=objects.train_data,
            eval_data=objects.eval_data,
            training=training,
            report=report,
        )
    if objects.any:
        raise ConfigError(
            f"the run is driven by {kind.__name__}, which takes no objects in memory",
            where=WORKER if recipe.actor.worker else MODEL_TYPE,
            remedy="let its model_provider_func and build_dataloader return them",
        )
    check_worker(recipe, kind)
    return kind(as_dict_config(recipe))


def worker_class(recipe: Recipe) -> type[FSDPSftWorker]:
    """The class of a recipe's worker.

    Raises:
        ConfigError: the recipe names no worker, or the choice is ambiguous.
    """
    modules = import_plugins(recipe.plugins)
    name = recipe.actor.model.model_type
    if recipe.actor.worker is not None:
        kind = _named(recipe.actor.worker)
        require_known(name)
        return kind
    if name in BUILT_IN or recipe.actor.model.adapter is not None:
        return SFTWorker
    worker = registered_worker(name)
    if worker is not None:
        return worker
    if registered_adapter(name) is not None or not (is_declared(name) or registered(name)):
        return SFTWorker  # it raises the error for an unknown name
    return _only_worker(name, modules, required=is_declared(name))


def _named(spec: str) -> type[FSDPSftWorker]:
    """The class of `file.py:Class` or of a built-in name."""
    if spec in BUILT_IN_WORKERS:
        return BUILT_IN_WORKERS[spec]
    found = load_function(spec, WORKER)
    if not (inspect.isclass(found) and issubclass(found, FSDPSftWorker)):
        raise ConfigError(
            f"{WORKER}: {spec} is no worker",
            where=WORKER,
            remedy="name a class that derives from shardtune.FSDPSftWorker",
        )
    lacking = missing_methods(found)
    if lacking:
        raise ConfigError(
            f"the worker {found.__name__} lacks {', '.join(lacking)}",
            where=f"{WORKER} = {spec}",
            remedy="write the methods that every worker has",
        )
    return found


def _only_worker(name: str, modules: list[ModuleType], *, required: bool) -> type[FSDPSftWorker]:
    """The one worker of the plugins that is not registered under a name."""
    found = unnamed_workers(modules)
    if len(found) == 1:
        return found[0]
    if not found and not required:
        return SFTWorker
    which = ", ".join(f"{kind.__name__} ({kind.__module__})" for kind in found)
    raise ConfigError(
        f"{MODEL_TYPE} = {name} is driven by no worker: the plugins define "
        + (f"several that have no name: {which}" if found else "none"),
        where=MODEL_TYPE,
        remedy=f'write @register_model("{name}") on the class, or {WORKER}: file.py:Class into the recipe',
    )


def unnamed_workers(modules: list[ModuleType]) -> list[type[FSDPSftWorker]]:
    """The complete worker classes that are defined in these modules and not registered under a name."""
    names = tuple(module.__name__ for module in modules)
    found: dict[tuple[str, str], type[FSDPSftWorker]] = {}  # a redefined class: the last definition counts
    waiting: list[type[FSDPSftWorker]] = [FSDPSftWorker]
    while waiting:
        kind = waiting.pop(0)
        waiting += kind.__subclasses__()
        inside = kind.__module__ in names or kind.__module__.startswith(tuple(f"{name}." for name in names))
        if inside and not missing_methods(kind) and not is_registered(kind):
            found[kind.__module__, kind.__qualname__] = kind
    return list(found.values())


def unused_workers(recipe: Recipe, worker: FSDPSftWorker) -> list[str]:
    """A note for the user if there are workers that nothing uses, or if the worker does not use `model_type`."""
    name, named = recipe.actor.model.model_type, recipe.actor.worker
    if named is not None and name != ModelConfig.model_fields["model_type"].default:
        other = registered_worker(name)
        if other is not None and other is not type(worker):
            return [
                f"{MODEL_TYPE} = {name} is registered for {other.__name__}, which nothing uses: {WORKER} is {named}"
            ]
        if not names_in(type(worker).model_provider_func) & READS_MODEL:
            return [f"{MODEL_TYPE} = {name} has no effect: model_provider_func of {named} makes a model of its own"]
    other = registered_worker(name)
    if named is None and other is not None and recipe.actor.model.adapter is not None:
        return [
            f"{MODEL_TYPE} = {name} is registered for {other.__name__}, which nothing uses: actor.model.adapter is set "
            f"({WORKER}: file.py:{other.__name__} names a worker beside an adapter)"
        ]
    found = [kind.__name__ for kind in unnamed_workers(import_plugins(recipe.plugins))]
    if not found or type(worker) is not SFTWorker:
        return []
    return [f"the plugins define {', '.join(found)}, which nothing uses: {MODEL_TYPE} is {name} and {WORKER} is null"]


CALLS: Mapping[str, tuple[object, ...]] = {
    "save_checkpoint": ("path", 0),
    "load_checkpoint": ("path",),
    "loss_weights": ("batch",),
    "get_train_model_output": ("batch",),
    "get_eval_model_output": ("batch",),
    "model_provider_func": (),
    "run_training": (),
    "run_eval": (),
}
"""Methods of a worker, and what each is called with."""


def check_signatures(kind: type[FSDPSftWorker]) -> None:
    """Refuse methods of a worker that cannot be called as they are.

    Raises:
        ConfigError: names the method, and its first line as it may be.
    """
    for name, arguments in CALLS.items():
        method = getattr(object.__new__(kind), name)
        own = next((base for base in kind.__mro__ if name in vars(base)), kind)
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError as error:
            shown = ", ".join(inspect.signature(getattr(FSDPSftWorker, name)).parameters)
            raise ConfigError(
                f"{own.__name__}.{name}({', '.join(inspect.signature(method).parameters)}) takes other arguments than "
                f"it is called with: {error}",
                where=f"{WORKER}: {kind.__name__}.{name}",
                remedy=f"write def {name}({shown})",
            ) from error
        except ValueError:  # a callable without a signature
            continue


def check_worker(recipe: Recipe, kind: type[FSDPSftWorker]) -> None:
    """Check a user-defined worker against its recipe, without creating it.

    Raises:
        ConfigError: keys that it would ignore, or a `build_dataloader` that cannot be called as the recipe needs it.
    """
    check_worker_names(kind, FSDPSftWorker)
    check_signatures(kind)
    check_keys(recipe, kind)
    _check_loader(recipe, kind)
    check_stored_length(recipe.actor.model)


def _check_loader(recipe: Recipe, kind: type[FSDPSftWorker]) -> None:
    """Refuse a `build_dataloader` that cannot be called for the rows of a recipe."""
    method = object.__new__(kind).build_dataloader
    check_build_dataloader(method, eval_dataset=False)
    if recipe.data.eval_data_paths is not None or recipe.data.eval_split:
        check_build_dataloader(method, eval_dataset=True)


def check_keys(recipe: Recipe, kind: type[FSDPSftWorker]) -> None:
    """Refuse keys that a user-defined worker would ignore."""
    actor, data, evaluation = recipe.actor, recipe.data, recipe.eval
    ignored = {
        "actor.model.adapter": actor.model.adapter is not None,
        "actor.loss": actor.loss is not None,
        "actor.label_smoothing": actor.label_smoothing > 0,
        "actor.z_loss": actor.z_loss > 0,
        "actor.neftune_alpha": actor.neftune_alpha is not None,
        "actor.max_tokens_per_micro_batch": actor.max_tokens_per_micro_batch is not None,
        "actor.fill_micro_batches": actor.fill_micro_batches is not None,
        "actor.global_batch_tokens": actor.global_batch_tokens is not None,
        "data.eval_split": data.eval_split > 0,
        "data.transform": data.transform is not None,
        "data.on_bad_row": data.on_bad_row != "fail",
        "data.on_too_long": data.on_too_long != "truncate",
        "data.thinking": data.thinking is not None,
        "data.template_kwargs": bool(data.template_kwargs),
        "data.on_prompt_mismatch": data.on_prompt_mismatch != "fail",
        "data.ignored_keys": bool(data.ignored_keys),
        "data.audit": data.audit != type(data.audit)(),
        "data.quarantine": data.quarantine is not None,
        "eval.generate": evaluation.generate,
        "eval.harness": bool(evaluation.harness),
        "eval.environment": evaluation.environment is not None,
        "eval.metrics": bool(evaluation.metrics),
    }
    for key, spec in (("data.train_data_paths", data.train_data_paths), ("data.eval_data_paths", data.eval_data_paths)):
        for name in _beside_paths(spec):
            raise ConfigError(
                f"{key}: {name} is for the built-in worker; build_dataloader of {kind.__name__} is given paths alone",
                where=recipe.where(key) or key,
                remedy="leave it out; settings of your own loader belong in actor.model.options",
            )
    for key in (key for key, given in ignored.items() if given):
        raise ConfigError(
            f"{key} is for the built-in worker; {kind.__name__} defines rows, loss and metrics itself",
            where=recipe.where(key) or key,
            remedy=f"leave it out, or write it into {kind.__name__}",
        )


def _beside_paths(spec: object) -> list[str]:
    """The keys of data path entries besides `path`."""
    if isinstance(spec, Mapping):
        spec = [entry for entries in spec.values() for entry in (entries if isinstance(entries, list) else [entries])]
    entries = spec if isinstance(spec, list) else [spec]
    given = [
        name for entry in entries if isinstance(entry, BaseModel) for name in entry.model_dump(exclude_defaults=True)
    ]
    return [name for name in dict.fromkeys(given) if name != "path"]


def user_code(recipe: Recipe) -> dict[str, str]:
    """A hash of each user code file that a recipe names."""
    worker = None if recipe.actor.worker in BUILT_IN_WORKERS else recipe.actor.worker
    environment = None if recipe.eval.environment in ENVIRONMENTS else recipe.eval.environment
    loss = None if recipe.actor.loss in LOSSES else recipe.actor.loss
    named = [worker, recipe.actor.model.adapter, loss, environment, *recipe.eval.metrics]
    named += [recipe.actor.optim.name] if FUNCTION_IN_FILE.fullmatch(recipe.actor.optim.name) else []
    named += [name for name in recipe.runner.logger.logger_backends if FUNCTION_IN_FILE.fullmatch(name)]
    return code_hashes(recipe.plugins, [*named, *recipe.runner.callbacks])
