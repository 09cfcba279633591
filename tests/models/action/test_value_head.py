"""A value head trained beside the actions: its loss, its metrics, what is saved, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional
from transformers import LlavaForConditionalGeneration
from typer.testing import CliRunner

import shardtune
from shardtune.checkpoint.hf_save import gather_full
from shardtune.cli.commands import app
from shardtune.config import load_recipe
from shardtune.errors import ConfigError, DataError
from shardtune.models.action.policy import action_class
from shardtune.models.action.vision_language_action import VisionLanguageAction
from shardtune.models.find_adapter import find_adapter
from shardtune.run.trained_policy import acting_policy
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.ranks import run_ranks
from tests.support.robot import episodes, frame, save_episodes
from tests.support.vision import save_vision_model

CHUNK, DISCOUNT, WEIGHT, STEPS, RATE = 2, 0.9, 0.5, 2, 0.5
VALUE = {"sizes": [8], "weight": WEIGHT, "discount": DISCOUNT}
Values = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("values")
    save_vision_model("llava", made / "llava")
    save_episodes(made / "light", 6, rewards=True)
    save_episodes(made / "other", 2, seed=9, rewards=True)
    return made


def recipe(folder: Path, name: str = "run", **changes: Any) -> Values:
    """`model__key=value` sets a key of actor.model, `data__key` one of data, `runner__key` one of runner."""
    values: Values = {
        "runner": {
            "max_steps": STEPS,
            "device": "cpu",
            "logger": {"log_path": str(folder / "runs"), "experiment_name": name, "logger_backends": ["jsonl"]},
        },
        "actor": {
            "micro_batch_size": 3,
            "global_batch_size": 9,
            "optim": {
                "name": "SGD",
                "lr": RATE,
                "lr_scheduler": "constant",
                "weight_decay": 0.0,
                "clip_grad": None,
            },
            "model": {
                "model_type": "vision_language_action",
                "model_path": str(folder / "llava"),
                "precision": "fp64",
                "action_chunks_len": CHUNK,
                "num_action_bins": 16,
                "action_tokens": "appended",
                "add_value_head": True,
                "value_head": VALUE,
            },
        },
        "data": {
            "train_data_paths": str(folder / "light"),
            "eval_data_paths": str(folder / "other"),
            "num_workers": 0,
            "cache_dir": str(folder / "cache"),
        },
    }
    for key, value in changes.items():
        section, _, key = key.partition("__")
        holder = values["actor"]["model"] if section == "model" else values[section]
        holder[key] = value
    return values


def worker_of(folder: Path, name: str = "run", **changes: Any) -> SFTWorker:
    return SFTWorker(load_recipe(recipe(folder, name, **changes)), report=lambda _: None)


@dataclass(frozen=True)
class Trained:
    """Two steps: metrics of each and of evaluation, the weights before and after, the rows of each step."""

    metrics: list[dict[str, float]]
    evaluation: dict[str, float]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    rows: list[list[int]]


def trained(folder: str, ways: list[Values]) -> list[Trained]:
    """Each way of training, in a process that may be a rank."""
    found = []
    for changes in ways:
        worker = worker_of(Path(folder), **changes)
        worker.setup()
        before, metrics, rows = whole(worker), [], []
        for _ in range(STEPS):
            state = worker.data_state
            metrics.append(worker.run_training())
            rows.append(worker.loader._order.step(state.epoch, state.rows_consumed).tolist())
        found.append(Trained(metrics, worker.run_eval(), before, whole(worker), rows))
    return found


def whole(worker: SFTWorker) -> dict[str, torch.Tensor]:
    with worker.weights.in_rows():
        return {name: gather_full(name, tensor).detach().clone() for name, tensor in worker.weights.tensors().items()}


def plain(folder: Path, made: Trained, *, detach: bool = False) -> tuple[list[Values], Values, dict[str, torch.Tensor]]:
    """The same steps by a plain loop: one row per forward by transformers' own model, sums divided once, SGD.

    Of each step the terms, the mean squared error and the explained variance; those of evaluation; and the weights.
    """
    worker = worker_of(folder)
    adapter, rows, held_out = worker.adapter, worker.prepared.train, worker.prepared.evals[""]
    assert isinstance(adapter, VisionLanguageAction)
    kind = action_class(LlavaForConditionalGeneration)
    model: Any = kind._from_config(adapter.config, dtype=torch.float64, attn_implementation="sdpa")
    model.resize_token_embeddings(len(made.before["lm_head.weight"]), mean_resizing=False)
    model.load_state_dict(made.before, strict=False)

    def summed(data: Any, numbers: Iterable[int]) -> Values:
        terms = {"ce": torch.zeros(()).double(), "value": torch.zeros(()).double()}
        errors, returns = [], []
        for number in numbers:
            sample = data.row(number)
            batch = adapter.collate([sample], [0], {})
            ids = batch.input_ids[None]
            out = model(input_ids=ids, **adapter.further_inputs(batch), output_hidden_states=True)
            at = np.flatnonzero(sample.loss_weights[1:])
            terms["ce"] = terms["ce"] + functional.cross_entropy(out.logits[0, at], ids[0, at + 1], reduction="sum")
            hidden = out.hidden_states[-1][0, at]
            head = model.value_head
            hidden = functional.gelu(head.layers[0](hidden.detach() if detach else hidden))
            error = float(sample.fields["return"]) - head.value(hidden)[:, 0]
            terms["value"] = terms["value"] + WEIGHT * error.square().sum()
            errors.append(error.detach())
            returns += [float(sample.fields["return"])] * len(at)
        off, true = torch.cat(errors), torch.tensor(returns).double()
        share = float(1 - off.var(unbiased=False) / true.var(unbiased=False))
        found = {name: term / len(off) for name, term in terms.items()}
        return {**found, "value_loss": float(off.square().mean()), "explained_variance": share}

    steps = []
    for numbers in made.rows:
        model.zero_grad()
        step = summed(rows, numbers)
        (step["ce"] + step["value"]).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
        steps.append({name: torch.as_tensor(value, dtype=torch.float64).item() for name, value in step.items()})
    with torch.no_grad():
        evaluated = {name: float(value) for name, value in summed(held_out, range(len(held_out))).items()}
    return steps, evaluated, dict(model.state_dict())


# -- training ------------------------------------------------------------------------------------------------------

UNPACKED = {"model__attn_implementation": "sdpa"}
DETACHED = {"model__value_head": {**VALUE, "detach": True}}


def compare(folder: Path, runs: list[Trained], *, detach: bool = False) -> dict[str, torch.Tensor]:
    steps, evaluated, weights = plain(folder, runs[0], detach=detach)
    for made in runs:
        for found, wanted in zip(made.metrics, steps, strict=True):
            assert found["train/loss"] == pytest.approx(wanted["ce"] + wanted["value"], rel=1e-10)
            assert found["train/loss/value"] == pytest.approx(wanted["value"], rel=1e-10)
            for name in ("value_loss", "explained_variance"):
                assert found[f"train/{name}"] == pytest.approx(wanted[name], rel=1e-9, abs=1e-12)
        for name in ("value_loss", "explained_variance"):
            assert made.evaluation[f"eval/{name}"] == pytest.approx(evaluated[name], rel=1e-9, abs=1e-12)
        assert made.evaluation["eval/loss/value"] == pytest.approx(evaluated["value"], rel=1e-10)
        for name, weight in made.after.items():
            assert float((weight - weights[name]).abs().max()) < 1e-10, name
        assert not torch.equal(made.after["value_head.layers.0.weight"], made.before["value_head.layers.0.weight"])
    return weights


@pytest.mark.lengthy
def test_equal_to_a_plain_loop(folder: Path) -> None:
    """Two ragged micro-batches, packed."""
    compare(folder, trained(str(folder), [{"actor__micro_batch_size": 5}]))


@pytest.mark.slow
def test_equal_to_a_plain_loop_on_two_ranks(folder: Path) -> None:
    """Two ragged micro-batches on each rank, packed and a row per forward."""
    ranks = run_ranks(trained, 2, str(folder), [{}, UNPACKED])
    compare(folder, [*ranks[0], *ranks[1]])


@pytest.mark.slow
def test_a_detached_head_is_trained_alone(folder: Path) -> None:
    """On one and two ranks; the model's weights are those of training without a value head."""
    one = trained(str(folder), [{"actor__micro_batch_size": 5, **DETACHED}])
    ranks = run_ranks(trained, 2, str(folder), [DETACHED, {**DETACHED, **UNPACKED}])
    compare(folder, [*one, *ranks[0], *ranks[1]], detach=True)
    (without,) = trained(str(folder), [{"model__add_value_head": False, "model__value_head": {}}])
    assert all(float((weight - one[0].after[name]).abs().max()) < 1e-12 for name, weight in without.after.items())


