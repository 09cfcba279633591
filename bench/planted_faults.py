"""Plant a fault beside a recipe, in training, a resume or an export, and check that `shardtune verify` finds it.

    python bench/planted_faults.py [--only NAME …] [--healthy] [--results FILE] [--save]

A fault is found when the command that should find it ends with exit code 1 and its message has the words that it
should; with `--healthy` the same recipes without their faults have to pass. `--results` keeps what is done, so that a
run may be interrupted; `--save` rewrites the section `faults` of docs/benchmarks.md.
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
from dataclasses import asdict, dataclass, field
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


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and the command that should find it.

    Attributes:
        name: for the table and `--only`.
        what: is wrong, in words.
        command: `parity` and so on.
        words: that its message has to contain.
        kind: of the recipe: `rows` (an adapter over rows of numbers), `numbers` (a worker with a loader of its own), or
            a language model: `qwen2`, `tied` (the same with a tied head), `gpt2`.
        plugin: a file of `tests/support/planted/`.
        adapter: a class of `tests/support/planted/adapters.py`.
        worker: a class of `tests/support/planted/workers.py`.
        healthy: the worker in its place that has no fault; None: the one that is built in.
        changes: of the recipe, by dotted key.
        options: of the command.
        refused: whether the run itself refuses it, before its first step.
    """

    name: str
    what: str
    command: str
    words: Sequence[str]
    kind: str = "qwen2"
    plugin: str | None = None
    adapter: str | None = None
    worker: str | None = None
    healthy: str | None = None
    changes: Mapping[str, object] = field(default_factory=dict)
    options: Sequence[str] = ("--steps", "2", "--ranks", "1")
    refused: bool = False


TWO_RANKS = ("--steps", "2", "--ranks", "2")
PARTS = "parts from plain PyTorch"
SMALL = {"actor.micro_batch_size": 2}
MERGED = {"actor.model.is_lora": True, "actor.model.lora.r": 4}
ONE_STEP, RUNS, FIVE_STEPS = (("--steps", number) for number in "125")
LORA = {"actor.model.is_lora": True, "actor.model.lora.r": 4, "actor.model.lora.init": False}
OF_NUMBERS: tuple[Fault, ...] = (
    Fault(
        "mean_of_means", "a mean of each micro-batch", "parity", (PARTS, "train/loss"), kind="rows",
        adapter="MeanOfMeans",
    ),
    Fault(
        "mixed_rows", "rows of a micro-batch are centred together, by a hundredth", "layouts",
        ("packing makes the difference",), kind="rows", adapter="MixedRows",
    ),
    Fault(
        "mean_over_ranks", "a loss divided by the number of ranks", "layouts",
        ("sharding makes the difference",), kind="rows", adapter="MeanOverRanks", options=TWO_RANKS,
    ),
    Fault(
        "lost_gradient", "a unit's gradient is lost on several ranks", "layouts",
        ("sharding makes the difference", "linear.weight is furthest away"), kind="rows", adapter="LostGradient",
        options=TWO_RANKS,
    ),
    Fault(
        "redrawn_activations", "a recomputed activation is drawn anew", "layouts",
        ("checkpointing makes the difference",), kind="rows", adapter="RedrawnActivations",
        changes={"actor.model.gradient_checkpointing": True},
    ),
    Fault(
        "half_offsets", "rows told apart by numbers too large for bf16", "layouts", ("precision makes the difference",),
        kind="rows", adapter="HalfOffsets", changes={"actor.model.precision": "bf16"},
    ),
    Fault(
        "rounded_batches", "batches rounded to bf16 on several ranks alone", "layouts",
        ("several ranks part from one process", "precision makes the difference"), plugin="rounded_batches.py",
        kind="rows", adapter="Regressor", changes={"actor.model.precision": "bf16"}, options=TWO_RANKS,
    ),
    Fault("compiled", "a shortcut where the model is compiled", "layouts", ("compile makes the difference",), "qwen2",
          plugin="compiled_otherwise.py", changes={"actor.model.compile": True}),
    Fault("centred_parts", "a mean over a tensor rank's part", "layouts", ("tensor makes the difference",), "qwen2",
          plugin="centred_parts.py", options=TWO_RANKS,
          changes={"actor.parallel.tensor": 2, "runner.nproc_per_node": 2}),
    Fault("mean_of_tokens", "a mean over a sequence rank's tokens", "layouts", ("cannot share sequences",),
          "qwen2", plugin="mean_of_tokens.py", options=TWO_RANKS, refused=True,
          changes={"actor.parallel.sequence": 2, "actor.micro_batch_size": 1, "runner.nproc_per_node": 2}),
    Fault("offloaded_gradients", "offloaded gradients rounded to bf16", "layouts", ("offload makes the difference",),
          "qwen2", plugin="offloaded_gradients.py", changes={"actor.fsdp_config.cpu_offload": True}, options=TWO_RANKS),
    Fault("leaking_rows", "packed rows attend to one another", "layouts", ("packing makes the difference",), "qwen2",
          plugin="leaking_rows.py"),
    Fault("running_positions", "positions go on from row to row", "layouts", ("packing makes the difference",), "gpt2",
          plugin="running_positions.py"),
    Fault("shifted_labels", "labels shifted by two", "parity", (PARTS, "train/loss"), "qwen2",
          plugin="shifted_labels.py"),
    Fault("lora_scale", "LoRA scaled by alpha, not alpha / r", "parity", (PARTS,), "qwen2", plugin="lora_scale.py",
          changes=LORA),
    Fault("late_schedule", "the learning rate of the step before", "parity", (PARTS, "the weight"), "qwen2",
          plugin="late_schedule.py", options=("--steps", "3", "--ranks", "1")),
    Fault("decayed_norms", "weight decay on norms", "parity", (PARTS, "the weight", "norm"), "qwen2",
          plugin="decayed_norms.py"),
    Fault("own_clipping", "gradients clipped to half of the norm", "parity", (PARTS, "the weight"), "qwen2",
          plugin="own_clipping.py", changes={"actor.optim.name": "SGD", "actor.optim.clip_grad": 0.1}),
)  # fmt: skip


