"""A model directory or a Hub name in the place of a run: what answers is the model as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from shardtune.config import ModelConfig, Recipe
from shardtune.config.own_code import refuse_unnamed
from shardtune.config.paths import exists, user_path
from shardtune.config.stored_recipe import stored_recipe
from shardtune.errors import ConfigError, ModelError
from shardtune.models.pretrained import NO_COPY, is_unreached, load_config, nearest_directory, settings_directory
from shardtune.run.choose_worker import make_worker
from shardtune.run.described_task import described_task
from shardtune.run.identity import CONFIG, FINAL, MANIFEST, holds_run
from shardtune.run.run import Run, load_run
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.exported_recipe import over_directory
from shardtune.training.worker.run_context import RunContext, silent

ADAPTER, SETTINGS = "adapter_config.json", "config.json"
PRECISIONS: Mapping[object, str] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
MAY_BE = (
    "give the directory of a run, as shardtune train makes it, the directory of a model, as save_pretrained or PEFT "
    "writes it, or a name on the Hub"
)


def load_run_or_model(target: str | Path, *, trust: Sequence[str] = ()) -> Run:
    """What generates answers: the run in a directory; otherwise the model in it, or the one on the Hub.

    Args:
        target: a run directory or its `final/`; a directory that `save_pretrained`, PEFT or `export` wrote; a Hub name.
        trust: as for `load_run`; a model among them may execute the code that comes with it.

    Raises:
        ConfigError: it is none of them.
    """
    path = user_path(target, "RUN_OR_MODEL")
    if is_run(path):
        return load_run(path, trust=trust)
    if path.is_dir():
        if (path / ADAPTER).is_file() or (path / SETTINGS).is_file():
            return PlainModel(path.absolute(), trust=trust)
        raise _neither(path)
    if exists(path) or not _may_be_on_hub(str(target)):
        raise _neither(path)
    return PlainModel(Path(target), trust=trust)


def is_run(path: Path) -> bool:
    """Whether a directory is a run, finished or not, or the `final/` of one."""
    return _is_run(path) or _is_run(path.absolute().parent, path.name)


def _is_run(folder: Path, name: str = FINAL) -> bool:
    """Whether `name` in a folder is the trained model of a run, or the folder a run that is not finished."""
    if name.lower() != FINAL:
        return False
    return holds_run(folder) or (folder / CONFIG).is_file() or (folder / MANIFEST).is_file()


def _may_be_on_hub(name: str) -> bool:
    """Whether a name that is no path here can be one on the Hub: not where the runs of this directory are."""
    if HUB_NAME.fullmatch(name) is None:
        return False
    return "/" not in name or not any(Path(name).parent.glob(f"*/{MANIFEST}"))


def _neither(path: Path) -> ConfigError:
    """The error for what is neither a run nor a model."""
    checkpoint = re.fullmatch(r"global_step_(\d+)", path.name)
    if checkpoint and holds_run(path.absolute().parents[1]):
        run = path.parents[1]
        return ConfigError(
            f"{path} is a checkpoint of the run {run}",
            where=str(path),
            remedy=f"shardtune generate {run} --checkpoint {checkpoint[1]}; chat likewise",
        )
    if path.is_file():
        what = f"{path} is a file, neither a run nor a model directory"
    elif path.is_dir():
        what = f"{path} is not a run directory: it has no {CONFIG}; nor a model's: it has no {SETTINGS} or {ADAPTER}"
    else:
        what = f"there is no {path}"
    inside = sorted(str(place.parent) for name in (CONFIG, SETTINGS) for place in path.glob(f"*/{name}"))[:5]
    found = "" if path.exists() else nearest_directory(path)
    found += f"there is {', '.join(inside)}; " if inside else ""
    if path.suffix in (".yaml", ".yml"):
        found = f"of a recipe give the run that it made, such as runs/{path.stem}; "
    return ConfigError(what, where=str(path), remedy=found + MAY_BE)


class PlainModel(Run):
    """A model without a run: it answers prompts, greedily by default, in the dtype of its files.

    Args:
        directory: of the model; or its name on the Hub.
        trust: names the model if the code that comes with it may be executed.
    """

    @property
    def recipe(self) -> Recipe:
        place = str(self.dir)
        adapter = self.dir / ADAPTER
        base = _base_of(adapter) if adapter.is_file() else place
        refuse_unnamed(self._trust, [base], self.dir)
        trusted = bool(self._trust)
        config = _config_of(base, place, trusted)
        task = described_task(settings_directory(place) or self.dir, config)
        model = {
            "model_path": base,
            "model_type": task.pop("model_type", None) or _model_type(config, base, place),
            "options": task.pop("options", {}),
            "precision": PRECISIONS.get(config.dtype, "fp32"),
            "trust_remote_code": trusted,
            "is_lora": adapter.is_file(),
        }
        recipe = stored_recipe({"actor": {"model": model}, "data": task})
        return over_directory(recipe, self.dir) if adapter.is_file() else recipe

    def executable_recipe(self) -> Recipe:
        return self.recipe

    def worker(
        self, checkpoint: str = "final", *overrides: str, eval_data: object = None, episodes_dir: Path | None = None
    ) -> SFTWorker:
        """The model, ready to generate; it has no checkpoints and nothing to evaluate on."""
        if checkpoint != "final":
            raise ConfigError(
                f"{self.dir} is a model, which has no checkpoints",
                where=f"--checkpoint {checkpoint}",
                remedy="leave it out, or give the directory of a run",
            )
        worker = make_worker(self.recipe, training=False, report=silent)
        assert isinstance(worker, SFTWorker)
        is_adapter = (self.dir / ADAPTER).is_file()
        worker.setup_evaluation(context=RunContext(report=silent, weights_directory=self.dir if is_adapter else None))
        return worker


def adapter_overrides(directory: Path) -> list[str]:
    """The model of an adapter's directory, as PEFT writes it, as overrides of a recipe; its base is the first."""
    folder = directory.absolute()
    model = [
        f"actor.model.model_path={json.dumps(_base_of(folder / ADAPTER))}",
        "actor.model.is_lora=true",
        f"actor.model.lora.load_from={json.dumps(str(folder))}",
    ]
    own = [f"actor.tokenizer.tokenizer_model={json.dumps(str(folder))}"]
    return [*model, *(own if (folder / "tokenizer_config.json").is_file() else [])]


