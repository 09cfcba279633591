"""What each recipe of recipes/ takes on three kinds of machines, by `shardtune plan`: `python bench/recipe_book.py`.

Plans from the published configurations, no weights. `recipes/machines.yaml` has what is changed in a recipe on each
kind of machine, and the memory then; `--choose` finds it: the first of a few changes, the cheapest first, that fits.
Rewrites the table of docs/recipes.md; exit code 1 where a plan is otherwise than machines.yaml has it.

    python bench/recipe_book.py --choose                # recipes that machines.yaml lacks; ends by itself
    python bench/recipe_book.py --choose --minutes 9    # as many as begin within 9 minutes
    python bench/recipe_book.py --choose --share 1/2    # half of them, beside a process that plans the other half
    python bench/recipe_book.py --only qwen3-8b         # these, compared with machines.yaml
    python bench/recipe_book.py --table                 # the table alone
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from published_models import PUBLISHED  # noqa: E402
from results import table, write_section  # noqa: E402

from shardtune.config import load_recipe  # noqa: E402
from shardtune.run.plan.plan import Plan, Speed, planner  # noqa: E402
from shardtune.run.plan.rows import Given  # noqa: E402

RECIPES = ROOT / "recipes"
MACHINES_FILE = RECIPES / "machines.yaml"
PAGE = ROOT / "docs" / "recipes.md"


@dataclass(frozen=True)
class Machine:
    """GPUs.

    Attributes:
        count: of them.
        memory: bytes of each.
    """

    count: int
    memory: float

    def __str__(self) -> str:
        return f"{self.count} x {self.memory / 1e9:.0f} GB"


MACHINES = (Machine(1, 24e9), Machine(1, 80e9), Machine(8, 80e9))
RECOMPUTE = "model.gradient_checkpointing=true"
SHORT = "max_tokens_per_micro_batch=4096"
SHORTEST = 2048
SHORTER = f"max_tokens_per_micro_batch={SHORTEST}"
ROWS = f"data.max_length={SHORTEST}"
REDUCE = "fsdp_config.reduce=every"
INT8 = "optim.state_dtype=int8"
NF4 = "model.lora.base_dtype=nf4"
OFFLOAD = "fsdp_config.cpu_offload=true"
CHANGES: Mapping[tuple[str, bool], Sequence[Sequence[str]]] = {
    ("full", False): (
        (),
        (RECOMPUTE,),
        (RECOMPUTE, SHORT),
        (RECOMPUTE, SHORT, INT8),
        (RECOMPUTE, SHORTER, ROWS, INT8),
    ),
    ("full", True): (
        (),
        (REDUCE,),
        (REDUCE, RECOMPUTE),
        (REDUCE, RECOMPUTE, SHORT),
        (REDUCE, RECOMPUTE, SHORT, INT8),
        (REDUCE, RECOMPUTE, SHORT, OFFLOAD),
    ),
    ("lora", False): (
        (),
        (RECOMPUTE,),
        (RECOMPUTE, SHORT),
        (RECOMPUTE, SHORT, NF4),
        (RECOMPUTE, SHORTER, ROWS, NF4),
    ),
    ("lora", True): ((), (RECOMPUTE,), (RECOMPUTE, SHORT)),
}
"""By method and whether there are several GPUs: what is changed, the cheapest first; each needs less memory."""
HEAD = """\
# What is changed in each recipe on each kind of machine, and the memory of the fullest GPU then, by `shardtune plan`;
# null: it does not fit, and the memory is the least that was found. `python bench/recipe_book.py` compares.
"""


def recipes() -> list[Path]:
    """The recipes, by the size of their models."""
    files = [file for file in RECIPES.glob("*.yaml") if file != MACHINES_FILE]
    return sorted(files, key=lambda file: (PUBLISHED[model_of(file)].parameters, file.name))


def model_of(recipe: Path) -> str:
    """The name in `PUBLISHED` of a recipe's model."""
    return recipe.stem.rpartition("-")[0]


def method_of(recipe: Path) -> str:
    """`full` or `lora`."""
    return recipe.stem.rpartition("-")[2]


