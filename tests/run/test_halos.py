"""`from shardtune.halos import SFTTrainer, BasicTrainer, main`, with that system's own configuration, in one process.

On several ranks they are in `tests/seeds/test_halos.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

import shardtune
from shardtune.config import load_recipe
from shardtune.errors import ConfigError, DataError
from shardtune.halos import BasicTrainer, SFTTrainer, main
from shardtune.run.accelerate_settings import contradicted_settings
from tests.support.tiny_run import Tiny, lines, make_model, make_tiny, make_tokenizer, rows

pytestmark = pytest.mark.lengthy


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("halos"), save_interval=-1)


@pytest.fixture(autouse=True)
def _cache(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tiny.folder / "cache"))


def config(tiny: Tiny, name: str, **changes: Any) -> DictConfig:
    """HALOs' names; one epoch of two steps."""
    return DictConfig({
        "loss": {"name": "sft"},
        "exp_name": name,
        "cache_dir": str(tiny.runs),
        "datasets": [str(tiny.folder / "train.jsonl")],
        "lr": 1e-3,
        "n_epochs": 1,
        "model": {"name_or_path": str(tiny.folder / "model"), "batch_size": 12, "policy_dtype": "float64"},
        "wandb": {"enabled": False},
        **changes,
    })  # fmt: skip


def in_memory(tiny: Tiny, name: str, **changes: Any) -> DictConfig:
    """Without the names of a model and of data."""
    values = config(tiny, name, **changes)
    del values["datasets"], values["model"]["name_or_path"]
    return values


class Loader:
    """Batches as HALOs' loader yields them: an iterable without a length."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = []
        for _ in range(number):
            ids = torch.randint(3, 200, (4, 9), generator=generator)
            labels = ids.clone()
            labels[:, :3] = -100
            labels[0, 5:] = -100
            mask = torch.ones_like(ids)
            self.batches.append({
                "target_combined_input_ids": ids, "target_combined_attention_mask": mask, "target_labels": labels
            })  # fmt: skip

    def __iter__(self) -> Iterator[Mapping[str, torch.Tensor]]:
        return iter(self.batches)


class Ported(BasicTrainer):
    """A loss as that system's own trainers write it."""

    def get_batch_metrics(self, batch: Mapping[str, torch.Tensor], mode: str = "train") -> Any:
        logits = self.policy(
            batch["target_combined_input_ids"],
            attention_mask=batch["target_combined_attention_mask"],
            use_cache=False,
        ).logits.to(self.policy_dtype)
        logps = self.get_batch_logps(logits, batch["target_labels"])
        mask = (logps != 0).float().detach()
        losses = -logps / mask.sum()
        metrics = {f"loss/{mode}": losses.detach().sum(), f"logps/{mode}": (logps * mask).detach().sum() / mask.sum()}
        return losses.sum(), {**metrics, f"rows/{mode}": logps.detach().sum(-1)}


class Referring(Ported):
    use_reference_model = True


def timeless(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if not key.startswith("perf/")} for line in lines(run)]


def test_a_trainer_has_halos_configuration_and_trains_to_final(tiny: Tiny) -> None:
    trainer = SFTTrainer(config(tiny, "trainer"))
    assert (trainer.config.lr, trainer.config.n_epochs, trainer.config.model.batch_size) == (1e-3, 1, 12)
    assert trainer.use_reference_model is False
    assert shardtune.SFTTrainer is SFTTrainer
    assert issubclass(SFTTrainer, BasicTrainer)
    run = trainer.train()
    assert run.dir == tiny.runs / "trainer"
    final = run.dir / "FINAL"
    for name in ("model.safetensors", "tokenizer.json", "metrics.json", "training_state/worker.json"):
        assert (final / name).is_file(), name
    first, last = lines(run.dir)
    assert last["step"] == 2
    assert first["logps/train"] == pytest.approx(-first["train/loss"], rel=1e-12)
    assert run.recipe.actor.worker == "sft_trainer"
    main(config(tiny, "main"))
    assert timeless(tiny.runs / "main") == timeless(run.dir)


