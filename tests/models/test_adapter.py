"""What an adapter of one's own may rely on: options with types, rows that become batches, losses with names."""

from __future__ import annotations

import importlib
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from torch import nn

from shardtune import Adapter, Batch, LossSum, Prediction, Sample
from shardtune.batch import Metric
from shardtune.config import Recipe, load_recipe
from shardtune.data.cache.cache import build_dataset
from shardtune.data.encoder import RowDropped, RowError
from shardtune.data.sources.resolve import resolve_sources
from shardtune.errors import ConfigError, DataError, ModelError
from shardtune.models.adapter_encoder import FieldEncoder, holds
from shardtune.models.find_adapter import find_adapter

LABELLED = {"pixels": [1.0, 2.0], "label": 1, "notes": [5]}


class Options(BaseModel):
    width: int = 4
    name: str = "net"


class Small(Adapter):
    """Fixed-size inputs, and notes of any length."""

    Options = Options
    padding: ClassVar[Mapping[str, float]] = {"notes": -1.0}

    def build(self) -> nn.Module:
        return nn.Linear(2, self.options.width)

    def encode(self, row: Mapping[str, Any]) -> Sample:
        fields = {"pixels": np.array(row["pixels"], np.float32), "label": np.asarray(row["label"])}
        return Sample(fields={**fields, "notes": np.array(row["notes"], np.int64)})

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        return LossSum(model(batch["pixels"]).sum(), float(len(batch["label"])))


class Reads(Small):
    """Reads keys of language models."""

    reads = ("data.chat_template", "data.train_on")


class Inner(BaseModel):
    depth: int = 1


class NestedOptions(BaseModel):
    inner: Inner = Inner()
    layers: list[Inner] = []
    sizes: tuple[int, ...] = (1, 2)
    rate: float = 0.5
    folder: Path = Path()


class Nested(Small):
    """Options within options."""

    Options = NestedOptions


class NoLoss(Adapter):
    """Lacks a method."""

    def build(self) -> nn.Module:
        return nn.Linear(1, 1)

    def encode(self, row: Mapping[str, Any]) -> Sample:
        return Sample()


def helper() -> None:
    """No adapter."""


def recipe(adapter: str = "Small", data: Mapping[str, Any] | None = None, **model: Any) -> Recipe:
    values = {
        "actor": {"model": {"adapter": f"{__file__}:{adapter}", **model}},
        "data": {"train_data_paths": "rows.jsonl", **(data or {})},
    }
    return load_recipe(values, files_must_exist=False)


def encoder(**changes: Any) -> FieldEncoder:
    made = find_adapter(recipe(**changes)).encoder(with_prompts=False)
    assert isinstance(made, FieldEncoder)
    return made


def test_options_are_typed_and_have_defaults() -> None:
    assert find_adapter(recipe(options={"width": 7})).build().out_features == 7
    assert find_adapter(recipe()).options.name == "net"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widht": 7}, r"actor.model.options.widht is not an option of this model.*did you mean width"),
        ({"width": "wide"}, r"actor.model.options.width = 'wide'.*the options are width: int, name: str"),
        ({"width": "7"}, r"actor.model.options.width = '7'"),
        ({"width": True}, r"actor.model.options.width = True"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_adapter(recipe(options=options))
    assert caught.match(message.replace(".*", r"[\s\S]*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"inner": {"dpeth": 2}},
            r"actor.model.options.inner.dpeth is not an option of this model.*did you mean depth",
        ),
        (
            {"layers": [{}, {"name": 2}]},
            r"actor.model.options.layers.1.name is not an option.*its options are: depth",
        ),
        ({"inner": {"depth": "2"}}, r"actor.model.options.inner.depth = '2'"),
    ],
)
def test_a_wrong_option_is_named_at_any_depth(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_adapter(recipe("Nested", options=options))
    assert caught.match(message.replace(".*", r"[\s\S]*"))


def test_options_may_be_of_types_that_a_recipe_has_no_word_for() -> None:
    given = {"inner": {"depth": 2}, "layers": [{"depth": 3}], "sizes": [3, 4], "rate": 1, "folder": "some/where"}
    read = find_adapter(recipe("Nested", options=given)).options
    assert (read.inner.depth, read.layers[0].depth, read.sizes, read.rate) == (2, 3, (3, 4), 1.0)
    assert read.folder == Path("some/where")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoLoss", "the adapter NoLoss lacks loss"),
        ("helper", "is no adapter"),
        ("Missing", "has no function or class 'Missing'"),
    ],
)
def test_what_is_no_adapter_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_adapter(recipe(name))


