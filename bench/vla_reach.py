"""Train the reaching task from nothing in 90 s of one core, and play it: `python bench/vla_reach.py`.

An untrained model, the trained one, the same exported and loaded again, then a low-rank adapter trained on top of that
and the adapter merged: each plays the same 100 episodes, which are none of the recorded ones. Rewrites the section
`vla_reach` of docs/benchmarks.md; ends with exit code 1 where success is below 0.9, or export or merge changes it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "vla_reach"
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from results import machine, table, write_section  # noqa: E402

ENOUGH = 0.9
SECONDS = 90.0
EPISODES = 100
ALONE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
INTRODUCTION = f"""\
`examples/vla_reach`: a LLaVA of 225,000 random weights, its demonstrations made on the spot. Each model plays the same
{EPISODES} episodes of MuJoCo, rendered in software; the interval is Wilson's, 95 %. "CPU" is the process time of the
whole training command on one thread, imports included, without evaluations and the encoding of rows; "wall" is what it
took while other processes ran."""


@dataclass(frozen=True)
class Played:
    """What one model reached.

    Attributes:
        name: of the model.
        metrics: that `shardtune eval` printed.
        outcomes: success and number of actions of each episode.
    """

    name: str
    metrics: dict[str, float]
    outcomes: list[tuple[bool, int]]

    @property
    def success(self) -> float:
        return self.metrics["eval/success"]

    def cells(self) -> list[str]:
        found = [self.metrics[f"eval/{name}"] for name in ("success", "success_low", "success_high", "episode_length")]
        return [self.name, f"{found[0]:.2f}", f"{found[1]:.2f} to {found[2]:.2f}", f"{found[3]:.1f}"]


def shardtune(*arguments: str) -> str:
    """Run a command; returns what it printed."""
    command = [sys.executable, "-m", "shardtune", *arguments]
    ended = subprocess.run(command, env={**os.environ, **ALONE}, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(arguments)}\n{ended.stdout}{ended.stderr}")
    return ended.stdout


def make(script: str, *arguments: str) -> None:
    command = [sys.executable, str(EXAMPLE / script), *arguments]
    subprocess.run(command, env={**os.environ, **ALONE}, check=True, capture_output=True)


class Bench:
    """The example with its data and runs in a folder of their own.

    Args:
        folder: where everything goes.
        changes: of the recipe, `key=value`.
    """

    def __init__(self, folder: Path, changes: list[str]) -> None:
        self.folder = folder
        self._changes = changes

    def overrides(self, name: str, model: Path) -> list[str]:
        return [
            f"actor.model.model_path={model}",
            f"data.train_data_paths={self.folder}/demonstrations",
            f"data.eval_data_paths={self.folder}/heldout",
            f"data.cache_dir={self.folder}/cache",
            f"runner.logger.log_path={self.folder}/runs",
            f"runner.logger.experiment_name={name}",
            *self._changes,
        ]

    def train(self, name: str, model: Path, *further: str) -> tuple[float, float]:
        """Returns the seconds of process time and of the clock, once the cache of encoded rows is there."""
        without = ["eval.environment=null", "data.eval_data_paths=null", "runner.eval_before_training=false"]
        given = [str(EXAMPLE / "recipe.yaml"), *self.overrides(name, model), *without]
        shardtune("data", "preview", *given)
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        shardtune("train", *given, *further)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return cpu, time.perf_counter() - began

    def play_run(self, name: str, run: str) -> Played:
        """Of a run's final model."""
        directory = self.folder / "runs" / run
        told = shardtune("eval", str(directory), "eval.environment=reach", f"eval.episodes={EPISODES}")
        return self._played(name, told, directory / "samples" / "final")

    def play_model(self, name: str, model: Path) -> Played:
        """Of a model's directory."""
        recipe = str(EXAMPLE / "recipe.yaml")
        given = [*self.overrides(model.name, model), f"eval.episodes={EPISODES}"]
        told = shardtune("eval", recipe, *given)
        return self._played(name, told, self.folder / "runs" / f"{model.name}-episodes")

    def export(self, run: str, *arguments: str) -> Path:
        target = self.folder / f"{run}-exported"
        shardtune("export", str(self.folder / "runs" / run), "--to", str(target), "--dtype", "fp32", *arguments)
        return target

    @staticmethod
    def _played(name: str, told: str, folder: Path) -> Played:
        metrics = json.loads(told[told.index("{") :])
        lines = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
        return Played(name, metrics, [(line["success"], line["steps"]) for line in lines])


def main() -> None:
    """Measure, write the section, and fail where it is not as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="changes of the recipe")
    parser.add_argument("--dry", action="store_true", help="print the section instead of writing it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make("make_data.py", "--out", name)
        make("make_model.py", "--out", str(folder / "model"))
        bench = Bench(folder, args.changes)
        played = [bench.play_model("untrained", folder / "model")]
        cpu, wall = bench.train("full", folder / "model")
        played.append(bench.play_run("trained", "full"))
        exported = bench.export("full")
        played.append(bench.play_model("exported, loaded again", exported))
        lora = ("actor.model.is_lora=true", "actor.model.lora.r=8", "runner.max_steps=100", "actor.optim.lr=2e-4")
        bench.train("lora", exported, *lora)
        played.append(bench.play_run("a low-rank adapter on top, 100 steps", "lora"))
        played.append(bench.play_model("the adapter merged", bench.export("lora", "--merge")))
    _, trained, reloaded, adapted, merged = played
    text = "\n\n".join(
        [
            f"{machine()}.",
            INTRODUCTION,
            table(["model", "success", "interval", "actions"], [each.cells() for each in played]),
            f"Training took {cpu:.0f} s of CPU ({wall:.0f} s wall).",
        ]
    )
    if args.dry:
        print(text)
    else:
        write_section("vla_reach", text)
    problems = [f"{each.name}: {each.success}" for each in played[1:] if each.success < ENOUGH]
    problems += [f"training took {cpu:.0f} s of CPU"] if cpu > SECONDS else []
    problems += ["untrained, it succeeds"] if played[0].success > 0.0 else []
    problems += ["export changed episodes"] if reloaded.outcomes != trained.outcomes else []
    problems += ["the merge changed episodes"] if merged.outcomes != adapted.outcomes else []
    if problems:
        raise SystemExit("; ".join(problems))


if __name__ == "__main__":
    main()