def planned(recipe: Path, ranks: int, changes: Sequence[str], folder: Path) -> Plan:
    """The plan of a recipe on GPUs, with its model's published configuration.

    Args:
        recipe: its rows are as long as it allows; those of a model with images are made.
        ranks: GPUs.
        changes: of the recipe.
        folder: for what is made.

    Raises:
        SystemExit: the memory cannot be computed; no table may have a guess.
    """
    model = PUBLISHED[model_of(recipe)]
    words = [f"model.model_path={model.save(folder)}", "runner.device=cuda", *changes]
    keys = load_recipe(str(recipe), changes, files_must_exist=False)
    given = Given(None, keys.data.max_length)
    rows = model.rows(folder, keys.data.max_length)
    if rows is not None:
        given = Given()
        words += [f"data.train_data_paths={rows}", "data.num_workers=0", f"data.cache_dir={folder / 'cache'}"]
    plan = planner(str(recipe), words, ranks=ranks, given=given, speed=Speed(), report=silent).plan()
    if plan.needed is None or plan.notes:
        raise SystemExit(f"{recipe.name} on {ranks} GPUs with {list(changes)}: {'; '.join(plan.notes)}")
    return plan


def steps_of(recipe: Path, on: Machine) -> Sequence[Sequence[str]]:
    """What may be changed in a recipe on a machine, the cheapest first: rows only become shorter, and micro-batches of
    a number of rows are made of fewer."""
    keys = load_recipe(str(recipe), files_must_exist=False)
    rows, length = keys.actor.micro_batch_size, keys.data.max_length
    words: dict[str, str | None] = {}
    if rows is not None:
        words = {SHORT: f"micro_batch_size={rows // 4}", SHORTER: "micro_batch_size=1", ROWS: None}
    elif length <= SHORTEST:
        words = {ROWS: None}
    steps = CHANGES[method_of(recipe), on.count > 1]
    return [[new for word in changes if (new := words.get(word, word)) is not None] for changes in steps]


def silent(text: str) -> None:
    """Print nothing."""


@dataclass(frozen=True)
class Found:
    """What a recipe takes on a machine.

    Attributes:
        changes: of the recipe; None: it does not fit with any.
        needed: bytes of the fullest GPU, with these changes, or with those that save the most.
    """

    changes: Sequence[str] | None
    needed: float

    def to_dict(self) -> dict[str, Any]:
        """As machines.yaml has it."""
        return {"changes": None if self.changes is None else list(self.changes), "gb": round(self.needed / 1e9, 1)}


Needed = Callable[[Sequence[str]], float]


def chosen(steps: Sequence[Sequence[str]], memory: float, needed: Needed, least: Needed) -> Found:
    """The cheapest changes that fit.

    Args:
        steps: changes, the cheapest first; each needs less memory than the one before it.
        memory: bytes of a GPU.
        needed: bytes with some changes, by a plan.
        least: fewer bytes than that, at once.
    """
    possible = [changes for changes in steps if least(changes) <= memory]
    if possible and needed(possible[0]) <= memory:
        return Found(possible[0], needed(possible[0]))
    most = needed(steps[-1])
    if most > memory:
        return Found(None, most)
    low, high = 1, len(possible) - 1  # the first one does not fit, the last one does
    while low < high:
        middle = (low + high) // 2
        if needed(possible[middle]) <= memory:
            high = middle
        else:
            low = middle + 1
    return Found(possible[low], needed(possible[low]))


def least_bytes(recipe: Path, ranks: int, changes: Sequence[str]) -> float:
    """Bytes of a GPU for weights and states alone, in round numbers below the true ones."""
    parameters = 0.75e9 * PUBLISHED[model_of(recipe)].parameters
    if OFFLOAD in changes:
        return 0.0
    if method_of(recipe) == "lora":
        return (0.5 if NF4 in changes else 2) * parameters / ranks
    return (6 if INT8 in changes else 12) * parameters / ranks