def test_options_without_a_reader_are_refused() -> None:
    with pytest.raises(ConfigError, match="no part of causal_lm reads them"):
        find_adapter(load_recipe(
            {"actor": {"model": {"model_path": "x", "options": {"a": 1}}}, "data": {"train_data_paths": "r.jsonl"}},
            files_must_exist=False,
        ))  # fmt: skip


def test_rows_weigh_one_or_their_labels() -> None:
    one = encoder()
    assert one.weights(one.encode(LABELLED)) == {"loss": 1.0}
    labels = Sample(fields={"labels": np.array([5, -100, 7])})
    assert one.weights(labels) == {"loss": 2.0}
    tokens = Sample(np.array([3, 4, 5], np.int32), np.array([0.0, 1.0, 0.5], np.float32))
    assert one.weights(tokens) == {"loss": 1.5}


def test_a_row_that_lacks_something_is_told_with_what_it_has() -> None:
    with pytest.raises(RowError, match=r"the row has no 'label', it has pixels \(test_adapter.py:\d+\)"):
        encoder().encode({"pixels": [1.0, 2.0]})
    with pytest.raises(RowError, match=r"ValueError: could not convert string to float: 'a' \(test_adapter.py:\d+\)"):
        encoder().encode({"pixels": ["a"], "label": 0, "notes": []})


class Faulty(Small):
    """Does in `encode` and `weights` what a test asks for."""

    does: ClassVar[Callable[[Any, Any], Any]]
    weighs: ClassVar[Any] = {"loss": 1}

    def encode(self, row: Mapping[str, Any]) -> Sample:
        return type(self).does(self, row)

    def weights(self, sample: Sample) -> Mapping[str, float]:
        return type(self).weighs


def encoded(does: Callable[[Any, Any], Any]) -> Sample:
    Faulty.does = does
    return FieldEncoder(Faulty(recipe()), recipe()).encode({"x": None})


