"""A directory with the weights of a policy in the place of a run: neither its training data nor its run are needed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardtune.config import Recipe
from shardtune.config.model_names import POLICIES
from shardtune.config.own_code import require_consent
from shardtune.config.paths import user_path
from shardtune.config.stored_recipe import stored_recipe
from shardtune.config.user_code import import_plugins
from shardtune.config.values import FUNCTION_IN_FILE
from shardtune.data.robot.representation import ENTRY, Representation
from shardtune.errors import ConfigError, ModelError
from shardtune.models.action.policy import SETTINGS
from shardtune.run.caller_settings import recipe_settings
from shardtune.run.choose_worker import make_worker
from shardtune.run.identity import FINAL, holds_run
from shardtune.run.overridden import overridden
from shardtune.run.run import Run, load_run
from shardtune.run.trained_policy import TrainedPolicy
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.exported_recipe import over_directory
from shardtune.training.worker.policy_files import POLICY_FILE
from shardtune.training.worker.run_context import RunContext, silent


@recipe_settings()
def load_policy(
    target: str | Path,
    *,
    checkpoint: str = "final",
    action_steps: int | None = None,
    temporal_ensembling: float | None = None,
    unnorm_key: str | None = None,
    trust: Sequence[str] = (),
) -> TrainedPolicy:
    """The policy in a directory; neither its training data nor its run have to be there.

    Args:
        target: a run, or a directory with the weights of a policy: `final/`, a copy of it, an export, a directory in
            the format of OpenVLA.
        checkpoint: of a run: final, latest, best, a step, or a path.
        action_steps: how many actions of a prediction `select_action` returns before the next one; None: as
            `eval.action_steps` of the recipe, by default all.
        temporal_ensembling: as `eval.temporal_ensembling`.
        unnorm_key: the data set by whose statistics it acts, of a model with those of several; None: as
            `model.unnorm_key` of the recipe.
        trust: files, modules and models whose code may be executed where the directory names them. What this user has
            trained with needs none.

    Raises:
        ConfigError: there is no policy, or it has no statistics of this data set.
    """
    run = policy_run(target, checkpoint, trust)
    return run.policy(
        checkpoint, action_steps=action_steps, temporal_ensembling=temporal_ensembling, unnorm_key=unnorm_key
    )


def policy_run(target: str | Path, checkpoint: str = "final", trust: Sequence[str] = ()) -> Run:
    """The run in a directory, or what stands for one."""
    path = user_path(target, "RUN_OR_FINAL").absolute()
    if holds_run(path) or (path.name in (FINAL, FINAL.upper()) and holds_run(path.parent)):
        return load_run(path, trust=trust)
    if not (path / POLICY_FILE).is_file() and not (path / "config.json").is_file():
        what = f"there is no {path}" if not path.exists() else f"{path} holds no run and no policy"
        raise ConfigError(
            what, where=str(path), remedy=f"give the directory of a run, or one with {POLICY_FILE}, such as a final/"
        )
    if checkpoint != FINAL:
        raise ConfigError(
            f"{path} is a model, which has no checkpoints",
            where=f"--checkpoint {checkpoint}",
            remedy="leave it out, or give the directory of a run",
        )
    return PolicyDirectory(path, trust=trust)


class PolicyDirectory(Run):
    """A directory with the weights of a policy, without its run."""

    @property
    def recipe(self) -> Recipe:
        file = self.dir / POLICY_FILE
        try:
            tree = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else _built_in(self.dir)
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read: {error}", where=str(file)) from error
        self._find_code(tree)
        return over_directory(stored_recipe(tree), self.dir)

    def _find_code(self, tree: dict[str, Any]) -> None:
        """Take the copy of the adapter's file beside the weights where the file itself is gone."""
        model = tree["actor"]["model"]
        named = FUNCTION_IN_FILE.fullmatch(model.get("adapter") or "")
        if named is not None and not Path(named["file"]).is_file():
            model["adapter"] = f"{self.dir / Path(named['file']).name}:{named['name']}"

    def executable_recipe(self) -> Recipe:
        recipe = self.recipe
        require_consent(recipe, self._trust, self.dir / POLICY_FILE)
        return recipe

    @recipe_settings()
    def worker(
        self, checkpoint: str = "final", *overrides: str, eval_data: object = None, episodes_dir: Path | None = None
    ) -> FSDPSftWorker:
        """The model; it has no checkpoints and nothing to evaluate on."""
        recipe = overridden(self.executable_recipe(), overrides)
        import_plugins(recipe.plugins)
        worker = make_worker(recipe, training=False, report=silent)
        worker.setup_evaluation(context=replace(RunContext(report=silent), weights_directory=self.dir))
        return worker


def _built_in(folder: Path) -> dict[str, Any]:
    """The recipe of an action model that was saved by `save_pretrained`, or in OpenVLA's or LeRobot's format.

    Raises:
        ConfigError: the directory holds another model.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("type") in POLICIES:
        return {"actor": {"model": {"model_type": config["type"], "model_path": str(folder), "precision": "fp32"}}}
    settings = config.get(SETTINGS) or {}
    if not settings and config.get("model_type") != "openvla":
        raise ConfigError(
            f"{folder} holds a model of type {config.get('model_type')!r}, which does not act",
            where=str(folder),
            remedy=f"give a directory with {POLICY_FILE}, or one whose config.json has {SETTINGS}",
        )
    dtype = config.get("dtype") or config.get("torch_dtype")
    model = {
        "model_type": "vision_language_action",
        "model_path": str(folder),
        "precision": {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "fp32"),
        "action_chunks_len": settings.get("action_chunks_len", 1),
        "num_action_bins": settings.get("num_action_bins", config.get("n_action_bins", 256)),
        **_representation(settings),
    }
    return {"actor": {"model": model}}


def _representation(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's keys of how the actions are represented, of the first data set that says so."""
    for entry in settings.get("norm_stats", {}).values():
        form = Representation.from_json(entry.get(ENTRY))
        if form is not None:
            return {"action_representation": form.kind, "action_representation_mask": list(form.given or ())}
    return {}
