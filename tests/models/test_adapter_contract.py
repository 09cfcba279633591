"""What is wrong with an adapter's class is told before anything is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel
from torch import nn

from shardtune import Adapter, LossSum, Sample, WholeStepAdapter
from shardtune.config import load_recipe
from shardtune.errors import ConfigError
from shardtune.models.adapter import Evaluation
from shardtune.models.adapter_contract import check_adapter_class, check_made
from shardtune.models.causal_lm import CausalLM
from shardtune.models.find_adapter import find_adapter


class Whole(Adapter):
    """Has all that it needs."""

    def build(self) -> nn.Module:
        return nn.Linear(1, 1)

    def encode(self, row: Any) -> Sample:
        return Sample(fields={"x": np.zeros(1)})

    def loss(self, model: nn.Module, batch: Any) -> LossSum:
        return LossSum(model(batch["x"]).sum(), 1)


class Helped(Whole):
    """Has helpers with the names of what adapters may have."""

    reads = ("optim.lr", "data", "model.config_overrides.width")

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        return model(batch["x"])

    def augment(self, row: Any) -> Any:
        return row

    def encode(self, row: Any) -> Sample:
        return super().encode(self.augment(row))

    def loss(self, model: nn.Module, batch: Any) -> LossSum:
        return LossSum(self.outputs(model, batch).sum(), 1)


@dataclass
class Plain:
    """Options of another kind."""

    width: int = 3


def made(**written: Any) -> type[Any]:
    return type("Mine", (Whole,), written)


def forgetful(self: Any, recipe: Any, tokenizer: Any = None) -> None:
    """An `__init__` that leaves out its base's."""


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (
            {"build": lambda self, cfg: None},
            r"Mine.build takes other arguments: .*'cfg'.*it is called as Mine.build\(\)",
        ),
        ({"loss": lambda self, batch: None}, r"Mine.loss takes other arguments.*called as Mine.loss\(model, batch\)"),
        ({"loss": staticmethod(lambda model: None)}, r"Mine.loss takes other arguments.*Mine.loss\(model, batch\)"),
        ({"collate": lambda self, samples: None}, r"called as Mine.collate\(samples, rows, weights\)"),
        ({"examples": [{"x": 1}]}, r"Mine.examples is \[\{'x': 1\}\], not a method.*write Mine.examples\(\)"),
        ({"__init__": lambda self: None}, r"called as Mine.__init__\(recipe, tokenizer\)"),
        ({"Options": Plain}, "Mine.Options is the class Plain, not a class of pydantic.*Options = Options"),
        ({"padding": ["x"]}, r"Mine.padding is \['x'\], not a dict of numbers"),
        ({"padding": {"x": None}}, "not a dict of numbers"),
        (
            {"unit_classes": "Block"},
            r"Mine.unit_classes is 'Block', not a tuple of names.*unit_classes = \(\"Block\",\)",
        ),
        ({"unit_classes": (nn.Linear,)}, "texts, no classes"),
        ({"metric": lambda self, model, batch: {}}, "Mine.metric is no method or attribute of an adapter.*metrics"),
        ({"weight": lambda self, sample: {}}, "did you mean weights"),
        ({"init_weights": lambda self: None}, "did you mean initial_weights"),
        ({"unit_class": ("Linear",)}, "did you mean unit_classes"),
        ({"options": BaseModel}, "did you mean Options"),
        ({"tensor_plans": {"0": "colwise"}}, "did you mean tensor_plan"),
        ({"augment": lambda self, sample, augment: sample}, "did you mean augmented"),
        ({"configure_optimizers": lambda self: None}, r"would never be called.*actor\.optim\.name"),
        ({"forward": lambda self, batch: None}, "would never be called.*loss calls the model"),
        (
            {"reads": ("model.config_overide",)},
            "reads names model.config_overide, .*did you mean model.config_overrides",
        ),
        ({"step_loss": lambda self, outputs: None}, "Mine.step_loss is never used: .*shardtune.WholeStepAdapter"),
        ({"evaluation_rows": 8}, "Mine.evaluation_rows is never used"),
    ],
)
def test_what_is_wrong_with_a_class_is_told(written: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        check_adapter_class(made(**written), "the recipe")
    assert caught.match(f"(?s){message}")
    assert caught.match("where:  the recipe")


def test_helpers_that_other_methods_call_may_have_such_names():
    check_adapter_class(Helped, "the recipe")


def test_a_method_that_a_class_beside_the_adapters_calls_is_its_own():
    module = type("Module", (), {"configure_optimizers": lambda self: None})
    kind = type("Mine", (made(configure_optimizers=lambda self: None), module), {})
    check_adapter_class(kind, "the recipe")


def test_a_class_that_lacks_methods_is_told_which():
    with pytest.raises(ConfigError, match="the adapter Pairs lacks build, encode, outputs, step_loss"):
        check_adapter_class(type("Pairs", (WholeStepAdapter,), {}), "the recipe")


def _evaluate(self: Any, model: nn.Module, batch: Any, measure: Any = None) -> Evaluation:
    return Evaluation({"loss": self.loss(model, batch)}, {})


@pytest.mark.parametrize(
    ("base", "written", "message"),
    [
        (CausalLM, "loss", "Mine.loss is never used: CausalLM.train_loss takes the place"),
        (CausalLM, "metrics", "Mine.metrics is never used: CausalLM.evaluate takes the place"),
        (CausalLM, "encode", "Mine.encode is never used: CausalLM.encoder takes the place"),
        (CausalLM, "weights", "Mine.weights is never used: CausalLM.encoder takes the place"),
        (CausalLM, "padding", "Mine.padding is never used: CausalLM.collate takes the place"),
        (CausalLM, "tensor_plan", "Mine.tensor_plan is never used: CausalLM.apply_model_parallel takes the place"),
        (type("Own", (Whole,), {"evaluate": _evaluate}), "metrics", "Mine.metrics is never used: Own.evaluate takes"),
    ],
)
def test_what_an_overridden_caller_does_not_call_is_refused(base: type[Any], written: str, message: str):
    given = {"padding": {"x": 0}, "tensor_plan": {"a": "colwise"}}.get(written, _methods()[written])
    kind: type[Any] = type("Mine", (base,), {written: given})
    with pytest.raises(ConfigError, match=message):
        check_adapter_class(kind, "the recipe")


def test_a_class_that_no_recipe_makes_is_refused_with_what_to_extend():
    kind: type[Any] = type("Mine", (CausalLM,), {"train_loss": lambda self, model, batch, token_loss: {}})
    with pytest.raises(ConfigError, match=r"Mine extends CausalLM, which is made from a model's config(.|\n)*Adapter"):
        check_adapter_class(kind, "the recipe")
    made_by_hand = classmethod(lambda cls, recipe, tokenizer=None: None)
    check_adapter_class(type("Made", (kind,), {"from_recipe": made_by_hand}), "the recipe")


def _methods() -> dict[str, Any]:
    return {
        "loss": lambda self, model, batch: None,
        "metrics": lambda self, model, batch: {},
        "encode": lambda self, row: None,
        "weights": lambda self, sample: {},
        "padding": None,
        "tensor_plan": None,
    }


def test_an_overridden_caller_may_call():
    def calling(self: Any, model: nn.Module, batch: Any, measure: Any = None) -> Evaluation:
        return Evaluation({"loss": self.loss(model, batch)}, self.metrics(model, batch))

    def extending(self: Any, model: nn.Module, batch: Any, measure: Any = None) -> Evaluation:
        return Adapter.evaluate(self, model, batch, measure)

    for evaluate in (calling, extending):
        check_adapter_class(made(evaluate=evaluate, metrics=_methods()["metrics"]), "the recipe")


def test_the_rows_of_an_evaluation_of_whole_steps():
    methods = {"outputs": lambda self, model, batch: {}, "step_loss": lambda self, outputs: None}
    for rows in (0, None, 2.5):
        kind = type(
            "Mine", (WholeStepAdapter, Whole), {**methods, "loss": WholeStepAdapter.loss, "evaluation_rows": rows}
        )
        with pytest.raises(ConfigError, match=r"Mine\.evaluation_rows is"):
            check_adapter_class(kind, "the recipe")


@pytest.mark.parametrize(
    "written",
    [
        {},
        {"loss": lambda self, *everything: None},
        {"loss": lambda self, model, batch, scale=1.0: None},
        {"encode": staticmethod(lambda row: None), "examples": classmethod(lambda cls: ())},
        {"metric": lambda self: 0, "metrics": lambda self, model, batch: {}},  # a helper beside what it may be for
        {"_weight": 1, "tokens": 5, "shift": lambda self, x: x},
        {"__init__": lambda self, recipe, tokenizer=None: Whole.__init__(self, recipe, tokenizer)},
    ],
)
def test_what_is_right_is_taken(written: dict[str, Any]):
    check_adapter_class(made(**written), "the recipe")


def test_an_init_that_forgets_its_base_is_told():
    with pytest.raises(ConfigError, match=r"(?s)Mine.__init__ does not call.*super\(\).__init__") as caught:
        check_made(made(__init__=forgetful)(None), "the recipe")
    assert caught.match("where:  the recipe")


class Forgetful(Whole):
    """For the recipe below."""

    __init__ = forgetful  # pyright: ignore[reportAssignmentType]


class Wrong(Whole):
    """For the recipe below."""

    def metric(self) -> None:
        """Nobody calls this."""


@pytest.mark.parametrize(("name", "message"), [("Forgetful", "does not call that of Adapter"), ("Wrong", "metrics")])
def test_both_are_looked_at_whenever_a_recipe_names_an_adapter(name: str, message: str):
    values = {
        "actor": {"model": {"adapter": f"{__file__}:{name}"}},
        "data": {"train_data_paths": "rows.jsonl"},
    }
    with pytest.raises(ConfigError, match=message):
        find_adapter(load_recipe(values, files_must_exist=False))
