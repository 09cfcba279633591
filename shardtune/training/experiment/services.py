"""The services, each through its own package, which is an extra and imported when it is used."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardtune.training.experiment.run import Experiment, LoggedRun

PARAMETERS_AT_ONCE, LONGEST_PARAMETER = 100, 500
"""Limits of MLflow's tracking servers."""


class WeightsAndBiases:
    """A Weights & Biases run; a resumed run continues under its id. Answers are tables."""

    def __init__(self, run: LoggedRun) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        for block in ("HISTORY", "SUMMARY"):  # at the end, what the summary of the run has; earlier versions ignore it
            os.environ.setdefault(f"WANDB_MAX_END_OF_RUN_{block}_METRICS", "0")
        known = run.known_id("wandb")
        self._table: Callable[..., Any] = wandb.Table
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=known,
            resume="allow" if known else None,
            config=dict(run.recipe),
            dir=str(run.run_dir),
        )
        run.keep_id("wandb", self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, name: str, answers: Sequence[Mapping[str, object]]) -> None:
        columns = list(answers[0])
        table = self._table(columns=columns, data=[[str(row.get(column)) for column in columns] for row in answers])
        self._run.log({name: table}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """An MLflow run of the experiment `project_name`; the recipe is its parameters, answers are JSON files."""

    def __init__(self, run: LoggedRun) -> None:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        self._client: Any = MlflowClient()
        self._metric: Callable[..., Any] = Metric
        known = run.known_id("mlflow")
        if known is not None:
            self._id = known
            self._client.update_run(known, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(run.project)
        number = self._client.create_experiment(run.project) if experiment is None else experiment.experiment_id
        self._id = self._client.create_run(number, run_name=run.name).info.run_id
        run.keep_id("mlflow", self._id)
        parameters = [Param(key, str(value)[:LONGEST_PARAMETER]) for key, value in _flat(run.recipe)]
        for start in range(0, len(parameters), PARAMETERS_AT_ONCE):
            self._client.log_batch(self._id, params=parameters[start : start + PARAMETERS_AT_ONCE])
        self._client.log_dict(self._id, dict(run.recipe), "recipe.yaml")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        finite = {key: value for key, value in metrics.items() if math.isfinite(value)}  # servers refuse others
        self._client.log_batch(self._id, metrics=[self._metric(key, value, now, step) for key, value in finite.items()])

    def samples(self, step: int, name: str, answers: Sequence[Mapping[str, object]]) -> None:
        self._client.log_dict(self._id, {"answers": [dict(row) for row in answers]}, f"{name}/step_{step}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Trackio:
    """A trackio run of the project `project_name`; a resumed run continues under its name."""

    def __init__(self, run: LoggedRun) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(
            project=run.project,
            name=run.name,
            config=dict(run.recipe),
            resume="allow" if run.resumed else "never",
            embed=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, name: str, answers: Sequence[Mapping[str, object]]) -> None:
        """Nothing: they are in `samples/`."""

    def close(self) -> None:
        self._run.finish()


class SwanLab:
    """A SwanLab experiment of the project `project_name`; a resumed run continues under its id."""

    def __init__(self, run: LoggedRun) -> None:
        import swanlab  # pyright: ignore[reportMissingImports]

        known = run.known_id("swanlab")
        self._text: Callable[..., Any] = swanlab.Text
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            id=known,
            resume="allow" if known else None,
            config=dict(run.recipe),
            log_dir=str(run.run_dir / "swanlab"),
        )
        run.keep_id("swanlab", str(self._run.id))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, name: str, answers: Sequence[Mapping[str, object]]) -> None:
        self._run.log({name: [self._text(f"{row.get('prompt')}\n{row.get('answer')}") for row in answers]}, step=step)

    def close(self) -> None:
        self._run.finish()


SERVICES: dict[str, Callable[[LoggedRun], Experiment]] = {
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
    "swanlab": SwanLab,
}


def _flat(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
