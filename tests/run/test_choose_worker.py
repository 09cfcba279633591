"""Which worker drives a run, what it is refused, and what the commands do with a run of a user's own worker."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.utils.data import DataLoader, random_split

import shardtune
from shardtune import FSDPSftWorker
from shardtune.config import load_recipe
from shardtune.config.user_code import code_hashes
from shardtune.errors import ConfigError
from shardtune.run.choose_worker import check_signatures, make_worker, unused_workers, worker_class
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.registry import nothing_registered
from tests.support.workspace import run_cli

HEAD = """\
import torch
from torch import nn
from shardtune import Adapter, FSDPSftWorker, LossSum, Sample, SupportedModel, register_model

"""
WORKER = """\
class {name}(FSDPSftWorker):
    def build_dataloader(self, data_paths, eval_dataset=False):
        x = torch.linspace(-1, 1, 8)[:, None]
        rows = [{{"x": row, "labels": (row > 0).long()[0]}} for row in x]
        return torch.utils.data.DataLoader(rows, batch_size=self.cfg.actor.micro_batch_size), {{"num_samples": 8}}

    def get_train_model_output(self, batch):
        return nn.functional.cross_entropy(self.model(batch["x"]), batch["labels"])

    def get_eval_model_output(self, batch):
        return int((self.model(batch["x"]).argmax(-1) == batch["labels"]).sum())

"""
NET = """\
@register_model("my_net")
def my_net(cfg):
    width = cfg.options.get("width", 4)
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 2))

"""
ENUM = """\
class Models(SupportedModel):
    MINE = ("my_net", "sft")

"""
REGISTERED = '@register_model("my_net")\n'
HALF = "class Half(FSDPSftWorker):\n    pass\n\n"
ADAPTER = """\
@register_model("my_net")
class Mine(Adapter):
    def build(self):
        return nn.Linear(1, 2)

    def encode(self, row):
        return Sample(fields=row)

    def loss(self, model, batch):
        return LossSum(model(batch["x"]).sum(), 1.0)

