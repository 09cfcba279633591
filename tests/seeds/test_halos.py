"""HALOs' SFT trainer as its page prints it: both commands, word by word after `launch.py`, and what they leave behind.

Changed against the print: where models and runs lie (`PLACES`), the port, and what accelerate's file says of this
machine (two processes instead of four GPUs). `datasets=[ultrachat]` finds its rows in the working directory.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

import shardtune
from shardtune.config import load_recipe
from tests.support.tiny_run import free_ports
from tests.support.workspace import make_model, make_tokenizer, quietly, rows

BASIC = r"""
accelerate launch \
    --config_file accelerate_config/fsdp_4gpu.yaml \
    --main_process_port 29501 \
    launch.py \
    loss=sft \
    model=llama \
    datasets=[ultrachat] \
    exp_name=llama3-8B-sft \
    ++cache_dir=/models \
    ++model.name_or_path=meta-llama/Meta-Llama-3-8B
"""
WITH_LORA = r"""
accelerate launch \
    --config_file accelerate_config/fsdp_4gpu.yaml \
    launch.py \
    loss=sft \
    model=llama \
    datasets=[ultrachat] \
    exp_name=llama3-8B-sft-lora \
    ++model.name_or_path=meta-llama/Meta-Llama-3-8B \
    ++model.use_peft=true \
    ++model.peft.lora_r=64 \
    ++model.peft.lora_alpha=256
"""
PLACES = {"++cache_dir=/models": "++cache_dir=models", "meta-llama/Meta-Llama-3-8B": "./llama"}
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_sync_module_states: true
  fsdp_version: 2
machine_rank: 0
mixed_precision: bf16
num_machines: 1
num_processes: 2
use_cpu: false
"""
EXAMPLE = Path(__file__).parents[2] / "examples" / "halos"


def words(command: str) -> tuple[list[str], list[str]]:
    """A printed command before and after `launch.py`, with its places exchanged."""
    for printed, here in PLACES.items():
        command = command.replace(printed, here)
    given = shlex.split(command.replace("\\\n", " "))
    place = given.index("launch.py")
    return given[:place], given[place + 1 :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as HALOs' users have one: launch.py, a model, a copy of the data set under its name on the Hub."""
    import datasets

    folder = tmp_path_factory.mktemp("halos")
    shutil.copy(EXAMPLE / "launch.py", folder)
    (folder / "accelerate_config").mkdir()
    (folder / "accelerate_config/fsdp_4gpu.yaml").write_text(ACCELERATE)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "llama")
    with quietly():
        make_model(len(tokenizer)).save_pretrained(folder / "llama")
    copy = datasets.DatasetDict({split: datasets.Dataset.from_list(rows(40)) for split in ("train_sft", "test_sft")})
    copy.save_to_disk(folder / "HuggingFaceH4/ultrachat_200k")
    return folder


@pytest.fixture
def here(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inside the directory, with a cache of its own."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return folder


def launch(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """`python launch.py ARGUMENTS` in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["launch.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path("launch.py", run_name="__main__")
    return int(ended.value.code or 0)


def outside(*command: str) -> None:
    """A command in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def steps(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_final(run: Path, *weights: str) -> None:
    """`FINAL/` with model weights, tokenizer, optimizer, scheduler, metrics.json."""
    final = run / "FINAL"
    for name in (*weights, "tokenizer.json", "metrics.json", "training_state/worker.json"):
        assert (final / name).is_file(), name
    assert list((final / "training_state").rglob("*.safetensors")), "no optimizer"
    assert json.loads((final / "metrics.json").read_text())["step"] == 2  # 40 rows in steps of 32
    state = json.loads((final / "training_state/worker.json").read_text())
    assert state["step"] == 2  # of which the rate of the next step is a function


def test_the_basic_command_under_accelerate(here: Path):
    pytest.importorskip("accelerate", reason="accelerate is not installed, which starts the processes here")
    before, after = words(BASIC)
    before[before.index("29501")] = str(free_ports(1)[0])
    assert before[:2] == ["accelerate", "launch"]
    outside(sys.executable, "-m", "accelerate.commands.launch", *before[2:], "launch.py", *after)
    run = here / "models/llama3-8B-sft"
    assert_final(run, "model.safetensors", "config.json")
    assert [line["step"] for line in steps(run)] == [1, 2]
    assert all({"loss/train", "logps/train"} <= line.keys() for line in steps(run))
    assert json.loads((run / "manifest.json").read_text())["world_size"] == 2
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run / "FINAL"), AutoTokenizer.from_pretrained(run / "FINAL")
    assert model(**tokenizer("What is 1", return_tensors="pt")).logits.isfinite().all()


def test_the_example_starts_four_processes():
    """Its file is one that accelerate reads, and says nothing that shardtune would not act on."""
    pytest.importorskip("accelerate", reason="accelerate is not installed, whose file this is")
    from accelerate.commands.config.config_args import load_config_from_file

    config: Any = load_config_from_file(str(EXAMPLE / "accelerate_config/fsdp_4gpu.yaml"))
    assert (config.num_processes, config.distributed_type, config.mixed_precision) == (4, "MULTI_GPU", "no")
    assert not config.fsdp_config


def test_the_command_with_lora_under_torchrun(here: Path):
    _, after = words(WITH_LORA)
    port = f"--master-port={free_ports(1)[0]}"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", port)
    outside(*launcher, "launch.py", *after)
    run = here / "runs/llama3-8B-sft-lora"
    assert_final(run, "adapter_model.safetensors", "adapter_config.json")
    config = json.loads((run / "FINAL/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (64, 256)
    assert [line["step"] for line in steps(run)] == [1, 2]


@pytest.mark.parametrize("command", [BASIC, WITH_LORA], ids=["basic", "lora"])
def test_both_commands_by_python_alone(here: Path, command: str, monkeypatch: pytest.MonkeyPatch):
    """With the trainer of that page: one word more, and another name."""
    _, after = words(command)
    name = f"alone-{'lora' if command is WITH_LORA else 'basic'}"
    after = [f"exp_name={name}" if word.startswith("exp_name=") else word for word in after]
    after = [word for word in after if not word.startswith("++cache_dir")]
    assert launch(*after, "actor.worker=sft_trainer", monkeypatch=monkeypatch) == 0
    run = here / "runs" / name
    for line in steps(run):
        assert line["loss/train"] == pytest.approx(line["train/loss"], rel=1e-5)
        assert line["logps/train"] == pytest.approx(-line["train/loss"], rel=1e-5)
        assert {"train/learning_rate", "train/grad_norm"} <= line.keys()
    assert steps(run)[0]["train/learning_rate"] == 5e-6
    launcher = _launcher(here)
    launcher.main(OmegaConf.load(run / "config.yaml"))  # of a finished run: nothing is left to do
    assert [line["step"] for line in steps(run)] == [1, 2]


def _launcher(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("halos_launch", folder / "launch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
