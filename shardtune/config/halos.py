"""HALOs' configuration in a recipe: its names translated into ours, or refused with the key to use instead."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from shardtune.config.keys import ALIASES, HALOS_DEFAULTS, IN_ROWS
from shardtune.config.layers import Layer
from shardtune.config.overrides import CHOOSING, LISTS, Override, choose, test_splits
from shardtune.config.schema import ACTOR, Recipe, escape_interpolation
from shardtune.config.shown import as_written
from shardtune.config.tree import Tree, copied, flatten, get_value, set_value, take_value
from shardtune.errors import ConfigError

BACKENDS, ROWS, TRAIN, EVAL = (
    *("runner.logger.logger_backends", "actor.global_batch_size"),
    *("data.train_data_paths", "data.eval_data_paths"),
)
DERIVED = {
    **IN_ROWS,
    "local_run_dir": "runner.logger.log_path",
    "model.load_from": "actor.model.model_path",
    "n_eval_examples": EVAL,
    "wandb.enabled": BACKENDS,
}
"""Names whose value depends on others', and our keys."""
RENAMED = {theirs: ours for theirs, ours in ALIASES.items() if theirs not in DERIVED and theirs not in LISTS}
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
FACTS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "debug": ((False,), "use shardtune train --dry-run, which writes nothing"),
    "frac_unique_desirable": ((1, None), "leave it out; it is for preference losses"),
    "frac_unique_undesirable": ((1, None), "leave it out; it is for preference losses"),
    "humanline": ((False,), "leave it out; it needs a reference model"),
    "loss.dataloader": (("SFTDataLoader",), "use data.train_data_paths, or pass batches to SFTTrainer"),
    "loss.name": (("sft",), "use sft, the only loss there is, or override get_batch_metrics of SFTTrainer"),
    "loss.sync_reference": ((False,), "leave it out; supervised fine-tuning uses no reference model"),
    "loss.policy_hf_model_class": (("AutoModelForCausalLM",), "use actor.model.model_type"),
    "loss.trainer": (("SFTTrainer",), "use actor.worker: my_trainer.py:MyTrainer"),
    "loss.use_reference_model": ((False,), "leave it out; supervised fine-tuning uses none"),
    "mode": (("train",), "use shardtune eval or shardtune generate"),
    "model.from_checkpoint": (
        (None,),
        "use runner.resume_dir for a checkpoint of shardtune, model.load_from otherwise",
    ),
    "model.gradient_accumulation_steps": ((1,), "multiply model.batch_size (actor.global_batch_size) by it"),
    "online": ((False,), "leave it out; the rows are not sampled from the model"),
    "sync_reference": ((False,), "leave it out; supervised fine-tuning uses no reference model"),
    "trainer": (("SFTTrainer", "BasicTrainer"), "use actor.worker: my_trainer.py:MyTrainer"),
    "use_fsdp": ((True,), "use actor.training_backend: ddp"),
    "wandb.entity": ((None,), "set the environment variable WANDB_ENTITY"),
    **dict.fromkeys(
        ("human_prefix", "human_suffix", "assistant_prefix", "assistant_suffix"),
        ((), "use data.chat_template, which has the marks of the turns"),
    ),
    **dict.fromkeys(
        ("n_samples", "samples_dir", "saved_policy", "top_p"),
        ((), "use eval.generate, eval.num_samples and eval.temperature"),
    ),
}
"""Names with the values that describe what happens here anyway, and what to use in place of any other value."""
UNREAD = {
    "minimum_log_interval_secs": "lines are logged every runner.logger.log_interval steps",
    "model.eval_batch_size": "rows of a forward pass in evaluation: actor.eval_micro_batch_size",
    "model.max_prompt_length": "rows are cut at data.max_length alone",
    "save_every": "checkpoints are those of intermediate_checkpoints, or runner.save_interval",
    "step_scheduler_with_optimizer": "the rate is a function of the step",
    **dict.fromkeys(
        (
            *(
                "cache_reference_logprobs",
                "load_reference_logprobs",
                "humanline_alpha",
                "log_epsilon_P",
                "log_epsilon_R",
                "loss.reference_hf_model_class",
            ),
            *("model.reference_dtype", "model.v_head_max_grad_norm", "model.policy_online"),
            *("model.policy_online_update_steps", "model.reward_model"),
            *(f"model.reward_model.{name}" for name in ("path", "model_class", "dtype", "attn_implementation")),
        ),
        "for other losses than sft",
    ),
}
"""Names without a counterpart, and why; a run reports them."""
PEFT = ("model.peft.", "model.load_lora_from")
SHARED = "model.attn_implementation"
"""A name that is also one of ours, without `actor.`."""
NAMES = tuple(name for name in (*RENAMED, *DERIVED, *FACTS, *UNREAD) if name != SHARED)


