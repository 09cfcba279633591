"""What a worker's own code freezes after the model was built, or unfreezes again, trains as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

import shardtune
from shardtune import Callback, FSDPSftWorker
from shardtune.config import Recipe, load_recipe
from shardtune.errors import ModelError, ShardtuneError
from shardtune.training.callbacks import StepEnd
from shardtune.training.worker.reported import evaluation_method, training_method
from tests.support.chosen import slow_except
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import whole

pytestmark = pytest.mark.lengthy

STEPS, GLOBAL, MICRO, RATE, DECAY, CLIP = 6, 8, 2, 0.05, 0.1, 0.7
FROZEN = {
    0: ("embed", "blocks.0", "blocks.1.inner.bias", "scale"),
    2: ("embed", "blocks.0.inner.bias", "scale"),
    3: ("head", "blocks.1"),
    4: (),
}
"""From which step on which parameters are frozen, by the beginnings of their names."""
LAYOUTS = ((1, "fsdp"), (2, "fsdp"), (2, "ddp"), (2, "fsdp1"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).tanh()


class Net(nn.Module):
    """Two units, parameters beside them, one of them a scalar, which each rank holds whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def made_net() -> Net:
    torch.manual_seed(5)
    return Net().double()


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    draw = torch.randint(0, 9, (STEPS * GLOBAL,), generator=generator)
    return [{"x": number, "y": number % 3} for number in draw]


def set_frozen(model: nn.Module, step: int) -> None:
    """Change what is trained, in those steps alone in which it changes."""
    if step in FROZEN:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(FROZEN[step] or ("none",)))


class Plain(FSDPSftWorker):
    def model_provider_func(self) -> nn.Module:
        return made_net()

    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> tuple[Any, dict[str, Any]]:
        made: Any = rows()
        return DataLoader(made, batch_size=MICRO), {"num_samples": len(made)}

    def get_train_model_output(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(self.model(batch["x"]), batch["y"])

    def get_eval_model_output(self, batch: Any) -> Any:
        return {"loss": (float(self.get_train_model_output(batch)) * len(batch["y"]), len(batch["y"]))}


class Gradual(Plain):
    """Frozen in `setup`; unfrozen and frozen again before steps."""

    def setup(self) -> None:  # type: ignore[override]
        super().setup()
        set_frozen(self.model, 0)

    def run_training(self) -> dict[str, float]:
        if self.step:
            set_frozen(self.model, self.step)
        return super().run_training()


class GradualLoop(Gradual):
    """The same with a loop of its own."""

    def run_training(self) -> dict[str, float]:
        if self.step:
            set_frozen(self.model, self.step)
        total, batches = 0.0, GLOBAL // MICRO // self.ranks.world_size
        for _ in range(batches):
            loss = self.get_train_model_output(next(self.data_iter)) * (MICRO / GLOBAL)
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": total * self.ranks.world_size}


class UnfrozenLate(Plain):
    """A part that is frozen from the start is to be trained from the third step on."""

    def model_provider_func(self) -> nn.Module:
        made = made_net()
        made.blocks[0].requires_grad_(False)
        return made

    def run_training(self) -> dict[str, float]:
        if self.step == 2:
            self.model.requires_grad_(True)
        return super().run_training()


class UnfrozenLoop(UnfrozenLate):
    def run_training(self) -> dict[str, float]:
        if self.step == 2:
            self.model.requires_grad_(True)
        loss = self.get_train_model_output(next(self.data_iter))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss.item()}


class UnfrozenInLoss(UnfrozenLate):
    """In the middle of a step: the norm counts what the optimizer has, and the next step is refused."""

    run_training = FSDPSftWorker.run_training

    def get_train_model_output(self, batch: Any) -> Any:
        if self.step == 2:
            self.model.requires_grad_(True)
        return super().get_train_model_output(batch)


class FrozenPart(UnfrozenLate):
    run_training = FSDPSftWorker.run_training


class AddsGroup(Plain):
    def setup(self, *given: Any, **named: Any) -> None:
        super().setup(*given, **named)
        self.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(()))], "lr": 0.01})


class StopsOnce(Callback):
    def on_step_end(self, event: StepEnd) -> None:
        mark = event.run_dir / "stopped"
        if event.step == 5 and not mark.exists():
            mark.touch()
            raise RuntimeError("stopped once")


class AddsToGroup(Plain):
    def run_training(self) -> dict[str, float]:
        if self.step == 2:
            self.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(4)))
        return super().run_training()


def recipe(kind: str, layout: str = "fsdp", precision: str = "fp64", folder: str = "runs", **runner: Any) -> Recipe:
    optim = {"name": "AdamW", "lr": RATE, "weight_decay": DECAY, "lr_scheduler": "linear", "clip_grad": CLIP}
    if kind.endswith("Loop"):
        optim["clip_grad"] = None
    return load_recipe(
        {
            "actor": {
                "worker": f"{__file__}:{kind}",
                "micro_batch_size": MICRO,
                "global_batch_size": GLOBAL,
                "training_backend": layout,
                "model": {"precision": precision},
                "optim": optim,
            },
            "data": {"eval_data_paths": "made by the worker"},
            "runner": {"device": "cpu", "max_steps": STEPS, "logger": {"log_path": folder}, **runner},
        }
    )


Told = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def trained(kind: str, layout: str, folder: Path, begin: int = 0, precision: str = "fp64") -> Told:
    """Metrics of each step, each followed by an evaluation and a checkpoint, and the weights at the end."""
    worker = globals()[kind](recipe(kind, layout, precision))
    worker.setup()
    step, evaluate, found = training_method(worker), evaluation_method(worker), []
    if begin:
        worker.load_checkpoint(folder / str(begin))
    while not worker.finished:
        found.append(step())
        evaluate()
        if not begin:
            worker.save_checkpoint(folder / str(worker.step), worker.step)
    tensors = worker.weights.tensors()
    weights = {name: whole(tensors[name]) for name in worker.weights.parameters}
    worker.release()
    return found, weights


