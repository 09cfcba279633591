"""The configuration reference: `python -m shardtune.config.reference > docs/configuration.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shardtune.config.keys import ALIASES, allowed, section_type
from shardtune.config.overrides import GROUPS, options
from shardtune.config.schema import ACTOR, OTHER_KEYS, ActorConfig, DataEntry, ParameterGroup, Recipe, short_key

INTRODUCTION = """\
# Configuration reference

<!-- Made from the schema by `python -m shardtune.config.reference`; a test compares the two. -->

A recipe is one YAML file. Every key has a default except `model.model_path` and `data.train_data_paths`, so this
is a whole recipe:

```yaml
model:
  model_path: Qwen/Qwen3-0.6B
data:
  train_data_paths: train.jsonl
```

- **`actor.` in front means the same**, everywhere: `actor.optim.lr` is `optim.lr`, in a file, on the command line, in
  references and in code that reads the recipe; both may stand side by side, and a key that one file gives two values
  is an error. Stored recipes have it.
- **Explanations.** `shardtune config explain optim.lr` shows one key, `shardtune config explain optim` a group.
- **Overrides.** Any key may be given on the command line, in
  [Hydra's grammar](https://hydra.cc/docs/advanced/override_grammar/basic/): `shardtune train recipe.yaml
  optim.lr=3e-5 'data.train_data_paths=[a.jsonl,{path: b.jsonl, weight: 2}]'`. `key=null` sets null, whose
  meaning is in the tables below; `section=null` sets all keys of a section to their defaults; `+key=` and `++key=`
  are the same as `key=`. Mappings with names of your choice
  (`optim.args`) merge key by key, and `data.eval_data_paths.math=a.jsonl` sets one of several named sets;
  everything else is replaced. Of a key that is given twice the last value counts, and a line of the command says
  so: a script may end in `"$@"`.
- **Flags.** `--actor.optim.lr 3e-5` is the same as `actor.optim.lr=3e-5`. A flag may be the last part of a key
  (`--max_length`), or the name that is usual in other trainers where one key means the same (`--learning_rate`,
  `--epochs`, `--output_dir`). `--config recipe.yaml` names the recipe; without one, `--model` and `--data` are enough.
  `--data` may be repeated.
- **References.** `${runner.seed}` is replaced by the value of that key, `${oc.env:HOME}` by an environment variable;
  stored recipes keep the latter as written, so that no secret is stored, and the run goes on with the same value only.
  The key's type decides what the value is: `runner.seed: ${oc.env:SEED,7}` is a whole number. Write
  `\\${` for the characters themselves.
- **Paths** in a recipe are relative to its own directory; paths in overrides, and `runner.logger.log_path`, to the
  working directory. A data or model path that neither exists nor looks like a file (`./`, for data also `*` or a
  suffix such as `.jsonl`) is a name on the Hub.
- **Mistakes.** Unknown keys, wrong types and contradictions are reported together, with file and line, before anything
  starts.
- **The resolved recipe**, every key written out, is `config.yaml` in the run directory; it is a recipe itself.
"""

GROUPS_AND_ALIASES = """\
## Config groups

`shardtune train loss=sft model=llama datasets=[ultrachat,my.jsonl]` works without a recipe; the run is then named
`sft-llama` unless `runner.logger.experiment_name` is given. With a recipe, the groups override its values. In
`datasets`, a word that is not a choice of the group is a path or a Hub name.

"""

FORMER = """
## Former and other names

These go on working: former names of keys, and places where other systems have them.

| name | here |
|---|---|
"""

HALOS = """
## Names of HALOs

These are accepted on the command line and in a recipe; giving a key under both names is an error. With `loss=sft` and
no other recipe, `lr` is 5e-6 unless it is given, as in HALOs. [Coming from HALOs](coming-from.md#halos) has further
names, whose values depend on others.

| HALOs | here |
|---|---|
"""


def page() -> str:
    """The whole page, in Markdown."""
    return "".join(_parts())


def _parts() -> Iterator[str]:
    yield INTRODUCTION
    yield f"\n## At the top\n\n{_table(Recipe, '')}{_rows(ActorConfig, f'{ACTOR}.')}"
    yield from _sections(ActorConfig, f"{ACTOR}.")
    yield from _sections(Recipe, "")
    entries = {
        "An entry of `data.train_data_paths` or `data.eval_data_paths`": DataEntry,
        "An entry of `optim.groups`": ParameterGroup,
    }
    for title, entry in entries.items():
        yield f"\n## {title}\n\n{_table(entry, None)}"
    yield f"\n{GROUPS_AND_ALIASES}| group | choices |\n|---|---|\n"
    yield from (f"| `{group}` | {', '.join(options(group))} |\n" for group in GROUPS)
    yield FORMER
    yield from (f"| `{short_key(theirs)}` | `{short_key(ours)}` |\n" for theirs, ours in OTHER_KEYS.items())
    yield HALOS
    yield from (f"| `{theirs}` | `{short_key(ours)}` |\n" for theirs, ours in ALIASES.items())


def _sections(section: type[BaseModel], prefix: str) -> Iterator[str]:
    """The sections inside one, each with its own keys as a table, then those inside it."""
    for name, field in section.model_fields.items():
        inner = section_type(field)
        if inner is None or f"{prefix}{name}" == ACTOR:
            continue
        yield f"\n## `{short_key(f'{prefix}{name}')}`\n\n{_table(inner, f'{prefix}{name}.')}"
        yield from _sections(inner, f"{prefix}{name}.")


def _table(section: type[BaseModel], prefix: str | None) -> str:
    return f"| key | default | allowed | meaning |\n|---|---|---|---|\n{_rows(section, prefix)}"


def _rows(section: type[BaseModel], prefix: str | None) -> str:
    """A section's own keys; prefix: its name with a dot, None for an entry of a list."""
    return "".join(
        f"| `{name}` | {_default(field)} | {_cell(allowed(field))} | {_cell(field.description or '')} |\n"
        for name, field in section.model_fields.items()
        if section_type(field) is None and (prefix is None or f"{prefix}{name}" not in OTHER_KEYS)
    )


def _default(field: FieldInfo) -> str:
    value: object = field.get_default(call_default_factory=True, validated_data={})
    return "required" if value is PydanticUndefined else f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
