"""HALOs: its configuration is read as it is (`shardtune train halos.yaml`); here it is written under our names."""

from __future__ import annotations

from shardtune.config.foreign.conversion import Conversion, Kind
from shardtune.config.foreign.values import is_on
from shardtune.config.halos import DERIVED, EVAL, FACTS, PEFT, RENAMED, SHARED, TRAIN, UNREAD, translate
from shardtune.config.layers import Layer
from shardtune.config.overrides import CHOOSING, LISTS
from shardtune.config.tree import flatten
from shardtune.errors import ConfigError

NAME = "HALOs"
MARKS = (
    *("exp_name", "n_epochs", "train_datasets", "model.name_or_path", "model.policy_dtype", "model.microbatch_size"),
    *("local_run_dir", "intermediate_checkpoints", "do_first_eval", "loss.trainer", "n_eval_examples", "eval_every"),
)


def convert(c: Conversion) -> None:
    """Read a configuration of HALOs, by the same rules as `shardtune train`.

    Raises:
        ConfigError: its loss is another than that of supervised fine-tuning.
    """
    for name, fine_tuning in (("loss.name", "sft"), ("loss.dataloader", "SFTDataLoader")):
        if c.get(name, fine_tuning) != fine_tuning:
            raise ConfigError(
                f"{name}: {c.get(name)} is no supervised fine-tuning",
                where=name,
                remedy="shardtune trains loss=sft; keep HALOs for other losses, or write the method on the engine "
                "(docs/your-method.md)",
            )
    found = translate([Layer(c.tree, "halos")])
    for layer in found.layers:
        for key, value in flatten(layer.tree).items():
            theirs = [name for name, ours in {**RENAMED, **DERIVED, **LISTS}.items() if ours == key and _given(c, name)]
            if key in (TRAIN, EVAL, "actor.model.model_path", "actor.tokenizer.tokenizer_model"):
                value = [_path(c, one) for one in value] if isinstance(value, list) else _path(c, value)
            c.put(key, value, *theirs, comment="" if theirs else "HALOs' default, or follows from its other keys")
    _model(c)
    for problem in found.problems:
        name = problem.what.partition(":")[0].partition(" ")[0]
        c.missing(f"{problem.what.partition(':')[2].strip() or problem.what}: {problem.remedy}", name)
    for name in c.given:
        if name in c.outcomes:
            continue
        if name in UNREAD:
            c.not_needed(UNREAD[name], name)
        elif name in FACTS:
            c.record(name, Kind.DEFAULT, "so it is here")
        elif name in DERIVED or name in RENAMED:
            ours = DERIVED.get(name) or RENAMED[name]
            c.record(name, Kind.DEFAULT, f"{ours}: as here")
        elif name in CHOOSING:
            c.record(name, Kind.TRANSLATED, "the config group of that name")
    c.notes.append(
        "HALOs' warm-up begins at a tenth of the rate, here at 1/n of it; docs/coming-from.md has the others"
    )


def _model(c: Conversion) -> None:
    """Read the attention, whose name is ours, too, and what the dtype and the adapter mean beside other keys."""
    if c.has(SHARED):
        is_half = str(c.get("model.policy_dtype", "bfloat16")) in ("bfloat16", "float16")
        attention = c.get(SHARED) if is_half else "eager"
        comment = "" if is_half else "HALOs' attention in other dtypes than bfloat16 and float16"
        c.put("actor.model.attn_implementation", attention, SHARED, comment=comment)
    if is_on(c.get("model.use_peft")):
        return
    c.not_needed("model.use_peft is off", *(name for name in c.given if name.startswith(PEFT)))
    if c.get("model.policy_dtype") == "bfloat16":
        c.notes.append(
            "HALOs trains weights in bf16; here they and the optimizer's states are fp32, computed with in bf16; "
            "actor.model.precision: pure_bf16 and actor.optim.state_dtype: bf16 take as little memory as there"
        )


def _path(c: Conversion, value: object) -> object:
    return c.path(value) if isinstance(value, str) else value


def _given(c: Conversion, name: str) -> bool:
    return name in c.given or name in c.tree
