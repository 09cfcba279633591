"""Checks of a user's adapter class, made before anything is built or read."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping

from pydantic import BaseModel
from torch import nn

from shardtune.config.checks.actions import OF_STATISTICS, idle_columns
from shardtune.config.keys import KEYS, is_free_mapping, nearest
from shardtune.config.other_trainers import OF_ADAPTERS
from shardtune.config.schema import long_key, present_key, short_key
from shardtune.config.user_code import check_call, function_of, names_in
from shardtune.data.robot.returns import RETURN
from shardtune.errors import ConfigError
from shardtune.models.action.acting import ActingAdapter
from shardtune.models.adapter import Adapter
from shardtune.models.value_head import ValueHead
from shardtune.models.value_loss import HEAD
from shardtune.models.whole_step_adapter import WholeStepAdapter

ADD_HEAD, DISCOUNT = "actor.model.add_value_head", "actor.model.value_head.discount"
PAGE = "docs/add-a-model.md shows how"
CALLS = {
    "build": "",
    "encode": "row",
    "weights": "sample",
    "loss": "model, batch",
    "outputs": "model, batch",
    "step_loss": "outputs",
    "metrics": "model, batch",
    "predictions": "model, batch",
    "initial_weights": "",
    "examples": "",
    "collate": "samples, rows, weights",
}
"""The methods that authors write, and the arguments they are called with."""
UNCALLED_IN_WHOLE_STEPS = ("loss", "train_loss", "evaluate", "metrics")
"""Methods that training and evaluation of a `WholeStepAdapter` do not call."""
CALLED_BY = {
    "loss": "train_loss",
    "metrics": "evaluate",
    "predictions": "evaluate",
    "encode": "encoder",
    "weights": "encoder",
    "padding": "collate",
    "unit_classes": "shard_units",
    "tensor_plan": "apply_model_parallel",
}
"""What authors write, and the method of `Adapter` that calls or reads it, which a class may override too."""
DECLARED = ("Options", "padding", "unit_classes", "image_fields", "reads", "normalization_mapping")
FURTHER = ("collate", "tensor_plan", "encoding_settings", "augmented", "new_weights", "processor")
"""What few authors write: a helper may have a name like one of these, if another method uses it."""
OF_WHOLE_STEPS = ("outputs", "step_loss", "evaluation_rows")
"""What a `WholeStepAdapter` alone has."""
OWN = "shardtune."
"""Prefix of the package's own modules."""
MEANT = 0.83
"""Similarity (difflib's ratio) from which a name counts as a misspelling of one above: metric and metrics have 0.92."""


def check_adapter_class(kind: type[Adapter], where: str) -> None:
    """Refuse a class that lacks methods, whose methods take other arguments, or whose attributes have wrong types.

    Args:
        kind: the user's class.
        where: the place of the recipe that names it, for messages.

    Raises:
        ConfigError: names the fault and the correct form.
    """
    if inspect.isabstract(kind):
        lacking = ", ".join(sorted(kind.__abstractmethods__))
        raise ConfigError(f"the adapter {kind.__name__} lacks {lacking}", where=where, remedy=f"write it; {PAGE}")
    written = {name: value for base in reversed(kind.__mro__) if _is_users(base) for name, value in vars(base).items()}
    _check_declared(kind, where)
    for name in CALLS.keys() & written.keys():
        _check_method(kind, name, written[name], where)
    if "__init__" in written and "from_recipe" not in written:
        made = f"{kind.__name__}.__init__(recipe, tokenizer)"
        check_call(written["__init__"], 3, made, where)
    _check_names(kind, written, where)
    if issubclass(kind, WholeStepAdapter):
        _check_whole_step(kind, where)
        _check_evaluation_rows(kind, where)
    else:
        _check_no_whole_step(kind, written, where)
    for name in CALLED_BY.keys() & written.keys():
        _check_called(kind, name, where)
    if not {"__init__", "from_recipe"} & written.keys():
        _check_base(kind, where)


