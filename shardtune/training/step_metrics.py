"""The metrics of an optimizer step."""

from __future__ import annotations

import torch

from shardtune.data.loader.step_loader import Step
from shardtune.parallel.ranks import Ranks
from shardtune.training.step import StepResult
from shardtune.training.utilisation import Utilisation, peak_memory_gb

TRAIN_METRICS = (
    "train/loss",
    "train/grad_norm",
    "train/learning_rate",
    "train/tokens",
    "train/supervised_tokens",
    "perf/tokens_per_second",
    "perf/data_wait",
    "perf/peak_memory_gb",
)
"""What every step measures."""


def step_metrics(
    step: Step,
    result: StepResult,
    *,
    rate: float,
    seconds: float,
    waited: float,
    ranks: Ranks,
    device: torch.device,
    utilisation: Utilisation | None,
) -> dict[str, float]:
    """The metrics of a step, the same on every rank, which all call this.

    Args:
        step: what was trained on.
        result: what came of it.
        rate: the learning rate.
        seconds: the step took, waiting for data included.
        waited: seconds of them for data.
        ranks: of the run.
        device: of this rank.
        utilisation: where the peak of the devices is known.
    """
    metrics = {"train/loss": result.loss}
    if len(result.losses) > 1:
        metrics |= {f"train/loss/{name}": value for name, value in result.losses.items()}
    metrics |= {
        "train/grad_norm": result.gradient_norm,
        "train/learning_rate": rate,
        "train/tokens": float(step.num_tokens),
        "train/supervised_tokens": float(step.num_targets),
        "perf/tokens_per_second": step.num_tokens / seconds,
        "perf/data_wait": waited,
        "perf/peak_memory_gb": ranks.largest(peak_memory_gb(device)),
    }
    if utilisation is not None:
        mean_length = step.num_tokens / max(1, len(step.rows))
        metrics["perf/mfu"] = utilisation.of(step.num_tokens / seconds, mean_length)
    return metrics
