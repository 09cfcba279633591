"""Adapters: what is adapted, how it begins, and that it trains as PEFT in a plain loop does."""

from __future__ import annotations

import re
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, BertForSequenceClassification, GPT2Config
from transformers.pytorch_utils import Conv1D

from shardtune.batch.seeds import derive_seed
from shardtune.checkpoint.hf_load import load_weights
from shardtune.checkpoint.peft_directory import save_adapter
from shardtune.config import LoraConfig, load_recipe
from shardtune.errors import ConfigError, ModelError
from shardtune.models.lora.attach import (
    adapter_config,
    attach_adapter,
    base_tensors,
    detach_adapter,
    is_adapted,
    keep_in_nf4,
    lora_layers,
    trainable_patterns,
)
from shardtune.models.lora.init import initialise_adapter, merged
from shardtune.models.lora.nf4 import NF4Linear, decode, encode
from shardtune.parallel.fsdp2 import shard
from shardtune.parallel.meta_init import fill, init_empty_weights, materialise
from shardtune.training.build.lora import adapt, check_frozen
from shardtune.training.build.model import freeze
from tests.support.adapted import adapted, all_ids, group, loss, train, whole
from tests.support.dist.ranks import run_ranks
from tests.support.tiny_checkpoint import config as tiny_config
from tests.support.tiny_checkpoint import empty, saved
from tests.support.tiny_checkpoint import model as tiny_model

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "alpha": 6.0},
    "rslora": {"r": 4, "alpha": 6.0, "use_rslora": True},
    "dora": {"r": 4, "alpha": 6.0, "use_dora": True},
    "patterns": {
        "r": 4,
        "alpha": 6.0,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "exclude_modules": r".*\.v_proj",
        "layers_to_transform": [1],
        "layers_pattern": ["layers"],
        "rank_pattern": {"q_proj": 2, ".*_proj": 3},
        "alpha_pattern": {"down_proj": 5},
    },
}


