"""HALOs' SFT trainer as its page prints it: the class, `main`, both commands under accelerate, and what they write.

`tests/seeds/halos.py` has the page's samples, and the list of what is changed.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import shardtune
from shardtune.config import load_recipe
from tests.seeds.halos import ACCELERATE, BASIC, CONFIG, WITH_LORA, launch_file, words
from tests.support.tiny_run import free_ports
from tests.support.workspace import make_model, make_tokenizer, quietly, rows, write_rows

EXAMPLE = Path(__file__).parents[2] / "examples" / "halos"
MODEL = "meta-llama/Meta-Llama-3-8B"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as HALOs' users have one: their launch.py, config groups, a model and data under the Hub's names."""
    import datasets

    folder = tmp_path_factory.mktemp("halos")
    for name, text in {
        **CONFIG,
        "../launch.py": launch_file(),
        "../accelerate_config/fsdp_4gpu.yaml": ACCELERATE,
    }.items():
        (folder / "config" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "config" / name).write_text(text)
    shutil.copy(EXAMPLE / "launch.py", folder / "example.py")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / MODEL)
    with quietly():
        make_model(len(tokenizer)).double().save_pretrained(folder / MODEL)  # `final/` has the dtype of these files
    copy = datasets.DatasetDict({split: datasets.Dataset.from_list(rows(40)) for split in ("train_sft", "test_sft")})
    copy.save_to_disk(folder / "HuggingFaceH4/ultrachat_200k")
    write_rows(folder / "ultrachat_train.jsonl", ragged(64))
    write_rows(folder / "ultrachat_test.jsonl", ragged(32, first=500))
    return folder