def _check_base(kind: type[Adapter], where: str) -> None:
    """Refuse a class that extends an adapter of this package which a recipe alone does not make."""
    base = next(base for base in kind.__mro__ if "__init__" in vars(base))
    try:
        inspect.signature(base.__init__).bind(None, None, None)
    except TypeError:
        if "from_recipe" not in {name for each in kind.__mro__[: kind.__mro__.index(base) + 1] for name in vars(each)}:
            raise ConfigError(
                f"{kind.__name__} extends {base.__name__}, which is made from a model's config and not from a recipe",
                where=where,
                remedy="extend Adapter, with a build that returns the model (docs/add-a-model.md), or choose the loss "
                "of its tokens by name or by a function of yours (docs/losses.md)",
            ) from None


def check_made(adapter: Adapter, where: str) -> None:
    """Refuse an adapter whose `__init__` does not call that of `Adapter`, or with an idle `observation_steps`."""
    if "recipe" not in vars(adapter):
        name = type(adapter).__name__
        raise ConfigError(
            f"{name}.__init__ does not call that of Adapter, so it has no recipe and no options",
            where=where,
            remedy="begin it with super().__init__(recipe, tokenizer), or do without it: an adapter keeps nothing",
        )
    acts = isinstance(adapter, ActingAdapter)  # its observations have earlier ones, whatever its rows are
    if adapter.observation_steps != 1 and adapter.action_chunk is None and not acts:
        name = type(adapter).__name__
        raise ConfigError(
            f"{name}.observation_steps is {adapter.observation_steps}, and rows have no earlier frames without "
            f"{name}.action_chunk: they are those of the data files",
            where=where,
            remedy="let action_chunk return the number of actions of a row, so that rows are frames of robot data, or "
            "leave observation_steps out",
        )


def check_value_head(adapter: Adapter, model: nn.Module) -> None:
    """Refuse `actor.model.add_value_head` where neither the model nor its adapter has values.

    Args:
        adapter: of the recipe.
        model: that it has built.

    Raises:
        ConfigError: there is no value head to train.
    """
    if not _is_users(type(adapter)) or not adapter.recipe.actor.model.add_value_head:
        return  # the package's own adapters build one, or refuse the key
    named = any(name.rpartition(".")[2] == HEAD or isinstance(part, ValueHead) for name, part in model.named_modules())
    valued = isinstance(adapter, ActingAdapter) and type(adapter).values is not ActingAdapter.values
    if not named and not valued:
        kind = type(adapter).__name__
        raise ConfigError(
            f"{ADD_HEAD} is true, and {kind}.build makes a {type(model).__name__} without a part named {HEAD}",
            where=adapter.recipe.where(ADD_HEAD) or ADD_HEAD,
            remedy=f"add {HEAD} = shardtune.ValueHead(width) to the model, and train it on what encode takes from "
            f'row["{RETURN}"]; or write {kind}.values where the model has values without a head; or leave the key out',
        )