def peft_loop(
    base: Path, directory: Path, changes: dict[str, Any], steps: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """PEFT's own model in a plain loop: the losses and the adapter at the end; saves how it began."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    given = {"lora_alpha" if key == "alpha" else key: value for key, value in changes.items()}
    torch.manual_seed(11)
    made = peft.get_peft_model(
        model,
        peft.LoraConfig(
            **{"target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM", **given}
        ),
        autocast_adapter_dtype=False,
    )
    made.save_pretrained(str(directory))
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.01)
    losses = []
    for _ in range(steps):
        total = loss(made, all_ids()) / 36
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses, {name: p.detach() for name, p in made.base_model.model.named_parameters() if p.requires_grad}


def our_loop(
    base: Path, adapters: dict[str, Path], steps: int
) -> dict[str, tuple[list[float], dict[str, torch.Tensor]]]:
    told = {}
    for kind, directory in adapters.items():
        stored = {} if kind == "patterns" else {"adapter_path": str(directory)}
        config = LoraConfig(**{**KINDS[kind], **stored})
        model, weights, ranks = adapted(base, config, "fp64", adapter=directory)
        losses = train(model, weights, ranks, steps)
        told[kind] = losses, {name: whole(p) for name, p in weights.trainable().items()}
    return told


@pytest.mark.lengthy
@pytest.mark.parametrize("steps", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_steps_equal_peft_in_a_plain_loop(tmp_path: Path, steps: int) -> None:
    base = tmp_path / "base"
    saved("qwen2_tied", base)
    wanted = {kind: peft_loop(base, tmp_path / kind, changes, steps) for kind, changes in KINDS.items()}
    adapters = {kind: tmp_path / kind for kind in KINDS}
    for told in (our_loop(base, adapters, steps), *run_ranks(our_loop, 2, base, adapters, steps)):
        for kind, (losses, adapter) in told.items():
            assert losses[0] > losses[-1]
            assert losses == pytest.approx(wanted[kind][0], rel=1e-10, abs=1e-10), kind
            assert adapter.keys() == wanted[kind][1].keys()
            for name, tensor in adapter.items():
                assert float((tensor - wanted[kind][1][name]).abs().max()) < 1e-10, (kind, name)


# How it begins.


class Net(nn.Module):
    """One of each kind that can be adapted."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.line = nn.Linear(24, 10)
        self.turned = Conv1D(9, 7)
        self.picture = nn.Conv2d(3, 8, 3)


LINEAR = ["line", "turned"]
BEGINNINGS: list[tuple[bool | str, list[str], bool]] = [
    (True, ["words", "line", "turned", "picture"], False),
    (True, ["words", "line", "turned", "picture"], True),
    (False, ["line", "picture"], False),
    ("gaussian", LINEAR, False),
    ("orthogonal", ["line"], True),
    ("pissa", LINEAR, False),
    ("pissa_niter_3", LINEAR, False),
    ("olora", ["line"], True),
    ("mica", LINEAR, False),
]


def net() -> Net:
    torch.manual_seed(8)
    return Net()


def begin(init: bool | str, targets: list[str], dora: bool) -> dict[str, torch.Tensor]:
    """An adapter as we begin it, and the base below it, by PEFT's names."""
    values = {name: tensor.detach() for name, tensor in net().named_parameters()}
    with init_empty_weights():
        model = Net()
    attach_adapter(model, LoraConfig(r=4, alpha=6.0, target_modules=targets, init=init, use_dora=dora))
    shard(model, [], group(), "fp32")
    materialise(model, dtype=torch.float32, device=torch.device("cpu"))
    for base in base_tensors(model):
        fill(base.tensor, values[base.name])
    initialise_adapter(model, 7)
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def begin_all() -> list[dict[str, torch.Tensor]]:
    return [begin(*beginning) for beginning in BEGINNINGS]


def peft_begins(init: bool | str, targets: list[str], dora: bool) -> dict[str, torch.Tensor]:
    """The same by PEFT itself, a layer at a time."""
    model = net()
    found: dict[str, torch.Tensor] = {}
    for target in targets:
        config = peft.LoraConfig(
            r=4,
            lora_alpha=6,
            target_modules=[target],
            init_lora_weights=init,  # pyright: ignore[reportArgumentType]
            use_dora=dora,
            fan_in_fan_out=target == "turned",
        )
        torch.manual_seed(derive_seed(7, "lora", target))
        alone = nn.ModuleDict({target: model.get_submodule(target)})
        peft.inject_adapter_in_model(config, alone)
        found |= {name: tensor.detach() for name, tensor in alone.named_parameters()}
    return found


@pytest.mark.lengthy
def test_an_adapter_begins_as_peft_begins_it_on_any_number_of_ranks() -> None:
    everywhere = [begin_all(), *run_ranks(begin_all, 2)]
    for number, beginning in enumerate(BEGINNINGS):
        wanted = peft_begins(*beginning)
        assert any("lora_" in name for name in wanted)
        for told in everywhere:
            for name, tensor in wanted.items():
                assert torch.allclose(told[number][name], tensor, rtol=1e-5, atol=1e-6), (beginning, name)


def test_what_pissa_takes_from_the_base_is_what_it_begins_with() -> None:
    before, after = net().line.weight, begin("pissa", ["line"], False)
    taken = after["line.lora_B.default.weight"] @ after["line.lora_A.default.weight"] * 6 / 4
    assert float(taken.abs().max()) > 0.05
    assert torch.allclose(after["line.base_layer.weight"] + taken, before, atol=1e-6)


@pytest.mark.parametrize("init", [True, "pissa"])
def test_magnitudes_are_exact_in_fp64(init: bool | str, tmp_path: Path) -> None:
    """Of what the layer begins with, which is the base weight, also where PiSSA has taken a part out of that."""
    base, name = tmp_path / "base", "model.layers.0.self_attn.q_proj"
    before = saved("llama", base).get_parameter(f"{name}.weight").detach().double()
    config = LoraConfig(r=2, alpha=6.0, use_dora=True, target_modules=["q_proj"], init=init)
    layer = adapted(base, config, "fp64")[0].get_submodule(name)
    factors = [layer.get_parameter(f"lora_{factor}.default.weight").detach() for factor in "BA"]
    begun = layer.get_parameter("base_layer.weight").detach() + 6 / 2 * (factors[0] @ factors[1])
    torch.testing.assert_close(begun, before, rtol=0, atol=1e-6)
    magnitudes = layer.get_parameter("lora_magnitude_vector.default.weight").detach()
    torch.testing.assert_close(magnitudes, begun.norm(dim=1), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("targets", "init", "message"),
    [
        (["words", "line"], "pissa", r"PEFT does not initialise words \(Embedding\) by pissa"),
        (["line", "picture"], "orthogonal", r"PEFT does not initialise picture \(Conv2d\) by orthogonal"),
        (LINEAR, "olora", r"PEFT's olora takes the weight of turned \(Conv1D\) for its transpose"),
        (["words"], "gaussian", r"init: gaussian has no effect on embeddings.* \(words\)"),
        (["turned"], "mica", r"the adapter of turned has the rank 8, and its weight \[7, 9\] has 7 parts at most"),
    ],
)
def test_an_initialiser_that_a_layer_cannot_have_is_refused_before_training(
    targets: list[str], init: str, message: str
) -> None:
    with init_empty_weights():
        model = Net()
    with pytest.raises(ConfigError, match=message):
        attach_adapter(model, LoraConfig(r=8, target_modules=targets, init=init))


def test_embeddings_that_an_initialiser_passes_over_are_named() -> None:
    notes = attach_adapter(net(), LoraConfig(r=4, target_modules=["words", "line"], init="gaussian"))
    assert any("LoRA on words begins as by init: true; PEFT has no gaussian for embeddings" in note for note in notes)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("whose", ["ours", "peft's"])
def test_mica_trains_one_factor_alone_when_it_is_continued_too(whose: str, tmp_path: Path) -> None:
    base, directory = saved("llama", tmp_path / "base"), tmp_path / "adapter"
    if whose == "ours":
        save_adapter(adapted(tmp_path / "base", LoraConfig(r=4, init="mica"))[0], directory, base=None)
    else:
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="mica", task_type="CAUSAL_LM")
        peft.get_peft_model(base, config).save_pretrained(str(directory))
    _, weights, _ = adapted(tmp_path / "base", LoraConfig(load_from=str(directory)), adapter=directory)
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    made = peft.PeftModel.from_pretrained(fresh, str(directory), is_trainable=True)
    wanted = {name for name, parameter in made.base_model.model.named_parameters() if parameter.requires_grad}
    assert set(weights.trainable()) == wanted
    assert wanted
    assert all("lora_A" in name for name in wanted)