@dataclass(frozen=True)
class Kept:
    """Plans of earlier calls, a line of JSON each, so that a recipe whose planning was interrupted goes on.

    Attributes:
        file: of them; None: they are not kept.
    """

    file: Path | None = None

    def read(self, recipe: str) -> dict[tuple[int, tuple[str, ...]], float]:
        """Bytes of a recipe's plans, by ranks and changes."""
        lines = self.file.read_text().splitlines() if self.file is not None and self.file.exists() else []
        found = [json.loads(line) for line in lines]
        return {(one["ranks"], tuple(one["changes"])): one["bytes"] for one in found if one["recipe"] == recipe}

    def add(self, recipe: str, ranks: int, changes: Sequence[str], size: float) -> None:
        """Add a plan."""
        if self.file is not None:
            with self.file.open("a") as lines:
                lines.write(json.dumps({"recipe": recipe, "ranks": ranks, "changes": changes, "bytes": size}) + "\n")


def found_for(
    recipe: Path,
    before: Mapping[str, Any] | None,
    folder: Path,
    kept: Kept = Kept(),
) -> dict[str, dict[str, Any]]:
    """What a recipe takes on each machine, by the machine.

    Args:
        recipe: of the book.
        before: what machines.yaml has, whose changes are taken; None: they are found.
        folder: for what is made.
        kept: plans that need not be made again.
    """
    known = kept.read(recipe.name)
    found: dict[str, dict[str, Any]] = {}
    for on in MACHINES:
        steps = steps_of(recipe, on)

        def needed(changes: Sequence[str], ranks: int = on.count) -> float:
            key = (ranks, tuple(changes))
            if key not in known:
                plan = planned(recipe, ranks, changes, folder)
                assert plan.needed is not None
                known[key] = plan.needed
                kept.add(recipe.name, ranks, changes, plan.needed)
            return known[key]

        if before is None:
            taken = chosen(steps, on.memory, needed, partial(least_bytes, recipe, on.count))
        else:
            words = before[str(on)]["changes"]
            size = needed(steps[-1] if words is None else words)
            taken = Found(words if size <= on.memory else None, size)
        found[str(on)] = taken.to_dict()
    return found


def cells(stored: Mapping[str, Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    """The rows of the table, one for each recipe."""
    for recipe in recipes():
        found = stored.get(recipe.name, {})
        yield f"[{recipe.stem}](../recipes/{recipe.name})", *(shown(found.get(str(on))) for on in MACHINES)


def shown(found: Mapping[str, Any] | None) -> str:
    """A cell: memory, and what is changed; None: not planned yet."""
    if found is None:
        return "not planned yet"
    if found["changes"] is None:
        return f"does not fit: {found['gb']:,.1f} GB at least"
    return "<br>".join([f"**{found['gb']:.1f} GB**", *(f"`{word}`" for word in found["changes"])])


def read_stored() -> dict[str, dict[str, Any]]:
    """What machines.yaml has, by recipe; other processes may have added to it."""
    return yaml.safe_load(MACHINES_FILE.read_text()) if MACHINES_FILE.exists() else {}


def main() -> None:
    """Plan and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="recipes whose names contain this")
    parser.add_argument("--choose", action="store_true", help="find the changes of recipes that machines.yaml lacks")
    parser.add_argument("--table", action="store_true", help="plan nothing")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no recipe after this time")
    parser.add_argument("--share", default="1/1", help="plan the first of so many shares of the recipes: 1/2")
    parser.add_argument("--keep", type=Path, help="a file of plans, which are not made again")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    stored = read_stored()
    share, shares = map(int, options.share.split("/"))
    wrong = []
    with tempfile.TemporaryDirectory() as made:
        for number, recipe in enumerate(recipes()):
            before = stored.get(recipe.name)
            if (
                number % shares != share - 1
                or options.table
                or options.only not in recipe.name
                or options.choose is (before is not None)
            ):
                continue
            if time.monotonic() > end:
                break
            began = time.process_time()
            found = found_for(recipe, before, Path(made), Kept(options.keep))
            seconds = round(time.process_time() - began)
            print(json.dumps({"recipe": recipe.name, "cpu_seconds": seconds, **found}), flush=True)
            if before is None:
                stored = {**read_stored(), recipe.name: found}
                MACHINES_FILE.write_text(HEAD + yaml.safe_dump(stored, sort_keys=False))
            elif found != before:
                wrong.append(recipe.name)
    write_section("plans", table(["recipe", *map(str, MACHINES)], list(cells(read_stored()))), PAGE)
    if wrong:
        raise SystemExit(f"otherwise than machines.yaml has it: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
