"""Plant a fault into a run, its resume or its export and check that `shardtune verify` finds it.

    python bench/planted_runs.py [--only NAME …] [--healthy] [--save]

A fault is found when the command that should find it ends with exit code 1 and names what it should. `--healthy` checks
the recipes without their faults. Rewrites the section `planted-runs` of docs/benchmarks.md with `--save`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import yaml  # noqa: E402
from results import machine, table, write_section  # noqa: E402

PLANTED = ROOT / "tests" / "support" / "planted"
HEADS = ("fault", "command", "found", "s", "message")
LORA = {"actor.model.is_lora": True, "actor.model.lora.r": 4}
SMALL = {"actor.micro_batch_size": 2}
ONE_STEP, TWO_STEPS = ("--steps", "1"), ("--steps", "2")
FIVE_STEPS = ("--steps", "5")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and the command that should find it.

    Attributes:
        name: for `--only`.
        what: is wrong, in words.
        command: `resume` and so on.
        words: that its message has to contain.
        worker: a class of `tests/support/planted/workers.py`.
        healthy: the class in its place that has no fault; None: the worker that is built in.
        plugin: a file of `tests/support/planted/`.
        kind: of the recipe: `qwen2`, `tied` (the same with a tied head), or `rows` of numbers.
        changes: of the recipe, by dotted key.
        options: of the command.
    """

    name: str
    what: str
    command: str
    words: Sequence[str]
    worker: str | None = None
    healthy: str | None = None
    plugin: str | None = None
    kind: str = "qwen2"
    changes: Mapping[str, object] = field(default_factory=dict)
    options: Sequence[str] = TWO_STEPS


def _own_loader(name: str, what: str, command: str, words: Sequence[str], worker: str) -> Fault:
    return Fault(name, what, command, words, worker, healthy="Fits", kind="rows", changes={"actor.micro_batch_size": 3})


FAULTS: tuple[Fault, ...] = (
    Fault("python_draws", "a draw from Python's generator", "resume", ("step 2", "Python's random module"),
          "DrawsFromPython"),
    Fault("lost_slot", "a slot of the optimizer lost at a resume", "resume", ("after step 2", "weights"),
          "ForgetsASlot"),
    Fault("counter", "a counter that is in no checkpoint", "resume", ("step 2", "train/loss"), "CountsForItself"),
    _own_loader("unseeded_loader", "a loader that shuffles by the system's noise", "resume",
                ("refused where it is continued", "the first batch: other content"), "ShufflesByTheClock"),
    _own_loader("lost_buffer", "a changing buffer that is in no checkpoint", "resume", ("step 2",),
                "RemembersForItself"),
    Fault("rank_in_loss", "a loss that depends on the rank", "elastic", ("step 1", "train/loss"), "LossOfTheRank",
          options=ONE_STEP),
    Fault("draws_in_loss", "a draw in the loss, once per micro-batch", "elastic", ("step 1", "train/loss"),
          "DrawsInTheLoss", options=ONE_STEP),
    Fault("mean_of_rank", "a mean over the rank's own targets", "elastic", ("step 1", "train/loss"), "MeanOfTheRank",
          changes=SMALL, options=ONE_STEP),
    _own_loader("rank_in_order", "an order of rows that depends on the rank", "elastic", ("step 1", "batches"),
                "OrderOfTheRank"),
    Fault("killed", "SIGTERM's default restored", "preempt", ("computed twice",), "DiesOfSigterm", options=FIVE_STEPS),
    Fault("lost_position", "a checkpoint without the position in the data", "preempt", ("computed twice",),
          "ForgetsThePosition", options=FIVE_STEPS),
    Fault("template", "another chat template in the export", "export", ("renders a conversation otherwise",),
          plugin="exported_template.py"),
    Fault("special_token", "another end token in the export", "export", ("special token", "eos_token"),
          plugin="exported_token.py"),
    Fault("rounded", "a matrix rounded in the export", "export", ("other bits", "layers.0.mlp.up_proj"),
          plugin="exported_rounded.py"),
    Fault("untrained", "a weight of before training in the export", "export", ("other bits", "model.norm.weight"),
          plugin="exported_untrained.py"),
    Fault("untied", "tied weights untied in the export", "export", ("ties other weights",), kind="tied",
          plugin="exported_untied.py"),
    Fault("merge_scale", "an adapter merged at twice its scale", "export", ("merged", "PEFT"), plugin="merge_scale.py",
          changes=LORA),
)  # fmt: skip


