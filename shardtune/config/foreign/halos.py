"""HALOs: its configuration is read as it is (`shardtune train halos.yaml`); here it is written under our names."""

from __future__ import annotations

from shardtune.config.foreign.conversion import Conversion, Kind
from shardtune.config.halos import DERIVED, EVAL, FACTS, RENAMED, TRAIN, UNREAD, translate
from shardtune.config.layers import Layer
from shardtune.config.overrides import CHOOSING, LISTS
from shardtune.config.tree import flatten

NAME = "HALOs"
MARKS = (
    *("exp_name", "n_epochs", "train_datasets", "model.name_or_path", "model.policy_dtype", "model.microbatch_size"),
    *("local_run_dir", "intermediate_checkpoints", "do_first_eval", "loss.trainer", "n_eval_examples", "eval_every"),
)


def convert(c: Conversion) -> None:
    """Read a configuration of HALOs, by the same rules as `shardtune train`."""
    found = translate([Layer(c.tree, "halos")])
    for layer in found.layers:
        for key, value in flatten(layer.tree).items():
            theirs = [name for name, ours in {**RENAMED, **DERIVED, **LISTS}.items() if ours == key and _given(c, name)]
            if key in (TRAIN, EVAL, "actor.model.model_path", "actor.tokenizer.tokenizer_model"):
                value = [_path(c, one) for one in value] if isinstance(value, list) else _path(c, value)
            c.put(key, value, *theirs, comment="" if theirs else "HALOs' default, or follows from its other keys")
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


def _path(c: Conversion, value: object) -> object:
    return c.path(value) if isinstance(value, str) else value


def _given(c: Conversion, name: str) -> bool:
    return name in c.given or name in c.tree
