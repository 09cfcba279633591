"""A worker of one's own trains as plain PyTorch does, whatever its train method returns, on 1 and 2 ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import DataLoader

from shardtune import FSDPSftWorker, LossSum, SFTRunner
from shardtune.config import Recipe, load_recipe
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import whole
from tests.support.tiny_run import free_ports

ROWS, WIDTH, STEPS = 22, 6, 5
RATE, MICRO, GLOBAL = 0.3, 2, 8
FORMS = ("mean", "list", "stack", "vectors", "pair", "sum", "terms")


def data() -> list[dict[str, torch.Tensor]]:
    """Rows with ragged numbers of targets, one of them without any, and a value each."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(ROWS):
        labels = torch.randint(0, 5, (WIDTH,), generator=generator)
        labels[: number % (WIDTH + 1)] = -100
        x = torch.randint(0, 9, (WIDTH,), generator=generator)
        made.append({"x": x, "labels": labels, "value": torch.rand((), generator=generator, dtype=torch.float64)})
    return made


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.value = nn.Embedding(9, 8), nn.Linear(8, 5), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.embed(x)
        return self.head(hidden), self.value(hidden.mean(1))[:, 0]


def made_net() -> nn.Module:
    torch.manual_seed(3)
    return Net().double()


def ce(scores: torch.Tensor, batch: Mapping[str, torch.Tensor], reduction: str) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), reduction=reduction)


class Task(FSDPSftWorker):
    form = "mean"

    def model_provider_func(self) -> nn.Module:
        made = made_net()
        if self.ranks.rank:  # a constructor that draws otherwise on each rank: rank 0's counts
            nn.init.normal_(made.get_parameter("head.weight"))
        return made

    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> tuple[Any, dict[str, Any]]:
        rows: Any = data()
        return DataLoader(rows, batch_size=MICRO), {"num_samples": ROWS}

    def loss_weights(self, batch: Any) -> Mapping[str, float] | None:
        if self.form != "terms":
            return None
        return {"ce": float((batch["labels"] != -100).sum()), "value": float(len(batch["value"]))}

    def get_train_model_output(self, batch: Any) -> Any:
        scores, values = self.model(batch["x"].to(self.device))
        mean, total = ce(scores, batch, "mean"), ce(scores, batch, "sum")
        targets = float((batch["labels"] != -100).sum())
        error = (values - batch["value"]).square().sum()
        return {
            "mean": mean,
            "list": [mean, mean],
            "stack": torch.stack([mean / 2, 1.5 * mean]),
            "vectors": [torch.stack([mean, mean]), torch.stack([0 * mean, 2 * mean])],
            "pair": (mean, {"value_error": (error.detach(), len(values))}),
            "sum": LossSum(total, targets),
            "terms": {"ce": LossSum(total, targets), "value": LossSum(error, float(len(values)))},
        }[self.form]

    def get_eval_model_output(self, batch: Any) -> Any:
        scores, values = self.model(batch["x"])
        targets = float((batch["labels"] != -100).sum())
        return {"ce": (float(ce(scores, batch, "sum")), targets), "rows": (0.0, len(values))}


def recipe(log_path: str = "runs", **runner: Any) -> Recipe:
    return load_recipe(
        {
            "actor": {
                "worker": f"{__file__}:Task",
                "micro_batch_size": MICRO,
                "global_batch_size": GLOBAL,
                "model": {"precision": "fp64"},
                "optim": {
                    "name": "SGD",
                    "lr": RATE,
                    "weight_decay": 0.0,
                    "lr_scheduler": "constant",
                    "clip_grad": None,
                },
            },
            "data": {"eval_data_paths": "made by the worker"},
            "runner": {"device": "cpu", "max_epochs": 2, "logger": {"log_path": log_path}, **runner},
        }
    )


def trained(forms: tuple[str, ...]) -> list[tuple[list[dict[str, float]], dict[str, torch.Tensor], dict[str, float]]]:
    """The metrics of each step, the weights at the end, and an evaluation, for each form of the loss."""
    told = []
    for form in forms:
        worker = type("Formed", (Task,), {"form": form})(recipe())
        worker.setup()
        steps = [worker.run_training() for _ in range(STEPS)]
        weights = {name: whole(parameter) for name, parameter in worker.weights.parameters.items()}
        told.append((steps, weights, worker.run_eval()))
        worker.release()
    return told