# -- what is saved, and acts ---------------------------------------------------------------------------------------

ADAM = {"actor__optim": {"lr": 5e-3, "lr_scheduler": "constant"}}
STATE = [0.5, 0.25]


def observation() -> dict[str, Any]:
    return {"images": {"wrist": frame(0.5)}, "instruction": "Follow the light 1", "state": STATE}


def by_hand(model: Any, adapter: VisionLanguageAction, seen: dict[str, Any]) -> float:
    """The value by transformers' own forward over the prompt."""
    prompt = adapter.actions.observed({**seen, "state": np.array(seen["state"], np.float32)})
    inputs = adapter.policy_inputs([prompt])
    with torch.no_grad():
        hidden = model(**inputs, output_hidden_states=True).hidden_states[-1][:, -1:]
        return float(model.value_head(hidden)[0, 0, 0])


@pytest.mark.lengthy
def test_a_checkpoint_continues_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    first, second = (worker_of(folder, model__precision="fp32", **ADAM) for _ in range(2))
    for worker in (first, second):
        worker.setup()
    first.run_training()
    first.save_checkpoint(tmp_path / "one", 1)
    wanted = first.run_training()
    second.load_checkpoint(tmp_path / "one")
    found = second.run_training()
    timed = ("perf/", "epoch")
    assert {key: value for key, value in found.items() if not key.startswith(timed)} == {
        key: value for key, value in wanted.items() if not key.startswith(timed)
    }
    after = whole(second)
    assert all(torch.equal(weight, after[name]) for name, weight in whole(first).items())