def test_mica_begins_over_four_bits(tmp_path: Path) -> None:
    saved("llama", tmp_path / "base")
    model, weights, _ = adapted(tmp_path / "base", LoraConfig(r=4, init="mica", base_dtype="nf4"))
    factors = [parameter for name, parameter in model.named_parameters() if "lora_B" in name]
    assert factors
    assert all(bool(whole(factor).any()) for factor in factors)
    assert all("lora_A" in name for name in weights.trainable())


def test_a_module_that_peft_cannot_load_beside_lora_is_named() -> None:
    """It takes `lora_dropout` for a module called `out`."""
    heads = nn.ModuleDict({"body": nn.Linear(4, 4), "out": nn.Linear(4, 2), "head": nn.Linear(4, 2)})
    for name, noted in (("out", True), ("head", False)):
        config = peft.LoraConfig(target_modules=["body"], modules_to_save=[name])
        with pytest.raises(TypeError) if noted else nullcontext():
            peft.get_peft_model(deepcopy(heads), config)
        notes = attach_adapter(deepcopy(heads), LoraConfig(target_modules=["body"], modules_to_save=[name]))
        assert any("PEFT cannot load out beside LoRA" in note for note in notes) == noted


# What is adapted.


def names(model: nn.Module) -> set[str]:
    return {name for name, _ in lora_layers(model)}


def test_all_linear_layers_but_the_head() -> None:
    model = empty(tiny_config("llama"))
    kind = type(model)
    assert attach_adapter(model, LoraConfig(r=2)) == []
    assert type(model) is kind
    assert len(names(model)) == 14
    assert "lm_head" not in names(model)
    patterns = trainable_patterns(dict(model.named_parameters()))
    assert patterns[0] == ("model.layers.*.self_attn.q_proj.lora_A.default.weight", 2, 64)
    assert all("lora_" in pattern for pattern, _, _ in patterns)


def test_what_is_listed_as_trained_can_be_pasted_into_freeze_and_groups() -> None:
    for model in (empty(tiny_config("llama")), nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))):
        attach_adapter(model, LoraConfig(r=2))
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        patterns = [pattern for pattern, _, _ in trainable_patterns(dict(model.named_parameters()))]
        assert {name for pattern in patterns for name in trained if re.search(pattern, name)} == trained


def test_names_below_the_adapter_are_those_before_it() -> None:
    for kind in ("qwen2_tied", "mixtral"):
        before = empty(tiny_config(kind))
        wanted = {base.name: tuple(base.tensor.shape) for base in base_tensors(before)}
        assert wanted.keys() == {name for name, _ in before.named_parameters(remove_duplicate=False)}
        parameters = [] if kind == "qwen2_tied" else ["experts.gate_up_proj", "experts.down_proj"]
        attach_adapter(before, LoraConfig(r=2, target_parameters=parameters))
        keep_in_nf4(before, torch.float32)
        assert {base.name: base.shape for base in base_tensors(before)} == wanted
        assert is_adapted(before)


def test_base_weights_load_below_the_adapter_whatever_their_names_on_disk(tmp_path: Path) -> None:
    for kind in ("qwen3_moe", "qwen2_tied"):
        whole_model = saved(kind, tmp_path / kind)
        model = empty(tiny_config(kind))
        attach_adapter(model, LoraConfig(r=2))
        load_weights(model, tmp_path / kind, dtype=torch.float32)
        loaded = {base.name: base.tensor for base in base_tensors(model)}
        for name, tensor in whole_model.named_parameters():
            assert torch.equal(loaded[name], tensor), name