"""


def worker(name: str = "Mine") -> str:
    return WORKER.format(name=name)


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    with nothing_registered():
        yield


def recipe(folder: Path, code: str, **model: Any) -> Any:
    """A recipe whose plugin is this code."""
    (folder / "mine.py").write_text(HEAD + code)
    return load_recipe(values(folder, **model))


def values(folder: Path, **model: Any) -> dict[str, Any]:
    actor: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 4}
    if "worker" in model:
        actor["worker"] = f"{folder / 'mine.py'}:{model.pop('worker')}"
    return {
        "plugins": [str(folder / "mine.py")],
        "data": {"train_data_paths": "made by the worker"},
        "actor": {**actor, "model": {"model_type": "my_net", "precision": "fp32", **model}},
        "runner": {"device": "cpu", "logger": {"log_path": str(folder / "runs")}},
    }


# -- Which one ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "model", "name"),
    [
        (REGISTERED + worker(), {}, "Mine"),
        (NET + worker(), {}, "Mine"),
        (ENUM + worker(), {}, "Mine"),
        (ENUM + HALF + worker(), {}, "Mine"),
        (ENUM + '@register_model("other")\n' + worker("Other") + worker(), {}, "Mine"),
        (NET + ENUM + REGISTERED + worker() + worker("Other"), {}, "Mine"),
        (NET + worker() + worker("Other"), {"worker": "Other"}, "Other"),
        (worker(), {"worker": "Mine", "model_type": "causal_lm", "model_path": "."}, "Mine"),
        (worker(), {"model_type": "causal_lm", "model_path": "."}, "SFTWorker"),
        (ADAPTER + worker("Other"), {}, "SFTWorker"),
        (NET, {}, "SFTWorker"),
    ],
    ids=[
        "registered",
        "the only one beside a function",
        "the only one beside an Enum",
        "the only complete one",
        "the only one without another name",
        "registered among others",
        "named in the recipe",
        "named, over a model of transformers",
        "a built-in type",
        "an adapter has its own",
        "a function alone",
    ],
)
def test_a_worker_is_found(tmp_path: Path, code: str, model: dict[str, Any], name: str) -> None:
    assert worker_class(recipe(tmp_path, code, **model)).__name__ == name


@pytest.mark.parametrize(
    ("code", "model", "says"),
    [
        (ENUM, {}, "my_net is driven by no worker: the plugins define none"),
        (ENUM + HALF, {}, "the plugins define none"),
        (ENUM + worker() + worker("Other"), {}, "several that have no name: Mine (shardtune_user_mine"),
        (NET + worker() + worker("Other"), {}, "several that have no name"),
        (HALF, {"worker": "Half"}, "the worker Half lacks build_dataloader, get_eval_model_output"),
        (NET, {"worker": "my_net"}, "mine.py:my_net is no worker"),
        (NET, {"worker": "Nobody"}, "has no function or class 'Nobody'"),
        (NET + worker(), {"worker": "Mine", "model_type": "my_nett"}, "actor.model.model_type = my_nett is not known"),
        (NET + worker(), {"worker": "Mine", "model_type": "net.py:Net"}, "write adapter: net.py:Net for a class in a"),
    ],
    ids=[
        "none",
        "an abstract one",
        "two",
        "two, a function",
        "half",
        "a function",
        "nobody",
        "a wrong type",
        "a file",
    ],
)
def test_what_is_no_worker_is_said(tmp_path: Path, code: str, model: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        worker_class(recipe(tmp_path, code, **model))
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("def save_checkpoint(self, path): ...", r"Mine\.save_checkpoint\(path\) takes other arguments"),
        ("def loss_weights(self): ...", r"Mine\.loss_weights\(\) takes other arguments"),
        ("def run_eval(self, data): ...", r"Mine\.run_eval\(data\) takes other arguments"),
        ("def get_train_model_output(self, batch, mode): ...", r"get_train_model_output\(batch, mode\) takes other"),
    ],
)
def test_methods_that_cannot_be_called_are_refused_before_training(tmp_path: Path, line: str, says: str) -> None:
    code = f"{NET}{worker().rstrip()}\n\n    {line}\n"
    made = recipe(tmp_path, code, worker="Mine")
    with pytest.raises(ConfigError, match=says):
        make_worker(made)


def test_methods_with_more_optional_arguments_are_fine(tmp_path: Path) -> None:
    code = f"{NET}{worker().rstrip()}\n\n    def save_checkpoint(self, path, step, *more, background=False): ...\n"
    check_signatures(worker_class(recipe(tmp_path, code, worker="Mine")))


def test_a_worker_that_nothing_uses_is_mentioned(tmp_path: Path) -> None:
    given = recipe(tmp_path, worker(), model_type="causal_lm", model_path=".")
    unused = object.__new__(SFTWorker)
    (told,) = unused_workers(given, unused)
    assert told.startswith("the plugins define Mine, which nothing uses: actor.model.model_type is causal_lm")


def test_a_registered_worker_that_an_adapter_stands_before_is_mentioned(tmp_path: Path) -> None:
    (tmp_path / "houses.py").touch()
    given = recipe(tmp_path, REGISTERED + worker(), adapter=f"{tmp_path / 'houses.py'}:Houses")
    (told,) = unused_workers(given, object.__new__(worker_class(given)))
    assert "is registered for Mine, which nothing uses: actor.model.adapter is set" in told


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            REGISTERED + worker("Other") + worker(),
            "registered for Other, which nothing uses: actor.worker is",
        ),
        (NET + worker(), "my_net has no effect: model_provider_func of"),
    ],
)
def test_a_model_type_that_the_named_worker_does_not_use_is_mentioned(tmp_path: Path, code: str, says: str) -> None:
    given = recipe(tmp_path, code, worker="Mine")
    kind = worker_class(given)
    if "registered" not in says:
        assert unused_workers(given, object.__new__(kind)) == []
        kind = type("Own", (kind,), {"model_provider_func": lambda self: nn.Linear(1, 1)})
    (told,) = unused_workers(given, object.__new__(kind))
    assert says in told


# -- What it is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override",
    [
        "eval.generate=true",
        "data.eval_split=0.5",
        "actor.label_smoothing=0.1",
        "actor.max_tokens_per_micro_batch=4096",
    ],
)
def test_keys_that_only_the_built_in_worker_acts_on_are_refused(tmp_path: Path, override: str) -> None:
    (tmp_path / "mine.py").write_text(HEAD + REGISTERED + worker())
    given = values(tmp_path)
    if "split" not in override:
        given["data"]["eval_data_paths"] = "made by the worker"
    loaded = load_recipe(given, [override])
    with pytest.raises(ConfigError, match=f"{override.partition('=')[0]} is for the built-in worker; Mine defines"):
        make_worker(loaded)


@pytest.mark.parametrize("spec", ["[{path: a, weight: 2.0}]", "{path: a, max_samples: 3}"])
@pytest.mark.parametrize("key", ["data.train_data_paths", "data.eval_data_paths"])
def test_what_stands_beside_a_path_is_refused(tmp_path: Path, key: str, spec: str) -> None:
    """`build_dataloader` would never see it."""
    (tmp_path / "mine.py").write_text(HEAD + REGISTERED + worker())
    name = "weight" if "weight" in spec else "max_samples"
    with pytest.raises(ConfigError, match=f"{key}: {name} is for the built-in worker; build_dataloader of Mine"):
        make_worker(load_recipe(values(tmp_path), [f"{key}={spec}"]))
    make_worker(load_recipe(values(tmp_path), [f"{key}=[{{path: a}}]"]))


def test_objects_in_memory_are_for_the_built_in_worker(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HEAD + REGISTERED + worker())
    with pytest.raises(ConfigError, match="the run is driven by Mine, which takes no objects in memory"):
        shardtune.train(values(tmp_path), train_data=[{"x": 1}])


def test_options_are_checked_by_the_workers_own_types(tmp_path: Path) -> None:
    typed = "from pydantic import BaseModel\n\nclass Options(BaseModel):\n    depth: int = 2\n\n"
    code = typed + REGISTERED + worker().replace("FSDPSftWorker):\n", "FSDPSftWorker):\n    Options = Options\n\n")
    assert make_worker(recipe(tmp_path, code, options={"depth": 3})).options.depth == 3
    with pytest.raises(ConfigError, match=r"actor\.model\.options\.dept is not an option") as error:
        make_worker(recipe(tmp_path, code, options={"dept": 3}))
    assert "did you mean depth?" in str(error.value)


# -- What the commands do with it --------------------------------------------------------------------------------------


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a recipe over a module of the user's own; no weights on disk anywhere."""
    (tmp_path / "mine.py").write_text(HEAD + NET + worker())
    given = values(tmp_path, options={"width": 3})
    given["data"] = {"eval_data_paths": {"near": "made here", "far": "made here"}}  # and no training rows named
    given["runner"]["logger"] = {"log_path": "runs"}
    given["actor"]["optim"] = {"lr": 0.1}
    (tmp_path / "recipe.yaml").write_text(json.dumps(given))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.lengthy
