"""Optimizers of whole matrices and of other packages: by name, the same on two ranks, and after a resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shardtune.config import OptimConfig, load_recipe
from shardtune.config.own_code import named_code
from shardtune.config.rank_layout import Layout
from shardtune.errors import ConfigError
from shardtune.optim.build import build_optimizer, check_optimizer
from shardtune.optim.named_class import way_of
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import quiet, recipe, save_model, save_rows, whole

OWN = '''
import torch


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                move = mean.lerp(p.grad, 1 - group["betas"][0]).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(move, alpha=-group["lr"])
                mean.lerp_(p.grad, 1 - group["betas"][1])


class CountsInGroup(torch.optim.Optimizer):
    """Warms up by a number in its groups, which is there from the beginning; by the norm of each matrix, if asked."""

    def __init__(self, params, lr=1e-4, by_norm=False):
        super().__init__(params, {"lr": lr, "by_norm": by_norm, "k": 0, "scale": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["scale"] *= 2
            for p in [p for p in group["params"] if p.grad is not None]:
                divisor = p.grad.norm() if group["by_norm"] else 1.0
                p.sub_(p.grad / divisor, alpha=group["lr"] * group["scale"] * group["k"])


class Together(Lion):
    """Scales its steps by the norm of all gradients."""

    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"]]
        total = torch.stack([p.grad.square().sum() for p in every]).sum()
        for p in every:
            p.data -= p.grad / total


class Counts(Lion):
    def step(self, closure=None):
        self.count = vars(self).get("count", 0) + 1
        super().step()


class Closes(Lion):
    def step(self, closure):
        closure()


class Clears(Lion):
    """As fused optimizers of other packages do."""

    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


class ClearsMore(Lion):
    def __init__(self, params, lr=1e-4, what="state"):
        super().__init__(params, lr)
        self._what, self._seen = what, []

    def zero_grad(self, set_to_none=True):
        if self._what == "state":
            for kept in self.state.values():
                kept["mean"] *= 0.5
        elif self._what == "group":
            self.param_groups[0]["betas"] = (0.5, 0.5)
        elif self._what == "hidden":
            self._seen.append(1)
        elif self._what == "weights":
            self.param_groups[0]["params"][0].data += 1
        if self._what != "gradients":
            super().zero_grad()


class TwoModes(Lion):
    """As optimizers without a schedule have them."""

    def train(self):
        pass

    def eval(self):
        pass


class NoOptimizer:
    pass
'''
THEIRS = "transformers.optimization:Adafactor"


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def config(name: str, **values: Any) -> OptimConfig:
    return OptimConfig.model_validate({"name": name, **values})


def train_and_resume(recipes: Sequence[dict[str, Any]], folder: Path) -> list[list[dict[str, torch.Tensor]]]:
    """Three steps of each recipe, and the third one again from a checkpoint; from `folder`, if it is there.

    Returns the weights at both ends.
    """
    found = []
    for number, values in enumerate(recipes):
        ends, kept = [], folder / str(number)
        saves = not kept.exists()
        for again in (False, True):
            worker = SFTWorker(load_recipe(values), report=quiet)
            worker.setup()
            if again:
                worker.load_checkpoint(kept)
            while not worker.finished:
                worker.run_training()
                if worker.step == 2 and saves and not again:
                    worker.save_checkpoint(kept, 2)
            tensors = worker.weights.tensors()
            ends.append({name: whole(tensors[name]) for name in worker.weights.parameters})
            if (average := worker.state.average) is not None:
                ends[-1] |= {f"average of {name}": whole(tensor) for name, tensor in average.checkpointed().items()}
            worker.release()
        found.append(ends)
    return found


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["few", "others"])
def test_each_trains_alike_on_two_ranks_and_resumes_bitwise(tmp_path: Path, own: str, few: bool) -> None:
    """In parts and whole; the others are found by the same trial."""
    model, rows = save_model("dense", tmp_path / "model"), save_rows(tmp_path / "rows.jsonl")
    keys: dict[str, Any] = {"runner__max_steps": 3, "actor__micro_batch_size": 2, "actor__optim__ema_decay": 0.9}
    given: list[dict[str, Any]] = [
        {"name": "Muon"},
        {"name": "Rprop"},
        {"name": f"{own}:Lion", "args": {"betas": [0.8, 0.9]}, "weight_decay": 0.1},
        {"name": THEIRS, "args": {"relative_step": False}},
        {"name": "SGD", "args": {"momentum": 0.9, "fused": True}},
    ]
    if not few:
        given = [{"name": "Adafactor"}, {"name": "AdamW", "args": {"fused": True}}]
        given += [{"name": "Adagrad", "args": {"fused": True}}]
        given += [{"name": f"{own}:CountsInGroup"}, {"name": f"{own}:CountsInGroup", "args": {"by_norm": True}}]
    recipes = [recipe(model, rows, **keys) for _ in given]
    for values, optim in zip(recipes, given, strict=True):
        values["actor"]["optim"] |= optim
    recipes.append({**recipes[0], "actor": {**recipes[0]["actor"], "training_backend": "ddp"}})
    on_two = run_ranks(train_and_resume, 2, recipes, tmp_path / "two")[0]
    alone = train_and_resume(recipes, tmp_path / "two")  # the second end goes on with the checkpoint of two ranks
    for values, one, two in zip(recipes, alone, on_two, strict=True):
        name = values["actor"]["optim"]["name"]
        for key, tensor in one[0].items():
            assert torch.equal(two[0][key], two[1][key]), (name, key)
            for other in (one[1], two[0]):
                torch.testing.assert_close(other[key], tensor, rtol=1e-10, atol=1e-10, msg=f"{name} {key}")


def test_what_steps_each_number_by_itself_is_found_by_a_trial(own: str) -> None:
    assert way_of(f"{own}:Lion", {}) == "parts"
    assert way_of(THEIRS, {"relative_step": False, "warmup_init": False}) == "whole"
    assert way_of(f"{own}:CountsInGroup", {}) == "parts"
    assert way_of(f"{own}:CountsInGroup", {"by_norm": True}) == "whole"
    assert way_of(f"{own}:Together", {}) == "together"
    check_optimizer(config(f"{own}:Together"), Layout())
    with pytest.raises(ConfigError, match=r"cannot train on 2 ranks .*: each of its steps depends on all parameters"):
        check_optimizer(config(f"{own}:Together"), Layout(shard=2))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("{own}:Lion", {"args": {"beta": 1}}, r"args.beta = 1: .*own.py:Lion has no such argument.*betas"),
        ("{own}:Lion", {"adam_beta1": 0.8}, r"adam_beta1 = 0.8 has no effect: .*Lion does not take it.*betas"),
        ("{own}:Lion", {"state_dtype": "int8"}, "keeps its states and weights in fp32 only"),
        ("{own}:Lyon", {}, "has no function or class 'Lyon'.*did you mean Lion"),
        ("{own}:NoOptimizer", {}, "is no subclass of torch.optim.Optimizer"),
        ("{own}:Counts", {}, "keeps count outside of `state` and `param_groups`"),
        ("{own}:Closes", {}, r"Closes.step failed: TypeError"),
        (
            "{own}:TwoModes",
            {},
            r"TwoModes has train\(\) and eval\(\): its weights in training and in evaluation differ",
        ),
        *(
            (
                "{own}:ClearsMore",
                {"args": {"what": what}},
                "ClearsMore.zero_grad does something else than clear gradien",
            )
            for what in ("state", "group", "hidden", "weights", "gradients")
        ),
        (THEIRS, {"args": {"relative_step": False, "warmup_init": True}}, r"Adafactor.__init__ failed: ValueError"),
        ("no_such_package:Lion", {}, "no_such_package cannot be imported"),
        ("transformers.optimization:Adam8", {}, "has no such class"),
    ],
)
def test_what_cannot_be_used_is_refused_before_ranks_start(
    own: str, name: str, values: dict[str, Any], message: str
) -> None:
    given, refused = config(name.format(own=own), **values), pytest.raises(ConfigError, match=f"(?s){message}")
    if given.state_dtype != "fp32":
        with refused:
            build_optimizer({"weight": torch.nn.Parameter(torch.ones(2, 2))}, given)
    else:
        with refused as told:
            check_optimizer(given, Layout())
        assert told.value.remedy


def test_a_zero_grad_that_only_clears_gradients_is_no_reason_to_refuse_a_class(own: str) -> None:
    assert way_of(f"{own}:Clears", {}) == "parts"


def test_code_that_an_optimizer_executes_needs_consent(tmp_path: Path, own: str) -> None:
    rows = save_rows(tmp_path / "rows.jsonl", 1)
    for name, code in ((f"{own}:Lion", own), (THEIRS, THEIRS)):
        values = recipe(tmp_path, rows, actor__optim__name=name)
        assert named_code(load_recipe(values))[code] == "actor.optim.name"
