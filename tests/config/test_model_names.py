"""Names of the user's own models: who may have one, and what is refused."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shardtune import Adapter, FSDPSftWorker, SupportedModel, register_model
from shardtune.config import model_names
from shardtune.config.model_names import (
    describe,
    is_declared,
    is_registered,
    known_names,
    registered,
    registered_adapter,
    registered_worker,
)
from shardtune.errors import ConfigError
from tests.support.registry import nothing_registered


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    with nothing_registered():
        yield


class Worker(FSDPSftWorker):
    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> Any: ...
    def get_train_model_output(self, batch: Any) -> Any: ...
    def get_eval_model_output(self, batch: Any) -> Any: ...


class OtherWorker(Worker):
    pass


class MyAdapter(Adapter):
    def build(self) -> nn.Module:
        return nn.Linear(1, 1)

    def encode(self, row: Any) -> Any: ...
    def loss(self, model: nn.Module, batch: Any) -> Any: ...


def function(cfg: Any) -> nn.Module:
    return nn.Linear(1, 1)


def test_one_name_may_have_one_of_each_kind() -> None:
    assert register_model("mine", category="sft")(Worker) is Worker
    register_model("mine")(MyAdapter)
    register_model("mine")(function)
    assert registered("mine") == [Worker, MyAdapter, function]
    assert (registered_worker("mine"), registered_adapter("mine")) == (Worker, MyAdapter)
    assert known_names() == ["mine"]
    assert is_registered(Worker)
    assert not is_registered(OtherWorker)
    for part in ("worker Worker in", "adapter MyAdapter in", "function function in", "test_model_names.py"):
        assert part in describe("mine")
    assert registered("nobody") == []
    assert registered_worker("nobody") is None


def test_the_same_again_is_fine_and_another_is_not() -> None:
    register_model("mine")(Worker)
    register_model("mine")(Worker)
    with pytest.raises(ConfigError, match=r"'mine' is registered twice: as Worker in .* and as OtherWorker in"):
        register_model("mine")(OtherWorker)
    assert registered("mine") == [Worker]


def test_a_file_that_is_imported_twice_registers_once(tmp_path: Path) -> None:
    """Under another name, as a script and as a plugin, or changed in between, as in a notebook: the last one counts."""
    file = tmp_path / "mine.py"
    file.write_text("from shardtune import register_model\n\n@register_model('twice')\ndef build(cfg):\n    return 1\n")
    for name in ("first_import", "second_import"):
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        assert registered("twice") == [module.build]
        del sys.modules[name]


@pytest.mark.parametrize(
    ("lacking", "says"),
    [
        (("get_eval_model_output",), "the worker Half lacks get_eval_model_output"),
        (
            ("get_eval_model_output", "build_dataloader", "get_train_model_output"),
            "the worker Half lacks build_dataloader, get_eval_model_output, get_train_model_output",
        ),
    ],
    ids=["one", "all"],
)
def test_a_worker_that_lacks_a_method_is_refused_by_name(lacking: tuple[str, ...], says: str) -> None:
    methods = {name: vars(Worker)[name] for name in ("build_dataloader", "get_train_model_output")}
    made: Any = type(FSDPSftWorker)
    half = made("Half", (FSDPSftWorker,), {name: method for name, method in methods.items() if name not in lacking})
    with pytest.raises(ConfigError, match=says):
        register_model("mine")(half)
    assert registered("mine") == []


def test_an_adapter_that_lacks_a_method_is_refused_by_name() -> None:
    class Half(Adapter):
        def build(self) -> nn.Module:
            return nn.Linear(1, 1)

    with pytest.raises(ConfigError, match="the adapter Half lacks encode, loss"):
        register_model("mine")(Half)


@pytest.mark.parametrize(
    ("name", "category", "thing", "says"),
    [
        ("mine", "embodied", Worker, "'embodied' is no category of models"),
        ("causal_lm", "sft", Worker, "'causal_lm' is a name of the system's own"),
        ("", "sft", Worker, "'' is no name of a model"),
        ("mine", "sft", nn.Linear, "the class Linear is neither a worker nor an adapter"),
        ("mine", "sft", 3, "3 is neither a class nor a function"),
    ],
)
def test_what_cannot_be_registered(name: str, category: str, thing: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        register_model(name, category=category)(thing)


def test_an_enum_declares_names() -> None:
    class Models(SupportedModel):
        ...
        MY_NEW_MODEL_SFT = ("my_new_model", "sft")
        ANOTHER = ("another", "sft")

    assert known_names() == ["another", "my_new_model"]
    assert is_declared("my_new_model")
    assert registered("my_new_model") == []
    assert "Models in" in describe("my_new_model")
    assert isinstance(Models.ANOTHER, Enum)
    assert (Models.ANOTHER.value, Models.ANOTHER.model_type, Models.ANOTHER.category) == (
        ("another", "sft"),
        "another",
        "sft",
    )


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (("x", "embodied"), "'embodied' is no category"),
        ("x", "the member is .'x',., not a name and a category"),
        (("x", "sft", 1), "not a name and a category"),
        (("causal_lm", "sft"), "a name of the system's own"),
    ],
    ids=str,
)
def test_an_enum_member_that_declares_nothing_is_refused(value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        type(SupportedModel)("Bad", (SupportedModel,), _members(value))
    assert known_names() == []


def _members(value: Any) -> Any:
    members = type(SupportedModel).__prepare__("Bad", (SupportedModel,))
    members["MEMBER"] = value
    return members


def test_packages_offer_names_and_are_loaded_when_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = __name__
    assert "packaged" not in known_names()
    package = tmp_path / "offering-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n")
    offered = {"packaged": f"{here}:MyAdapter", "broken": "no_such_package.models:Mine", "mine": f"{here}:function"}
    lines = [f"[{model_names.GROUP}]", *(f"{name} = {value}" for name, value in offered.items())]
    (package / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert known_names() == ["broken", "mine", "packaged"]
    assert describe("packaged") == f"{here}:MyAdapter of offering 1.0"
    assert registered_adapter("packaged").__name__ == "MyAdapter"  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(ConfigError, match=r"offers the model 'broken' as no_such_package\.models:Mine") as error:
        registered("broken")
    assert "ModuleNotFoundError: No module named 'no_such_package'" in str(error.value)
    register_model("mine")(Worker)  # what the user registers goes first
    assert registered("mine") == [Worker]


def test_registering_needs_no_torch() -> None:
    code = "import sys; from shardtune import register_model, SupportedModel; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
