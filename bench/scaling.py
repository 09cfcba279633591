"""What steps cost by the formulas, and what small ones cost when counted: `python bench/scaling.py [--plans]`.

Rewrites the section `plans` of docs/scaling.md, and without `--plans` the section `scaling` of docs/benchmarks.md; ends
with exit code 1 where a formula is off by more than its limit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from results import machine, table, write_section  # noqa: E402

from shardtune.parallel.cost.choose import USABLE, Plan, fastest, fits  # noqa: E402
from shardtune.parallel.cost.shape import ModelShape  # noqa: E402
from shardtune.parallel.cost.time import Machine  # noqa: E402
from tests.support.dist.layouts import LaidOut  # noqa: E402
from tests.support.dist.traffic import CASES, EXPERTS, Counts, Ratio  # noqa: E402

SCALING = ROOT / "docs" / "scaling.md"
MACHINE = Machine()
TOKENS, LENGTH, MOST = 2**22, 4096, 32768
MODELS = {
    "1B": ModelShape(2048, 16, 32, 8, 64, 8192, 128256, tied=True),
    "8B": ModelShape(4096, 32, 32, 8, 128, 14336, 128256),
    "70B": ModelShape(8192, 80, 64, 8, 128, 28672, 128256),
    "405B": ModelShape(16384, 126, 128, 8, 128, 53248, 128256),
}
"""Llama 3.2 1B, and Llama 3.1 8B, 70B and 405B."""
RANKS = (8, 64, 256, 1024)
LIMIT = 0.005
ESTIMATES = {"kept": 0.1, "to-all": 0.1, "gathered": 0.3}
"""Of estimates: activations; tokens to experts, which are not chosen equally often; layers of experts, at most."""
SHORT_ROWS = 0.1
"""Of int8 moments: rows of less than 256 numbers have a scale of their own."""


def layout_of(plan: Plan) -> str:
    """The layout and the other keys that are not at their defaults."""
    setting = plan.setting
    keys = [str(setting.layout)]
    keys += ["reduce every"] if setting.reduce == "every" and plan.work.micro_batches > 1 else []
    keys += ["keep weights"] if not setting.reshard_after_forward and setting.shards > 1 else []
    keys += {False: [], True: ["checkpointing"], "selective": ["selective checkpointing"]}[
        setting.gradient_checkpointing
    ]
    keys += ["offload"] if setting.cpu_offload else []
    return ", ".join(keys)


def amount(number_of_bytes: float) -> str:
    return f"{number_of_bytes / 1e9:.1f}" if number_of_bytes < 1e11 else f"{number_of_bytes / 1e9:,.0f}"


def seconds(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def memory_row(plan: Plan) -> list[str]:
    found = plan.memory
    parts = (found.weights, found.moments, found.gradients, found.gathered, found.unreduced, found.activations)
    host = amount(found.host) if found.host else ""
    return [*map(amount, parts), amount(found.device), host, "yes" if fits(plan, MACHINE) else "**no**"]


def time_row(plan: Plan, shape: ModelShape) -> list[str]:
    found = plan.time
    needed = TOKENS * 6 * (shape.multiplied + shape.layers * shape.query_width * LENGTH)
    reached = needed / (found.step * plan.setting.layout.num_ranks * MACHINE.flops)
    hidden, exposed = (
        sum(e.sent for e in plan.exchanges if (e.axis in ("shard", "replicate")) is beside) for beside in (True, False)
    )
    times = (found.compute, found.hidden, found.waiting, found.exposed, found.update, found.step)
    return [amount(hidden), amount(exposed), *map(seconds, times), f"{reached:.0%}"]


def plans() -> str:
    """The tables of docs/scaling.md."""
    memory_lines, time_lines = [], []
    for name, shape in MODELS.items():
        for ranks in RANKS:
            plan = fastest(shape, ranks, MACHINE, TOKENS, LENGTH, MOST)
            work = f"{plan.work.micro_batches:,} x {plan.work.tokens:,.0f}"
            memory_lines.append([name, f"{ranks:,}", layout_of(plan), work, *memory_row(plan)])
            time_lines.append([name, f"{ranks:,}", *time_row(plan, shape)])
    kinds = ("weights", "moments", "gradients", "gathered", "unreduced", "activations", "together", "host", "fits")
    sent = ("sent beside, GB", "sent between, GB")
    times = ("compute", "beside", "waits for that", "between", "update", "step, s", "MFU")
    first = table(("model", "GPUs", "layout", "micro-batches x tokens", *kinds), memory_lines)
    second = table(("model", "GPUs", *sent, *times), time_lines)
    return f"{assumptions()}\n\nMemory of a rank in GB:\n\n{first}\n\nTraffic and time of a rank in a step:\n\n{second}"


def assumptions() -> str:
    return (
        f"Steps of {TOKENS:,} tokens in rows of {LENGTH:,}, all of them targets, bf16, AdamW; a micro-batch has "
        f"{LENGTH:,} to {MOST:,} tokens. A GPU has {MACHINE.memory / 1e9:.0f} GB, of which {USABLE:.0%} may be used, "
        f"and {MACHINE.flops / 1e12:.0f} TFLOP/s, of which products reach {MACHINE.flops_share:.0%}; "
        f"{MACHINE.per_node} of them are a node. One way, a GPU sends {MACHINE.inside / 1e9:.0f} GB/s to others of its "
        f"node, {MACHINE.outside / 1e9:.0f} GB/s to other nodes (collectives reach {MACHINE.link_share:.0%}; "
        f"{MACHINE.hop * 1e6:.0f} µs from node to node), {MACHINE.host / 1e9:.0f} GB/s to host memory, of which it has "
        f"{MACHINE.host_size / 1e9:.0f} GB; its own memory moves {MACHINE.device_memory / 1e12:.2f} TB/s. The layout "
        "is the one that `fastest` finds: the least traffic among those within 2 % of the shortest step that fit; host "
        "memory where nothing else fits, and where nothing fits the least memory. Unreduced are gradients before their "
        "reduction and the head's; where whole gradients wait, they stand in for the shards. Beside computing goes "
        "what gathers and reduces, between it what computing waits for. MFU counts what the tokens need once, "
        "attention without its causal half."
    )


def cell(lines: Sequence[Ratio], what: str) -> str:
    """Calls where there are any, megabytes, and their ratio to the formula's."""
    found = [line for line in lines if line.what.startswith(what)]
    parts = []
    for line in found:
        if line.what.endswith("calls"):
            parts.append(f"{line.counted:.0f}" if line.ratio == 1 else f"{line.counted:.0f} ({line.formula:.0f})")
        else:
            parts.append(f"{line.counted / 1e6:.3f} MB: {line.ratio:.3f}" if line.counted else "0")
    return ", ".join(parts)