def given(**fields: Any) -> Sample:
    return Sample(fields={"notes": np.zeros(1), **fields})


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (lambda self, row: row["x"].lower(), "AttributeError: 'NoneType' object has no attribute 'lower'"),
        (lambda self, row: Path("gone.png").read_bytes(), "FileNotFoundError: .*'gone.png'"),
        (lambda self, row: 1 / 0, "ZeroDivisionError"),
        (lambda self, row: torch.ones(2) @ torch.ones(3), "RuntimeError"),
        (lambda self, row: given(x=[[1, 2], [3]]), "the field 'x' is no array"),
        (lambda self, row: given(x="text"), "the field 'x' is <U4, not an array of numbers"),
    ],
)
def test_what_a_row_may_cause_is_told_with_the_row(does: Callable[[Any, Any], Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        encoded(does)


@pytest.mark.parametrize(
    ("does", "error"),
    [
        (lambda self, row: self.widht, AttributeError),
        (lambda self, row: row.x, AttributeError),
        (lambda self, row: np.arry(1), AttributeError),  # pyright: ignore[reportAttributeAccessIssue]
        (lambda self, row: no_such_name, NameError),  # pyright: ignore[reportUndefinedVariable] # noqa: F821
        (lambda self, row: {"x": 1}, ModelError),
        (lambda self, row: Sample(), ModelError),
        (lambda self, row: Sample({"x": 1}), ModelError),  # pyright: ignore[reportArgumentType]
        (lambda self, row: Sample(fields=[1]), ModelError),  # pyright: ignore[reportArgumentType]
        (lambda self, row: Sample(fields={"notes": np.array(1)}), ModelError),
    ],
)
def test_what_no_row_causes_is_no_matter_of_a_row(does: Callable[[Any, Any], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        encoded(does)


def test_tensors_are_taken_as_they_are() -> None:
    sample = encoded(lambda self, row: given(x=torch.ones(2, requires_grad=True), y=torch.tensor(0.5).bfloat16()))
    assert sample.fields["x"].tolist() == [1, 1]
    assert (sample.fields["y"].dtype, sample.fields["y"].item()) == (np.float32, 0.5)


@pytest.mark.parametrize("weighs", [1.0, {}, None, {"loss": float("nan")}, {"loss": -1}, {"loss": "many"}])
def test_weights_are_numbers_by_name(weighs: Any) -> None:
    sample = encoded(lambda self, row: given())
    Faulty.weighs = weighs
    with pytest.raises(ModelError, match=r"weights returned .*, not a dict of numbers from 0 on"):
        FieldEncoder(Faulty(recipe()), recipe()).weights(sample)


def test_long_fields_are_cut_dropped_or_refused() -> None:
    row = {**LABELLED, "notes": list(range(9))}
    cut = encoder(data={"max_length": 4})
    sample = cut.fit(cut.encode(row))
    assert sample.fields["notes"].tolist() == [0, 1, 2, 3]
    assert sample.length == 4
    dropping = encoder(data={"max_length": 4, "on_too_long": "drop"})
    with pytest.raises(RowDropped):
        dropping.fit(dropping.encode(row))
    failing = encoder(data={"max_length": 4, "on_too_long": "fail"})
    with pytest.raises(DataError, match=r"the field 'notes' has length 9, data.max_length is 4"):
        failing.fit(failing.encode(row))


def test_an_encoder_is_the_same_in_another_process() -> None:
    one = encoder(options={"width": 9})
    other = pickle.loads(pickle.dumps(one))
    assert other.cache_key() == one.cache_key()
    sample, again = one.encode(LABELLED), other.encode(LABELLED)
    assert sample.fields["pixels"].tobytes() == again.fields["pixels"].tobytes()


def test_the_cache_key_follows_options_and_code() -> None:
    assert encoder().cache_key() == encoder().cache_key()
    assert encoder().cache_key() != encoder(options={"width": 5}).cache_key()
    assert encoder().cache_key() != encoder(data={"max_length": 9}).cache_key()


def test_the_cache_key_follows_the_keys_that_an_adapter_reads_and_their_files(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    keys = [encoder(adapter="Reads", data={"train_on": on}).cache_key() for on in ("assistant", "all", "all")]
    for text in ("a", "b", "a"):
        template.write_text(text)
        keys.append(encoder(adapter="Reads", data={"chat_template": str(template)}).cache_key())
    assert keys[1] == keys[2]
    assert keys[3] == keys[5]
    assert len(set(keys)) == 4


def test_the_cache_key_follows_the_settings_beside_a_model(tmp_path: Path) -> None:
    keys = []
    for name, text in (("config.json", "{}"), ("generation_config.json", "{}"), ("tokenizer_config.json", "{}")):
        (tmp_path / name).write_text(text)
        keys.append(encoder(model_path=str(tmp_path)).cache_key())
    assert keys[0] == keys[1] != keys[2], "no row depends on how answers are generated"


def test_the_cache_key_follows_every_file_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "several_files_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "features.py").write_text("SCALE = 1\n")
    (package / "model.py").write_text("from tests.models.test_adapter import Small\n\n\nclass Mine(Small):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    kind = importlib.import_module("several_files_of_mine.model").Mine
    before = FieldEncoder(kind(recipe()), recipe()).cache_key()
    assert FieldEncoder(kind(recipe()), recipe()).cache_key() == before
    (package / "features.py").write_text("SCALE = 2\n")
    assert FieldEncoder(kind(recipe()), recipe()).cache_key() != before


def test_a_class_typed_into_a_notebook_has_a_cache_key_too() -> None:
    keys = []
    for scale in (1, 2, 1):
        space = {"__name__": "a_notebook", "Small": Small}
        exec(f"class Typed(Small):\n    def encode(self, row):\n        return {scale}", space)
        keys.append(FieldEncoder(space["Typed"](recipe()), recipe()).cache_key())  # pyright: ignore[reportCallIssue]
    assert keys[0] == keys[2] != keys[1]


def test_rows_are_stacked_and_padded() -> None:
    adapter = find_adapter(recipe())
    made = adapter.encoder(with_prompts=False)
    samples = [made.encode({**LABELLED, "notes": [1] * length}) for length in (3, 1)]
    batch = adapter.collate(samples, (4, 7), {"loss": 2.0})
    assert batch["pixels"].shape == (2, 2)
    assert batch["notes"].tolist() == [[1, 1, 1], [1, -1, -1]]
    assert batch.lengths["notes"].tolist() == [3, 1]
    assert (batch.rows, batch.num_rows, batch.weights) == ((4, 7), 2, {"loss": 2.0})


def test_rows_of_different_shapes_need_padding() -> None:
    adapter = find_adapter(recipe())
    samples = [Sample(fields={"pixels": np.zeros(size)}) for size in (2, 3)]
    with pytest.raises(ModelError, match=r"the field 'pixels' has rows of different shapes, \[2\] and \[3\]"):
        adapter.collate(samples, (0, 1), {})


def test_a_missing_field_names_those_that_are_there() -> None:
    adapter = find_adapter(recipe())
    batch = adapter.collate([adapter.encode(LABELLED)], (0,), {"loss": 1.0})
    with pytest.raises(ModelError, match="the batch has no field 'image'; it has label, notes, pixels"):
        batch["image"]


def test_a_filler_weighs_nothing_and_has_a_graph() -> None:
    adapter = find_adapter(recipe(precision="fp32"))
    root = adapter.root(adapter.build())
    batch = adapter.collate([adapter.filler(adapter.encode(LABELLED))], (-1,), {"loss": 0.0})
    losses = root(batch)
    assert (losses["loss"].total.item(), losses["loss"].weight) == (0.0, 0.0)
    losses["loss"].total.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in root.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_a_model_computes_in_the_precision_that_is_asked_for(precision: str) -> None:
    adapter = find_adapter(recipe(precision=precision))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[precision]
    model = adapter.build().to(dtype)
    seen = []
    model.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].dtype))
    adapter.root(model)
    model._forward_pre_hooks.move_to_end(next(iter(model._forward_pre_hooks)))  # looked at after the cast
    outputs = model(torch.ones(1, 2))
    assert seen == [dtype]
    assert outputs.dtype == (torch.float32 if precision == "bf16" else dtype)


def test_a_loss_that_is_none_is_refused() -> None:
    class Mean(Small):
        def loss(self, model: nn.Module, batch: Batch) -> Any:
            return model(batch["pixels"]).mean()

    adapter = Mean(recipe(precision="fp32"))
    batch = adapter.collate([adapter.encode(LABELLED)], (0,), {"loss": 1.0})
    with pytest.raises(ModelError, match="loss returned a Tensor, not a LossSum"):
        adapter.root(adapter.build())(batch)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda out: LossSum(out.flatten(), 1), r"the total of the loss 'loss' is of shape \[4\]"),
        (lambda out: LossSum(out.sum().item(), 1), "the total of the loss 'loss' is a float"),
        (lambda out: LossSum(out.sum(), None), "the weight of the loss 'loss' is None, not a number"),  # pyright: ignore[reportArgumentType]
        (lambda out: LossSum(out.sum(), out), "the weight of the loss 'loss' is tensor"),
        (lambda out: LossSum(out.sum().detach(), 1), "the loss has no graph"),
    ],
)
def test_a_loss_that_cannot_be_summed_is_told(returned: Callable[[torch.Tensor], Any], message: str) -> None:
    class Odd(Small):
        def loss(self, model: nn.Module, batch: Batch) -> Any:
            return returned(model(batch["pixels"]))

    adapter = Odd(recipe(precision="fp32"))
    batch = adapter.collate([adapter.encode(LABELLED)], (0,), {"loss": 1.0})
    with pytest.raises(ModelError, match=message):
        adapter.root(adapter.build())(batch)