def _base_of(file: Path) -> str:
    """The base model that a saved adapter names."""
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}", where=str(file), remedy="give a whole directory") from error
    base, revision = described.get("base_model_name_or_path"), described.get("revision")
    if not isinstance(base, str) or not base:
        raise ModelError(
            "the adapter does not name its base model",
            where=str(file),
            remedy="write its directory or Hub name into the file: base_model_name_or_path",
        )
    return f"{base}@{revision}" if revision and not Path(base).exists() else base


def _config_of(base: str, place: str, trusted: bool) -> PreTrainedConfig:
    try:
        return load_config(ModelConfig(model_path=base, trust_remote_code=trusted))
    except ModelError as error:
        if "trust_remote_code" in str(error.__cause__):
            raise ConfigError(
                f"{base} comes with Python code of its own, which would be executed",
                where=place,
                remedy=f"read it; to execute it, name it: --trust {base}",
            ) from error
        if base != place or Path(base).is_dir():
            raise ModelError(error.what, where=place, remedy=MAY_BE) from error
        why = NO_COPY if is_unreached(error.__cause__) else error.what
        what = f"there is no run or model {base} here, and {why}"
        raise ModelError(what, where=place, remedy=nearest_directory(Path(base)) + MAY_BE) from error


def _model_type(config: PreTrainedConfig, base: str, place: str) -> str:
    """Whether a model takes text alone, or images too.

    Raises:
        ModelError: it is neither.
    """
    folder = settings_directory(base)
    files = ("processor_config.json", "preprocessor_config.json")
    processors = [] if folder is None else [name for name in files if (folder / name).is_file()]
    if config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and processors:
        return "vision_language"
    own_code = "AutoModelForCausalLM" in (config.to_dict().get("auto_map") or {})
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or own_code:
        return "causal_lm"
    raise ModelError(
        f"{base} is a model of type {config.model_type!r}, which is neither a causal language model nor one of images "
        "and text",
        where=place,
        remedy="it may be an encoder, a translator or a part of another model; shardtune models lists what generates",
    )
