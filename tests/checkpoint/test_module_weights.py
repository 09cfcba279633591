"""A plain module's weights on disk: whole, once, readable by others, and the same when they are read back."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from shardtune.checkpoint import export_check, export_check_process
from shardtune.checkpoint.export_check import check_reload
from shardtune.checkpoint.hf_save import save_pretrained
from shardtune.checkpoint.module_weights import in_files, load_plain, save_plain
from shardtune.checkpoint.peft_directory import merging, save_adapter
from shardtune.checkpoint.safetensors_file import read_header
from shardtune.config import LoraConfig
from shardtune.errors import CheckpointError, ModelError
from shardtune.models.lora.attach import attach_adapter, base_tensors, keep_in_nf4
from shardtune.models.lora.init import initialise_adapter
from shardtune.models.lora.nf4 import NF4Linear, encode
from shardtune.parallel.fsdp2 import shard
from shardtune.parallel.meta_init import materialise, named_tensors
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.shard_units import choose_units
from shardtune.training.build.model import build_empty, load_initial_weights
from shardtune.verify.claims import plain_reader
from tests.parallel.test_fsdp2 import group
from tests.support import tiny_checkpoint
from tests.support import tiny_checkpoint as tiny
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import whole
from tests.support.plain_modules import KINDS, SEED, made

ALONE = Ranks(0, 1, torch.device("cpu"))


def through_disk(folder: str) -> dict[str, dict[str, torch.Tensor]]:
    """Each kind, sharded with its initial weights, saved, and read into another that is sharded too."""
    found = {}
    for kind in KINDS:
        ranks = group()
        first, second = (build_empty(KINDS[kind], SEED)[0] for _ in range(2))
        for model in (first, second):
            shard(model, choose_units(model)[0], ranks, "fp32")
        arguments: dict[str, Any] = {"dtype": torch.float32, "ranks": ranks, "device": ranks.device}
        load_initial_weights(None, first, first, build=KINDS[kind], seed=SEED, **arguments)
        path = Path(folder) / kind
        save_plain(first, path, max_shard_bytes=100 if kind == "perceptron" else 1 << 30)
        ranks.barrier()
        load_initial_weights(path, second, second, build=KINDS[kind], seed=0, **arguments)
        found[kind] = {name: whole(tensor) for name, tensor in named_tensors(second).items()}
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, dict[str, torch.Tensor]]]]:
    folder = tmp_path_factory.mktemp("plain")
    return folder, [through_disk(str(folder / "one")), *run_ranks(through_disk, 2, str(folder / "two"))]


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", KINDS)
def test_what_two_ranks_save_is_what_one_does_and_comes_back(kind: str, saved: Any) -> None:
    folder, found = saved
    expected = named_tensors(made(kind))
    for tensors in found:
        assert tensors[kind].keys() == expected.keys()
        assert all(torch.equal(tensors[kind][name], tensor) for name, tensor in expected.items())
    files = sorted(file.name for file in (folder / "one" / kind).iterdir())
    assert files == sorted(file.name for file in (folder / "two" / kind).iterdir())
    assert (len(files) > 2) == (kind == "perceptron")
    for name in files:
        assert (folder / "one" / kind / name).read_bytes() == (folder / "two" / kind / name).read_bytes()


@pytest.mark.parametrize("kind", ["tied", "bare", "convolutions"])
def test_safetensors_own_reader_fills_the_module(kind: str, saved: Any) -> None:
    file = saved[0] / "one" / kind / "model.safetensors"
    model = KINDS[kind]()
    load_model(model, file)  # strict: a name too few or too many is an error
    expected = made(kind).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert ("out.weight" in load_file(file)) is False


def test_a_dtype_is_for_parameters_and_an_earlier_save_is_replaced(tmp_path: Path) -> None:
    save_plain(made("perceptron"), tmp_path, max_shard_bytes=100)
    model = made("convolutions")
    save_plain(model, tmp_path, dtype=torch.bfloat16)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checksums.json", "model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert {str(found[name].dtype) for name, _ in model.named_parameters()} == {"torch.bfloat16"}
    assert found["layers.1.running_var"].dtype == torch.float32
    assert found["layers.1.num_batches_tracked"].dtype == torch.int64
    places = {name: tensor.start % 64 for name, tensor in read_header(tmp_path / "model.safetensors")[0].items()}
    assert {place for name, place in places.items() if found[name].nbytes % 64 == 0} <= {0}, (
        "kernels need aligned memory"
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="the model cannot be saved"):
        save_plain(model, tmp_path / "file")


def test_an_adapted_model_takes_the_weights_of_the_one_below(tmp_path: Path) -> None:
    expected = made("perceptron").state_dict()
    save_file(expected, tmp_path / "weights.safetensors")
    for base_dtype in ("auto", "nf4"):
        model, _ = build_empty(KINDS["perceptron"], SEED)
        attach_adapter(model, LoraConfig(r=2, target_modules=["up"]))
        if base_dtype == "nf4":
            keep_in_nf4(model, torch.float32)
        materialise(model, dtype=torch.float32, device=ALONE.device)
        supplies = in_files(tmp_path / "weights.safetensors")
        load_plain(model, supplies, where="here", remedy="none")
        layers = {name.replace(".base_layer", ""): module for name, module in model.named_modules()}
        for name in ("blocks.0.up", "blocks.2.down", "head"):
            layer, weight = layers[name], expected[f"{name}.weight"]
            assert isinstance(layer, NF4Linear) == (base_dtype == "nf4"), name
            if isinstance(layer, NF4Linear):
                assert torch.equal(layer.packed, encode(weight))
            else:
                assert torch.equal(dict(layer.named_parameters())["weight"], weight)
        assert torch.equal(layers["blocks.1.norm"].get_parameter("bias"), expected["blocks.1.norm.bias"])
        del supplies["blocks.1.norm.bias"]
        with pytest.raises(ModelError, match=r"17 tensors: 1 missing: blocks\.1\.norm\.bias"):
            load_plain(model, supplies, where="here", remedy="none")


@pytest.mark.lengthy
@pytest.mark.parametrize("base_dtype", ["auto", "nf4"])
def test_fresh_weights_are_the_same_below_an_adapter(base_dtype: str) -> None:
    def build() -> nn.Module:
        return tiny.empty(tiny.config("llama"))

    arguments: dict[str, Any] = {"build": build, "seed": 3, "dtype": torch.float32, "ranks": ALONE, "by_class": True}
    plain, adapted = (build_empty(build, 3)[0] for _ in range(2))
    load_initial_weights(None, plain, plain, device=ALONE.device, **arguments)
    attach_adapter(adapted, LoraConfig(r=2, use_dora=True))
    if base_dtype == "nf4":
        keep_in_nf4(adapted, torch.float32)
    load_initial_weights(None, adapted, adapted, device=ALONE.device, **arguments)
    expected = dict(plain.named_parameters())
    assert float(expected["model.layers.0.mlp.up_proj.weight"].detach().std()) > 0.01
    for base in base_tensors(adapted):
        values = expected[base.name].detach()
        assert torch.equal(base.tensor, values if base.layer is None else encode(values)), base.name


class WithEncoder(nn.Module):
    """A model of transformers, with a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = tiny.model("qwen2")
        self.head = nn.Linear(16, 3)