def test_experts_and_routers_are_left_out_with_a_word_or_adapted_by_name() -> None:
    model = empty(tiny_config("qwen3_moe"))
    experts, routers = attach_adapter(model, LoraConfig(r=2))
    assert "target_parameters: [experts.down_proj, experts.gate_up_proj]" in experts
    assert routers.startswith("LoRA leaves out 2 matrices outside linear layers")
    assert routers.endswith("target_parameters: [gate.weight]")
    assert names(model) == {f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qkvo"}
    with pytest.raises(ConfigError, match="matches no parameter") as error:
        attach_adapter(empty(tiny_config("qwen3_moe")), LoraConfig(r=2, target_parameters=["w1"]))
    assert "down_proj, gate_up_proj" in str(error.value)


def test_conv1d_layers_are_linear_layers() -> None:
    model = empty(GPT2Config(n_embd=12, n_head=2, n_layer=1, vocab_size=20, n_positions=8))
    assert attach_adapter(model, LoraConfig(r=2)) == []
    assert names(model) == {
        f"transformer.h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.line = nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 4))
        self.wide = nn.Conv1d(8, 8, 3, dilation=2)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.mirrored = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))])


def test_layers_that_are_not_called_are_left_out_with_a_word() -> None:
    model = Attends()
    (note,) = attach_adapter(model, LoraConfig(r=2))
    assert "nn.MultiheadAttention (attention, …)" in note
    assert names(model) == {"line", "inner.0", "layers.0", "layers.1.0"}
    assert adapter_config(model).target_modules is not None