@pytest.mark.lengthy
@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_values_of_what_is_saved(folder: Path, tmp_path: Path, lora: bool) -> None:
    """In final/, loaded in every way, with the metrics in the log; beside a low-rank adapter the head is whole."""
    adapted = {"model__is_lora": True, "model__lora": {"r": 2}} if lora else {}
    name = "lora" if lora else "full"
    run = shardtune.train(recipe(folder, name, model__precision="fp32", **ADAM, **adapted))
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    assert all({"train/value_loss", "train/explained_variance", "train/loss/value"} <= line.keys() for line in steps)
    assert {"eval/value_loss", "eval/explained_variance"} <= run.metrics.keys()
    seen, final = observation(), run.dir / "final"
    policy = run.policy()
    value = policy.value(seen)
    assert policy.values([seen, {**seen, "images": {"wrist": frame(-0.5)}}]).shape == (2,)
    weights: dict[str, torch.Tensor] = {}
    for file in final.glob("*.safetensors"):
        weights |= load_file(file)
    prefix = "base_model.model." if lora else ""
    assert weights[f"{prefix}value_head.layers.0.weight"].shape == (8, 32)
    assert weights[f"{prefix}value_head.value.bias"].any(), "trained"
    if lora:
        assert json.loads((final / "adapter_config.json").read_text())["modules_to_save"] == ["value_head"]
    copy = Path(shutil.copytree(final, tmp_path / "copy"))
    (folder / "light").rename(folder / "away")
    try:
        loaded = shardtune.load_policy(copy)
    finally:
        (folder / "away").rename(folder / "light")
    assert loaded.value(seen) == value
    if lora:
        return
    adapter = worker_of(folder).adapter
    assert isinstance(adapter, VisionLanguageAction)
    model: Any = action_class(LlavaForConditionalGeneration).from_pretrained(copy).eval()
    assert by_hand(model, adapter, seen) == pytest.approx(value, abs=1e-6)
    (copy / "policy.json").unlink()
    assert shardtune.load_policy(copy).value(seen) == value
    Image.fromarray(seen["images"]["wrist"]).save(tmp_path / "seen.png")
    words = ["act", str(final), "--image", str(tmp_path / "seen.png"), "--instruction", seen["instruction"]]
    found = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert json.loads(found.stdout)["value"] == pytest.approx(value)
    again = recipe(folder, "again", model__model_path=str(copy), model__action_tokens="auto")
    again["actor"]["model"]["value_head"] = {"sizes": [4], "discount": DISCOUNT}
    with pytest.raises(ConfigError, match=r"value_head.sizes is \[4\], the model has a value head of \[8\]"):
        find_adapter(load_recipe(again))


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.lengthy
def test_rows_without_returns(folder: Path, tmp_path: Path) -> None:
    """One message that names the row and the remedies; a transform may give returns."""
    given = {"value_head": {"sizes": [8]}}
    with pytest.raises(DataError, match=r"no return, which model.add_value_head .* data.columns .*discount") as failed:
        worker_of(folder, model__value_head=given["value_head"])
    assert "row 1" in str(failed.value.where)
    save_episodes(tmp_path / "bare", 2)
    bare = {"data__train_data_paths": str(tmp_path / "bare"), "data__eval_data_paths": None}
    with pytest.raises(DataError, match=r"no column of rewards .*from which returns are to be computed"):
        worker_of(folder, **bare)
    (tmp_path / "own.py").write_text("def returned(row):\n    return {**row, 'return': float(row['frame'])}\n")
    worker = worker_of(folder, **bare, data__transform=f"{tmp_path}/own.py:returned", model__value_head={"sizes": [8]})
    rows = worker.prepared.train
    assert rows is not None
    assert {float(rows.row(number).fields["return"]) for number in range(len(rows))} >= {0.0, 1.0}


