"""Throughput per core of two ranks beside one rank: `python bench/ranks.py [--turns 5] [--steps 4] [--small]`.

Each rank is bound to one core and has one thread. Rewrites the section `ranks` of docs/benchmarks.md (with `--small`
nothing is written); ends with exit code 1 below the target.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from results import machine, table, write_section  # noqa: E402

from shardtune.config import load_recipe  # noqa: E402
from shardtune.config.rank_layout import Layout  # noqa: E402
from shardtune.parallel.cost.shape import ModelShape, Setting, Work  # noqa: E402
from shardtune.parallel.cost.traffic import Exchange, traffic  # noqa: E402
from shardtune.training.worker.adapter_worker import SFTWorker  # noqa: E402
from tests.support.dist.ranks import run_ranks  # noqa: E402
from tests.support.dist.training import quiet, recipe, save_model, save_rows  # noqa: E402

TARGET = 0.85
SHAPE = ModelShape(256, 6, 4, 4, 64, 768, 264, biased=True)
ROWS, TOKENS = 64, 2048
"""Rows of a step, and tokens of a micro-batch."""
WARM = 1
"""Steps that are not measured."""


@dataclass(frozen=True)
class Measured:
    """What a rank measured.

    Attributes:
        seconds: of the measured steps.
        tokens: of them, on all ranks.
        micro_batches: of a step, at most.
        rates: bytes per second that collectives send, by kind.
    """

    seconds: float
    tokens: float
    micro_batches: int
    rates: dict[str, float]


def bind(core: int) -> None:
    """Keep all threads of this process, those of its connections too, on one core."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


def train(values: Mapping[str, Any], cores: list[int], steps: int) -> Measured:
    """Measure some steps of a recipe on this rank."""
    bind(cores[int(os.environ["RANK"])])
    worker = SFTWorker(load_recipe(dict(values)), report=quiet)
    worker.setup()
    calls = [0]
    hook = worker.root.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    for _ in range(WARM):
        worker.run_training()
    calls[0], tokens, begun = 0, 0.0, time.perf_counter()
    for _ in range(steps):
        tokens += worker.run_training()["train/tokens"]
    seconds = time.perf_counter() - begun
    hook.remove()
    worker.release()
    rates = {kind: rate(kind) for kind in ("all_gather", "reduce_scatter")} if dist.get_world_size() > 1 else {}
    return Measured(seconds, tokens, -(-calls[0] // steps), rates)


def rate(kind: str, tries: int = 7) -> float:
    """Bytes per second that a rank sends in a collective of the size of a layer."""
    whole = torch.zeros(SHAPE.unit // dist.get_world_size() * dist.get_world_size())
    part = whole.chunk(dist.get_world_size())[dist.get_rank()].clone()
    took = []
    for _ in range(tries):
        dist.barrier()
        begun = time.perf_counter()
        if kind == "all_gather":
            dist.all_gather_single(whole, part)
        else:
            dist.reduce_scatter_single(part, whole)
        took.append(time.perf_counter() - begun)
    return part.numel() * part.element_size() * (dist.get_world_size() - 1) / median(took)


def expected(alone: Measured, both: Measured, steps: int) -> float:
    """The ratio that follows from the formulas: on gloo a step computes, then waits for what is sent."""
    setting = Setting(Layout(1, 2), "fp32")
    moved: list[Exchange] = traffic(SHAPE, setting, Work(TOKENS, both.micro_batches, TOKENS, 0.0))
    compute = alone.seconds / steps / 2
    return compute / (compute + sum(exchange.sent / both.rates[exchange.kind] for exchange in moved))


def make_recipe(folder: Path, steps: int, rows: int) -> dict[str, Any]:
    model = save_model(
        "dense",
        folder / "model",
        hidden_size=SHAPE.width,
        intermediate_size=SHAPE.intermediate,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.02,
    )
    return recipe(
        model,
        save_rows(folder / "rows.jsonl", rows * (steps + WARM), longest=400),
        runner__max_steps=steps + WARM,
        actor__global_batch_size=rows,
        actor__micro_batch_size=None,
        actor__max_tokens_per_micro_batch=TOKENS,
        actor__model__precision="fp32",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--small", action="store_true", help="one turn of one small step, to see that it works")
    args = parser.parse_args()
    turns, steps, rows = (1, 1, 16) if args.small else (args.turns, args.steps, ROWS)
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("two ranks with a core each need two cores; this process may use one")
    load = os.getloadavg()[0]
    lines, ratios = [], []
    with tempfile.TemporaryDirectory() as folder:
        values = make_recipe(Path(folder), steps, rows)
        for turn in range(turns):
            alone = run_ranks(train, 1, values, cores[turn % 2 :], steps, timeout=900)[0]
            both = max(run_ranks(train, 2, values, cores, steps, timeout=900), key=lambda found: found.seconds)
            per_core = [found.tokens / found.seconds / ranks for found, ranks in ((alone, 1), (both, 2))]
            ratios.append(per_core[1] / per_core[0])
            numbers = [f"{value:,.0f}" for value in per_core]
            lines.append([turn + 1, *numbers, f"{ratios[-1]:.3f}", f"{expected(alone, both, steps):.3f}"])
            print(*lines[-1], flush=True)
    kept = median(ratios) >= TARGET
    found = (
        f"median {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
        f"{'at least' if kept else 'BELOW'} {TARGET:g}; load average at the start {load:.1f}"
    )
    print(found)
    if args.small:
        return 0
    text = (
        f"{SHAPE.parameters / 1e6:.1f} million parameters in fp32, FSDP2, {rows} rows a step, micro-batches of at "
        f"most {TOKENS:,} tokens; each rank bound to a core, with one thread; {turns} turns of {steps} steps, one rank "
        "and two in turn. By the formulas: with the traffic of docs/scaling.md at the rate that gloo reaches for a "
        "layer, and nothing beside it.\n\n"
    )
    heads = ("turn", "1 rank, tokens/s", "2 ranks, tokens/s per core", "ratio", "by the formulas")
    write_section("ranks", f"{text}{table(heads, lines)}\n\nRatio: {found}. {machine()}.")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
