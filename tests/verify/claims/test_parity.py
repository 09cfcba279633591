"""Parity with plain PyTorch: holds for models of transformers, adapters and workers, and finds planted faults."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import CLIPVisionConfig, HubertConfig, HubertModel, LlavaConfig, WhisperConfig
from transformers.models.dinov2.modeling_dinov2 import Dinov2DropPath
from transformers.models.hubert.modeling_hubert import HubertEncoder
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from shardtune.config.schema import OptimConfig
from shardtune.models import causal_lm
from shardtune.optim.build import rate_factor
from shardtune.verify.claims import plain_loop, plain_run
from shardtune.verify.claims.dropout import PLUGIN, drops, parts_drop, without_dropout
from shardtune.verify.claims.layouts import check_layouts
from shardtune.verify.claims.numbers import weight_gap
from shardtune.verify.claims.parity import check_parity
from shardtune.verify.result import Failed, Skipped
from tests.support import fork_server
from tests.support.short_runs import runs_of
from tests.support.tiny_run import Tiny, make_tiny

ALONE = plain_run.run_alone
PLANTED = Path(__file__).parents[2] / "support" / "planted"
WORKER = """
import json
from pathlib import Path

import torch
from shardtune import FSDPSftWorker
from torch.utils.data import DataLoader