def ragged(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Rows whose numbers of targets differ by a factor of ten."""
    made = rows(count, first)
    for number, row in enumerate(made):
        row["messages"][1]["content"] *= 1 + number * 7 % 10
    return made


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inside the directory, with a cache of its own."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return folder


def launch(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """`python launch.py ARGUMENTS` with the example's file, in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["launch.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path("example.py", run_name="__main__")
    return int(ended.value.code or 0)


def steps(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_final(run: Path, *weights: str) -> None:
    """`FINAL/` with model weights, tokenizer, optimizer, scheduler, metrics.json."""
    final = run / "FINAL"
    for name in (*weights, "tokenizer.json", "metrics.json", "training_state/worker.json"):
        assert (final / name).is_file(), name
    assert list((final / "training_state").rglob("*.safetensors")), "no optimizer"
    assert json.loads((final / "metrics.json").read_text())["step"] == 2
    state = json.loads((final / "training_state/worker.json").read_text())
    assert state["step"] == 2  # of which the rate of the next step is a function


def module_at(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain(launcher: Any, folder: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The loop of plain PyTorch in one process, each step's rows in one batch: what it logs, and the weights."""
    tokenizer = AutoTokenizer.from_pretrained(folder / MODEL)
    with quietly():
        model = AutoModelForCausalLM.from_pretrained(folder / MODEL, dtype=torch.float64)
    groups = [[p for p in model.parameters() if (p.ndim > 1) is decays] for decays in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.01}, {"params": groups[1], "weight_decay": 0.0}]
    )

    def nll(batch: dict[str, Any]) -> torch.Tensor:
        ids, mask = batch["target_combined_input_ids"], batch["target_combined_attention_mask"]
        logits = model(ids, attention_mask=mask).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["target_labels"][:, 1:].flatten())

    logged = []
    (held_out,) = launcher.SFTDataLoader(["ultrachat"], tokenizer, "test", 32)
    for step, batch in enumerate(launcher.SFTDataLoader(["ultrachat"], tokenizer, "train", 32)):
        rate = 5e-6 * (1 + math.cos(math.pi * step / 2)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = nll(batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            evaluated = nll(held_out).item()
        logged.append({
            "train/loss": loss.item(), "loss/train": loss.item(), "logps/train": -loss.item(),
            "train/grad_norm": norm.item(), "train/learning_rate": rate,
            "eval/loss": evaluated, "loss/eval": evaluated, "logps/eval": -evaluated,
        })  # fmt: skip
    return logged, model.state_dict()


def assert_logged(run: Path, expected: list[dict[str, float]]) -> None:
    found = steps(run)
    assert [line["step"] for line in found] == [1, 2]
    for line, wanted in zip(found, expected, strict=True):
        for key, value in wanted.items():
            assert line[key] == pytest.approx(value, rel=1e-10), key
    final = json.loads((run / "FINAL/metrics.json").read_text())
    assert final["eval/loss"] == pytest.approx(expected[-1]["eval/loss"], rel=1e-10)  # loaded afresh


def assert_weights(file: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(file)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value.double(), expected[name].double(), rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_both_commands_on_accelerates_processes(here: Path, processes: int):
    """The printed class over batches of its own, two micro-batches on each rank, in full and with LoRA."""
    pytest.importorskip("accelerate", reason="accelerate is not installed, which starts the processes here")
    from hydra import compose, initialize_config_dir

    before, after = words(BASIC)
    second = words(WITH_LORA)[1]
    before[before.index("29501")] = str(free_ports(1)[0])
    assert before[:2] == ["accelerate", "launch"]
    fewer = [] if processes == 4 else ["--num_processes", str(processes)]
    command = [sys.executable, "-m", "accelerate.commands.launch", *fewer, *before[2:], "launch.py", *after]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "SECOND": shlex.join(second),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run, lora = here / "models/llama3-8B-sft", here / "runs/llama3-8B-sft-lora"
    for directory in (run, lora):  # of the other number of processes
        shutil.rmtree(directory, ignore_errors=True)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "mixed_precision: bf16 (actor.model.precision decides)" in " ".join((done.stdout + done.stderr).split())

    assert_final(run, "model.safetensors", "config.json")
    assert_final(lora, "adapter_model.safetensors", "adapter_config.json")
    for directory in (run, lora):
        assert json.loads((directory / "manifest.json").read_text())["world_size"] == processes
        actor = OmegaConf.load(directory / "config.yaml").actor
        assert (actor.global_batch_size, actor.micro_batch_size) == (32, 32 // processes // 2)
    launcher = module_at(here / "launch.py")
    logged, weights = plain(launcher, here)
    assert_logged(run, logged)
    assert_weights(run / "FINAL/model.safetensors", weights)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run / "FINAL"), AutoTokenizer.from_pretrained(run / "FINAL")
    assert model(**tokenizer("What is 1", return_tensors="pt")).logits.isfinite().all()

    config = json.loads((lora / "FINAL/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (64, 256)
    with initialize_config_dir(str(here / "config"), version_base=None):
        alone = compose("config", overrides=[*second, "exp_name=alone"])
    launcher.main(alone)  # on one rank, two micro-batches as well
    assert_logged(lora, [{key: line[key] for key in logged[0]} for line in steps(here / "runs/alone")])
    assert_weights(
        lora / "FINAL/adapter_model.safetensors", load_file(here / "runs/alone/FINAL/adapter_model.safetensors")
    )


def test_the_example_starts_four_processes():
    """Its file is one that accelerate reads, and says nothing that shardtune would not act on."""
    pytest.importorskip("accelerate", reason="accelerate is not installed, whose file this is")
    from accelerate.commands.config.config_args import load_config_from_file

    config: Any = load_config_from_file(str(EXAMPLE / "accelerate_config/fsdp_4gpu.yaml"))
    assert (config.num_processes, config.distributed_type, config.mixed_precision) == (4, "MULTI_GPU", "no")
    assert not config.fsdp_config


@pytest.mark.lengthy
def test_the_command_with_lora_by_the_example_alone(here: Path, monkeypatch: pytest.MonkeyPatch):
    """With the package's own trainer and data: the rows of the Hub's copy; one process, and another name."""
    _, after = words(WITH_LORA)
    assert launch(*after, "exp_name=example", monkeypatch=monkeypatch) == 0
    run = here / "runs/example"
    assert_final(run, "adapter_model.safetensors", "adapter_config.json")
    for line in steps(run):
        assert line["loss/train"] == pytest.approx(line["train/loss"], rel=1e-5)
        assert line["logps/train"] == pytest.approx(-line["train/loss"], rel=1e-5)
        assert {"train/learning_rate", "train/grad_norm"} <= line.keys()
    assert steps(run)[0]["train/learning_rate"] == 5e-6
    module_at(here / "example.py").main(OmegaConf.load(run / "config.yaml"))  # of a finished run: nothing is left to do
    assert [line["step"] for line in steps(run)] == [1, 2]


def test_a_key_that_does_not_exist_is_an_error(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    _, after = words(WITH_LORA)
    assert launch(*after, "++model.peft.lora_rank=3", monkeypatch=monkeypatch) == 2
    assert "model.peft.lora_rank" in capsys.readouterr().err


def test_the_signature_is_the_printed_one():
    assert shardtune.SFTTrainer.use_reference_model is False
    assert issubclass(shardtune.SFTTrainer, shardtune.FSDPSftWorker)
    parameters = inspect.signature(shardtune.SFTTrainer.get_batch_metrics).parameters
    assert list(parameters) == ["self", "batch", "mode"]
    assert parameters["mode"].default == "train"
    made_of = list(inspect.signature(shardtune.SFTTrainer).parameters)
    assert made_of[:4] == ["config", "model", "train_dataset", "eval_dataset"]
    assert inspect.signature(shardtune.SFTTrainer).parameters["eval_dataset"].default is None


def test_the_defaults_are_the_printed_ones(here: Path):
    recipe = load_recipe(None, words(BASIC)[1])
    assert recipe.actor.optim.lr == 5e-6
    assert recipe.runner.max_epochs == 1
    assert recipe.actor.global_batch_size == 32
    assert recipe.actor.model.is_lora is False
    assert load_recipe(None, [*words(BASIC)[1], "lr=2e-5"]).actor.optim.lr == 2e-5