def check_keys_of_actions(adapter: Adapter) -> None:
    """Refuse keys of actions and of a value head that do nothing with a user's adapter, unless its class reads them.

    Raises:
        ConfigError: nothing is normalised, a chunk has another length, returns cannot be computed from these rows, or
            nothing reads a column.
    """
    if not _is_users(type(adapter)):
        return
    recipe, kind = adapter.recipe, type(adapter).__name__
    model = recipe.actor.model
    reads, given = {long_key(name) for name in adapter.reads}, model.model_dump(exclude_defaults=True)
    idle: dict[str, tuple[str, str]] = {}
    if not (isinstance(adapter, ActingAdapter) and adapter.normalizes):
        remedy = f"derive {kind} from ActingAdapter and give it normalization_mapping, or leave it out"
        idle |= dict.fromkeys((*OF_STATISTICS, "normalization_mapping"), (f"{kind} has no self.normalizer", remedy))
    chunk = adapter.action_chunk
    if chunk != model.action_chunks_len:
        remedy = f"let {kind}.action_chunk return self.recipe.actor.model.action_chunks_len, or leave the key out"
        idle["action_chunks_len"] = (f"{kind}.action_chunk is {chunk}", remedy)
    for name, (why, remedy) in idle.items():
        key = f"actor.model.{name}"
        if name in given and key not in reads:
            raise ConfigError(f"{key} has no effect: {why}", where=recipe.where(key) or key, remedy=remedy)
    if chunk is not None:
        problem = next(idle_columns(recipe), None)
        if problem is not None:
            raise problem
    elif model.add_value_head and model.value_head.discount is not None and DISCOUNT not in reads:
        raise ConfigError(
            f"{DISCOUNT}: the rows of {kind} are no frames of robot data, so no returns are computed from rewards",
            where=recipe.where(DISCOUNT) or DISCOUNT,
            remedy=f"leave it out; or let {kind}.action_chunk be the number of actions of a row; or act on it in "
            f"{kind} and add it to its reads",
        )


def _check_declared(kind: type[Adapter], where: str) -> None:
    """Check the types of the class attributes."""
    options: object = kind.Options
    if not (inspect.isclass(options) and issubclass(options, BaseModel)):
        raise ConfigError(
            f"{kind.__name__}.Options is {_describe(options)}, not a class of pydantic",
            where=where,
            remedy="class Options(pydantic.BaseModel): width: int = 16; and in the adapter: Options = Options",
        )
    padding: object = kind.padding
    if not isinstance(padding, Mapping) or not all(isinstance(value, int | float) for value in padding.values()):
        raise ConfigError(
            f"{kind.__name__}.padding is {_describe(padding)}, not a dict of numbers",
            where=where,
            remedy='padding = {"field": 0}: the fields whose rows differ in length, and what they are filled with',
        )
    texts = {"unit_classes": kind.unit_classes, "image_fields": kind.image_fields, "reads": kind.reads}
    for name, value in texts.items():
        if isinstance(value, str) or not all(isinstance(item, str) for item in value):
            raise ConfigError(
                f"{kind.__name__}.{name} is {_describe(value)}, not a tuple of names",
                where=where,
                remedy=f'{name} = ("{value}",)'
                if isinstance(value, str)
                else f'{name} = ("Block",): texts, no classes',
            )
    for name in kind.reads:
        key = present_key(name)
        if key in KEYS or any(is_free_mapping(KEYS[upper].field) for upper in _sections_of(key) if upper in KEYS):
            continue
        near = nearest(key)
        raise ConfigError(
            f"{kind.__name__}.reads names {name}, which is no key of a recipe",
            where=where,
            remedy=f"did you mean {short_key(near)}?" if near else "docs/configuration.md lists all keys",
        )


def _sections_of(key: str) -> list[str]:
    """The dotted names of what a key lies in."""
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _check_method(kind: type[Adapter], name: str, found: object, where: str) -> None:
    """Check that a method can be called with its documented arguments."""
    call = f"{kind.__name__}.{name}({CALLS[name]})"
    function = function_of(found)
    if not callable(function):
        raise ConfigError(
            f"{kind.__name__}.{name} is {_describe(found)}, not a method", where=where, remedy=f"write {call}"
        )
    arguments = len(CALLS[name].split(", ")) if CALLS[name] else 0
    check_call(function, arguments + (not isinstance(found, staticmethod)), call, where)