def test_a_name_that_is_also_an_ending_is_taken_exactly() -> None:
    """PEFT matches the endings of names; `0` in a list would be `layers.0` as well."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ModuleDict({"0": nn.Embedding(3, 3)}))
    attach_adapter(model, LoraConfig(r=2))
    assert names(model) == {"0"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_modules": ["q_proj"]}, "no module of Attends is called q_proj"),
        ({"target_modules": ["attention"]}, "attention is a MultiheadAttention, which cannot be adapted"),
        ({"target_modules": ["out_proj"]}, "is inside an nn.MultiheadAttention"),
        ({"target_modules": ["wide"]}, "wide is a Conv1d with dilation, which cannot be adapted"),
        ({"target_modules": ["depthwise"]}, "depthwise is a Conv2d with groups, which cannot be adapted"),
        ({"target_modules": ["mirrored"]}, "mirrored is a Conv2d with padding_mode, which cannot be adapted"),
        ({"target_modules": ["inner"]}, "inner is a Sequential, which cannot be adapted"),
        ({"target_modules": ["line"], "modules_to_save": ["line"]}, "line is both adapted and trained in full"),
        ({"modules_to_save": ["lines"]}, "is called lines"),
        ({"target_parameters": ["line.bias"]}, "has not two or three dimensions"),
    ],
)
def test_what_cannot_be_adapted_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        attach_adapter(Attends(), LoraConfig(r=2, **changes))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "inside"),
    [
        ({"layers_to_transform": 1}, {"model.layers.1"}),
        ({"layers_to_transform": [0], "layers_pattern": "layers", "exclude_modules": ["o_proj"]}, {"model.layers.0"}),
        (
            {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [0], "rank_pattern": {"lm_head": 5}},
            {"model.layers.0", "lm_head"},
        ),
    ],
)
def test_chosen_layers_and_modules_are_those_of_the_file_that_peft_loads(
    tmp_path: Path, changes: dict[str, Any], inside: set[str]
) -> None:
    model, again = empty(tiny_config("llama")), empty(tiny_config("llama"))
    attach_adapter(model, LoraConfig(r=2, **changes))
    ranks = {name: layer.r["default"] for name, layer in lora_layers(model)}
    assert {name.partition(".self_attn")[0].partition(".mlp")[0] for name in ranks} == inside
    assert any(name.endswith("o_proj") for name in ranks) == (changes["layers_to_transform"] == 1)
    adapter_config(model).save_pretrained(str(tmp_path))
    peft.inject_adapter_in_model(peft.PeftConfig.from_pretrained(str(tmp_path)), again, low_cpu_mem_usage=True)
    assert {name: layer.r["default"] for name, layer in lora_layers(again)} == ranks


def test_a_pattern_adapts_the_linear_layers_whose_whole_names_it_matches(tmp_path: Path) -> None:
    model, again = empty(tiny_config("llama")), empty(tiny_config("llama"))
    attach_adapter(model, LoraConfig(r=2, target_modules=r".*\.layers\.0\..*|.*\.1\..*\.(q|v)_proj"))
    names = {name for name, _ in lora_layers(model)}
    assert {name.rpartition(".")[2] for name in names if ".layers.1." in name} == {"q_proj", "v_proj"}
    assert len([name for name in names if ".layers.0." in name]) == 7
    adapter_config(model).save_pretrained(str(tmp_path))
    peft.inject_adapter_in_model(peft.PeftConfig.from_pretrained(str(tmp_path)), again, low_cpu_mem_usage=True)
    assert {name for name, _ in lora_layers(again)} == names


def test_patterns_reach_stacked_experts_and_keep_their_order_in_the_file(tmp_path: Path) -> None:
    """PEFT sorts them when it saves; the first that matches decides."""
    config = LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=["experts.down_proj"],
        rank_pattern={"1.self_attn.q_proj": 3, ".*_proj": 4},
        alpha_pattern={"experts.down_proj": 5.0},
    )
    model = empty(tiny_config("qwen3_moe"))
    attach_adapter(model, config)
    ranks = {name: layer.r["default"] for name, layer in lora_layers(model)}
    assert ranks == {f"model.layers.{i}.self_attn.q_proj": 4 - i for i in (0, 1)} | {
        f"model.layers.{i}.mlp.experts": 4 for i in (0, 1)
    }
    assert {layer.lora_alpha["default"] for name, layer in lora_layers(model) if "experts" in name} == {5}
    adapter_config(model).save_pretrained(str(tmp_path))
    again = empty(tiny_config("qwen3_moe"))
    attach_adapter(again, LoraConfig(load_from=str(tmp_path)))
    assert {name: layer.r["default"] for name, layer in lora_layers(again)} == ranks


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["norm"]}, ""),
        ({"target_modules": r".*\.(q|up)_proj"}, ""),
        ({"target_modules": ["proj"]}, "target_modules: no module"),
        ({"target_modules": ["q_proj"]}, "leaves out model.layers.0.mlp.up_proj, which the adapter in"),
        ({"target_modules": "all-linear"}, "means model.layers.0.mlp.down_proj, which the adapter in"),
        ({"modules_to_save": ["input_layernorm"]}, "modules_to_save means model.layers.0.input_layernorm, which"),
    ],
)
def test_the_words_of_a_recipe_mean_the_modules_of_the_adapter_that_it_starts_from(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    model = empty(tiny_config("llama"))
    attach_adapter(model, LoraConfig(target_modules=["q_proj", "up_proj"], modules_to_save=["norm"]))
    adapter_config(model).save_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match=re.escape(message)) if message else nullcontext():
        attach_adapter(empty(tiny_config("llama")), LoraConfig(load_from=str(tmp_path), **given))


@pytest.mark.parametrize(
    ("changes", "message", "remedy"),
    [
        ({"rank_pattern": {"q_prj": 4}}, "rank_pattern: q_prj matches no adapted module", "q_proj"),
        ({"rank_pattern": {"lm_head": 4}}, "rank_pattern: lm_head matches no adapted module", "names here are"),
        ({"alpha_pattern": {".*proj": 4, "q_proj": 8}}, "q_proj decides about no module", "narrower pattern first"),
        ({"target_modules": ".*q_prj"}, ".*q_prj matches the whole name of no linear layer", "q_proj"),
        ({"exclude_modules": ["up_prj"]}, "exclude_modules: up_prj is the name of no module", "up_proj"),
        ({"exclude_modules": "up_proj"}, "up_proj matches no whole name of a module", "[up_proj]"),
        ({"exclude_modules": ["mlp"]}, "mlp is a module with adapted ones inside", r"'.*mlp\..*'"),
        ({"exclude_modules": ".*proj"}, "leaves no module to adapt", "exclude fewer"),
        ({"layers_to_transform": [0, 2]}, "no targeted module is in layer 2", "layers here are 0, 1"),
        ({"layers_to_transform": [0], "layers_pattern": ["layer"]}, "layer is no list with targeted", "layers"),
    ],
)
def test_a_choice_without_effect_is_refused_with_the_nearest_names(
    changes: dict[str, Any], message: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as error:
        attach_adapter(empty(tiny_config("llama")), LoraConfig(r=2, **changes))
    assert message in error.value.what
    assert remedy in str(error.value.remedy)
    assert error.value.where is not None
    assert error.value.where.rpartition(".")[2] in changes


def test_an_excluded_module_with_a_named_parameter_is_refused() -> None:
    config = LoraConfig(r=2, target_parameters=["experts.down_proj"], exclude_modules=["experts"])
    with pytest.raises(ConfigError, match="of which target_parameters names"):
        attach_adapter(empty(tiny_config("qwen3_moe")), config)


def test_modules_trained_in_full_stay_what_they_are_and_bring_what_they_share() -> None:
    model = empty(tiny_config("qwen2_tied"))
    (note,) = attach_adapter(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"]))
    assert "lm_head shares its weights" in note
    assert type(model.get_output_embeddings()) is nn.Linear
    assert model.get_output_embeddings().weight.requires_grad
    assert adapter_config(model).modules_to_save == ["lm_head", "model.embed_tokens"]


class Tied(nn.Module):
    """A module whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def test_a_note_says_that_a_tied_weight_of_a_plain_module_is_two_when_merged() -> None:
    (note,) = attach_adapter(Tied(), LoraConfig(r=2, target_modules=["embed"]))
    assert note.startswith("LoRA on embed does not reach head.weight, the same weight under another name")
    assert not attach_adapter(empty(tiny_config("qwen2_tied")), LoraConfig(r=2, target_modules=["embed_tokens"]))