def test_a_part_may_come_from_a_directory_of_transformers_and_the_rest_from_the_constructor(tmp_path: Path) -> None:
    trained = tiny.saved("qwen2", tmp_path)
    with torch.no_grad():
        trained.get_input_embeddings().weight += 1.0  # pyright: ignore[reportOperatorIssue]
    trained.save_pretrained(tmp_path)
    torch.manual_seed(SEED)
    head = WithEncoder().head
    model, _ = build_empty(WithEncoder, SEED)
    arguments: dict[str, Any] = {"build": WithEncoder, "seed": SEED, "dtype": torch.float64, "ranks": ALONE}
    load_initial_weights({"encoder": tmp_path, "head": None}, model, model, device=ALONE.device, **arguments)
    found = model.state_dict()
    assert torch.equal(found["head.weight"], head.weight.double())
    for name, tensor in trained.state_dict().items():
        assert torch.equal(found[f"encoder.{name}"], tensor.double()), name
    model, _ = build_empty(WithEncoder, SEED)
    with pytest.raises(ModelError, match=r"2 tensors: 2 missing: head\.weight, head\.bias\n(.|\n)*'head': None"):
        load_initial_weights({"encoder": tmp_path}, model, model, device=ALONE.device, **arguments)


# Exported directories, looked at by a fresh process.


def test_a_fresh_process_reads_the_same_tensors_or_says_which_differ(tmp_path: Path) -> None:
    model = made("tied")
    save_plain(model, tmp_path, dtype=torch.bfloat16)
    assert check_reload(model, tmp_path) == "read afresh, has the same 11 tensors, bit by bit"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the fresh process would do, in this one."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess:
        try:
            export_check_process.main(command[-3], Path(command[-2]), Path(command[-1]))
        except Exception as error:
            return subprocess.CompletedProcess(command, 1, stderr=str(error))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(export_check.subprocess, "run", run)


