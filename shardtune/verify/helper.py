"""The program of the kit's other processes: train on two ranks, or load what another process saved."""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from shardtune.config import Recipe, load_recipe
from shardtune.config.user_code import import_plugins
from shardtune.errors import ShardtuneError, lost_a_peer
from shardtune.models.find_adapter import find_adapter
from shardtune.parallel.ranks import leave_ranks
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.run_context import RunContext
from shardtune.verify.case import IN_MEMORY, STEPS
from shardtune.verify.processes import ERROR, FreshResult, RanksResult
from shardtune.verify.runs import digests
from shardtune.verify.structure import ties
from shardtune.verify.trial import Trial, accumulation, first_steps, run, set_up, silent


def main() -> int:
    """Read the work from a line of JSON, do it, write the result; returns the exit code."""
    line = sys.stdin.readline()
    if not line:
        return 0
    work = json.loads(line)
    folder = Path(work["folder"])
    try:
        recipe = load_recipe(work["recipe"], in_memory=IN_MEMORY, files_must_exist=False)
        import_plugins(recipe.plugins)
        if work["work"] == "train":
            _train(recipe, Path(work["shared"]))
        else:
            result = _load(recipe, Path(work["checkpoint"]), Path(work["final"]))
            (folder / "found.json").write_text(json.dumps(result))
    except BaseException as error:
        traceback.print_exc()
        (folder / ERROR).write_text(json.dumps(_failure(error)))
        return 1
    return 0


def _failure(error: BaseException) -> dict[str, str]:
    """The arguments of `Failed` for an error."""
    if lost_a_peer(error):
        return {"what": str(error), "where": "another rank", "remedy": "see the other rank's error"}
    rank = f"rank {os.environ['RANK']} of 2: " if "WORLD_SIZE" in os.environ else "in a fresh process: "
    if isinstance(error, ShardtuneError):
        return {"what": rank + error.what, "where": error.where or "", "remedy": error.remedy or ""}
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "what": f"{rank}{type(error).__name__}: {error}",
        "where": f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "",
        "remedy": "fix what the message names; with sharding, weights are available only inside a unit's forward",
    }


def _train(recipe: Recipe, shared: Path) -> None:
    """Compute the gradient of the first step and train a few steps, on all ranks; rank 0 writes the results."""
    worker = set_up(recipe)
    worker.model.eval()
    tied = ties(worker.inner_model)
    trial = Trial(worker)
    with trial.draws() if trial.nondeterminism is None else nullcontext():
        gradients = _first_gradient(worker)
        done = run(worker, STEPS)
    shared.mkdir(parents=True, exist_ok=True)
    worker.save_checkpoint(shared / "checkpoint", STEPS)
    if worker.ranks.is_main:
        save_file(gradients, shared / "gradients.safetensors")
        result = RanksResult(losses=list(done.losses), norms=list(done.norms), ties=tied, notes=list(worker.notes))
        (shared / "run.json").write_text(json.dumps(result))
    leave_ranks(worker.ranks)


def _first_gradient(worker: SFTWorker) -> dict[str, torch.Tensor]:
    """The gradient of the run's first step, whole, on every rank; zero where no rank has one."""
    step = first_steps(worker, 1)[0]
    weights = worker.weights
    weights.zero_gradients()
    accumulation(worker)(
        worker.get_train_model_output,
        step.micro_batches,
        step.denominators,
        weights,
        draws=(0, 0, worker.ranks.draws_rank),
        scale=1.0,
    )
    weights.sync_replicated_gradients()
    found = {}
    for name, parameter in weights.trainable().items():
        gradient = weights.to_checkpoint_layout(
            name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        )
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        found[name] = whole.detach().clone().contiguous()
    weights.zero_gradients()
    return found


def _load(recipe: Recipe, checkpoint: Path, final: Path) -> FreshResult:
    """The fingerprints of encoded rows, and their losses with the weights of a checkpoint and of an exported model."""
    samples = digests(find_adapter(recipe), recipe, backwards=True)
    worker = SFTWorker(recipe, report=silent)
    worker.setup_evaluation(checkpoint)
    found = {"checkpoint": Trial(worker).row_losses()}
    reopened = worker.reopened(final)
    reopened.setup_evaluation(context=RunContext(weights_directory=final))
    return {"samples": samples, "losses": {**found, "exported model": Trial(reopened).row_losses()}}


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the threads of a process group that is not left in order would abort an orderly end
