"""Evaluation by lm-evaluation-harness: its settings, what is checked before training, and the names of its scores."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from shardtune.config import Recipe
from shardtune.config.values import OF_HARNESS_MODEL, TASK_FILES
from shardtune.data.durable import write_text
from shardtune.errors import ConfigError
from shardtune.parallel.ranks import Ranks

KEY = "eval.harness"
PACKAGE = "lm_eval"
RESULTS = "harness.json"


@dataclass(frozen=True, slots=True)
class HarnessModel:
    """A sharded model, as the harness's own class for models of transformers calls it.

    Attributes:
        logits: maps tokens int64 [rows, tokens] to logits [rows, tokens, vocabulary]; all ranks call it together.
        continued: maps left-padded tokens [rows, tokens], their mask and the arguments of `generate` to prompts and
            answers [rows, longer]; all ranks call it together.
        config: of the model.
        tokenizer: as it is in `final/`.
        ranks: among which requests are divided.
        rows: requests of a forward pass.
    """

    logits: Callable[[torch.Tensor], torch.Tensor]
    continued: Callable[[torch.Tensor, torch.Tensor, Mapping[str, object]], torch.Tensor]
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    ranks: Ranks
    rows: int


@dataclass(frozen=True, slots=True)
class Harness:
    """The tasks of an evaluation by the harness.

    Attributes:
        tasks: names of tasks and groups, and paths of YAML files.
        settings: arguments of the harness's `simple_evaluate`.
        model_settings: arguments of its class of models.
        where: of the key in the recipe.
    """

    tasks: tuple[str, ...]
    settings: Mapping[str, Any]
    model_settings: Mapping[str, Any]
    where: str

    @classmethod
    def of(cls, recipe: Recipe) -> Harness | None:
        """The settings of a recipe; None without `eval.harness`.

        Raises:
            ConfigError: the package is not installed, or a file does not exist.
        """
        if not recipe.eval.harness:
            return None
        options = recipe.eval.harness_options
        model = {name: value for name, value in options.items() if name in OF_HARNESS_MODEL}
        settings = {name: value for name, value in options.items() if name not in OF_HARNESS_MODEL}
        found = cls(tuple(recipe.eval.harness), settings, model, recipe.where(KEY) or KEY)
        if find_spec(PACKAGE) is None:
            raise found.problem(
                "lm-evaluation-harness, which runs these tasks, is not installed",
                "pip install 'shardtune[harness]', or leave it out",
            )
        for name in found.tasks:
            if name.endswith(TASK_FILES) and not Path(name).is_file():
                raise found.problem(f"there is no file {name}", "give the YAML file of a task, or a task's name")
        return found

    def problem(self, what: str, remedy: str) -> ConfigError:
        return ConfigError(f"{KEY}: {what}", where=self.where, remedy=remedy)


def scores(results: Mapping[str, Any]) -> dict[str, float]:
    """The scores of the harness's results as `task/metric`, with `/filter` where one is used; no standard errors.

    Worked example: {"gsm8k": {"alias": "gsm8k", "exact_match,strict-match": 0.5, "exact_match_stderr,strict-match":
    0.1}} gives {"gsm8k/exact_match/strict-match": 0.5}.
    """
    tables = {**results["results"], **results.get("groups", {})}
    return {name: value for task, table in tables.items() for name, value in _scores_of(task, table)}


def _scores_of(task: str, table: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in table.items():
        metric, comma, chosen = key.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, (int, float)):
            yield score_name(task, metric, chosen), float(value)


def score_name(task: str, metric: str, chosen: str) -> str:
    """The name of a score, without `eval/`, of the answers that a filter has chosen."""
    return f"{task}/{metric}" if chosen == "none" else f"{task}/{metric}/{chosen}"


def keep(results: Mapping[str, Any], folder: Path, plain: Callable[[object], object]) -> None:
    """Write the results as `harness.json`, and the answers of each task as `harness_TASK.jsonl`.

    Args:
        results: of the harness.
        folder: is created.
        plain: makes values that JSON does not have plain.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = {name: value for name, value in results.items() if name != "samples"}
    write_text(folder / RESULTS, json.dumps(table, indent=2, default=plain, ensure_ascii=False), durably=False)
    answers: Mapping[str, Sequence[object]] = results.get("samples", {})
    for task, lines in answers.items():
        text = "".join(json.dumps(line, default=plain, ensure_ascii=False) + "\n" for line in lines)
        write_text(folder / f"harness_{task.replace('/', '_')}.jsonl", text, durably=False)
