"""All that only a GPU can show, in parts: `python bench/gpu.py [--list] [--part NAME ...] [--minutes 9] [--save]`.

Numbers against fp64 on the CPU, every branch that runs on CUDA alone, throughput beside TRL, memory against the plan,
and where the time of a step goes. Each part is a process of its own that ends within eight minutes; each check of it is
a JSON line in `build/gpu/PART.jsonl`. What has a line is not computed again, so a second call continues, and a call
ends by itself after `--minutes`. `--again` forgets the results of the named parts. `--save` writes the tables into
docs/benchmarks.md. Checks of the parts branches, numbers and memory need no GPU of their own: calls with different
`--folder`s and a `--match` each may run side by side, and their lines be joined. On a CPU: `--device cpu --small`, for
a trial of the bench itself. Exit code 1 where a check failed.

It uses whichever of TRL, Liger, flash-attn, bitsandbytes and torchao can be imported, and lists the others as missing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from gpu_parts.parts import PARTS  # noqa: E402
from gpu_parts.records import FAIL, Records, Setting, compute  # noqa: E402
from gpu_parts.tables import page, verdicts  # noqa: E402
from results import write_section  # noqa: E402

PART_SECONDS = 480.0
"""Of a part's process, after which the check that it is in has failed."""
NEEDED_SECONDS = 30.0
"""No part is begun with less time left than this."""


def run_part(name: str, setting: Setting, seconds: float) -> None:
    """Compute what a part lacks, in a process of its own, for some seconds at most."""
    records = Records(setting.folder, name)
    began, end = time.time(), time.time() + seconds
    while records.pending(PARTS[name].names(setting)) and time.time() < end - NEEDED_SECONDS:
        command = [sys.executable, str(Path(__file__)), "--inside", name, "--until", str(end), *setting.words()]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        log = setting.folder / f"{name}.log"
        with log.open("a") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            try:
                code = process.wait(timeout=max(1.0, end - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                if seconds >= PART_SECONDS and (unfinished := records.unfinished()):
                    records.add(unfinished, verdict=FAIL, note=f"not done after {time.time() - began:.0f} s")
                return
        unfinished = records.unfinished()
        if unfinished:  # it died; what comes after this check is computed by the next process
            records.add(unfinished, verdict=FAIL, note=f"its process ended with exit code {code}; see {log.name}")
        elif code:
            raise SystemExit(f"{name}: exit code {code}\n{log.read_text()[-2000:]}")
        else:  # all that there is time for
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="the parts, and how much of each is done")
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=list(PARTS), metavar="NAME")
    parser.add_argument("--match", default="", metavar="REGEX", help="only checks whose names contain it")
    parser.add_argument("--contenders", default="", metavar="REGEX", help="of throughput, only these")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="tiny shapes and few steps: a trial of the bench")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call")
    parser.add_argument("--again", action="store_true", help="forget the results of the named parts first")
    parser.add_argument("--save", action="store_true", help="write the tables into docs/benchmarks.md")
    parser.add_argument("--inside", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    setting = Setting(
        arguments.device, arguments.small, arguments.folder.resolve(), arguments.match, arguments.contenders
    )
    setting.folder.mkdir(parents=True, exist_ok=True)
    if arguments.inside:
        compute(PARTS[arguments.inside], Records(setting.folder, arguments.inside), setting, arguments.until)
        return 0
    if arguments.again:
        for name in arguments.part:
            Records(setting.folder, name).forget()
    end = time.time() + 60 * arguments.minutes
    for name in arguments.part if not arguments.list else ():
        left = end - time.time()
        if left > NEEDED_SECONDS:
            run_part(name, setting, min(left, PART_SECONDS))
            print(verdicts(name, PARTS[name], setting), flush=True)
    found = {name: Records(setting.folder, name) for name in PARTS}
    for name, part in PARTS.items():
        names = part.names(setting)
        print(f"{name:24}{len(names) - len(found[name].pending(names)):3} of {len(names):2} done: {part.title}")
    text, failed = page(PARTS, setting)
    (setting.folder / "tables.md").write_text(text, encoding="utf-8")
    print(f"tables: {setting.folder / 'tables.md'}")
    if arguments.save:
        write_section("gpu", text)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
