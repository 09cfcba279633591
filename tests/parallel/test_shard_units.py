"""Which modules shard as a unit: as the recipe says, else as declared, else repeated blocks that are safe to part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, BertModel, PreTrainedModel

from shardtune.config.rank_layout import Layout
from shardtune.errors import ModelError, ParallelError
from shardtune.parallel import shard_units
from shardtune.parallel.meta_init import init_empty_weights
from shardtune.parallel.ranks import lay_out
from shardtune.parallel.shard import shard_model
from shardtune.parallel.shard_units import choose_units
from tests.support.plain_modules import Block, Convolutions, Perceptron, Tied
from tests.support.tiny_architectures import DECODERS, tiny_config
from tests.support.zoo import by_shardtune, decoder, one_rank, relative


def encoder() -> PreTrainedModel:
    with init_empty_weights():
        return BertModel(
            BertConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)
        )


class Classifier(nn.Module):
    """A model of transformers, and a stack of its own beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.tail = nn.ModuleList([Block(), Block()])


class Mixture(nn.Module):
    """Blocks of which a forward calls some, among them lists, and blocks that it always calls."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Sequential(Block(), Block()) for _ in range(4)])
        self.task_heads = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])
        self.by_name = nn.ModuleDict({"a": nn.Sequential(Block(), Block())})
        self.trunk = nn.Sequential(nn.Linear(6, 6), Block(), nn.ReLU(), Block(), nn.Linear(6, 6), nn.ReLU())


class Stages(nn.Module):
    """Lists of lists, which have no forward, and stages that do, with blocks inside."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])])
        self.stages = nn.ModuleList([nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())])
        self.masks = nn.ParameterList([nn.Parameter(torch.ones(100, 100)), nn.Parameter(torch.ones(100, 100))])


def names_of(model: nn.Module, chosen: list[nn.Module]) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[unit] for unit in chosen]


def test_the_recipe_goes_before_the_adapter_and_that_before_transformers() -> None:
    model = Classifier()
    chosen, note = choose_units(model)
    assert names_of(model, chosen) == ["encoder.embeddings", "encoder.encoder.layer.0", "encoder.encoder.layer.1"]
    assert note == ""
    chosen, note = choose_units(model, classes=["Block"])
    assert names_of(model, chosen) == ["tail.0", "tail.1"]
    assert note == ""
    chosen, note = choose_units(model, classes=["Block"], wrap=["BertLayer", "BertAttention"])
    assert [type(unit).__name__ for unit in chosen] == ["BertLayer", "BertAttention"] * 2
    assert note == ""


def test_without_any_declaration_repeated_blocks_are_chosen_with_a_note() -> None:
    model = Perceptron()
    chosen, note = choose_units(model)
    assert names_of(model, chosen) == ["blocks.0", "blocks.1", "blocks.2"]
    assert note.startswith("3 Block shard as units, chosen by their size; they have to be called as modules")
    assert "unit_classes of the adapter" in note
    assert "actor.fsdp_config.wrap" in note
    convolutions = Convolutions()
    assert names_of(convolutions, choose_units(convolutions)[0]) == ["layers.0", "layers.3"]
    chosen, note = choose_units(nn.Linear(3, 3))
    assert chosen == []
    assert note.startswith("the model is sharded as one")


def test_what_a_forward_may_leave_out_stays_with_the_rest() -> None:
    model = Mixture()
    assert names_of(model, choose_units(model)[0]) == ["trunk.1", "trunk.3"]


def test_large_parts_of_layers_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.ModuleList(nn.ModuleList([nn.Sequential(Block(), Block())]) for _ in range(2)))
    parts = ["0.0.0", "0.1.0"]
    assert names_of(model, choose_units(model)[0]) == parts
    monkeypatch.setattr(shard_units, "LARGE", sum(parameter.numel() for parameter in Block().parameters()))
    assert names_of(model, choose_units(model)[0]) == [name + end for name in parts for end in ("", ".0", ".1")]