def _own_loader(name: str, what: str, command: str, words: Sequence[str], worker: str) -> Fault:
    changes = {"actor.micro_batch_size": 3}
    return Fault(name, what, command, words, "numbers", worker=worker, healthy="Fits", changes=changes, options=RUNS)


OF_RUNS: tuple[Fault, ...] = (
    Fault("own_draws", "a draw from a generator of the worker's own", "resume", ("step 2", "train/loss"),
          worker="DrawsForItself", options=RUNS),
    Fault("lost_slot", "a slot of the optimizer lost at a resume", "resume", ("after step 2", "weights"),
          worker="ForgetsASlot", options=RUNS),
    Fault("counter", "a counter that is in no checkpoint", "resume", ("step 2", "train/loss"),
          worker="CountsForItself", options=RUNS),
    _own_loader("unseeded_loader", "a loader that shuffles by the system's noise", "resume",
                ("refused where it is continued", "the first batch: other content"), "ShufflesByTheClock"),
    _own_loader("lost_buffer", "a changing buffer that is in no checkpoint", "resume", ("step 2",),
                "RemembersForItself"),
    Fault("rank_in_loss", "a loss that depends on the rank", "elastic", ("step 1", "train/loss"),
          worker="LossOfTheRank", options=ONE_STEP),
    Fault("draws_in_loss", "a draw in the loss, once per micro-batch", "elastic", ("step 1", "train/loss"),
          worker="DrawsInTheLoss", options=ONE_STEP),
    Fault("mean_of_rank", "a mean over the rank's own targets", "elastic", ("step 1", "train/loss"),
          worker="MeanOfTheRank", changes=SMALL, options=ONE_STEP),
    _own_loader("rank_in_order", "an order of rows that depends on the rank", "elastic", ("step 1", "batches"),
                "OrderOfTheRank"),
    Fault("killed", "SIGTERM's default restored", "preempt", ("computed twice",),
          worker="DiesOfSigterm", options=FIVE_STEPS),
    Fault("lost_position", "a checkpoint without the position in the data", "preempt",
          ("the position in the data",),
          worker="ForgetsThePosition", options=FIVE_STEPS),
    Fault("template", "another chat template in the export", "export", ("renders a conversation otherwise",),
          plugin="exported_template.py", options=RUNS),
    Fault("special_token", "another end token in the export", "export", ("special token", "eos_token"),
          plugin="exported_token.py", options=RUNS),
    Fault("rounded", "a matrix rounded in the export", "export", ("other bits", "layers.0.mlp.up_proj"),
          plugin="exported_rounded.py", options=RUNS),
    Fault("untrained", "a weight of before training in the export", "export", ("other bits", "model.norm.weight"),
          plugin="exported_untrained.py", options=RUNS),
    Fault("untied", "tied weights untied in the export", "export", ("ties other weights",), kind="tied",
          plugin="exported_untied.py", options=RUNS),
    Fault("merge_scale", "an adapter merged at twice its scale", "export", ("merged", "PEFT"), plugin="merge_scale.py",
          changes=MERGED, options=RUNS),
)  # fmt: skip
FAULTS = (*OF_NUMBERS, *OF_RUNS)