def make_inputs(folder: Path) -> None:
    """Models, tokenizer and rows of all recipes."""
    from tests.support.tiny_run import make_model, make_tiny, make_tokenizer, write_rows

    make_tiny(folder / "qwen2")
    make_tiny(folder / "tied")
    model = make_model(make_tokenizer())
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder / "tied" / "model")
    draws = Random(0)
    (folder / "rows").mkdir()
    numbers = [{"x": [draws.random() for _ in range(4)], "y": [draws.random() for _ in range(2)]} for _ in range(21)]
    write_rows(folder / "rows" / "train.jsonl", numbers)  # pyright: ignore[reportArgumentType]


def recipe_of(fault: Fault, folder: Path, *, planted: bool) -> dict[str, Any]:
    """The recipe of a fault, or the same without it."""
    from shardtune.config.tree import set_value

    inputs = folder / fault.kind
    values: dict[str, Any] = {
        "actor": {
            "global_batch_size": 6,
            "micro_batch_size": 3,
            "model": {"precision": "fp32"},
            "optim": {"lr": 1e-2, "lr_scheduler": "linear"},
        },
        "data": {"train_data_paths": str(inputs / "train.jsonl"), "num_workers": 0},
        "runner": {"logger": {"log_path": str(folder / "runs"), "experiment_name": fault.name}},
    }
    if fault.kind != "rows":
        values["actor"]["model"]["model_path"] = str(inputs / "model")
        values["data"] |= {"cache_dir": str(inputs / "cache"), "max_length": 96}
    worker = fault.worker if planted else fault.healthy
    if worker is not None:
        values["actor"]["worker"] = f"{PLANTED / 'workers.py'}:{worker}"
    if fault.plugin is not None and planted:
        values["plugins"] = [str(PLANTED / fault.plugin)]
    for key, value in fault.changes.items():
        set_value(values, key, value)
    return values


def verify(fault: Fault, folder: Path, *, planted: bool) -> tuple[int, str, float]:
    """Exit code and message of a fault's command, and its seconds."""
    file = folder / f"{fault.name}{'' if planted else '-healthy'}.yaml"
    file.write_text(yaml.safe_dump(recipe_of(fault, folder, planted=planted)))
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "shardtune", "verify", fault.command, str(file), *fault.options, "--json"],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))},
    )
    seconds = time.perf_counter() - began
    try:
        (result,) = json.loads(done.stdout)["results"]
    except ValueError:
        return done.returncode, done.stderr.strip(), seconds
    return done.returncode, f"{result['text']}\n{result['where']}", seconds


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="+", help="names of faults")
    options.add_argument("--healthy", action="store_true", help="check the recipes without their faults instead")
    options.add_argument("--save", action="store_true", help="rewrite the section of docs/benchmarks.md")
    given = options.parse_args()
    lines, missed = [], 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_inputs(folder)
        for fault in FAULTS:
            if given.only and fault.name not in given.only:
                continue
            code, message, seconds = verify(fault, folder, planted=not given.healthy)
            found = code == 1 and all(word in message for word in fault.words)
            right = code == 0 if given.healthy else found
            missed += not right
            shown = (
                ("passes" if right else "refused") if given.healthy else "yes" if right else f"no (exit code {code})"
            )
            first = next((line for line in message.splitlines() if line), "")
            lines.append([fault.what, fault.command, shown, f"{seconds:.0f}", first])
            print(f"{fault.name}: {shown} [{seconds:.0f} s]\n    {message}", flush=True)
    verdict = f"{len(lines) - missed} of {len(lines)} {'pass' if given.healthy else 'found'}"
    print(verdict)
    if given.save and not given.only and not given.healthy:
        lines = [[cell.replace("|", "\\|") for cell in line] for line in lines]
        write_section("planted-runs", f"{verdict}. {machine()}\n\n{table(HEADS, lines)}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
