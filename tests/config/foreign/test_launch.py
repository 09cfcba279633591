"""Launchers of other trainers: each of their options has an outcome, and what they set is in the recipe."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from shardtune.config.foreign.command_line import read_command_line
from shardtune.config.foreign.conversion import Kind
from shardtune.config.foreign.convert import Converted, convert
from shardtune.errors import ConfigError
from tests.config.foreign.conftest import value

FLAGS = "--model_name_or_path me/model --dataset_name me/rows"
OFFLOAD, PRECISION = "actor.fsdp_config.cpu_offload", "actor.model.precision"
RANKS, ROWS = "runner.nproc_per_node", "actor.global_batch_size"
LLAMA_FACTORY = "--stage sft --dataset me/rows --dataset_dir ONLINE --cutoff_len 64 --model_name_or_path me/model"
FSDP = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "downcast_bf16": "no",
    "fsdp_config": {
        "fsdp_offload_params": True,
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_activation_checkpointing": False,
    },
    "gpu_ids": None,
    "main_process_port": 29501,
    "mixed_precision": "fp16",
    "num_machines": 2,
    "num_processes": 16,
    "tpu_env": [],
    "typo_key": 3,
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def of(typed: str, world_size: int | None = None, **files: dict[str, object]) -> Converted:
    """Convert a command line, beside files of accelerate."""
    for name, content in files.items():
        Path(f"{name}.yaml").write_text(yaml.safe_dump(content))
    given = read_command_line(shlex.split(typed))
    return convert(given, world_size=world_size)


def kinds(found: Converted) -> dict[str, Kind]:
    return {name: outcome.kind for name, outcome in found.conversion.outcomes.items()}


@pytest.mark.parametrize(
    ("typed", "rows", "ranks"),
    [
        ("torchrun --nproc_per_node 4 --nnodes 2", 8, 4),
        ("accelerate launch --num_processes 8 --num_machines 2", 8, 4),
        ("deepspeed --num_gpus 4 --num_nodes 2", 8, 4),
        ("torchrun --nproc_per_node 4", 4, 4),
        ("torchrun --nproc_per_node gpu", 1, "absent"),
    ],
)
def test_the_rows_of_a_step_are_those_of_all_hosts(typed: str, rows: int, ranks: object) -> None:
    found = of(f"{typed} sft.py {FLAGS} --per_device_train_batch_size 1")
    assert (value(found, ROWS), value(found, RANKS)) == (rows, ranks)
    named = [name for name in kinds(found) if name.startswith(typed.partition(" --")[0])]
    assert {kinds(found)[name] for name in named} == {Kind.MISSING if "gpu" in typed.split() else Kind.TRANSLATED}
    assert ("start each with torchrun --nnodes 2" in found.report) == (rows == 8)


def test_the_number_on_the_own_command_line_replaces_that_of_the_launcher() -> None:
    found = of(f"torchrun --nproc_per_node gpu --nnodes 1:4 sft.py {FLAGS} --per_device_train_batch_size 1", 6)
    assert (value(found, ROWS), value(found, RANKS)) == (6, 6)
    assert kinds(found)["torchrun --nnodes"] is Kind.NOT_NEEDED


def test_every_option_is_listed() -> None:
    typed = "--mixed_precision fp16 --use_fsdp --fsdp_offload_params true --main_process_ip a --fsdp_version 2 --foo 1"
    found = of(f"accelerate launch {typed} -t 3 sft.py {FLAGS} --bf16 false")
    outcomes = {name.removeprefix("accelerate launch --"): kind for name, kind in kinds(found).items()}
    assert {
        name: outcomes[name] for name in outcomes if "accelerate" not in name and name not in found.conversion.tree
    } == {
        "mixed_precision": Kind.TRANSLATED,
        "use_fsdp": Kind.NOT_NEEDED,
        "fsdp_offload_params": Kind.TRANSLATED,
        "main_process_ip": Kind.NOT_NEEDED,
        "fsdp_version": Kind.NOT_NEEDED,
        "foo": Kind.UNKNOWN,
        "tee": Kind.NOT_NEEDED,
    }
    assert (value(found, OFFLOAD), value(found, PRECISION)) == (True, "fp16")
    assert set(found.conversion.outcomes) == set(found.conversion.given)
    assert "# accelerate launch --foo: 1" in found.recipe


def test_the_file_of_accelerate_is_read() -> None:
    found = of(f"accelerate launch --config_file acc.yaml --num_processes 8 sft.py {FLAGS} --bf16 false", acc=FSDP)
    expected = {
        RANKS: 4,
        PRECISION: "fp16",
        OFFLOAD: True,
        "actor.fsdp_config.reshard_after_forward": False,
        "actor.fsdp_config.wrap": ["LlamaDecoderLayer"],
        "runner.master_port": 29501,
        "actor.model.gradient_checkpointing": True,  # TRL's default
    }
    assert {key: value(found, key) for key in expected} == expected
    assert "does not load" not in found.report
    assert set(found.conversion.outcomes) == set(found.conversion.given)
    known = kinds(found)
    assert known["acc.yaml num_processes"] is Kind.NOT_NEEDED  # the flag replaces it
    assert known["acc.yaml num_machines"] is known["acc.yaml mixed_precision"] is Kind.TRANSLATED
    assert known["acc.yaml typo_key"] is Kind.UNKNOWN
    own = found.conversion.outcomes["acc.yaml fsdp_config.fsdp_activation_checkpointing"]
    assert own.text == "TRL's own keys decide: actor.model.gradient_checkpointing: true"


def test_a_file_that_is_not_at_hand_is_missing_and_one_that_is_broken_an_error() -> None:
    found = of(f"accelerate launch --config_file acc.yaml --fsdp_offload_params true sft.py {FLAGS}")
    outcome = found.conversion.outcomes["accelerate launch --config_file"]
    assert (outcome.kind, "--world-size N" in outcome.text) == (Kind.MISSING, True)
    assert value(found, OFFLOAD) is True
    Path("acc.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"acc\.yaml"):
        of(f"accelerate launch --config_file acc.yaml sft.py {FLAGS}")


def test_settings_of_what_is_not_used_have_no_effect() -> None:
    changed = {**FSDP, "distributed_type": "MULTI_GPU", "deepspeed_config": {"offload_param_device": "cpu"}}
    found = of(f"accelerate launch --config_file acc.yaml sft.py {FLAGS}", acc=changed)
    assert value(found, OFFLOAD) == "absent"
    assert kinds(found)["acc.yaml fsdp_config.fsdp_offload_params"] is Kind.NOT_NEEDED
    assert kinds(found)["acc.yaml deepspeed_config.offload_param_device"] is Kind.NOT_NEEDED


def test_deepspeed_of_accelerate_is_read() -> None:
    content = {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "zero_stage": 3,
            "offload_optimizer_device": "cpu",
            "offload_param_device": "none",
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1.0,
        },
    }
    found = of(f"accelerate launch --config_file acc.yaml sft.py {FLAGS}", acc=content)
    assert value(found, OFFLOAD) is True
    known = {name.rpartition(".")[2]: kind for name, kind in kinds(found).items()}
    assert known["gradient_accumulation_steps"] is Kind.MISSING  # TRL's own is 1
    assert known["gradient_clipping"] is known["zero_stage"] is known["offload_param_device"] is Kind.NOT_NEEDED
    Path("z.json").write_text(json.dumps({"zero_optimization": {"offload_param": {"device": "cpu"}}}))
    given = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "z.json"}}
    assert value(of(f"accelerate launch --config_file acc.yaml sft.py {FLAGS}", acc=given), OFFLOAD) is True


@pytest.mark.parametrize(
    ("flags", "precision", "kind"),
    [
        (f"{FLAGS} --bf16 false", "fp16", Kind.TRANSLATED),
        (f"{FLAGS} --bf16", "absent", Kind.NOT_NEEDED),
        (FLAGS, "absent", Kind.MISSING),  # TRL switches bf16 on, which counts more
        (LLAMA_FACTORY, "fp16", Kind.TRANSLATED),
        (f"{LLAMA_FACTORY} --bf16 true", "absent", Kind.NOT_NEEDED),
    ],
)
def test_mixed_precision_counts_where_the_trainer_sets_none(flags: str, precision: str, kind: Kind) -> None:
    found = of(f"accelerate launch --mixed_precision fp16 train.py {flags}")
    assert (value(found, PRECISION), kinds(found)["accelerate launch --mixed_precision"]) == (precision, kind)
    assert "computes in the model's own dtype" not in found.report


def test_the_command_of_trl_takes_options_of_accelerate() -> None:
    found = of(f"trl sft {FLAGS} --per_device_train_batch_size 1 --num_processes 4 --accelerate_config zero3")
    assert (value(found, ROWS), value(found, RANKS)) == (4, 4)
    assert (kinds(found)["num_processes"], kinds(found)["accelerate_config"]) == (Kind.TRANSLATED, Kind.MISSING)
    found = of(f"trl sft {FLAGS} --accelerate_config acc.yaml", acc=FSDP)
    assert (value(found, ROWS), value(found, OFFLOAD)) == (8 * 16, True)


@pytest.mark.parametrize(("used", "rows", "tensor"), [(True, 4, 2), (False, 16, "absent")])
def test_processes_that_share_rows_by_accelerate_count_once(used: bool, rows: int, tensor: object):
    sizes = {f"parallelism_config_{name}_size": 2 for name in ("dp_shard", "tp", "cp")}
    file = {"num_processes": 8, "distributed_type": "FSDP", "parallelism_config": sizes, "fsdp_config": {}}
    file |= {} if used else {"use_parallelism_config": False}
    started = f"accelerate launch --config_file a.yaml sft.py {FLAGS} --per_device_train_batch_size 2"
    found = of(started, a=file)
    assert value(found, ROWS) == rows
    assert value(found, RANKS) == 8
    assert [value(found, f"actor.parallel.{name}") for name in ("tensor", "sequence", "data_shard")] == [tensor] * 3
    assert "does not load" not in found.report


def test_sizes_by_flags_alone_have_no_effect_as_in_accelerate():
    sizes = "--num_processes 8 --parallelism_config_tp_size 2"
    off = of(f"accelerate launch {sizes} sft.py {FLAGS} --per_device_train_batch_size 2")
    assert (value(off, ROWS), value(off, "actor.parallel.tensor")) == (16, "absent")
    on = of(f"accelerate launch {sizes} --use_parallelism_config sft.py {FLAGS} --per_device_train_batch_size 2")
    assert (value(on, ROWS), value(on, "actor.parallel.tensor")) == (8, 2)


def test_fp8_of_a_launcher_is_answered_by_its_key():
    found = of(f"accelerate launch --mixed_precision fp8 sft.py {FLAGS}")
    assert "write model.fp8.scaling: tensorwise" in " ".join(found.report.split())