def test_keys_without_an_effect(folder: Path) -> None:
    def refused(what: str, **changes: Any) -> None:
        with pytest.raises(ConfigError, match=what):
            load_recipe(recipe(folder, **changes))

    several = "value_head.sizes, actor.model.value_head.weight and actor.model.value_head.discount have no effect"
    refused(f"^actor.model.{several} with actor.model.add_value_head: false", model__add_value_head=False)
    kinds = {"action_chunks_len": 1, "num_action_bins": 256, "action_tokens": "auto"}
    for kind, why in (("causal_lm", "does not act"), ("act", "directories are LeRobot's")):
        changes = {f"model__{name}": value for name, value in {**kinds, "model_type": kind}.items()}
        refused(f"add_value_head: true does not work with model_type: {kind}, .*{why}", **changes)
    refused("data.columns.return has no effect with actor.model.value_head.discount", data__columns={"return": "r"})
    refused(
        "data.columns.reward has no effect without actor.model.value_head.discount",
        data__train_data_paths={"path": str(folder / "light"), "columns": {"reward": "r"}},
        model__value_head={},
    )
    refused(
        "data.columns.reward has no effect without actor.model.add_value_head",
        data__columns={"reward": "r"},
        model__add_value_head=False,
        model__value_head={},
    )


# -- adapters of one's own -----------------------------------------------------------------------------------------

OWN = """
import numpy as np
import torch
from shardtune import LossSum, Sample
from tests.support.pushing import Pushing


class Valued(Pushing):
    reads = ("model.add_value_head",)

    def encode(self, row):
        sample = super().encode(row)
        return Sample(fields={**sample.fields, "return": np.float32(row["return"])})

    def weights(self, sample):
        return {"loss": 1.0, "value": 1.0}

    def loss(self, model, batch):
        error = model(batch["state"])[:, 0] - batch["return"]
        weight = self.recipe.actor.model.value_head.weight
        return {"loss": super().loss(model, batch), "value": LossSum(weight * error.square().sum(), len(error))}

    def values(self, root, device):
        return lambda seen: np.array([one["state"][0] for one in seen], np.float32)


class Headless(Pushing):
    reads = ("model.add_value_head",)


class Counting(Headless):
    action_chunk = None


class Plain(Pushing):
    normalization_mapping = {}


class Silent(Pushing):
    observation_steps = 2


class Bare(Pushing):
    action_chunk = None
    observation_steps = 2
"""


