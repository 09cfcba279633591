"""kill -9 of the real command at random moments, many of them inside a save; then it goes on to its end.

    python bench/kill.py [--kills 30] [--in-saves 10] [--ranks 1] [--seed 0] [--save]

Each time the same command is started again. In the end weights, optimizer and log must be those of a run that was left
alone, bit for bit. Saving is slowed down to two seconds by a plugin, `tests/support/slow_saves.py`.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
from results import machine, table, write_section  # noqa: E402

from tests.support.tiny_run import Tiny, assert_same_tensors, lines, make_tiny  # noqa: E402

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
STEPS = 48
START_SECONDS = 15.0
"""About what it takes from the command to the third step: random moments are drawn from it."""


def command(tiny: Tiny, name: str, ranks: int) -> list[str]:
    recipe = tiny.folder / f"{name}.yaml"
    keys = {
        "plugins": [str(ROOT / "tests/support/slow_saves.py")],
        "runner__max_epochs": STEPS // 4,
        "runner__nproc_per_node": ranks,
        "runner__keep_last": 2,
    }
    recipe.write_text(yaml.safe_dump(tiny.recipe(name, **keys)))
    return [sys.executable, "-m", "shardtune", "train", str(recipe)]


def run_to_the_end(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}\n{done.stderr[-3000:]}")


def kill_once(argv: list[str], mark: Path, log: Path, in_save: bool, draw: random.Random) -> bool:
    """Start the command and kill it; returns whether it was saving then."""
    mark.unlink(missing_ok=True)
    with log.open("w") as told:
        environment = {**os.environ, "TEST_SAVING": str(mark)}
        process = subprocess.Popen(argv, env=environment, cwd=ROOT, stdout=told, stderr=told)
        if in_save:
            for _ in range(draw.randrange(1, 3)):  # the first save, or the second
                wait(lambda: mark.exists(), process, log)
                pause = draw.uniform(0.0, 1.9)
                time.sleep(pause)
        else:
            time.sleep(draw.uniform(0.0, START_SECONDS))
        if process.poll() is not None:
            raise SystemExit(f"it ended by itself, with {process.returncode}:\n{log.read_text()[-3000:]}")
        saving = mark.exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
    return saving


def wait(condition, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 120
    while not condition():
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"it did not come to a save:\n{log.read_text()[-3000:]}")
        time.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--in-saves", type=int, default=10, help="how many of them at least inside a save")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny(Path(folder), dropout=0.2)
        run_to_the_end(command(tiny, "whole", options.ranks))
        argv = command(tiny, "killed", options.ranks)
        plan = [True] * (options.in_saves + 2) + [False] * (options.kills - options.in_saves - 2)
        draw.shuffle(plan)
        in_saves = 0
        for number, in_save in enumerate(plan, start=1):
            saving = kill_once(argv, tiny.folder / "saving", tiny.folder / "log", in_save, draw)
            in_saves += saving
            latest = tiny.run("killed") / "checkpoints/latest"
            stands = latest.read_text().strip() if latest.exists() else "no checkpoint yet"
            print(f"kill {number}: {'while saving' if saving else 'otherwise'}; {stands}", flush=True)
        run_to_the_end(argv)
        last = f"checkpoints/global_step_{STEPS}"
        assert_same_tensors(tiny.run("whole") / last, tiny.run("killed") / last)
        assert lines(tiny.run("whole")) == lines(tiny.run("killed"))
        if in_saves < options.in_saves:
            raise SystemExit(f"only {in_saves} kills met a save: run it again with another --seed")
    rows = [[options.ranks, len(plan), in_saves, "bitwise the same weights, optimizer and log"]]
    text = f"{machine()}\n\n" + table(["ranks", "kills", "inside a save of 2 s", "in the end"], rows)
    print(text)
    if options.save:
        write_section("kill", text)


if __name__ == "__main__":
    main()
