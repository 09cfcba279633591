"""Train the example adapters on one rank and on two, then ask the conformance kit: `python bench/adapters.py`.

Rewrites the section `adapters` of docs/benchmarks.md; ends with exit code 1 where something fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from results import machine, table, write_section  # noqa: E402

EXAMPLES = ROOT / "examples" / "adapters"
INTRODUCTION = """\
Each example as its README says, but in fp64: rows made, trained on one rank and on two, then `shardtune verify
adapter`. Loss: of the held-out rows, before and after; apart: the largest relative difference of a step's loss between
the two runs."""


def command(folder: Path, *words: str) -> tuple[str, float]:
    """What a command of shardtune prints, and how long it takes."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout + done.stderr, time.perf_counter() - began


def train(folder: Path, name: str, ranks: int) -> list[dict[str, float]]:
    """The lines of a run's metrics."""
    keys = (
        f"runner.logger.experiment_name={name}",
        f"runner.nproc_per_node={ranks}",
        "actor.model.precision=fp64",  # in fp32 Adam makes rounding large: 1e-3 in the losses of seq2seq after 64 steps
    )
    command(folder, "-m", "shardtune", "train", "recipe.yaml", *keys)
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def losses(lines: list[dict[str, float]], key: str = "train/loss") -> list[float]:
    return [line[key] for line in lines if key in line]


def main() -> int:
    found, wrong = [], 0
    with tempfile.TemporaryDirectory() as name:
        for example in sorted(folder for folder in EXAMPLES.iterdir() if (folder / "recipe.yaml").is_file()):
            folder = Path(shutil.copytree(example, Path(name) / example.name, ignore=shutil.ignore_patterns("made")))
            command(folder, "make_rows.py")
            one, two = train(folder, "one", 1), train(folder, "two", 2)
            pairs = list(zip(losses(one), losses(two), strict=True))
            apart = max(abs(a - b) / max(1e-12, abs(a)) for a, b in pairs)
            told, seconds = command(folder, "-m", "shardtune", "verify", "adapter", "recipe.yaml")
            verdict = re.findall(r"(\d+ passed.* of \d+ checks)", told)[-1]
            wrong += "failed" in verdict
            before, after = losses(one, "eval/loss")[0], losses(one, "eval/loss")[-1]
            found.append(
                [example.name, len(pairs), f"{before:.3f} -> {after:.3f}", f"{apart:.1e}", verdict, f"{seconds:.0f} s"]
            )
            print(found[-1], flush=True)
    text = table(("example", "steps", "loss", "apart", "kit", "took"), found)
    write_section("adapters", f"{INTRODUCTION}\n\n{text}\n\n{machine()}.")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