@pytest.mark.lengthy
def test_adapters_of_ones_own(folder: Path, tmp_path: Path) -> None:
    """Rows have returns where the class reads the key; its values are the policy's."""
    (tmp_path / "own.py").write_text(OWN)
    values = recipe(folder, "own", **ADAM)
    head = {"add_value_head": True, "value_head": {"discount": DISCOUNT, "weight": 2.0}}
    values["actor"]["model"] = {"adapter": f"{tmp_path}/own.py:Valued", "precision": "fp32", **head}
    worker = SFTWorker(load_recipe(values), report=lambda _: None)
    rows = worker.prepared.train
    assert rows is not None
    valued = worker_of(folder).prepared.train
    assert valued is not None
    returns = [[float(data.row(number).fields["return"]) for number in range(len(data))] for data in (rows, valued)]
    assert returns[0] == returns[1]
    wanted = [
        float(sum(DISCOUNT**k * reward for k, reward in enumerate(each.rewards[start:])))
        for each in episodes(6, rewards=True)
        if each.rewards is not None
        for start in range(len(each))
    ]
    assert returns[0] == pytest.approx(wanted, abs=1e-6)
    worker.setup()
    assert worker.run_training()["train/loss/value"] > 0
    policy = acting_policy(worker, worker.recipe.eval, None, None)
    assert policy.value({**observation(), "state": [0.25, 0.5]}) == 0.25
    told = "a value head is trained on returns: rewards until the end of the episode, discounted by 0.9"
    assert worker.summary().notes[-1] == told
    values["actor"]["model"]["value_head"] = {}
    with pytest.raises(DataError, match=r"no return, which model.add_value_head"):
        SFTWorker(load_recipe(values), report=lambda _: None)
    values["actor"]["model"] |= {"value_head": {"discount": DISCOUNT}, "adapter": f"{tmp_path}/own.py:Headless"}
    headless = SFTWorker(load_recipe(values), report=lambda _: None)
    for refuses in (headless.task.check, headless.model_provider_func):  # before ranks are started, and in each
        with pytest.raises(
            ConfigError, match=r"Headless.build makes a Linear without a part named value_head"
        ) as found:
            refuses()
        assert "shardtune.ValueHead" in str(found.value.remedy)
    values["actor"]["model"]["adapter"] = f"{tmp_path}/own.py:Counting"
    with pytest.raises(ConfigError, match=r"value_head.discount: the rows of Counting are no frames"):
        find_adapter(load_recipe(values))
    values["actor"]["model"] = {"adapter": f"{tmp_path}/own.py:Headless", "precision": "fp32"}
    columns = {**values, "data": {**values["data"], "columns": {"reward": "r"}}}
    with pytest.raises(ConfigError, match=r"data.columns.reward has no effect without actor.model.add_value_head"):
        find_adapter(load_recipe(columns))
    for name, key, value, why in (
        ("Headless", "num_action_bins", 8, "num_action_bins: the adapter Headless does not read it"),
        ("Headless", "action_chunks_len", 7, r"action_chunks_len has no effect: Headless.action_chunk is 2"),
        ("Plain", "unnorm_key", "light", r"unnorm_key has no effect: Plain has no self.normalizer"),
        ("Plain", "action_normalization_mask", [True], "action_normalization_mask has no effect"),
    ):
        changed = {**values, "actor": {**values["actor"], "model": {**values["actor"]["model"], key: value}}}
        changed["actor"]["model"]["adapter"] = f"{tmp_path}/own.py:{name}"
        with pytest.raises(ConfigError, match=why):
            find_adapter(load_recipe(changed))
    values["actor"]["model"] |= head
    values["actor"]["model"]["adapter"] = f"{tmp_path}/own.py:Silent"
    with pytest.raises(ConfigError, match=r"add_value_head: the adapter Silent does not read it"):
        find_adapter(load_recipe(values))
    values["actor"]["model"] = {"adapter": f"{tmp_path}/own.py:Bare", "precision": "fp32"}
    bare: Any = find_adapter(load_recipe(values))
    assert "observation_steps (2) applies to observations alone" in bare.history_notes()[0]