@dataclass(slots=True)
class Translation:
    """Layers under our names.

    Attributes:
        layers: in place of the given ones.
        notes: what of HALOs' configuration has no effect, and why.
        problems: what is refused.
    """

    layers: list[Layer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[ConfigError] = field(default_factory=list)

    def last(self, dotted: str) -> object:
        """The value of a key that the last layer gives which has it."""
        values = (get_value(layer.tree, dotted) for layer in reversed(self.layers))
        return next((value for value in values if value is not None), None)

    def refuse(self, name: str, value: object, where: str, remedy: str, why: str = "is not available here") -> None:
        self.problems.append(ConfigError(f"{name}: {as_written(value)} {why}", where=where, remedy=remedy))


@dataclass(frozen=True, slots=True)
class Pending:
    """A name whose value depends on others'.

    Attributes:
        place: the number of layers before the one that is made of it.
        name: HALOs'.
        value: as given.
        layer: that gives it.
    """

    place: int
    name: str
    value: object
    layer: Layer

    @property
    def where(self) -> str:
        return self.layer.where(self.name)


def translate(layers: Sequence[Layer], in_memory: Collection[str] = ()) -> Translation:
    """Translate HALOs' names in layers; those without any stay as they are.

    Args:
        layers: earlier ones first.
        in_memory: keys of ours whose values are passed as objects.
    """
    uses = [get_value(layer.tree, "model.use_peft") for layer in layers]
    loads = [get_value(layer.tree, "model.load_lora_from") for layer in layers]
    peft = next((use for use in reversed(uses) if use is not None), None)
    no_adapter = "model.use_peft is false" if peft is False else "they are those of the adapter in model.load_lora_from"
    adapter = peft is not False and not any(loads)
    result = Translation()
    unread: dict[str, list[str]] = {}  # by the reason
    pending: list[Pending] = []
    for layer in layers:
        rest, own = copied(layer.tree), {}
        # a section is no value
        names = [name for name in NAMES if not isinstance(get_value(layer.tree, name), Mapping)]
        given = {name: value for name in names for found, value in [take_value(rest, name)] if found}
        groups = {name: rest.pop(name) for name in CHOOSING if isinstance(rest.get(name), str | list)}
        if not given and not groups:
            result.layers.append(layer)
            continue
        sft = "loss" in groups or any(name.startswith("loss.") for name in given)
        if groups or sft:
            result.layers += _chosen(groups, sft, layer, result)
        for name, raw in given.items():
            value, where = _resolved(layer.tree, name, raw), layer.where(name)
            if value == "???":
                result.refuse(name, value, where, "give it a value", "is required")
            elif name in DERIVED:
                pending.append(Pending(len(result.layers) + 2, name, value, layer))  # behind this layer's two
            elif name in FACTS:
                allowed, remedy = FACTS[name]
                if value not in allowed:
                    result.refuse(name, value, where, remedy)
            elif name in UNREAD:
                unread.setdefault(UNREAD[name], []).append(name)
            elif name.startswith(PEFT[0]) and not adapter and len(given) > 1:
                unread.setdefault(no_adapter, []).append(name)
            elif name == PEFT[1] and (value is None or peft is False):
                continue
            else:
                _rename(name, value, where, layer, own, result)
        result.problems += _unknown(rest, layer)
        lines = {ours: layer.lines[theirs] for theirs, ours in ALIASES.items() if theirs in layer.lines}
        result.layers.append(replace(layer, tree=rest))
        result.layers.append(Layer(own, layer.origin, lines))
    _derive(pending, in_memory, result)
    result.notes += [
        f"of HALOs' configuration without an effect here: {', '.join(names)} ({why})" for why, names in unread.items()
    ]
    return result


def _resolved(tree: Mapping[str, object], name: str, value: object) -> object:
    """A value whose references are to other names of the same configuration."""
    if not isinstance(value, str) or "${" not in value:
        return value
    try:
        return OmegaConf.select(DictConfig(dict(tree)), name)
    except OmegaConfBaseException:
        return value  # a reference to a key of ours is resolved with all the others


def _chosen(groups: Mapping[str, object], sft: bool, layer: Layer, result: Translation) -> Iterator[Layer]:
    """The config groups that a configuration chooses; a section `loss` is that of sft."""
    given = {**groups, **({"loss": groups.get("loss", "sft")} if sft else {})}
    for name in [name for name, value in given.items() if value == "???"]:
        result.refuse(name, given.pop(name), layer.where(name), "give it a value", "is required")
    lists = [name for name in LISTS if name in given]
    for place, name in enumerate(lists):
        twins = [other for other in lists[:place] if LISTS[other] == LISTS[name]]
        twins += [LISTS[name]] if get_value(layer.tree, LISTS[name]) is not None else []
        result.problems += [_two_names(name, twin, layer.where(name)) for twin in twins]
    if sft:
        yield Layer(HALOS_DEFAULTS, layer.origin)
    chosen, _ = choose([Override(f"{name}={value}", name, value) for name, value in given.items()])
    yield from (Layer(one.tree, layer.where(next(iter(lists), "loss"))) for one in chosen)


def _rename(name: str, value: object, where: str, layer: Layer, own: Tree, result: Translation) -> None:
    ours = RENAMED[name]
    if get_value(layer.tree, ours) is not None:
        result.problems.append(_two_names(name, ours, where))
    elif name == "n_epochs" and value is None:
        set_value(own, ours, -1)
    elif name == "model.policy_dtype":
        set_value(own, ours, PRECISIONS.get(str(value), value))
    elif name == "model.block_name" and isinstance(value, str):
        set_value(own, ours, [value])
    elif value is not None or name not in ("model.name_or_path", "model.microbatch_size"):
        set_value(own, ours, value)


def _two_names(theirs: str, ours: str, where: str) -> ConfigError:
    return ConfigError(f"{theirs} and {ours} are two names of one key", where=where, remedy="keep one of them")


def _unknown(rest: Tree, layer: Layer) -> Iterator[ConfigError]:
    """Refuse what is left of HALOs' sections, in a configuration with HALOs' names."""
    for section in ("loss", "model", "wandb"):
        left = rest.pop(section, None)
        for name in flatten({section: left}) if isinstance(left, Mapping) and left else ():
            near = difflib.get_close_matches(name, NAMES, n=1)
            remedy = f"did you mean {near[0]}?" if near else "docs/coming-from.md lists the names of HALOs"
            yield ConfigError(f"unknown key {name}", where=layer.where(name), remedy=remedy)


def _derive(pending: Sequence[Pending], in_memory: Collection[str], result: Translation) -> None:
    """Add the layers of names whose values depend on others'."""
    rows = result.last(ROWS) or Recipe().actor.global_batch_size
    values = {one.name: one.value for one in pending}
    made: list[tuple[int, Layer]] = []
    for one in pending:
        name, value, where, ours = one.name, one.value, one.where, DERIVED[one.name]
        tree: Tree = {}
        if name in IN_ROWS and get_value(one.layer.tree, ours) is not None:
            result.problems.append(_two_names(name, ours, where))
        elif name in ("eval_every", "n_examples") or (name == "intermediate_checkpoints" and value is True):
            given = values.get("eval_every") if name == "intermediate_checkpoints" else value
            steps = _steps(name, given, rows, where, result)
            if steps is not None:
                set_value(tree, ours, steps)
        elif name == "intermediate_checkpoints":
            set_value(tree, ours, -1 if value is False else value)
        elif name == "wandb.enabled":
            set_value(tree, ours, _with_wandb(value, where, result))
        elif name == "model.load_from" and value is not None:
            set_value(tree, ours, value)
            name_or_path = result.last(ours)
            if name_or_path is not None and result.last("actor.tokenizer.tokenizer_model") is None:
                set_value(tree, "actor.tokenizer.tokenizer_model", name_or_path)
        elif name == "local_run_dir" and value is not None:
            _check_run_directory(str(value), where, result)
        if tree:
            made.append((one.place, Layer(tree, where)))
    for place, layer in reversed(made):
        result.layers.insert(place, layer)
    _evaluate(values, {one.name: one.where for one in pending}, in_memory, result)


def _steps(name: str, value: object, rows: object, where: str, result: Translation) -> int | None:
    """A number of rows as a number of steps; None if the key stays as it is."""
    if value is None:
        if name == "intermediate_checkpoints":
            result.refuse(name, True, where, "give eval_every, or runner.save_interval", "needs eval_every")
        return None
    if type(value) is not int or value < 1:
        result.refuse(name, value, where, "give a number of rows", "is no number of rows")
        return None
    if result.last("actor.global_batch_tokens") is not None or not isinstance(rows, int):
        result.refuse(name, value, where, f"use {DERIVED[name]}, in steps", "needs steps of a fixed number of rows")
        return None
    if name == "n_examples":
        return -(-value // rows)
    if value % rows:
        result.refuse(
            "eval_every",
            value,
            where,
            f"give a multiple of {rows}, or {DERIVED['eval_every']}, in steps",
            f"is not a whole number of steps of {rows} rows (model.batch_size)",
        )
        return None
    return value // rows


def _with_wandb(value: object, where: str, result: Translation) -> object:
    """The logger backends after HALOs' switch for Weights & Biases."""
    given = result.last(BACKENDS)
    backends = given if isinstance(given, list) else Recipe().runner.logger.logger_backends
    if not isinstance(value, bool):
        result.refuse("wandb.enabled", value, where, "allowed: true or false", "is not allowed")
    others = [backend for backend in backends if backend != "wandb"]
    return [*others, "wandb"] if value is True else others


def _check_run_directory(value: str, where: str, result: Translation) -> None:
    logger = Recipe().runner.logger
    folder = result.last("runner.logger.log_path") or logger.log_path
    name = result.last("runner.logger.experiment_name")
    expected = f"{str(folder).rstrip('/')}/{name}"
    if value.rstrip("/").replace("//", "/") != expected.replace("//", "/"):
        result.refuse(
            "local_run_dir", value, where, "leave it out, or change them", f"is not cache_dir/exp_name, {expected}"
        )


def _evaluate(
    values: Mapping[str, object], places: Mapping[str, str], in_memory: Collection[str], result: Translation
) -> None:
    """Evaluate on the test split of the training data, as HALOs does, where no evaluation data is given."""
    count, where = values.get("n_eval_examples"), places.get("n_eval_examples", "")
    wanted = values.get("eval_every") or count or result.last("runner.eval_before_training") is True
    if not {"eval_every", "n_eval_examples"} & values.keys():
        return
    if EVAL in in_memory:
        if count is not None:
            result.notes.append("n_eval_examples has no effect: the evaluation data is passed as objects")
        return
    named, limit = result.last(EVAL), {} if count is None else {"max_samples": count}
    if isinstance(named, str | list):
        entries = [dict(entry) if isinstance(entry, Mapping) else {"path": entry} for entry in _listed(named)]
        if limit and not any("max_samples" in entry for entry in entries):
            _evaluate_on([{**entry, **limit} for entry in entries], where, result)
            return
    if named is not None or result.last("data.eval_split") or not wanted:
        if count is not None:
            remedy = "write max_samples into the entries of data.eval_data_paths"
            result.refuse("n_eval_examples", count, where, remedy, "is for a plain list of evaluation data")
        return
    tests = test_splits(_listed(result.last(TRAIN)))
    if tests:
        _evaluate_on([{**entry, **limit} for entry in tests], where or places["eval_every"], result)
    elif not values.get("eval_every"):
        remedy = "give data.eval_data_paths, entries with max_samples"
        result.refuse("n_eval_examples", count, where, remedy, "needs evaluation data, and there is none")


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _evaluate_on(entries: Sequence[object], where: str, result: Translation) -> None:
    tree: Tree = {}
    set_value(tree, EVAL, list(entries))
    result.layers.append(Layer(tree, where))


def in_names_of_halos(recipe: Recipe) -> DictConfig:
    """A recipe as a `DictConfig` with HALOs' names beside ours: `config.lr`, `config.model.batch_size`."""
    short = {name: value for name, value in recipe.to_dict()[ACTOR].items() if name != "loss"}  # HALOs' section
    tree = {**recipe.to_dict(), **short}
    for theirs, ours in ALIASES.items():
        value = get_value(recipe.to_dict(), ours)
        if theirs == "wandb.enabled":
            value = "wandb" in recipe.runner.logger.logger_backends
        elif theirs == "model.policy_dtype":
            value = next(name for name, short in PRECISIONS.items() if short == value)
        elif theirs == "model.block_name":
            value = None if not isinstance(value, list) else value[0]
        set_value(tree, theirs, value)
    for theirs, value in _derived_names(recipe).items():
        set_value(tree, theirs, value)
    return DictConfig(escape_interpolation(tree))


def _derived_names(recipe: Recipe) -> Mapping[str, object]:
    """HALOs' names whose value depends on several keys of ours, and those with a single possible value."""
    runner, rows = recipe.runner, recipe.actor.global_batch_size

    def in_rows(steps: object) -> int | None:
        return steps * rows if isinstance(steps, int) and steps > 0 and rows is not None else None

    fixed = {name: values[0] for name, (values, _) in FACTS.items() if values and not name.endswith("trainer")}
    return fixed | {
        "n_epochs": None if runner.max_epochs == -1 else runner.max_epochs,
        "n_examples": in_rows(runner.max_steps),
        "eval_every": in_rows(runner.eval_interval),
        "intermediate_checkpoints": runner.save_interval != -1,
        "local_run_dir": f"{runner.logger.log_path}/{runner.logger.experiment_name}",
    }