def limit(line: Ratio, case: LaidOut) -> float:
    if "int8" in case.name and line.what.startswith("moments"):
        return SHORT_ROWS
    return next((value for part, value in ESTIMATES.items() if part in line.what), LIMIT)


COLUMNS = {
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce",
    "all-to-all": "all-to-all",
    "weights": "weights, ",
    "moments": "moments, ",
    "gradients": "gradients, ",
    "gradients that wait": "gradients that wait",
    "gathered at most": "gathered",
    "activations": "kept",
}


def counted() -> Iterator[tuple[list[str], list[str]]]:
    """A line of the table per case, and what is off in it."""
    for kind, cases, changes in (
        ("dense", CASES, {}),
        ("qwen3_moe", EXPERTS, {"head_dim": 16, "moe_intermediate_size": 96}),
    ):
        chosen = [(case, precision) for precision in ("fp32", "bf16") for case in cases]
        with tempfile.TemporaryDirectory() as folder:
            found = Counts(Path(folder), kind, **changes).of(chosen)
        for (case, precision), lines in zip(chosen, found, strict=True):
            named = [kind, case.name, str(case.ranks), precision]
            far = [line for line in lines if abs(line.ratio - 1) > limit(line, case)]
            off = [f"{' '.join(named)}: {line.what} {line.ratio:.3f}" for line in far]
            yield [*named, *(cell(lines, part) for part in COLUMNS.values())], off


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", action="store_true", help="only the tables of docs/scaling.md, which need no ranks")
    args = parser.parse_args()
    write_section("plans", plans(), SCALING)
    if args.plans:
        return 0
    lines, wrong = [], []
    for line, off in counted():
        lines.append(line)
        wrong += off
        print(*line, flush=True)
    verdict = "All within their limits" if not wrong else "OFF: " + "; ".join(wrong)
    print(verdict)
    text = (
        "One step of a small model (3 layers of width 64) on rank 0 over gloo: calls and bytes of collectives (the "
        "whole tensors', of all calls), and bytes of what the rank holds; after each colon the ratio to the formula of "
        f"`shardtune.parallel.cost`. Limits: {LIMIT:.1%}; of activations and of tokens to experts "
        f"{ESTIMATES['kept']:.0%}; "
        f"with experts that are spread {ESTIMATES['gathered']:.0%} of the gathered weights, as a layer and its experts "
        "are taken to be there at once; of int8 moments "
        f"{SHORT_ROWS:.0%}, as rows of less than 256 numbers have a scale each. Collectives of a few numbers are left "
        "out. Activations: the formula leaves out sines and cosines of positions, a number per norm and token, and "
        "copies that attention makes on a CPU.\n\n"
    )
    heads = ("model", "layout", "ranks", "precision", *COLUMNS)
    write_section("scaling", f"{text}{table(heads, lines)}\n\n{verdict}. {machine()}.")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