def test_it_can_be_taken_out_again() -> None:
    model = tiny_model("qwen3_moe")
    before = dict(model.named_parameters())
    attach_adapter(model, LoraConfig(r=2, target_parameters=["experts.gate_up_proj", "experts.down_proj"]))
    detach_adapter(model)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is parameter for name, parameter in before.items())


def test_a_layer_can_be_merged_more_than_once() -> None:
    with init_empty_weights():
        model = Net()
    attach_adapter(model, LoraConfig(r=4, init=False, target_modules=["line"]))
    materialise(model, dtype=torch.float32, device=torch.device("cpu"))
    initialise_adapter(model, 3)
    nn.init.ones_(model.get_parameter("line.base_layer.weight"))
    ((_, layer),) = lora_layers(model)
    first, second = (merged(layer, torch.float32).get_parameter("weight") for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(model.get_parameter("line.base_layer.weight"), torch.ones(10, 24))


# What is kept in memory.


def test_frozen_weights_need_no_second_copy(tmp_path: Path) -> None:
    base = tmp_path / "base"
    saved("llama", base, torch.bfloat16)
    _, weights, _ = adapted(base, LoraConfig(r=2), "bf16")
    trained = weights.trainable()
    assert all("lora_" in name for name in trained)
    assert all(tensor.dtype == torch.float32 for tensor in trained.values())
    frozen = {name: tensor for name, tensor in weights.parameters.items() if name not in trained}
    assert all(tensor.dtype == torch.bfloat16 for tensor in frozen.values())
    assert all(tensor is weights._computed[name] for name, tensor in frozen.items())
    weights.restore_model()
    assert all(tensor.dtype == torch.float32 for tensor in frozen.values()), "as it was"


def four_bits(base: Path) -> dict[str, Any]:
    """Ten steps over a base in NF4, and over the weights that its codes stand for."""
    told: dict[str, Any] = {}
    for dtype in ("nf4", "auto"):
        config = LoraConfig(r=4, alpha=6.0, use_dora=True, base_dtype=dtype)
        model, weights, ranks = adapted(base, config, "fp64")
        if dtype == "auto":
            for name, parameter in model.named_parameters():
                if name.endswith("base_layer.weight"):
                    values = whole(parameter)
                    fill(parameter, decode(encode(values), values.shape[1], torch.float64))
            initialise_adapter(model, 1)
        told[dtype] = train(model, weights, ranks, 10), {name: whole(p) for name, p in weights.trainable().items()}
        told[f"{dtype} layers"] = sum(isinstance(module, NF4Linear) for module in model.modules())
    return told


@pytest.mark.slow
def test_four_bits_train_as_what_they_stand_for(tmp_path: Path) -> None:
    saved("qwen2_tied", tmp_path / "base")
    for told in (four_bits(tmp_path / "base"), *run_ranks(four_bits, 2, tmp_path / "base")):
        assert (told["nf4 layers"], told["auto layers"]) == (14, 0)
        assert told["nf4"][0] == pytest.approx(told["auto"][0], rel=1e-10)
        for name, tensor in told["nf4"][1].items():
            assert torch.allclose(tensor, told["auto"][1][name], rtol=1e-9, atol=1e-9), name


# What begins with random weights.


def test_a_new_head_is_trained_in_full_with_a_word(tmp_path: Path) -> None:
    """Beside a pretrained encoder; PEFT would otherwise save an adapter for a head that nobody has."""
    config = BertConfig(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    values = {"actor": {"model": {"model_path": str(tmp_path), "is_lora": True}}}
    recipe = load_recipe(values, in_memory=["data.train_data_paths"], files_must_exist=False)
    cases: list[tuple[Any, bool]] = [
        ({"bert": tmp_path, "classifier": None}, True),
        ({"bert": tmp_path, "": None}, True),
        ({"bert": None, "classifier": None}, False),
        ({"": tmp_path, "bert.pooler": tmp_path}, False),
        (tmp_path, False),
        (None, False),
    ]
    for source, trains in cases:
        with init_empty_weights():
            model = BertForSequenceClassification(config)
        notes = adapt(model, recipe, None, lambda source=source: source)
        assert model.classifier.weight.requires_grad == trains, source
        assert any("classifier begins with random weights" in note for note in notes) == trains
        assert adapter_config(model).modules_to_save == (["classifier"] if trains else None)
        assert not model.bert.pooler.dense.base_layer.weight.requires_grad


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    ("parts", "message"),
    [(["haed"], r"new_parts names 'haed', which is no submodule of ModuleDict(.|\n)*'head'"), ("head", "not a tuple")],
)
def test_new_parts_are_submodules(lora: bool, parts: Any, message: str) -> None:
    values = {"actor": {"model": {"model_path": "base", "is_lora": lora}}}
    recipe = load_recipe(values, in_memory=["data.train_data_paths"], files_must_exist=False)
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
    with pytest.raises(ConfigError, match=message):
        adapt(model, recipe, None, new_parts=parts)
    adapt(model, recipe, None, new_parts=["head"])
    assert model["head"].weight.requires_grad


@pytest.mark.parametrize("frozen", [False, True])
def test_a_bare_parameter_that_begins_anew_and_is_not_trained_is_named(frozen: bool, tmp_path: Path) -> None:
    recipe = load_recipe(
        {"actor": {"model": {"model_path": str(tmp_path), "is_lora": True}}},
        in_memory=["data.train_data_paths"],
        files_must_exist=False,
    )
    with init_empty_weights():
        model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
        model.register_parameter("scale", nn.Parameter(torch.ones(4), requires_grad=not frozen))
    notes = adapt(model, recipe, None, lambda: {"body": tmp_path, "head": None, "scale": None})
    assert any(note.startswith("scale: a parameter that begins as the constructor") for note in notes) != frozen
    assert not any("head: a parameter" in note or "head.weight" in note for note in notes)


@pytest.mark.parametrize(
    ("lora", "patterns", "named"),
    [
        ({"modules_to_save": ["classifier"]}, ["classifier"], "modules_to_save names classifier"),
        ({"target_modules": ["query", "pooler.dense"]}, ["pooler"], "target_modules names pooler.dense"),
        ({"target_modules": ["query"]}, ["lora_A"], None),
        ({"target_modules": ["dense"]}, ["pooler"], None),
        ({}, ["pooler"], None),
    ],
)
def test_what_is_named_and_frozen_is_refused(lora: dict[str, Any], patterns: list[str], named: str | None) -> None:
    config = BertConfig(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    values = {"actor": {"model": {"model_path": "base", "is_lora": True, "lora": lora, "freeze": patterns}}}
    recipe = load_recipe(values, in_memory=["data.train_data_paths"], files_must_exist=False)
    with init_empty_weights():
        model = BertForSequenceClassification(config)
    adapt(model, recipe, None, lambda: None)
    freeze(model, patterns)
    if named is None:
        check_frozen(model, recipe.actor.model)
        return
    with pytest.raises(ConfigError, match=f"{named}, and actor.model.freeze freezes all of it"):
        check_frozen(model, recipe.actor.model)


def test_a_new_head_that_is_adapted_is_left_to_that() -> None:
    model = Attends()
    config = LoraConfig(r=2, target_modules=["line", "inner.0"])
    assert attach_adapter(model, config, afresh=["inner"]) == []
    assert names(model) == {"line", "inner.0"}


class Distilled(nn.Module):
    """A student and a teacher that its own code has frozen, and a head with a frozen part."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.student = nn.ModuleDict({"up": nn.Linear(4, 4), "experts": Stack()})
        self.teacher = nn.ModuleDict({"up": nn.Linear(4, 4), "experts": Stack()}).requires_grad_(False)
        self.policy = nn.ModuleDict({"old": nn.Linear(4, 4).requires_grad_(False), "new": nn.Linear(4, 4)})
        if frozen:
            self.requires_grad_(False)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stacked = nn.Parameter(torch.zeros(2, 4, 4))


@pytest.mark.parametrize(
    ("changes", "adapted", "note"),
    [
        (
            {},
            {"student.up", "policy.new"},
            r"2 linear layers that requires_grad_\(False\) has frozen \(teacher.up, …\)",
        ),
        ({"target_modules": ["up"]}, {"student.up"}, "1 of the modules called up, .* their full names in .*modules"),
        ({"target_modules": ["up", "teacher.up"]}, {"student.up", "teacher.up"}, "their full names"),
        ({"target_modules": ["old"]}, {"policy.old"}, None),
        (
            {"target_modules": ["new"], "modules_to_save": ["up"]},
            {"policy.new"},
            "modules called up, .*modules_to_save",
        ),
        (
            {"target_modules": ["new"], "target_parameters": ["experts.stacked"]},
            {"policy.new", "student.experts"},
            r"1 of the parameters called experts.stacked, .*teacher.experts.stacked",
        ),
    ],
)
def test_what_a_model_has_frozen_is_left_out_with_a_word(
    changes: dict[str, Any], adapted: set[str], note: str | None
) -> None:
    model = Distilled()
    notes = [one for one in attach_adapter(model, LoraConfig(r=2, **changes)) if "stacked parameters" not in one]
    assert names(model) == adapted
    assert len(notes) == (note is not None)
    assert note is None or re.search(note, notes[0]), notes
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name or name.startswith("student.up") for name in trained), trained


def test_a_part_that_is_trained_in_full_keeps_what_is_frozen_inside_it() -> None:
    for how in ({"modules_to_save": ["policy"]}, {}):
        model = Distilled()
        attach_adapter(
            model, LoraConfig(r=2, target_modules=["student.up"], **how), (), () if how else ("policy", "teacher")
        )
        full = {name for name, parameter in model.named_parameters() if parameter.requires_grad and "lora_" not in name}
        assert full == {"policy.new.weight", "policy.new.bias"}


def test_a_model_that_is_frozen_whole_is_adapted_as_if_it_were_not() -> None:
    """As in plain PEFT, where the base is frozen either way."""
    model = Distilled(frozen=True)
    assert not any("has frozen" in note for note in attach_adapter(model, LoraConfig(r=2)))
    assert names(model) == {"student.up", "teacher.up", "policy.old", "policy.new"}
    thawed = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.LayerNorm(2))
    with pytest.raises(ConfigError, match=r"no linear layer to adapt: requires_grad_\(False\) has frozen 1 \(0, …\)"):
        attach_adapter(thawed, LoraConfig(r=2))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["embed_tokens"], "the adapter has model.embed_tokens.weight alone"),
        (["lm_head"], "the adapter has lm_head.weight alone"),
        (["embed_tokens", "lm_head"], "the adapter has weights of its own for each"),
    ],
)
def test_an_adapter_that_parts_tied_weights_is_refused(names: list[str], message: str, tmp_path: Path) -> None:
    model = saved("qwen2_tied", tmp_path / "base")
    made = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=names))
    with torch.no_grad():
        next(weight for name, weight in made.named_parameters() if f"{names[0]}.modules_to_save" in name).add_(1.0)
    made.save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(ModelError, match=message) as error:
        adapted(tmp_path / "base", LoraConfig(load_from=str(tmp_path / "adapter")), adapter=tmp_path / "adapter")
    assert "share their weights in this base" in error.value.what
    assert "tie_word_embeddings = False" in str(error.value.remedy)


def test_the_heads_of_other_classes_that_peft_names_for_every_classifier_are_left_out(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=8, **sizes)
    settings = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    peft.get_peft_model(BertForSequenceClassification(config), settings).save_pretrained(str(tmp_path))
    assert sorted(peft.LoraConfig.from_pretrained(str(tmp_path)).modules_to_save or ()) == ["classifier", "score"]
    model = BertForSequenceClassification(config)
    attach_adapter(model, LoraConfig(load_from=str(tmp_path)))
    assert adapter_config(model).modules_to_save == ["classifier"]
    other = peft.get_peft_model(BertForSequenceClassification(config), peft.LoraConfig(modules_to_save=["pooler"]))
    other.save_pretrained(str(tmp_path / "of_another"))
    with pytest.raises(ConfigError, match="no module with parameters of LlamaForCausalLM is called pooler"):
        attach_adapter(empty(tiny_config("llama")), LoraConfig(load_from=str(tmp_path / "of_another")))


def test_modules_that_peft_finds_by_the_end_of_a_word_are_trained_and_saved(tmp_path: Path) -> None:
    """`norm` is for PEFT the end of `input_layernorm` as well; in a recipe it is not."""
    model = saved("llama", tmp_path / "base")
    made = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"]))
    whole = {
        name.removeprefix("base_model.model.").replace(".modules_to_save.default", ""): weight
        for name, weight in made.named_parameters()
        if weight.requires_grad and "lora" not in name
    }
    with torch.no_grad():
        for number, weight in enumerate(whole.values()):
            weight.add_(number + 1.0)
    made.save_pretrained(str(tmp_path / "adapter"))
    stored = LoraConfig(load_from=str(tmp_path / "adapter"))
    again, weights, _ = adapted(tmp_path / "base", stored, adapter=tmp_path / "adapter")
    found = {name: weight for name, weight in weights.trainable().items() if "lora" not in name}
    assert len(found) == 5
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert whole.keys() == {f"{name}.weight" for name in adapter_config(again).modules_to_save}
    fresh, _, _ = adapted(tmp_path / "base", LoraConfig(r=2, modules_to_save=["norm"]))
    assert adapter_config(fresh).modules_to_save == ["model.norm"]