def test_layers_that_are_lists_of_their_parts_have_these_as_units() -> None:
    """Not their norms, of which there are as many."""
    mixer = [nn.Sequential(nn.Linear(6, 6)) for _ in range(2)]
    norms: list[nn.Module] = [nn.ModuleList([nn.LayerNorm(6), nn.LayerNorm(6)]) for _ in range(4)]
    layers = nn.ModuleList(
        nn.ModuleList([norm, nn.LayerNorm(2), part])
        for norm, part in zip(norms, [Block(), mixer[0], Block(), mixer[1]], strict=True)
    )
    model = nn.ModuleDict({"first": nn.Linear(6, 6), "layers": layers})
    assert names_of(model, choose_units(model)[0]) == [f"layers.{number}.2" for number in range(4)]


def test_layers_that_hold_their_parts_by_name_have_these_as_units() -> None:
    """As in rtdl's transformer, whose first layer lacks a norm; not where parts are alternatives."""

    def layer(first: str, second: str, other: type[nn.Module] = Block) -> nn.Module:
        return nn.ModuleDict({first: nn.Sequential(nn.Linear(6, 6)), second: other(), "norm": nn.LayerNorm(2)})

    model = nn.Sequential(nn.ModuleList([nn.ModuleDict({"attention": Block()}), layer("ffn", "attention")]))
    model.append(nn.ModuleList([layer("ffn", "attention"), layer("ffn", "attention")]))
    parts = ["0.0.attention", "0.1.attention", "1.0.ffn", "1.0.attention", "1.1.ffn", "1.1.attention"]
    assert names_of(model, choose_units(model)[0]) == parts
    named = nn.ModuleList([layer("adapter", "attention"), layer("adapter", "attention")])
    assert choose_units(nn.Sequential(named))[0] == []
    alike = nn.ModuleList([nn.ModuleDict({"image": Block(), "text": Block()}) for _ in range(2)])
    assert choose_units(nn.Sequential(alike))[0] == []


class NamedStage(nn.ModuleDict):
    """Blocks by name, called as one, as a DenseNet's are."""

    def __init__(self) -> None:
        super().__init__({"first": Block(), "second": Block()})

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.values():
            rows = block(rows)
        return rows


def test_a_dict_with_a_forward_is_a_block_like_any_other() -> None:
    model = nn.Sequential(NamedStage(), nn.ReLU(), NamedStage())
    assert names_of(model, choose_units(model)[0]) == ["0", "2"]


def test_a_block_in_two_lists_is_one_unit() -> None:
    """As in a masked autoencoder, which makes a second sequence of the layers of its encoder's first."""
    patches = nn.Sequential(Block(), Block())
    model = nn.ModuleDict({"whole": patches, "again": nn.Sequential(*patches)})
    units, note = choose_units(model)
    assert names_of(model, units) == ["whole.0", "whole.1"]
    assert note.startswith("2 Block shard")


def test_repeated_norms_between_layers_are_no_units() -> None:
    """As in the patch embedding of many vision transformers."""
    patches = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 32), nn.LayerNorm(32))
    assert names_of(nn.Sequential(patches), choose_units(nn.Sequential(patches))[0]) == []
    assert choose_units(nn.Sequential(patches, nn.Sequential(Block(), Block())))[0] != []


def test_one_list_among_named_parts_has_the_blocks() -> None:
    """As in nanoGPT; of two lists under names a forward may call one."""
    blocks = nn.ModuleList([Block(), Block()])
    parts: dict[str, nn.Module] = {"wte": nn.Embedding(5, 6), "h": blocks}
    model = nn.Sequential(nn.ModuleDict({**parts, "ln_f": nn.LayerNorm(6)}))
    assert names_of(model, choose_units(model)[0]) == ["0.h.0", "0.h.1"]
    towers = nn.ModuleDict({"image": nn.ModuleList([Block(), Block()]), "text": nn.ModuleList([Block(), Block()])})
    assert choose_units(nn.Sequential(nn.ModuleDict(parts), towers))[0] == [*blocks]
    assert choose_units(nn.Sequential(nn.ModuleDict({"a": nn.ModuleList([Block(), Block()])})))[0] == []
    experts = nn.ModuleDict({"gate": nn.Linear(6, 2), "experts": nn.ModuleList([Block(), Block()])})
    assert choose_units(nn.Sequential(experts))[0] == []