def test_every_command(reader: Path) -> None:
    dry = run_cli("train", "recipe.yaml", "--dry-run", "runner.max_epochs=4")
    assert dry.code == 0, dry.err
    for line in (
        "✓ model weights: Sequential of 14 parameters, drawn from the seed",
        "✓ training data: 8 rows in 2 steps",
        "✓ format: a batch holds x float32 [2, 1], labels int64 [2]",
        "✓ supervision target: a loss of ",
        "✓ evaluation data: near, 8 rows; its first batch gives eval_accuracy ",
        "✓ evaluation data: far, 8 rows; its first batch gives eval_accuracy ",
    ):
        assert line in dry.err
    assert not (reader / "runs").exists()

    trained = run_cli("train", "recipe.yaml", "runner.max_epochs=4")
    assert trained.code == 0, trained.err
    assert "chat" not in trained.err
    final = json.loads((reader / "runs/recipe/final/metrics.json").read_text())
    assert final["eval/near/eval_accuracy"] == final["eval/far/eval_accuracy"]
    assert (reader / "runs/recipe/final/model.safetensors").is_file()
    for checkpoint in ("final", "latest"):
        evaluated = run_cli("eval", "runs/recipe", "--checkpoint", checkpoint)
        assert json.loads(evaluated.out)["eval/near/eval_accuracy"] == final["eval/near/eval_accuracy"]
    fresh = json.loads(run_cli("eval", "recipe.yaml").out)
    assert fresh.keys() == {"eval/near/eval_accuracy", "eval/far/eval_accuracy"}
    exported = run_cli("export", "runs/recipe", "--to", "exported")
    assert exported.code == 0, exported.err
    assert (reader / "exported/model.safetensors").is_file()

    for command in (("generate", "runs/recipe", "--prompt", "x"), ("chat", "runs/recipe")):
        refused = run_cli(*command)
        assert (refused.code, "the run is driven by Mine, which gives no answers" in refused.err) == (2, True)
    refused = run_cli("data", "preview", "recipe.yaml")
    assert (refused.code, "driven by Mine, which makes its own batches" in refused.err) == (2, True)


