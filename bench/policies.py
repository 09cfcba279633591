"""Train each ready policy on the reaching task on one core, and play it: `python bench/policies.py [NAME …]`.

Every recipe of examples/policies is trained from random weights on the demonstrations of examples/vla_reach, made on
the spot; the trained policy plays 100 episodes, which are none of the recorded ones. Rewrites the section `policies` of
docs/benchmarks.md; ends with exit code 1 where success is below 0.9.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from results import machine, table, write_section  # noqa: E402

ENOUGH = 0.9
EPISODES = 100
ALONE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
BACKBONES = {"smolvla": ("vlm_model_name", "smolvlm"), "pi0": ("paligemma_variant", "paligemma")}
"""By policy: the option that names its vision-language model, and the directory that make_vlm.py writes."""
INTRODUCTION = f"""\
The recipes of `examples/policies`, from random weights, on one thread. Each trained policy plays the same {EPISODES}
episodes of MuJoCo, rendered in software; the interval is Wilson's, 95 %. "CPU" is the process time of the whole
training command, imports included, without evaluations and the encoding of rows; the memory is its peak."""


def run(*arguments: str) -> tuple[str, float, float]:
    """Run a command of shardtune; returns what it printed, its minutes of CPU and its peak memory in GB."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "shardtune", *arguments]
    with tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen(command, env={**os.environ, **ALONE}, stdout=told, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        told.seek(0)
        text = told.read()
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{' '.join(arguments)}\n{text}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return text, cpu / 60, used.ru_maxrss / 1e6


def measure(name: str, data: Path, folder: Path) -> list[str]:
    """The cells of a policy's row.

    Args:
        name: of the policy and its recipe.
        data: the demonstrations.
        folder: for runs and cache.
    """
    given = [
        str(EXAMPLES / "policies" / f"{name}.yaml"),
        f"data.train_data_paths={data.absolute()}/demonstrations",
        f"data.cache_dir={folder}/cache",
        f"runner.logger.log_path={folder}/runs",
        f"runner.logger.experiment_name={name}",
    ]
    if name in BACKBONES:
        option, directory = BACKBONES[name]
        given.append(f"actor.model.options.{option}={folder}/{directory}")
    without = ["eval.environment=null", "data.eval_data_paths=null"]
    run("data", "preview", *given, *without)
    _, minutes, memory = run("train", *given, *without)
    told, _, _ = run("eval", f"{folder}/runs/{name}", "eval.environment=reach", f"eval.episodes={EPISODES}")
    metrics = json.loads(told[told.index("{") : told.rindex("}") + 1])
    found = [metrics[f"eval/{one}"] for one in ("success", "success_low", "success_high", "episode_length")]
    interval = f"{found[1]:.2f} to {found[2]:.2f}"
    return [name, f"{found[0]:.2f}", interval, f"{found[3]:.1f}", f"{minutes:.1f}", f"{memory:.1f}"]


def main() -> None:
    """Measure, write the section, and fail where it is not as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="policies; by default all")
    parser.add_argument("--data", type=Path, help="a folder that make_data.py has written; by default it is made anew")
    parser.add_argument("--dry", action="store_true", help="print the section instead of writing it")
    args = parser.parse_args()
    names = args.names or sorted(path.stem for path in (EXAMPLES / "policies").glob("*.yaml"))
    with tempfile.TemporaryDirectory() as made:
        if args.data is None:
            command = [sys.executable, str(EXAMPLES / "vla_reach" / "make_data.py"), "--out", made]
            subprocess.run(command, env={**os.environ, **ALONE}, check=True, capture_output=True)
        command = [sys.executable, str(EXAMPLES / "policies" / "make_vlm.py"), "--out", made]
        subprocess.run(command, env={**os.environ, **ALONE}, check=True, capture_output=True)
        rows = [measure(name, args.data or Path(made), Path(made)) for name in names]
    columns = ["policy", "success", "interval", "actions", "CPU, minutes", "memory, GB"]
    text = "\n\n".join([f"{machine()}.", INTRODUCTION, table(columns, rows)])
    if args.dry:
        print(text)
    else:
        write_section("policies", text)
    if any(float(row[1]) < ENOUGH for row in rows):
        raise SystemExit("a policy does not learn the task")


if __name__ == "__main__":
    main()
