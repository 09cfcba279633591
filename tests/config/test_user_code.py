"""The user's own code: imported once per process, from the parent, the ranks and the processes that read data."""

from __future__ import annotations

import pickle
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from shardtune.config import user_code
from shardtune.config.user_code import (
    import_file,
    import_plugins,
    load_function,
    note_on_other_plugins,
    user_fault,
)
from shardtune.data.encoder import RowError
from shardtune.data.files.json_text import JsonChunk
from shardtune.errors import ConfigError
from tests.support.dist.ranks import run_ranks


def names_in_ranks(file: str) -> tuple[str, bytes]:
    """The module's name in this process, and an object of a class of it, pickled."""
    import_plugins([file])
    module = import_file(Path(file), "plugins")
    return module.__name__, pickle.dumps(module.Box(7))


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(
        "from pathlib import Path\n"
        "count = Path(__file__).with_suffix('.count')\n"
        "count.write_text(count.read_text() + 'x' if count.exists() else 'x')\n"
        "class Box:\n"
        "    def __init__(self, value): self.value = value\n"
        "def double(value): return 2 * value\n"
    )
    return file


def test_a_file_is_imported_once(plugin: Path) -> None:
    import_plugins([str(plugin)])
    assert load_function(f"{plugin}:double", "eval.match")(4) == 8
    assert plugin.with_suffix(".count").read_text() == "x"


def test_its_objects_travel_between_processes(plugin: Path) -> None:
    import_plugins([str(plugin)])
    for name, pickled in run_ranks(names_in_ranks, 2, str(plugin)):
        assert name in sys.modules
        assert pickle.loads(pickled).value == 7


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"def here(): return {folder!r}\n")
    assert [load_function(f"{tmp_path / folder}/mine.py:here", "x")() for folder in "ab"] == ["a", "b"]


@pytest.mark.parametrize("line", ["import beside", "from beside.inner import x", "from .beside import x"])
def test_importing_a_neighbouring_file_is_an_error_with_a_remedy(tmp_path: Path, line: str) -> None:
    (tmp_path / "beside.py").write_text("x = 1\n")
    (tmp_path / "mine.py").write_text(f"{line}\n")
    with pytest.raises(ConfigError, match="its directory is not on Python's path") as caught:
        import_file(tmp_path / "mine.py", "actor.model.adapter")
    assert caught.match("mine.py:1")