def make_inputs(folder: Path) -> None:
    """Models, tokenizer and rows of all recipes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from tests.support.tiny_run import make_model, make_tiny, make_tokenizer

    make_tiny(folder / "qwen2")
    make_tiny(folder / "tied")
    model = make_model(make_tokenizer())
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder / "tied" / "model")
    tokenizer = make_tokenizer()
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 1024, "vocab_size": 272}
    GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).save_pretrained(
        folder / "gpt2" / "model"
    )
    tokenizer.save_pretrained(folder / "gpt2" / "model")
    (folder / "gpt2" / "train.jsonl").write_text((folder / "qwen2" / "train.jsonl").read_text())
    draws = Random(0)
    rows = [
        {
            "x": [draws.gauss(0, 1) for _ in range(4)],
            "y": [draws.gauss(0, 1) for _ in range(2)],
            "seen": [1.0, float(number % 3 > 0)],
        }
        for number in range(21)
    ]
    numbers = [{"x": [draws.random() for _ in range(4)], "y": [draws.random() for _ in range(2)]} for _ in range(21)]
    for name, given in (("rows", rows), ("numbers", numbers)):
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))


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
    if fault.kind == "rows":
        kind = fault.adapter if planted else "Regressor"
        values["actor"]["model"]["adapter"] = f"{PLANTED / 'adapters.py'}:{kind}"
    elif fault.kind != "numbers":
        values["actor"]["model"]["model_path"] = str(inputs / "model")
    if fault.kind != "numbers":
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
    return done.returncode, f"{result['text']} {result['where']}", seconds


def is_found(fault: Fault, code: int, message: str) -> bool:
    return code == (2 if fault.refused else 1) and all(word in message for word in fault.words)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a fault's command printed.

    Attributes:
        name: of the fault.
        right: whether the fault was found, or the healthy recipe passes.
        code: the command's exit code.
        message: its result.
        seconds: it took.
    """

    name: str
    right: bool
    code: int
    message: str
    seconds: float


def try_out(fault: Fault, folder: Path, *, planted: bool) -> Seen:
    """Run a fault's command on its recipe."""
    code, message, seconds = verify(fault, folder, planted=planted)
    return Seen(fault.name, is_found(fault, code, message) if planted else code == 0, code, message, seconds)


def line_of(fault: Fault, seen: Seen) -> list[str]:
    """A row of the table."""
    found = ("refused" if fault.refused else "yes") if seen.right else f"NO (exit code {seen.code})"
    lines = seen.message.splitlines()
    first = next((line for line in reversed(lines) if line.startswith("error: ")), lines[0]).replace("|", "/")
    return [fault.what, f"`{fault.command}`", found, f"{seen.seconds:.0f}", first]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="+", help="names of faults")
    options.add_argument("--healthy", action="store_true", help="check the recipes without their faults instead")
    options.add_argument("--results", type=Path, help="a file that results are added to, and read from")
    options.add_argument("--save", action="store_true", help="rewrite the section of docs/benchmarks.md")
    given = options.parse_args()
    lines = given.results.read_text().splitlines() if given.results and given.results.exists() else []
    found = {seen.name: seen for seen in (Seen(**json.loads(line)) for line in lines)}
    chosen = [fault for fault in FAULTS if not given.only or fault.name in given.only]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_inputs(folder)
        for fault in chosen:
            if fault.name in found:
                continue
            seen = found[fault.name] = try_out(fault, folder, planted=not given.healthy)
            print(
                f"{fault.name}: {'right' if seen.right else 'WRONG'} [{seen.seconds:.0f} s]\n    {seen.message}",
                flush=True,
            )
            if given.results:
                with given.results.open("a") as file:
                    file.write(json.dumps(asdict(seen)) + "\n")
    rows = [line_of(fault, found[fault.name]) for fault in FAULTS if fault.name in found]
    right = sum(found[fault.name].right for fault in chosen)
    verdict = f"{right} of {len(chosen)} {'healthy recipes pass' if given.healthy else 'faults found'}"
    print(verdict)
    if given.save and len(rows) == len(FAULTS) and not given.healthy:
        write_section("faults", f"{machine()}\n\n{table(HEADS, rows)}\n\n{verdict}.")
    return 0 if right == len(chosen) else 1


if __name__ == "__main__":
    raise SystemExit(main())