def _check_names(kind: type[Adapter], written: Mapping[str, object], where: str) -> None:
    """Refuse misspelt names, and those by which other trainers call methods: nothing would ever read them."""
    free = [name for name in (*CALLS, *DECLARED, *FURTHER) if name not in written]
    lower = {name.lower(): name for name in free}
    for name in written:
        if name.startswith("_") or name in vars(Adapter) or name in CALLS or name in DECLARED:
            continue
        near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=MEANT)
        if near and not (lower[near[0]] in FURTHER and _is_used(name, written)):
            raise ConfigError(
                f"{kind.__name__}.{name} is no method or attribute of an adapter",
                where=where,
                remedy=f"did you mean {lower[near[0]]}? The name of a helper of your own may begin with _",
            )
        others = any(name in vars(base) for base in kind.__mro__ if not _is_users(base))  # such as nn.Module's forward
        if name in OF_ADAPTERS and inspect.isfunction(written[name]) and not others and not _is_used(name, written):
            raise ConfigError(
                f"{kind.__name__}.{name} would never be called",
                where=where,
                remedy=f"leave it out: {OF_ADAPTERS[name]}. The name of a helper of your own may begin with _",
            )
    if "options" in written:
        raise ConfigError(
            f"{kind.__name__}.options is set by the recipe, and cannot be set by the class",
            where=where,
            remedy="did you mean Options, the class of their types?",
        )


def _check_whole_step(kind: type[WholeStepAdapter], where: str) -> None:
    """Refuse overrides that a loss of whole steps would bypass."""
    for name in UNCALLED_IN_WHOLE_STEPS:
        if getattr(kind, name) is not getattr(WholeStepAdapter, name):
            raise ConfigError(
                f"{kind.__name__}.{name} is never called: a WholeStepAdapter is trained and evaluated by its step_loss",
                where=where,
                remedy="leave it out; step_loss may return several terms, each of which is logged",
            )


def _check_no_whole_step(kind: type[Adapter], written: Mapping[str, object], where: str) -> None:
    """Refuse what only a loss of whole steps would use."""
    for name in OF_WHOLE_STEPS:
        if name in written and not _is_used(name, written):
            raise ConfigError(
                f"{kind.__name__}.{name} is never used: {kind.__name__} is trained by its loss, batch by batch",
                where=where,
                remedy=f"derive {kind.__name__} from shardtune.WholeStepAdapter, whose step_loss is of all rows of a "
                "step, or leave it out",
            )


def _is_used(name: str, written: Mapping[str, object]) -> bool:
    """Whether another method of the class names it."""
    return any(name in names_in(found) for key, found in written.items() if key != name)


def _check_called(kind: type[Adapter], name: str, where: str) -> None:
    """Refuse what is never called or read, because a class of the same hierarchy overrides the caller.

    An overridden caller counts as calling it where its code names it. What helpers of the user's own call is not known,
    so of their callers only `evaluate` is looked at.
    """
    outer = CALLED_BY[name]
    for base in kind.__mro__:
        if base is Adapter:
            return
        caller = vars(base).get(outer)
        if caller is None:
            continue
        names = names_in(caller)
        if name in names or (_is_users(base) and (name != "metrics" or not inspect.isfunction(caller))):
            return
        # A user's class may name another's method in place of super(); here a function has the name of a method.
        if not names & ({outer, "super"} if _is_users(base) else {"super"}):
            raise ConfigError(
                f"{kind.__name__}.{name} is never used: {base.__name__}.{outer} takes the place of what would use it",
                where=where,
                remedy=f"call it in {outer}, or leave it out"
                if _is_users(base)
                else f"leave it out, or write {outer}, which is what {base.__name__} calls; {PAGE}",
            )


def _check_evaluation_rows(kind: type[WholeStepAdapter], where: str) -> None:
    rows: object = kind.evaluation_rows
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise ConfigError(
            f"{kind.__name__}.evaluation_rows is {_describe(rows)}, not a number of rows",
            where=where,
            remedy="evaluation_rows = 64: the rows that step_loss compares at once in evaluation",
        )


def _is_users(kind: type) -> bool:
    """Whether a base class is the user's own: neither the package's nor Python's."""
    return issubclass(kind, Adapter) and not kind.__module__.startswith(OWN)


def _describe(value: object) -> str:
    return f"the class {value.__name__}" if inspect.isclass(value) else f"{value!r}"[:60]