def test_a_model_and_data_in_memory(tiny: Tiny, capfd: pytest.CaptureFixture[str]) -> None:
    """As batches without a length, with the rows of a micro-batch from the first; and as rows."""
    loader = Loader(6)
    found = {}
    for kind in (SFTTrainer, Ported):
        name = kind.__name__
        model = make_model(make_tokenizer())
        trainer = kind(
            in_memory(tiny, name), model=model, tokenizer=make_tokenizer(), train_dataset=loader, eval_dataset=loader
        )
        assert trainer.recipe.actor.micro_batch_size == 4
        found[name] = trainer.train()
        last, final = lines(found[name].dir)[-1], json.loads((found[name].dir / "FINAL/metrics.json").read_text())
        assert final["eval/loss"] == pytest.approx(last["eval/loss"], rel=1e-7)  # in fp32, loaded afresh
        assert final["loss/eval"] == pytest.approx(final["eval/loss"], rel=1e-12)
        assert model(torch.arange(5)[None]).logits.isfinite().all()
        assert len(found[name].generate("say 1", max_new_tokens=2)) == 1
        capfd.readouterr()
        again = kind(
            in_memory(tiny, name),
            model=make_model(make_tokenizer()),
            tokenizer=make_tokenizer(),
            train_dataset=Loader(7),
            eval_dataset=loader,
        )
        again.train()  # finished: other batches cannot be recognised, which is reported
        assert "data.train_data_paths: batches in memory are not compared" in "".join(capfd.readouterr())
    plain, ported = (lines(run.dir) for run in found.values())
    assert len(plain) == 2
    for ours, theirs in zip(plain, ported, strict=True):
        for key in ("train/loss", "train/grad_norm", "loss/train", "logps/train"):
            assert theirs[key] == pytest.approx(ours[key], rel=1e-9), key
    targets = torch.cat([batch["target_labels"][:, 1:].reshape(-1) for batch in loader.batches[3:]])
    assert ported[1]["rows/train"] * 12 == pytest.approx(ported[1]["logps/train"] * int((targets != -100).sum()))
    with pytest.raises(ConfigError, match=r"trained by Ported, which its recipe does not name(.|\n)*actor.worker"):
        found["Ported"].evaluate(eval_data=rows(3))
    main(in_memory(tiny, "rows"), model=make_model(make_tokenizer()), tokenizer=make_tokenizer(), train_data=rows(21))
    trainer = SFTTrainer(
        in_memory(tiny, "rows too"), make_model(make_tokenizer()), rows(21), tokenizer=make_tokenizer()
    )
    trainer.train()
    assert timeless(tiny.runs / "rows too") == timeless(tiny.runs / "rows")


def test_what_cannot_train_is_refused(tiny: Tiny) -> None:
    with pytest.raises(DataError, match="a int yields no batches"):
        SFTTrainer(config(tiny, "wrong"), train_dataset=5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match="train_dataset and train_data are both given"):
        SFTTrainer(config(tiny, "wrong"), train_dataset=Loader(2), train_data=rows(3))
    ranks = OmegaConf.merge(config(tiny, "wrong"), {"runner": {"nproc_per_node": 2}})
    with pytest.raises(ConfigError, match=r"the recipe sets 2 ranks(.|\n)*torchrun --nproc-per-node 2"):
        SFTTrainer(ranks).train()  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"Referring.use_reference_model is True(.|\n)*= False"):
        Referring(config(tiny, "wrong"))
    adapted = peft.get_peft_model(make_model(make_tokenizer()), peft.LoraConfig(target_modules="all-linear"))
    with pytest.raises(ConfigError, match=r"PeftModel(.|\n)*before get_peft_model(.|\n)*model.use_peft"):
        SFTTrainer(config(tiny, "wrong"), model=adapted)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="abstract"):
        BasicTrainer(config(tiny, "wrong"))  # pyright: ignore[reportAbstractUsage]
    assert not (tiny.runs / "wrong").exists()


def test_what_has_no_effect_is_on_the_first_screen(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    main(config(tiny, "told", minimum_log_interval_secs=1.0))
    assert "minimum_log_interval_secs" in capsys.readouterr().err
    assert json.loads((tiny.runs / "told/FINAL/metrics.json").read_text())["step"] == 2


def test_what_accelerates_file_switches_on_is_done_or_on_the_first_screen(tiny: Tiny) -> None:
    environment = {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_ACTIVATION_CHECKPOINTING": "false",
    }
    (note,) = contradicted_settings(load_recipe(config(tiny, "launched")), environment)
    assert "mixed_precision: bf16 (actor.model.precision decides)" in note
    assert "fsdp_offload_params: true (actor.fsdp_config.cpu_offload decides)" in note
    assert "dynamo" not in note
    assert "activation_checkpointing" not in note
    same = config(tiny, "launched", actor={"fsdp_config": {"cpu_offload": True}})
    same.model.policy_dtype = "bfloat16"
    assert contradicted_settings(load_recipe(same), environment) == []
    assert contradicted_settings(load_recipe(same), {}) == []