class Worker(FSDPSftWorker):
    def model_provider_func(self):
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 2)).double()

    def build_dataloader(self, data_paths, eval_dataset=False):
        rows = [json.loads(line) for path in data_paths for line in Path(path).read_text().splitlines()]
        rows = [{name: torch.tensor(row[name], dtype=torch.float64) for name in ("x", "y")} for row in rows]
        return DataLoader(rows, batch_size=self.cfg.actor.micro_batch_size), {"num_samples": len(rows)}

    def get_train_model_output(self, batch):
        return (self.model(batch["x"]) - batch["y"]).square().mean(), {"size": batch["x"].abs().mean()}

    def get_eval_model_output(self, batch):
        return 0
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("parity"), dropout=0.1)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plain loop in this process, and no dropout left off by a plugin of a run."""
    monkeypatch.setattr(plain_run, "run_alone", plain_loop.main)
    monkeypatch.setattr(F, "dropout", F.dropout)
    monkeypatch.setattr(torch.nn.Module, "train", torch.nn.Module.train)
    monkeypatch.setattr(F, "scaled_dot_product_attention", F.scaled_dot_product_attention)
    yield
    sys.modules.pop(PLUGIN, None)


def rows_of_numbers(folder: Path, keys: dict[str, Any]) -> dict[str, Any]:
    """A recipe over rows of numbers."""
    draws = torch.Generator().manual_seed(0)
    file = folder / "numbers.jsonl"
    rows = [
        {"x": torch.randn(4, generator=draws).tolist(), "y": torch.randn(2, generator=draws).tolist()}
        for _ in range(15)
    ]
    seen = [[1.0, float(number % 3 > 0)] for number in range(15)]
    file.write_text("".join(f"{row | {'seen': s}}\n".replace("'", '"') for row, s in zip(rows, seen, strict=True)))
    return {
        "runner": {"logger": {"log_path": str(folder / "runs"), "experiment_name": "numbers"}},
        "actor": {"global_batch_size": 6, "micro_batch_size": 3, "model": {"precision": "fp32"}, **keys},
        "data": {"train_data_paths": str(file), "cache_dir": str(folder / "cache"), "num_workers": 0},
    }


def adapter(name: str) -> dict[str, Any]:
    return {"model": {"precision": "fp32", "adapter": f"{PLANTED / 'adapters.py'}:{name}"}}


@pytest.mark.lengthy
def test_a_language_model_trains_as_plain_pytorch(tiny: Tiny, tmp_path: Path) -> None:
    keys = {"actor__optim__lr_scheduler": "wsd", "actor__z_loss": 1e-3, "actor__model__freeze": ["layers.0"]}
    found = check_parity(runs_of(tiny.recipe("parity", **keys), tmp_path))
    assert "Qwen2ForCausalLM of transformers, a row per forward" in found
    assert "off)" in found, "dropout is left out, and that is said"
    assert "bf16's own spread" in found


def test_lora_trains_as_peft_does(tiny: Tiny, tmp_path: Path) -> None:
    keys = {"actor__model__is_lora": True, "actor__model__lora": {"r": 4, "init": False}}
    runs = runs_of(tiny.recipe("lora", **keys), tmp_path, steps=1)
    assert "of transformers with PEFT" in check_parity(runs)


def test_shifted_labels_are_found(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = causal_lm.pack

    def shifted(*arguments: Any) -> Any:
        batch = pack(*arguments)
        return replace(batch, targets=batch.targets.roll(-1))

    monkeypatch.setattr(causal_lm, "pack", shifted)
    with pytest.raises(Failed, match=r"in step 1 on 1 rank the run parts from plain PyTorch .* train/loss is"):
        check_parity(runs_of(tiny.recipe("shifted"), tmp_path, steps=1))


def test_an_optimizer_that_decays_norms_is_found(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_alike(name: str, ndim: int, config: OptimConfig) -> tuple[float, float]:
        return config.lr, config.weight_decay

    monkeypatch.setattr("shardtune.optim.build._group_of", all_alike)
    with pytest.raises(Failed, match=r"the weight .*norm.* of its size away") as failure:
        check_parity(runs_of(tiny.recipe("decayed"), tmp_path, steps=1))
    assert "gradients agree and weights do not" in failure.value.remedy


@pytest.mark.parametrize("check", [check_parity, check_layouts])
def test_a_frozen_weight_that_is_written_to_is_found(tiny: Tiny, tmp_path: Path, check: Callable[..., str]) -> None:
    """In the last step, after which no loss shows it."""
    keys = {"actor__worker": f"{PLANTED / 'workers.py'}:WritesToFrozen", "actor__model__freeze": ["layers.0"]}
    with pytest.raises(
        Failed, match=r"on 1 rank changes a weight that is frozen, in step 2: model\.layers\.0\."
    ) as seen:
        check(runs_of(tiny.recipe("frozen", **keys), tmp_path))
    assert "actor.model.freeze" in seen.value.remedy


def test_an_adapter_trains_as_its_own_loss_row_by_row(tmp_path: Path) -> None:
    found = check_parity(runs_of(rows_of_numbers(tmp_path, adapter("Regressor")), tmp_path / "runs"))
    assert "the loss of Regressor, a row per forward" in found
    assert "dropout off" in found


def test_a_mean_of_means_is_found(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="the loss of MeanOfMeans, a row per forward"):
        check_parity(runs_of(rows_of_numbers(tmp_path, adapter("MeanOfMeans")), tmp_path / "runs"))


def test_a_users_worker_trains_as_its_own_method_batch_by_batch(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    keys = {"worker": f"{tmp_path / 'worker.py'}:Worker"}
    found = check_parity(runs_of(rows_of_numbers(tmp_path, keys), tmp_path / "runs"))
    assert "get_train_model_output of Worker, a batch per forward" in found


SEVERAL = """
    def run_training(self):
        losses = []
        for _ in range({batches}):
            losses.append(self.get_train_model_output(next(self.data_iter))[0] / {batches})
            losses[-1].backward()
        norm = self.clip_grad_norm_()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {{"loss": sum(losses).item(), "grad_norm": float(norm)}}