def test_containers_are_looked_into_and_large_blocks_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stages()
    inside = ["pairs.0.0", "pairs.0.1", "pairs.1.0"]
    assert names_of(model, choose_units(model)[0]) == [*inside, "stages.0", "stages.1"]
    monkeypatch.setattr(shard_units, "LARGE", sum(parameter.numel() for parameter in Block().parameters()))
    split = ["stages.0", "stages.0.0", "stages.0.1", "stages.1", "stages.1.0", "stages.1.1"]
    assert names_of(model, choose_units(model)[0]) == [*inside, *split]


def test_a_list_of_modules_may_have_entries_that_are_none() -> None:
    model = Classifier()
    model.norms = nn.ModuleList([nn.LayerNorm(6), None])  # pyright: ignore[reportArgumentType]
    chosen, _ = choose_units(model)
    assert names_of(model, chosen) == ["encoder.embeddings", "encoder.encoder.layer.0", "encoder.encoder.layer.1"]


def test_modules_that_share_parameters_with_others_belong_to_the_root() -> None:
    model = Tied()
    chosen, note = choose_units(model)
    assert chosen == []
    assert "its own" in note
    chosen, note = choose_units(model, wrap=["Block", "LayerNorm"])
    assert names_of(model, chosen) == ["blocks.0.norm", "blocks.1.norm"]
    assert note == "2 modules (Block) share parameters with others, so they are gathered with the whole model"
    layer, own = nn.Linear(2, 2), nn.Linear(2, 2)
    twice = nn.ModuleList([nn.Sequential(layer, own), nn.Sequential(layer, nn.ReLU()), nn.Sequential(nn.Linear(2, 2))])
    assert choose_units(twice, wrap=["Sequential"])[0] == [twice[2]]
    whole = nn.Sequential(Tied(), Tied())  # what is shared inside a unit alone may be one
    assert len(choose_units(whole, classes=["Tied"])[0]) == 2


@pytest.mark.parametrize(("classes", "wrap", "key"), [(["Blok"], None, "unit_classes"), ((), ["Blok"], "actor.fsdp")])
def test_a_class_that_is_not_there_is_named_with_those_that_are(classes: list, wrap: list | None, key: str) -> None:
    with pytest.raises(ModelError, match=rf"{key}.*no module of the model is a Blok(.|\n)*Block, LayerNorm, Linear"):
        choose_units(Perceptron(), classes, wrap)


@pytest.mark.parametrize("name", ["ModuleList", "ParameterList"])
def test_what_has_no_forward_is_no_unit(name: str) -> None:
    with pytest.raises(ModelError, match="names a list of modules, which cannot shard as a unit: it has no forward"):
        choose_units(Stages(), wrap=[name])


@pytest.mark.lengthy
def test_reversible_layers_train_sharded_as_on_one_process(tmp_path: Path) -> None:
    values = decoder("reformer", tmp_path, "fp64").values
    alone = by_shardtune(values)
    sharded = by_shardtune(values, prepared=alone.prepared, sharded=True)
    assert relative(sharded.numbers, alone.numbers) < 1e-12


def test_layers_that_the_backward_pass_computes_again_are_no_units() -> None:
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(tiny_config("reformer", DECODERS["reformer"]))
    assert names_of(model, choose_units(model)[0]) == ["reformer.encoder"]
    with pytest.raises(ModelError, match=r"names ReformerLayer(.|\n)*name ReformerEncoder"):
        choose_units(model, wrap=["ReformerLayer"])
    with one_rank(), pytest.raises(ParallelError, match="fsdp1 does not work with ReformerEncoder"):
        shard_model(model, [], lay_out(Layout(flat=True), 0, torch.device("cpu")), "fp64")