@pytest.mark.usefixtures("at_once")
def test_another_model_than_the_trained_one_is_told(tmp_path: Path) -> None:
    model = made("bare")
    save_plain(model, tmp_path)
    model.get_parameter("scale").data += 1e-6
    with pytest.raises(CheckpointError, match="is not the trained one: 1 tensors differ, scale"):
        check_reload(model, tmp_path)


def classifier() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    return BertForSequenceClassification(config)


@pytest.mark.usefixtures("at_once")
def test_a_model_of_transformers_without_logits_is_built_by_its_class(tmp_path: Path) -> None:
    model = classifier()
    save_pretrained(model, tmp_path, dtype=torch.float16)
    told = check_reload(model, tmp_path)
    assert told.startswith("loaded afresh as BertForSequenceClassification by transformers, has the same ")
    model.classifier.weight.data += 0.01
    with pytest.raises(CheckpointError, match=r"1 tensors differ, classifier\.weight"):
        check_reload(model, tmp_path)


@pytest.mark.lengthy
@pytest.mark.usefixtures("at_once")
def test_an_adapter_is_compared_over_its_base_and_merged(tmp_path: Path) -> None:
    tiny.saved("qwen2", tmp_path / "base")
    model, _ = build_empty(lambda: tiny.empty(tiny.config("qwen2")), 0)
    attach_adapter(model, LoraConfig(r=2, alpha=7))
    arguments: dict[str, Any] = {"seed": 0, "dtype": torch.float32, "ranks": ALONE, "device": ALONE.device}
    load_initial_weights(tmp_path / "base", model, model, build=nn.Identity, **arguments)
    initialise_adapter(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.add_(0.3)
    save_adapter(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    assert check_reload(model, tmp_path / "adapter").startswith("loaded afresh, gives the same logits")
    whole_model = merging(model, torch.float32)
    tensors, gather = whole_model.tensors, whole_model.gather
    save_pretrained(model, tmp_path / "merged", dtype=torch.float32, tensors=tensors, gather=gather)  # pyright: ignore[reportArgumentType]
    assert check_reload(model, tmp_path / "merged").startswith("loaded afresh, gives the same logits")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.add_(0.3)
    for directory in ("adapter", "merged"):
        with pytest.raises(CheckpointError, match="gives other logits"):
            check_reload(model, tmp_path / directory)


@pytest.mark.usefixtures("at_once")
def test_a_directory_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="the exported model cannot be loaded"):
        check_reload(made("tied"), tmp_path)


@pytest.mark.parametrize("read", [export_check_process.tensors_in_files, plain_reader.tensors_in_files])
@pytest.mark.parametrize("name", ["model", "adapter_model", "model-00001-of-00002"])
def test_statistics_in_files_of_their_own_are_no_weights(
    read: Callable[[Path], Any], name: str, tmp_path: Path
) -> None:
    save_file({"action.mean": torch.zeros(2)}, tmp_path / "policy_preprocessor.safetensors")
    save_file({"weight": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    if "-of-" in name:
        index = {"weight_map": {"weight": f"{name}.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert list(read(tmp_path)) == ["weight"]


def test_files_that_an_index_of_another_name_lists_are_read(tmp_path: Path) -> None:
    """diffusers writes large models as diffusion_pytorch_model-00001-of-00002.safetensors; what the index does not
    name is left alone."""
    stem = "diffusion_pytorch_model"
    files = [f"{stem}-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, file in zip(["weight", "bias"], files, strict=True):
        save_file({name: torch.ones(2)}, tmp_path / file)
    save_file({"weight": torch.zeros(2)}, tmp_path / "older.safetensors")
    index = {"weight_map": dict(zip(["weight", "bias"], files, strict=True))}
    (tmp_path / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    assert {name: supply.full().tolist() for name, supply in in_files(tmp_path).items()} == {
        "weight": [1.0, 1.0],
        "bias": [1.0, 1.0],
    }


def test_experts_in_fp64_are_compared(tmp_path: Path) -> None:
    """No grouped kernel of torch takes fp64, so the fresh process and the model in memory compute without one."""
    model = tiny_checkpoint.saved("mixtral", tmp_path, torch.float64)
    assert "gives the same logits" in check_reload(model, tmp_path)