"""


@pytest.mark.parametrize("batches", [4, 1])
def test_a_workers_own_step_may_take_several_of_the_loader(tmp_path: Path, batches: int) -> None:
    (tmp_path / "worker.py").write_text(WORKER + SEVERAL.format(batches=batches))
    keys = {"worker": f"{tmp_path / 'worker.py'}:Worker"}
    runs = runs_of(rows_of_numbers(tmp_path, keys), tmp_path / "runs", steps=1)
    if batches == 4:
        assert "a batch per forward" in check_parity(runs)
        return
    with pytest.raises(Skipped, match="takes a part of a step's batches for one update"):
        check_parity(runs)


@pytest.mark.parametrize(
    ("layer", "instead", "says"),
    [
        ("Dropout(0.2)", "torch.nn.BatchNorm1d(6)", "batch norms"),
        ("Linear(4, 6)", "torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 6))", "from call to call"),
        ("Dropout(0.2)", "torch.nn.RReLU()", "draws random numbers from torch"),
    ],
)
def test_what_no_row_has_alone_is_skipped(tmp_path: Path, layer: str, instead: str, says: str) -> None:
    (tmp_path / "worker.py").write_text(WORKER.replace(f"torch.nn.{layer}", instead))
    keys = {"worker": f"{tmp_path / 'worker.py'}:Worker"}
    with pytest.raises(Skipped, match=says):
        check_parity(runs_of(rows_of_numbers(tmp_path, keys), tmp_path / "runs"))


HIDES = """
import random
from dataclasses import replace
import torch
from tests.support.healthy_adapters import Regressor


class Hides(Regressor):
    def collate(self, samples, rows, weights):
        batch = super().collate(samples, rows, weights)
        return replace(batch, fields={**batch.fields, "x": batch["x"] * random.random()})