def test_a_module_that_is_nowhere_is_no_matter_of_files_beside(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import no_such_module_anywhere\n")
    with pytest.raises(ConfigError, match=r"python .*mine.py shows the whole error"):
        import_file(tmp_path / "mine.py", "actor.model.adapter")


def test_a_module_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "installed_plugin_of_mine.py"
    file.write_text("loaded = True\ndef fails(): return {}['x']\n")
    monkeypatch.syspath_prepend(tmp_path)
    import_plugins(["installed_plugin_of_mine"])
    module = sys.modules["installed_plugin_of_mine"]
    assert module.loaded
    with pytest.raises(KeyError) as caught:
        module.fails()
    told = user_fault(caught.value)  # as a mistake in a file that the recipe names
    assert told is not None
    assert (told.what, told.where) == ("KeyError: 'x'", f"{file}:2, in fails")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import math\n\nmath.sine(1)\n", r"AttributeError: .*'sine'(?s:.*)mine\.py:3"),
        ("def f(:\n", r"SyntaxError(?s:.*)mine\.py:1"),
        ("import sys\nsys.exit(3)\n", r"SystemExit: 3(?s:.*)mine\.py:2"),
    ],
)
def test_what_does_not_import_is_told_with_its_line(tmp_path: Path, code: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(code)
    for _ in range(2):  # a module that failed is not left half-made
        with pytest.raises(ConfigError, match=said):
            import_plugins([str(tmp_path / "mine.py")])


def test_a_function_that_is_not_there_names_those_that_are(plugin: Path) -> None:
    with pytest.raises(ConfigError, match=r"no function or class 'triple'(?s:.*)double"):
        load_function(f"{plugin}:triple", "eval.match")


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package counts as the user's: tests before may have imported one of these tests as a plugin."""
    monkeypatch.setattr(user_code, "_packages", set())


def test_a_mistake_in_a_users_file_is_told_from_there_on(tmp_path: Path, no_packages: None) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def inner():\n    return {}['x']\n\n\ndef outer():\n    return inner()\n")
    outer = load_function(f"{file}:outer", "somewhere")
    with pytest.raises(KeyError) as caught:
        outer()
    told = user_fault(caught.value)
    assert told is not None
    assert (told.what, told.where, told.exit_code) == ("KeyError: 'x'", f"{file}:2, in inner", 2)
    assert told.remedy.startswith("fix it there")
    assert "return inner()" in told.remedy
    assert __file__ not in told.remedy


def test_a_gradient_in_an_evaluation_has_its_own_remedy(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\ndef loss(model, x):\n    x = x.detach().requires_grad_()\n"
        "    return torch.autograd.grad(model(x).sum(), x)\n"
    )
    loss = load_function(f"{file}:loss", "somewhere")
    with torch.no_grad(), pytest.raises(RuntimeError) as caught:
        loss(torch.sin, torch.ones(2))
    told = user_fault(caught.value)
    assert told is not None
    assert "with torch.enable_grad():" in told.remedy


@pytest.mark.parametrize(
    "layer", ["nn.LayerNorm(3)", "nn.Linear(3, 3)", "nn.Conv1d(2, 2, 1)", "nn.GRU(3, 3)"], ids=lambda text: text[3:]
)
def test_a_layer_that_casts_its_input_by_itself_has_its_own_remedy(tmp_path: Path, layer: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"from torch import nn\nmodel = {layer}.bfloat16()\ndef loss(x):\n    return model(x.float())\n")
    loss = load_function(f"{file}:loss", "somewhere")
    with pytest.raises((RuntimeError, ValueError)) as caught:
        loss(torch.ones(2, 2, 3, dtype=torch.bfloat16)[0])
    told = user_fault(caught.value)
    assert told is not None
    assert told.remedy.startswith("model.precision is the dtype of parameters"), told.what


def test_a_gradient_for_a_weight_of_a_unit_has_its_own_remedy_on_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import torch\ndef slope(x, weight):\n    return torch.autograd.grad(x.sum(), weight)\n")
    slope = load_function(f"{file}:slope", "somewhere")
    with pytest.raises(RuntimeError) as caught:
        slope(torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True))
    for ranks, said in (("1", "fix it there"), ("2", "a weight outside of all units")):
        monkeypatch.setenv("WORLD_SIZE", ranks)
        monkeypatch.setenv("RANK", "0")
        told = user_fault(caught.value)
        assert told is not None
        assert said in told.remedy


def test_any_other_error_stays_what_it_is(no_packages: None) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 / 0
    assert user_fault(caught.value) is None


def test_a_plugin_of_ours_makes_no_error_a_users(no_packages: None) -> None:
    """A row that a parser refuses is a bad row, and no fault of a user's code, in shortened runs too."""
    import_plugins(["shardtune.errors"])
    (row,) = JsonChunk([(1, b'{"a": %s}' % (b"9" * 5000))], 1.0).rows()
    assert isinstance(row[1], RowError)


def test_plugins_of_earlier_runs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(user_code, "_plugins", defaultdict(set))
    first, second = str(tmp_path / "a" / "mine.py"), str(tmp_path / "b" / "mine.py")
    for file in (first, second):
        Path(file).parent.mkdir()
        Path(file).write_text("x = 1")
    import_plugins([first])
    import_plugins([first])
    assert note_on_other_plugins([first]) == []
    import_plugins([second])
    (note,) = note_on_other_plugins([second])
    assert f": {first};" in note
    Path(second).write_text("x = 2")
    import_plugins([second])
    (note,) = note_on_other_plugins([second])
    assert f": {first}, {second} as it was before its change;" in note
    assert note_on_other_plugins([]) != []
