"""The guide for action models trains as it is printed, with classes that are not this package's, up to `final/`.

Changes of the print, beside those of `tests/seeds/actions.py` for sizes of a small model and a machine without GPU:

- `YourBaseModel` is imported from the stranger's package, not from `transformers`: no such class is there;
- `ValueHead` is imported from `shardtune`, which has RLinf's;
- the two functions are registered by a decorator, as the guide's author edits the system's own source;
- the class of the model stands in the same file as `get_model`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardtune
from shardtune.config import load_recipe
from shardtune.errors import ConfigError
from tests.seeds.actions import CONFIG, CONFIG_CHANGES, GET_MODEL, GET_MODEL_CHANGES, MODEL, RECIPE, RECIPE_CHANGES
from tests.seeds.guide import Change, changed
from tests.support.foreign_action import KEY, save_model, write_frames, your_package
from tests.support.foreign_worker import WORKER
from tests.support.registry import nothing_registered
from tests.support.tiny_run import lines

IMPORTS = """\
import numpy as np
import torch
from omegaconf import DictConfig
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer, LogitsProcessorList

from shardtune import register_model
from your_package.modeling import YourLogitsProcessor

torch_dtype_from_precision = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}.__getitem__


"""
MODEL_CHANGES = (
    Change("from transformers import YourBaseModel", "from your_package.modeling import YourBaseModel", "its place"),
    Change("from rlinf.models.embodiment.modules.value_head import", "from shardtune import", "its place"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("foreign")
    with your_package(made):
        save_model(made / "model")
        write_frames(made / "frames.jsonl")
        registered = tuple(change for change in CONFIG_CHANGES if "register_model" in change.here)
        samples = (changed(CONFIG, registered), changed(MODEL, MODEL_CHANGES), changed(GET_MODEL, GET_MODEL_CHANGES))
        (made / "your_model.py").write_text(IMPORTS + "\n\n".join(samples))
        (made / "your_worker.py").write_text(WORKER)
        recipe = changed(RECIPE, RECIPE_CHANGES).replace("your_action_key", KEY)
        head = f"plugins: [your_model.py]\ntokenizer:\n  tokenizer_model: {made / 'model'}\n"
        (made / "recipe.yaml").write_text(head + recipe)
        yield made


@pytest.fixture(autouse=True)
def _registry(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    with nothing_registered():
        yield


def keys(folder: Path, name: str, *others: str) -> list[str]:
    frames = folder / "frames.jsonl"
    return [
        f"actor.model.model_path={folder / 'model'}",
        f"data.train_data_paths={frames}",
        f"data.eval_data_paths={frames}",
        f"data.cache_dir={folder / 'cache'}",
        f"runner.logger.log_path={folder / 'runs'}",
        f"runner.logger.experiment_name={name}",
        *("runner.device=cpu", "runner.max_steps=2", "actor.global_batch_size=4", "actor.optim.lr=1e-3"),
        *("data.num_workers=0", "actor.model.precision=fp64", *others),
    ]


OWN = "actor.worker=your_worker.py:YourWorker"
LORA = ("actor.model.is_lora=true", "actor.model.lora.r=2")


@pytest.mark.parametrize("way", ["worker", "worker-lora", "built-in"])
def test_recipe_to_final(folder: Path, way: str) -> None:
    """By a worker of one's own, also with LoRA, and by the built-in one over robot data; the same on two ranks."""
    others = {"worker": (OWN,), "worker-lora": (OWN, *LORA), "built-in": ()}[way]
    given = [override.replace("your_worker", str(folder / "your_worker")) for override in others]
    run = shardtune.train(folder / "recipe.yaml", *keys(folder, way, *given))
    final = json.loads((run.dir / "final/metrics.json").read_text())
    measured = "eval/action_accuracy" if way == "built-in" else "eval/eval_accuracy"
    assert (final["step"], final[measured]) == (2, pytest.approx(lines(run.dir)[-1][measured], abs=1e-9))
    assert (run.dir / "final/processor_config.json").exists()
    assert run.evaluate()[measured] == pytest.approx(final[measured])
    if way == "worker-lora":
        return
    on_two = shardtune.train(folder / "recipe.yaml", *keys(folder, f"{way}-2", *given, "runner.nproc_per_node=2"))
    for one, two in zip(lines(run.dir), lines(on_two.dir), strict=True):
        for name in ("train/loss", "train/grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-10)


def test_a_length_of_actions_that_is_not_the_models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardtune.run.api.run_ranks", None)  # refused before ranks are started
    worker = f"actor.worker={folder / 'your_worker.py'}:YourWorker"
    for others in ([worker, "runner.nproc_per_node=2"], ["runner.nproc_per_node=2"]):
        given = keys(folder, "wrong", "actor.model.action_token_len=6", *others)
        with pytest.raises(ConfigError, match="action_token_len is 6, the actions of your_action_key have 7"):
            shardtune.train(folder / "recipe.yaml", *given)


def test_the_printed_recipe_alone(folder: Path) -> None:
    recipe = load_recipe(folder / "recipe.yaml", files_must_exist=False)
    assert (recipe.actor.micro_batch_size, recipe.actor.eval_micro_batch_size) == (1, 8)
    assert recipe.actor.model.model_type == "your_model_type"
    assert recipe.where("actor.model.vocab_size") == f"{folder / 'recipe.yaml'}:12"