"""


def test_draws_of_collate_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "hides.py").write_text(HIDES)
    keys = {"model": {"precision": "fp32", "adapter": f"{tmp_path / 'hides.py'}:Hides"}}
    with pytest.raises(Skipped, match="draws random numbers from torch, numpy or Python"):
        check_parity(runs_of(rows_of_numbers(tmp_path, keys), tmp_path / "runs"))


def test_the_plain_loop_knows_nothing_of_the_package() -> None:
    tree = ast.parse(Path(plain_loop.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in names if name.startswith("shardtune")]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_the_plain_schedule_is_the_recipes(schedule: str) -> None:
    config = OptimConfig.model_validate({"lr": 0.5, "lr_scheduler": schedule, "lr_warmup_steps_ratio": 0.2})
    job = {"optim": config.model_dump(), "horizon": 10}
    assert [plain_loop.rate(step, 0.5, job) for step in range(12)] == pytest.approx(
        [0.5 * rate_factor(step, 10, config) for step in range(12)]
    )


def test_differences_of_weights_are_relative_to_their_size() -> None:
    one = torch.tensor([2.0, 1.0])
    assert weight_gap(one, one + torch.tensor([0.0, 0.1]), 0.0) == pytest.approx(0.05)
    assert weight_gap(one * 0, one * 0 + 1e-12, 1e-3) == pytest.approx(1e-9), "tiny weights: of an update's size"
    assert weight_gap(one, one * float("nan"), 0.0) == float("inf")


def test_dropout_is_off_inside_only() -> None:
    ones = torch.ones(64)
    with without_dropout(torch.nn.Identity()):
        assert torch.equal(F.dropout(ones, 0.5), ones)
    assert not torch.equal(F.dropout(ones, 0.5), ones)


def test_branches_that_are_left_out_by_chance_are_computed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Dinov2DropPath(0.5))
    assert drops(model)
    with without_dropout(model):
        assert not model[1].training
        model.train()
        assert (model[0].training, model[1].training) == (True, False)
    assert model[1].training
    assert model.train()[1].training


WHISPER = WhisperConfig(
    encoder_attention_heads=2, encoder_ffn_dim=8, encoder_layers=1, encoder_layerdrop=1.0, d_model=8
)
NOT_DROPPED = dict.fromkeys(("hidden_dropout", "activation_dropout", "attention_dropout"), 0.0)
HUBERT = HubertConfig(
    num_attention_heads=2, hidden_size=16, intermediate_size=8, num_hidden_layers=1, layerdrop=1.0, **NOT_DROPPED
)


@pytest.mark.parametrize(
    ("encoder", "sound"),
    [
        pytest.param(lambda: WhisperEncoder(WHISPER), (1, 80, 3000), id="kept by the module"),
        pytest.param(lambda: HubertEncoder(HUBERT), (1, 5, 16), id="read from the config"),
    ],
)
def test_layers_that_are_left_out_by_chance_are_computed(
    encoder: Callable[[], WhisperEncoder | HubertEncoder], sound: tuple[int, ...]
) -> None:
    model = encoder().train()
    called: list[torch.nn.Module] = []
    model.layers[0].register_forward_hook(lambda module, *_: called.append(module))
    assert drops(model)
    with without_dropout(model):
        assert not drops(model)
        model.train()(torch.randn(sound))
    assert (len(called), drops(model)) == (1, True)
    model(torch.randn(sound))
    assert len(called) == 1, "outside they are left out as before"


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_parts_of_a_sound_that_are_hidden_by_chance_are_heard(share: float) -> None:
    shape: dict[str, Any] = {"conv_dim": (16,), "conv_kernel": (4,), "conv_stride": (2,), "mask_time_length": 2}
    silent = {"feat_proj_dropout": 0.0, "num_feat_extract_layers": 1, "num_conv_pos_embeddings": 4}
    sizes = {"num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    config = HubertConfig(layerdrop=0.0, mask_time_prob=share, **shape, **silent, **sizes, **NOT_DROPPED)
    model, sound = HubertModel(config).train(), torch.randn(1, 200)
    whole = model.eval()(sound).last_hidden_state
    assert drops(model.train()) is (share > 0)
    with without_dropout(model):
        torch.testing.assert_close(model.train()(sound).last_hidden_state, whole)
    assert config.apply_spec_augment
    assert torch.equal(model(sound).last_hidden_state, whole) is (share == 0)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_dropout_inside_the_attention_of_a_vision_tower_is_seen(rate: float) -> None:
    adapter = object.__new__(causal_lm.CausalLM)
    adapter.config = LlavaConfig(vision_config=CLIPVisionConfig(attention_dropout=rate))
    assert parts_drop(adapter) is (rate > 0)


def test_a_fault_of_the_plain_loop_is_no_reason_to_skip(tmp_path: Path) -> None:
    """A job without settings, as a renamed key would leave it."""
    torch.save({"precision": "fp64"}, tmp_path / "job.pt")
    with fork_server.own_starts(), pytest.raises(Failed) as failure:
        ALONE(tmp_path / "job.pt", tmp_path)
    first, *traceback = failure.value.what.splitlines()
    assert first == "nothing was compared: the plain loop ended with KeyError: 'trust_remote_code'"
    assert any("in build" in line for line in traceback)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            "mat1 and mat2 must have the same dtype, but got Float and Double\nat",
            "in fp64: mat1 and mat2 must .* Double$",
        ),
        ("\"grouped_mm\" not implemented for 'Double'", "in fp64: .*grouped_mm"),
        ("Input type (double) and bias type (float) should be the same", "in fp64: Input type"),
        ("The size of tensor a (3) must match the size of tensor b (4)", None),
    ],
)
def test_only_a_model_without_fp64_is_a_reason_to_skip(error: str, reason: str | None) -> None:
    class Model(torch.nn.Linear):
        dtype = torch.float64

        def forward(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError(error)

    row = {"input_ids": torch.arange(3), "weights": torch.ones(3), "inputs": {}}
    with pytest.raises(plain_loop.Unable if reason else RuntimeError, match=reason or "The size of tensor"):
        plain_loop.row_loss(Model(1, 1), row, {"precision": "fp64"})


def test_an_architecture_that_only_a_plugin_makes_known_is_a_reason_to_skip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "of_my_own"}')
    job = {"precision": "fp64", "trust_remote_code": False, "config": str(tmp_path)}
    torch.save(job, tmp_path / "job.pt")
    with pytest.raises(plain_loop.Unable, match=r"made known by a plugin: .*of_my_own"):
        plain_loop.main(str(tmp_path / "job.pt"), str(tmp_path))
    ended = SimpleNamespace(returncode=plain_loop.UNABLE, stderr="a warning\nits architecture is made known\n")
    monkeypatch.setattr(plain_run.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(
        Skipped, match=r"transformers alone cannot train .* per forward: its architecture is made known$"
    ):
        ALONE(tmp_path / "job.pt", tmp_path)