def all_trained(kind: str, layouts: list[str], folder: Path, begin: int = 0) -> list[Told]:
    return [trained(kind, layout, folder / layout, begin) for layout in layouts]


def plain(clip: float | None) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Losses and norms, and the weights at the end, by PyTorch alone."""
    net, found, data = made_net(), [], rows()
    vectors = [parameter for parameter in net.parameters() if parameter.ndim < 2]
    matrices = [parameter for parameter in net.parameters() if parameter.ndim >= 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=DECAY, betas=(0.9, 0.999))
    for step in range(STEPS):
        set_frozen(net, step)
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = RATE * (1 - step / STEPS)
        cut = data[step * GLOBAL : (step + 1) * GLOBAL]
        x, y = (torch.stack([row[name] for row in cut]) for name in "xy")
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9 if clip is None else clip)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found, {name: parameter.detach() for name, parameter in net.named_parameters()}


def compare(told: Told, wanted: tuple[list[tuple[float, float]], dict[str, torch.Tensor]], begin: int = 0) -> None:
    losses, norms = zip(*wanted[0][begin:], strict=True)
    assert [step["train/loss"] for step in told[0]] == pytest.approx(losses, abs=1e-12)
    if "train/grad_norm" in told[0][0]:
        assert [step["train/grad_norm"] for step in told[0]] == pytest.approx(norms, abs=1e-12)
    assert told[1].keys() == wanted[1].keys()
    for name, weight in told[1].items():
        torch.testing.assert_close(weight, wanted[1][name], rtol=0, atol=1e-12, msg=name)


def every(kind: str, folder: Path, begin: int = 0) -> Iterator[Told]:
    """On each layout; a resume of each by the other number of ranks."""
    layouts = [layout for number, layout in LAYOUTS if number == 2]
    if begin:
        yield trained(kind, "fsdp", folder / "two/fsdp1", begin)
        yield from run_ranks(all_trained, 2, kind, layouts, folder / "two", begin)[0]
        return
    yield trained(kind, "fsdp", folder / "one/fsdp")
    yield from run_ranks(all_trained, 2, kind, layouts, folder / "two")[0]


@pytest.mark.parametrize("kind", ["Gradual", pytest.param("GradualLoop", marks=pytest.mark.slow)])
def test_frozen_and_unfrozen_parameters_train_as_plain_pytorch_does(tmp_path: Path, kind: str) -> None:
    """Units and parts of them, with clipping, evaluations and checkpoints between; and from a checkpoint on.

    A checkpoint has what is frozen: the code changes that in single steps, which a resumed run does not see.
    """
    wanted = plain(CLIP if kind == "Gradual" else None)
    for told in every(kind, tmp_path):
        compare(told, wanted)
    for begin in (5,):
        for told in every(kind, tmp_path, begin):
            compare(told, wanted, begin)


def test_half_precision_freezes_too(tmp_path: Path) -> None:
    """One process has copies in full precision beside the model, which the optimizer has."""
    _, weights = trained("Gradual", "fsdp", tmp_path, precision="bf16")
    for name, wanted in plain(CLIP)[1].items():
        torch.testing.assert_close(weights[name].double(), wanted, rtol=0, atol=RATE / 4, msg=name)


def refusal(kind: str, layout: str, folder: Path) -> str:
    with pytest.raises(ModelError) as error:
        trained(kind, layout, folder / layout)
    return str(error.value)


def refusals(kind: str, folder: Path) -> list[str]:
    return [refusal(kind, layout, folder) for number, layout in LAYOUTS if number == 2]


@pytest.mark.parametrize("kind", slow_except(["UnfrozenLate", "UnfrozenLoop", "UnfrozenInLoss"], "UnfrozenInLoss"))
def test_what_the_optimizer_does_not_have_is_never_trained_in_silence(tmp_path: Path, kind: str) -> None:
    for told in (refusal(kind, "fsdp", tmp_path), *run_ranks(refusals, 2, kind, tmp_path)[0]):
        assert "blocks.0.inner.weight, blocks.0.inner.bias: frozen when the model was built" in told
        assert "requires_grad_(False) in the worker's setup" in told


def norms(kind: str) -> list[float]:
    worker = globals()[kind](recipe(kind))
    worker.setup()
    return [worker.run_training()["train/grad_norm"] for _ in range(3)]


def test_the_norm_counts_what_the_optimizer_has() -> None:
    wanted = norms("FrozenPart")
    for found in (norms("UnfrozenInLoss"), *run_ranks(norms, 2, "UnfrozenInLoss")):
        assert found == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("kind", ["AddsGroup", "AddsToGroup"])
def test_parameters_beside_the_models_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ModelError, match="a parameter group of the optimizer is not as it was built"):
        shardtune.train(recipe(kind, folder=str(tmp_path)).to_dict())


def test_a_whole_run_freezes_saves_and_resumes(tmp_path: Path) -> None:
    """Through the command's own path: it stops after its fifth step, and goes on as if it had not."""
    values = recipe("Gradual", folder=str(tmp_path), callbacks=[f"{__file__}:StopsOnce"]).to_dict()
    with pytest.raises(ShardtuneError, match="stopped once"):
        shardtune.train(values)
    run = shardtune.train(values)
    found = load_file(run.dir / "final/model.safetensors")
    for name, wanted in plain(CLIP)[1].items():
        torch.testing.assert_close(found[name], wanted, rtol=0, atol=1e-12, msg=name)
