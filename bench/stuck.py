"""Ways to be stuck, on two ranks of the real command: which rank is named, and after how long.

    python bench/stuck.py [--ways sleeps,stopped] [--launchers native,torchrun] [--results FILE] [--save]

One rank gets stuck, in its third step or before the first (`tests/support/stuck_ways.py`); `runner.watchdog_seconds`
is 5. Results are kept
in a file, and a way that is in it is not tried again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
from results import machine, table, write_section  # noqa: E402

from tests.support.stuck_ways import WAYS  # noqa: E402
from tests.support.tiny_run import Tiny, make_tiny  # noqa: E402

SECONDS = 5
LIMIT = 180.0
BY_TORCHRUN = (
    *("stopped", "sleeps", "holds_the_interpreter", "loading_sleeps", "skips_a_step"),
    *("leaves", "leaves_at_once"),
)
BY_RAY = ("sleeps", "stopped", "loading_sleeps")
"""The ways in which torchrun, as the parent of the ranks, may matter."""


def command(tiny: Tiny, name: str, launcher: str, way: str) -> list[str]:
    keys = {
        "plugins": [str(ROOT / "tests/support/stuck_ways.py")],
        "runner__watchdog_seconds": SECONDS,
        "runner__eval_interval": 2,
        "data__eval_data_paths": str(tiny.folder / "eval.jsonl"),
    }
    if way in ("evaluation_sleeps", "save_sleeps"):
        keys["runner__save_interval"] = 1
    if launcher == "native":
        keys["runner__nproc_per_node"] = 2
    elif launcher == "ray":
        keys |= {"runner__launcher": "ray", "runner__num_ranks": 2}
    recipe = tiny.folder / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump(tiny.recipe(name, **keys)))
    torchrun = ["-m", "shardtune.launch.torchrun", "--standalone", "--nproc-per-node", "2"]
    return [sys.executable, *(torchrun if launcher == "torchrun" else []), "-m", "shardtune", "train", str(recipe)]


def try_way(tiny: Tiny, launcher: str, way: str, guilty: int) -> dict[str, object]:
    """Run until it ends by itself; seconds count from the last sign of progress."""
    name = f"{launcher}-{way}-{guilty}"
    environment = {**os.environ, "TEST_STUCK": way, "TEST_STUCK_RANK": str(guilty)}
    log = tiny.folder / f"{name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command(tiny, name, launcher, way), env=environment, cwd=ROOT, stdout=output, stderr=output
        )
        began = progress = time.monotonic()
        written: list[str] = []
        while process.poll() is None and time.monotonic() - began < LIMIT:
            text = [line for line in log.read_text().splitlines() if "step " in line[:14]]
            if text != written:
                written, progress = text, time.monotonic()
            time.sleep(0.05)
        seconds = time.monotonic() - progress
        code = process.poll()
        process.kill()
        process.wait()
    text = log.read_text()
    return {
        "launcher": launcher,
        "way": way,
        "rank": guilty,
        "seconds": round(seconds, 1),
        "code": code,
        "right": named_right(text, None if way == "all_sleep" else guilty),
        "text": text[text.find("error:") :][:1500] if "error:" in text else text[-1500:],
    }


def named_right(text: str, guilty: int | None) -> bool:
    """Whether the part of the message that names a rank names this one alone; None: no rank differs."""
    found = text[text.find("error:") :].splitlines()
    head = " ".join(found[: 1 if "no progress" in found[0] else 2])
    if guilty is None:
        return "no rank differs" in head
    return f"rank {guilty}" in head and f"rank {1 - guilty}" not in head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--launchers", default="native,torchrun,ray")
    parser.add_argument("--results", type=Path, help="a file of JSON lines that is read and added to")
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = [(launcher, way, 1) for launcher in options.launchers.split(",") for way in options.ways.split(",")]
    some = {"torchrun": BY_TORCHRUN, "ray": BY_RAY}
    chosen = [each for each in chosen if each[1] in some.get(each[0], WAYS)]
    by = [launcher for launcher in options.launchers.split(",") if launcher != "ray"]
    chosen += [(launcher, "stopped", 0) for launcher in by if "stopped" in options.ways]
    done = []
    if options.results is not None and options.results.exists():
        done = [json.loads(line) for line in options.results.read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny(Path(folder))
        for launcher, way, guilty in chosen:
            if any((each["launcher"], each["way"], each["rank"]) == (launcher, way, guilty) for each in done):
                continue
            done.append(try_way(tiny, launcher, way, guilty))
            print(json.dumps(done[-1]), flush=True)
            if options.results is not None:
                with options.results.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
    rows = [
        [each["way"].replace("_", " "), each["rank"], each["launcher"], each["seconds"], each["code"],
         "yes" if each["right"] else "no"]
        for each in done
    ]  # fmt: skip
    heads = ["rank 1 (or 0) …", "stuck rank", "launcher", "seconds until the end", "exit code", "named right"]
    text = f"{machine()}; runner.watchdog_seconds: {SECONDS}\n\n{table(heads, rows)}"
    print(text)
    if options.save:
        write_section("stuck", text)


if __name__ == "__main__":
    main()
