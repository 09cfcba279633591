"""Kills and signals at random moments of the real command, which is then continued to its end and compared.

    python bench/kill.py [--trials 300] [--results FILE] [--seconds 660] [--seed 0] [--save]

Each trial is a run of its own: on one rank, on two, or on two under torchrun; a signal reaches the command, one of its
ranks, or all of its processes at a random moment. The same command then goes on to the end: weights, optimizer and log
must be those of a run that was left alone, bit for bit. One trial in ten starts Python anew, so that the moment may lie
in its imports; the others are forked from a process that has done them. Results are kept in a file: a trial that is in
it is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
from results import machine, table, write_section  # noqa: E402

from tests.support import fork_server  # noqa: E402
from tests.support.tiny_run import Tiny, assert_same_tensors, lines, make_tiny  # noqa: E402

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
EPOCHS = 4
STEPS = 4 * EPOCHS
LIMIT = 240.0
SIGNALS = ("SIGKILL", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGINT")
SHARES = (6, 2, 2, 2, 2, 2, 2)
SHAPES = ("one rank", "two ranks", "two ranks, torchrun")
IMPORTS = 12.0
"""Seconds that a start of Python takes longer than a fork, about."""


def command(tiny: Tiny, name: str, shape: str) -> list[str]:
    recipe = tiny.folder / f"{name}.yaml"
    ranks = 2 if shape == "two ranks" else 1
    keys = {
        "runner__max_epochs": EPOCHS,
        "runner__save_interval": 2,
        "runner__nproc_per_node": ranks,
        "runner__keep_last": 2,
    }
    recipe.write_text(yaml.safe_dump(tiny.recipe(name, **keys)))
    torchrun = ["-m", "shardtune.launch.torchrun", "--standalone", "--nproc-per-node", "2"]
    return [sys.executable, *(torchrun if "torchrun" in shape else []), "-m", "shardtune", "train", str(recipe)]


def start(argv: list[str], log: Path, *, own: bool = False) -> subprocess.Popen[bytes]:
    with log.open("w") as output, fork_server.own_starts() if own else nullcontext():
        return subprocess.Popen(argv, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)


def family(pid: int, log: Path) -> list[int]:
    """A process and those below it that write into its log: not the servers that fork them, nor a fork on its way."""
    found = [pid]
    for each in found:
        with suppress(OSError):
            below = Path(f"/proc/{each}/task/{each}/children").read_text().split()
            found += [int(child) for child in below if os.readlink(f"/proc/{child}/fd/2") == str(log)]
    return found


def to_the_end(argv: list[str], log: Path) -> float:
    began = time.monotonic()
    process = start(argv, log)
    try:
        code = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        for pid in family(process.pid, log):
            os.kill(pid, signal.SIGKILL)
        code = None
    if code:
        raise RuntimeError(f"exit code {code}: {log.read_text()[-1500:]}")
    return time.monotonic() - began


def trial(tiny: Tiny, number: int, seed: int, durations: dict[str, float]) -> dict[str, object]:
    draw = random.Random(f"{seed}/{number}")
    name = draw.choices(SIGNALS, SHARES)[0]
    shape = draw.choice(SHAPES)
    target = draw.choice(["the command"] if shape == "one rank" else ["the command", "a rank", "all"])
    own = number % 10 == 0
    argv, log, run = command(tiny, f"trial-{number}", shape), tiny.folder / "log", tiny.run(f"trial-{number}")
    while True:
        moment = draw.uniform(0.0, durations[shape] + own * IMPORTS)
        process = start(argv, log, own=own)
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            break
        shutil.rmtree(run)  # it had ended before: another moment
    processes = family(process.pid, log)
    chosen = {"the command": [process.pid], "all": processes, "a rank": [draw.choice(processes[1:] or processes)]}
    ended = process.poll() is not None
    for pid in [] if ended else chosen[target]:
        with suppress(ProcessLookupError):
            os.kill(pid, getattr(signal, name))
    try:
        code = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name} to {target} ({shape}) did not end it: {log.read_text()[-1500:]}") from None
    text = log.read_text()
    steps = len(lines(run)) if (run / "metrics.jsonl").exists() else 0
    latest = run / "checkpoints/latest"
    saved = int(latest.read_text().rpartition("_")[2]) if latest.exists() else 0
    torn = run.exists() and any(run.glob("checkpoints/.*"))
    to_the_end(argv, log)
    whole = tiny.run(shape.replace(",", "").replace(" ", "-"))
    last = f"checkpoints/global_step_{STEPS}"
    assert_same_tensors(whole / last, run / last)
    assert lines(whole) == lines(run)
    shutil.rmtree(run)
    return {
        "number": number,
        "signal": name,
        "shape": shape,
        "target": target,
        "own": own,
        "moment": round(moment, 2),
        "ended_before": ended,
        "code": code,
        "steps": steps,
        "saved": saved,
        "in_save": torn,
        "traceback": "Traceback" in text,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--results", type=Path, default=Path("kill-results.jsonl"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no new trial after that time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="write the result into docs/benchmarks.md")
    options = parser.parse_args()
    began = time.monotonic()
    done = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    done = [each for each in done if "failed" not in each]  # these are tried again
    left = [number for number in range(options.trials) if number not in {each["number"] for each in done}]
    undo = fork_server.install()
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny(Path(folder), dropout=0.2)
        durations = {}
        for shape in SHAPES if left else ():
            argv = command(tiny, shape.replace(",", "").replace(" ", "-"), shape)
            to_the_end(argv, tiny.folder / "log")
            shutil.rmtree(tiny.run(shape.replace(",", "").replace(" ", "-")))
            durations[shape] = to_the_end(argv, tiny.folder / "log")  # the first has filled caches
        print(durations, flush=True)
        for number in left:
            if time.monotonic() - began > options.seconds:
                break
            try:
                done.append(trial(tiny, number, options.seed, durations))
            except (RuntimeError, AssertionError) as error:
                done.append({"number": number, "failed": str(error)})
            print(json.dumps(done[-1]), flush=True)
            with options.results.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
    undo()
    text = f"{machine()}\n\n{summary(done)}"
    print(text)
    if options.save:
        write_section("kill", text)
    if any("failed" in each for each in done):
        raise SystemExit("\n\n".join(f"{each['number']}: {each['failed']}" for each in done if "failed" in each))


def summary(done: list[dict]) -> str:
    """A table by signal and shape."""
    good = [each for each in done if "failed" not in each]
    rows = []
    for name in SIGNALS:
        for shape in SHAPES:
            mine = [each for each in good if (each["signal"], each["shape"]) == (name, shape)]
            codes = Counter("ended before" if each["ended_before"] else str(each["code"]) for each in mine)
            if mine:
                ended = ", ".join(f"{code}: {count}" for code, count in sorted(codes.items()))
                lost = sum(each["steps"] > each["saved"] for each in mine)
                rows.append([name, shape, len(mine), sum(each["in_save"] for each in mine), ended, lost, len(mine)])
    heads = ["signal", "on", "trials", "inside a save", "exit codes", "lost steps", "bitwise in the end"]
    return table(heads, rows) + f"\n\n{len(good)} of {len(done)} trials ended bitwise equal."


if __name__ == "__main__":
    main()