@pytest.mark.lengthy
def test_a_file_that_changed_is_refused_on_resume(reader: Path) -> None:
    """Rows that were not trained on yet are of the same data."""
    file = reader / "rows.txt"
    file.write_text("one\n")
    keys = ("recipe.yaml", "data.train_data_paths=rows.txt", "runner.max_epochs=-1")
    assert run_cli("train", *keys, "runner.max_steps=1").code == 0
    file.write_text("two\n")
    refused = run_cli("train", *keys, "runner.max_steps=2")
    assert refused.code == 2
    assert f"not what this run was trained on so far:\n    {file}: other content" in refused.err
    assert run_cli("train", *keys, "runner.max_steps=2", "runner.allow_changes=[data.train_data_paths]").code == 0


def test_what_build_dataloader_draws_is_the_same_each_time(tmp_path: Path) -> None:
    """A split that it draws leaves no row on both sides, in any run."""
    drawn: list[Any] = []

    class Splitting(FSDPSftWorker):
        def model_provider_func(self) -> nn.Module:
            return nn.Linear(1, 2)

        def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> Any:
            rows: Any = list(range(16))
            half = random_split(rows, [8, 8])[eval_dataset]
            random.shuffle(rows)
            drawn.append((list(half.indices), rows))
            return DataLoader(half, batch_size=2), {}

        def get_train_model_output(self, batch: Any) -> Any: ...

        def get_eval_model_output(self, batch: Any) -> Any: ...

    given = values(tmp_path, model_type="causal_lm") | {"plugins": []}
    given["data"] = {"eval_data_paths": "made here"}
    made_here = ["actor.model.model_path", "data.train_data_paths"]
    for seed in (1, 1, 2):
        worker = Splitting(load_recipe(given, [f"runner.seed={seed}"], in_memory=made_here))
        worker.setup()
        assert sorted(drawn[-2][0] + drawn[-1][0]) == list(range(16))
    assert drawn[:2] == drawn[2:4] != drawn[4:]


def test_the_dry_run_knows_how_many_ranks_are_to_come(reader: Path) -> None:
    dry = run_cli("train", "recipe.yaml", "--dry-run", "runner.nproc_per_node=3")
    assert dry.code == 2
    assert "is not divisible by micro_batch_size = 2 times 3 ranks" in dry.err


@pytest.mark.lengthy
def test_the_dry_run_says_what_is_missing(reader: Path) -> None:
    dry = run_cli("train", "recipe.yaml", "--dry-run", "data.eval_data_paths=null")
    assert "– evaluation data: none, so only the training loss is watched" in dry.err


def test_code_has_a_hash(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    file = tmp_path / "one.py"
    file.write_text("a = 1\n")
    first = code_hashes([str(file)], [f"{file}:a", None, f"{tmp_path / 'two.py'}:b"])
    assert list(first) == [str(file), str(tmp_path / "two.py")]
    file.write_text("a = 2\n")
    assert code_hashes([str(file)])[str(file)] != first[str(file)]
    assert code_hashes(["json"]) == code_hashes(["json"])
