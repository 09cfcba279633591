"""A run trained and evaluated from Python has the numbers of its recipe, whatever torch's settings are there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Thread

import numpy as np
import pytest
import torch

import shardtune
from shardtune.config import load_recipe
from shardtune.run import caller_settings
from shardtune.run.api import evaluate
from shardtune.run.caller_settings import in_recipe_settings, recipe_settings
from tests.support.tiny_run import Tiny, lines, make_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("settings"), save_interval=-1)


@pytest.fixture
def _double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(caller_settings, "_set_by_code", {})
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_double")
def test_settings_of_the_script_do_not_change_a_run(tiny: Tiny) -> None:
    held_out = str(tiny.folder / "eval.jsonl")
    given = {"runner__max_steps": 2, "data__eval_data_paths": held_out, "actor__model__precision": "bf16"}
    unused = r"default dtype torch\.float64 and torch\.autocast of this process have no effect"
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        with pytest.warns(UserWarning, match=unused):
            run = shardtune.train(tiny.recipe("script", **given))
        assert torch.is_autocast_enabled("cpu")
        with pytest.warns(UserWarning, match=unused):
            found = run.evaluate()
        with pytest.warns(UserWarning, match=unused):
            assert evaluate(run.dir) == found
        with pytest.warns(UserWarning, match=unused):
            answers = run.generate(["say 3", "say 9"], max_new_tokens=8, temperature=1.0)
    assert torch.get_default_dtype() == torch.float64
    torch.set_default_dtype(torch.float32)
    plain = shardtune.train(tiny.recipe("plain", **given))
    assert lines(run.dir) == lines(plain.dir)
    assert plain.generate(["say 3", "say 9"], max_new_tokens=8, temperature=1.0) == answers
    with pytest.warns(UserWarning, match=r"optim\.lr has no effect in an evaluation"):
        assert plain.evaluate("final", "optim.lr=1") == found


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]


def test_a_run_leaves_the_scripts_generators_as_they_were(tiny: Tiny) -> None:
    """A search that draws a learning rate between its runs draws another one each time."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    held_out = str(tiny.folder / "eval.jsonl")
    run = shardtune.train(tiny.recipe("drawing", runner__max_steps=1, data__eval_data_paths=held_out))
    run.evaluate()
    evaluate(run.dir)
    run.generate(["say 3"], max_new_tokens=2, temperature=1.0)
    assert drawn() == expected


@pytest.mark.usefixtures("_double")
def test_a_default_dtype_of_the_recipes_own_code_stays(recwarn: pytest.WarningsRecorder) -> None:
    torch.set_default_dtype(torch.float32)
    with recipe_settings():
        torch.set_default_dtype(torch.float64)  # as a plugin does, whose file is imported once
    with recipe_settings():
        assert torch.get_default_dtype() == torch.float64
    assert not recwarn


@pytest.fixture
def _lowered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(caller_settings, "_set_by_code", {})
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("_lowered")
def test_lower_precision_and_a_default_device_of_the_script_stay_outside() -> None:
    unused = r"precision of fp32 products \(TF32, bf16\) and the default device meta of this process have no effect"
    items = in_recipe_settings((torch.get_float32_matmul_precision(), torch.zeros(1).device.type) for _ in range(1))
    with torch.device("meta"):
        with pytest.warns(UserWarning, match=unused):
            assert next(items) == ("highest", "cpu")
        assert torch.zeros(1).is_meta
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.usefixtures("_double")
def test_each_item_is_computed_with_the_recipes_settings() -> None:
    items = in_recipe_settings(torch.zeros(1).dtype for _ in range(2))
    with pytest.warns(UserWarning, match="default dtype"):
        assert next(items) == torch.float32
    assert torch.get_default_dtype() == torch.float64
    with pytest.warns(UserWarning, match="default dtype"):
        assert [*items] == [torch.float32]


@pytest.mark.usefixtures("_lowered")
@pytest.mark.filterwarnings("ignore:the lower precision")
def test_calls_in_several_threads_leave_the_scripts_settings_and_do_not_take_them_for_the_recipes() -> None:
    seen, first, last = list[str](), Barrier(2, timeout=30), Barrier(2, timeout=30)

    def act(ends_last: bool) -> None:
        with recipe_settings():
            first.wait()
            if ends_last:
                last.wait()
            seen.append(torch.get_float32_matmul_precision())
        if not ends_last:
            last.wait()

    threads = [Thread(target=act, args=(ends_last,)) for ends_last in (False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.get_float32_matmul_precision() == "medium"
    with recipe_settings():
        seen.append(torch.get_float32_matmul_precision())
    assert seen == ["highest"] * 3


def test_a_default_device_of_the_recipes_own_code_stays(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(caller_settings, "_set_by_code", {})
    try:
        with recipe_settings():
            torch.set_default_device("meta")
        with recipe_settings():
            assert torch.zeros(1).is_meta
    finally:
        torch.set_default_device(None)
    assert not recwarn


@pytest.mark.usefixtures("_lowered")
def test_settings_of_the_file_of_a_transform_are_the_recipes(tiny: Tiny, tmp_path: Path) -> None:
    torch.set_float32_matmul_precision("highest")
    file = tmp_path / "rows.py"
    file.write_text("import torch\n\ntorch.set_float32_matmul_precision('high')\n\n\ndef same(row):\n    return row\n")
    run = shardtune.Run(tmp_path)
    recipe = load_recipe(tiny.recipe("rows", data__transform=f"{file}:same"))
    run.executable_recipe = lambda: recipe  # type: ignore[method-assign]
    run.rows_as_trained()
    with recipe_settings():
        assert torch.get_float32_matmul_precision() == "high"