def test_a_weight_may_be_a_tensor_and_evaluation_needs_no_graph() -> None:
    class Counted(Small):
        def loss(self, model: nn.Module, batch: Batch) -> LossSum:
            return LossSum(model(batch["pixels"]).sum(), torch.tensor(3))  # pyright: ignore[reportArgumentType]

    adapter = Counted(recipe(precision="fp32"))
    batch = adapter.collate([adapter.encode(LABELLED)], (0,), {"loss": 1.0})
    root = adapter.root(adapter.build())
    weight = root(batch)["loss"].weight
    assert (weight, type(weight)) == (3.0, float)
    with torch.no_grad():
        assert root.evaluate(batch).losses["loss"].weight == 3.0


def test_metrics_that_are_no_dict_are_told() -> None:
    class Pair(Small):
        def metrics(self, model: nn.Module, batch: Batch) -> Any:
            return 3, 5

    adapter = Pair(recipe(precision="fp32"))
    batch = adapter.collate([adapter.encode(LABELLED)], (0,), {"loss": 1.0})
    with pytest.raises(ModelError, match="metrics returned a tuple, not a dict"):
        adapter.root(adapter.build()).evaluate(batch)


class Deep(Small):
    """A stack of layers, some of which may be computed twice."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3)))


def gradients(**model: Any) -> tuple[list[torch.Tensor], int]:
    """The gradients of one batch, and how often the layers were computed."""
    adapter = find_adapter(recipe("Deep", precision="fp32", **model))
    torch.manual_seed(1)
    net = adapter.build()
    adapter.set_execution(net)
    runs = []
    assert isinstance(net, nn.Sequential)
    for layer in net[1:]:
        assert isinstance(layer, nn.Sequential)
        layer[0].register_forward_hook(lambda *_: runs.append(1))
    batch = adapter.collate([adapter.encode(LABELLED)], (0,), {"loss": 1.0})
    torch.manual_seed(2)
    adapter.root(net)(batch)["loss"].total.backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None], len(runs)


@pytest.mark.parametrize("how", [True, "selective"])
def test_gradient_checkpointing_computes_twice_and_changes_nothing(how: bool | str) -> None:
    once, runs = gradients()
    twice, more = gradients(gradient_checkpointing=how)
    assert (runs, more) == (3, 6)
    assert len(once) == len(twice) == 8
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


def test_gradient_checkpointing_without_units_is_refused() -> None:
    adapter = find_adapter(recipe(precision="fp32", gradient_checkpointing=True))
    with pytest.raises(ModelError, match="Linear has no units whose activations could be computed again"):
        adapter.set_execution(adapter.build())


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ({}, {"config_overrides": {"a": 1}}, "actor.model.config_overrides: the adapter Small does not read it"),
        ({}, {"attn_implementation": "eager"}, "actor.model.attn_implementation: the adapter Small does not read it"),
        ({"system_prompt": "Hm."}, {}, "data.system_prompt: the adapter Small does not read it"),
        ({"keep_pixels": True}, {}, "data.keep_pixels: the adapter Small does not read it"),
        ({"image_hosts": ["a.example"]}, {}, "data.image_hosts: the adapter Small does not read it"),
    ],
)
def test_keys_that_an_adapter_does_not_read_are_refused(
    data: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        find_adapter(recipe(data=data, **model))


class Blurred(Small):
    """Names as an image what it does not have."""

    image_fields: ClassVar[Sequence[str]] = ("not",)


class Misspelt(Small):
    """Pads what it does not have."""

    padding: ClassVar[Mapping[str, float]] = {"note": 0.0}


def test_padding_of_a_field_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelError, match="padding names 'note', which is no field of a row") as caught:
        encoder(adapter="Misspelt").encode(LABELLED)
    assert caught.match("did you mean 'notes'")
    with pytest.raises(ModelError, match="image_fields names 'not', which is no field of a row"):
        encoder(adapter="Blurred").encode(LABELLED)


class Filled(Small):
    """Pads with what the notes, int64, are not."""

    padding: ClassVar[Mapping[str, float]] = {"notes": -1.5}


def test_padding_that_a_field_cannot_hold_is_refused() -> None:
    with pytest.raises(ModelError, match=r"padding fills 'notes' with -1.5, which its rows, of int64, cannot hold"):
        encoder(adapter="Filled").encode(LABELLED)


class Sized(Small):
    """Rows with a size of their own."""

    def encode(self, row: Mapping[str, Any]) -> Sample:
        return replace(super().encode(row), size=row["size"])


def test_a_size_that_is_no_number_of_positions_is_refused() -> None:
    assert encoder(adapter="Sized").encode({**LABELLED, "size": 7}).size == 7
    for size in (-3, 2.5):
        with pytest.raises(ModelError, match=f"encode returned a Sample of size {size}, which is not a number"):
            encoder(adapter="Sized").encode({**LABELLED, "size": size})


@pytest.mark.parametrize(
    ("dtype", "value", "held"),
    [
        ("int64", -1.5, False),
        ("int64", float("nan"), False),
        ("int64", -1.0, True),
        ("uint8", -1, False),
        ("uint8", 255, True),
        ("bool", 2, False),
        ("bool", False, True),
        ("float16", 1e5, False),
        ("float32", float("-inf"), True),
    ],
)
def test_which_values_a_type_holds(dtype: str, value: float, held: bool) -> None:
    assert holds(np.dtype(dtype), value) is held


def test_fp64_takes_fields_along() -> None:
    adapter = find_adapter(recipe(precision="fp64"))
    batch = adapter.collate([adapter.encode(LABELLED)], (0,), {"loss": 1.0})
    assert batch["pixels"].dtype == torch.float64
    assert batch["notes"].dtype == torch.int64


OUTPUTS, TARGETS = torch.zeros(4), torch.ones(4)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "predictions returned a NoneType, not pieces"),
        (Prediction(OUTPUTS, TARGETS, TARGETS), "predictions returned a Prediction of 3, not pieces"),
        ([OUTPUTS], r"predictions gave a tensor of shape \[4\], not a Prediction"),
        ([(OUTPUTS, TARGETS)], "predictions gave a tuple of 2, not a Prediction"),
        ([(OUTPUTS, TARGETS, 1.0)], "parts that are no tensors of a target each: .*weights a float"),
        ([(OUTPUTS, TARGETS, TARGETS[:1])], "a prediction has 4 outputs, 4 targets, 1 weights"),
    ],
)
def test_predictions_that_are_none_are_told(returned: Any, message: str) -> None:
    class Odd(Small):
        def predictions(self, model: nn.Module, batch: Batch) -> Any:
            return returned

    adapter = Odd(recipe(precision="fp32"))
    batch = adapter.collate([adapter.encode(LABELLED)], (0,), {"loss": 1.0})
    model = adapter.build()
    with pytest.raises(ModelError, match=message):
        adapter.train_loss(model, batch, lambda outputs, targets: outputs - targets)
    with pytest.raises(ModelError, match=message):
        adapter.evaluate(model, batch, lambda predictions: {"n": Metric(float(len(list(predictions))), 1.0)})


def test_predictions_may_be_plain_tuples() -> None:
    class Tuples(Small):
        def predictions(self, model: nn.Module, batch: Batch) -> Any:
            yield OUTPUTS[:3], TARGETS[:3], TARGETS[:3]
            yield OUTPUTS[3:], TARGETS[3:], TARGETS[3:]

    adapter = Tuples(recipe(precision="fp32"))
    batch = adapter.collate([adapter.encode(LABELLED)], (0,), {"loss": 4.0})
    found = adapter.train_loss(adapter.build(), batch, lambda outputs, targets: targets - outputs)["loss"]
    assert (found.total.item(), found.weight) == (4.0, 4.0)


def test_a_cut_field_is_named(tmp_path: Path) -> None:
    rows = [{**LABELLED, "notes": list(range(length))} for length in (3, 9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changed = recipe(data={"max_length": 4, "cache_dir": str(tmp_path / "cache")}).data
    sources = resolve_sources(str(tmp_path / "rows.jsonl"), changed, name_format=lambda row: "rows", report=len)
    made = build_dataset(
        sources, encoder(data={"max_length": 4}), cache_dir=tmp_path / "cache", num_workers=0, on_bad_row="fail",
        max_bad_rows=0, report=len,
    )  # fmt: skip
    (line,) = made.report.lines()
    assert line.endswith("1 of 2 rows cut to data.max_length: row 2 (notes of length 9)")