def plain(form: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same steps of rows, each as one batch, by PyTorch alone."""
    net, rows, losses = made_net(), data(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    cuts = [rows[start : start + GLOBAL] for start in range(0, ROWS, GLOBAL)]
    for number in range(STEPS):
        step = cuts[number % len(cuts)]
        batch = {name: torch.stack([row[name] for row in step]) for name in step[0]}
        scores, values = net(batch["x"])
        loss = ce(scores, batch, "mean")
        if form == "terms":
            loss = loss + (values - batch["value"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in net.named_parameters()}


def test_every_form_of_a_loss_trains_as_plain_pytorch_does() -> None:
    """Ragged numbers of targets, a last step that is smaller, an epoch's end: to 1e-12 in fp64."""
    for told in [trained(FORMS), *run_ranks(trained, 2, FORMS)]:
        for form, (steps, weights, evaluated) in zip(FORMS, told, strict=True):
            losses, wanted = plain(form)
            assert [step["train/loss"] for step in steps] == pytest.approx(losses, abs=1e-12), form
            for name, weight in weights.items():
                torch.testing.assert_close(weight, wanted[name], rtol=0, atol=1e-12)
            assert evaluated["eval/rows"] == 0.0
            assert ("train/loss/value" in steps[0]) == (form == "terms")
            assert ("train/value_error" in steps[0]) == (form == "pair")
            assert steps[0]["train/supervised_tokens"] == sum((row["labels"] >= 0).sum() for row in data()[:GLOBAL])


def test_the_data_iterator_gives_this_ranks_batches_and_counts_them() -> None:
    worker = Task(recipe())
    worker.setup()
    batches = [next(worker.data_iter) for _ in range(5)]
    assert torch.equal(batches[4]["x"], torch.stack([row["x"] for row in data()[8:10]]))
    assert (worker._data_epoch, worker._data_iter_offset) == (0, 8)  # the second step has begun
    worker.run_training()
    assert (worker._data_epoch, worker._data_iter_offset) == (1, 0)


class Assigning(Task):
    def __init__(self, cfg: Any) -> None:
        self.cfg = OmegaConf.create({})
        super().__init__(cfg)


def test_the_validated_recipe_is_there_for_a_worker_that_assigned_its_own_before() -> None:
    worker = Assigning(recipe())
    assert worker.cfg == Task(recipe()).cfg
    assert worker.cfg.actor.micro_batch_size == MICRO


SCRIPT = """\
import sys
from tests.training.worker.test_base import Task, recipe
from shardtune import SFTRunner

cfg = recipe(sys.argv[1], max_epochs=1)
actor = Task(cfg)
print(sorted(SFTRunner(cfg, actor).run()))
if "fail" in sys.argv and actor.ranks.rank == 1:
    raise ValueError("a mistake of mine")
"""


@pytest.mark.parametrize(
    ("argument", "codes"),
    [
        pytest.param("well", [0, 0], id="well"),
        pytest.param("well", [0, 0], id="well, own start", marks=[pytest.mark.own_start, pytest.mark.slow]),
        pytest.param("fail", None, id="one fails"),
    ],
)
def test_the_ranks_of_a_script_end_by_themselves(tmp_path: Path, argument: str, codes: list[int] | None) -> None:
    """Nothing at the end of the script leaves the group; a rank that fails does not wait for the others."""
    (port,) = free_ports(1)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    root = str(Path(__file__).resolve().parents[3])
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), argument],
            env={**os.environ, **here, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": root},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=100) for rank in reversed(ranks)][::-1]
    finally:
        for rank in ranks:
            rank.kill()
    ended = [rank.returncode for rank in ranks]
    if codes is not None:
        assert ended == codes, told
        assert all("eval/ce" in out for out, _ in told)
    else:
        assert ended[1] == 1
        assert "a mistake of mine" in told[1][1]
        assert ended[0] != 0 or not told[0][1]


def test_a_worker_leaves_at_the_end_of_a_with(tmp_path: Path) -> None:
    with Task(recipe(str(tmp_path), max_steps=1)) as actor:
        metrics = SFTRunner(actor.recipe, actor).run()
    assert metrics["eval/ce"] > 0
