"""A file in the working directory that is named like an installed package is not executed by processes of this one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardtune
from shardtune.config.user_code import import_plugins
from shardtune.launch import module_process
from shardtune.launch.module_process import module_command, module_environment

PACKAGE = Path(shardtune.__file__).parent
TRAP = "from pathlib import Path\nPath(__file__ + '.executed').touch()\nraise SystemExit('executed')\n"


@pytest.fixture
def traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("shardtune", "pydantic", "typer", "yaml"):
        (tmp_path / f"{name}.py").write_text(TRAP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.own_start
def test_a_module_does_not_look_into_the_working_directory(traps: Path) -> None:
    """As the ranks of a run and of an engine are started, and the check of an export."""
    command = module_command("shardtune.config.reference")
    done = subprocess.run(command, env=module_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (traps / "shardtune.py").unlink()  # which `python -m shardtune` itself finds, before any line of this package
    done = subprocess.run([sys.executable, "-m", "shardtune", "--version"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(traps.glob("*.executed"))


def test_no_process_is_started_in_another_way() -> None:
    found = {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if re.search(r'sys\.executable, "-m"', file.read_text())
    }
    assert not found


def test_the_package_in_its_own_checkout_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_process.os, "getcwd", lambda: module_process.PACKAGE_ROOT)
    monkeypatch.setenv("PYTHONPATH", "/a")
    assert module_environment()["PYTHONPATH"] == f"/a:{module_process.PACKAGE_ROOT}"
    monkeypatch.setattr(sys, "path", [module_process.PACKAGE_ROOT, "/b"])
    module_process.leave_out_working_directory()
    assert sys.path == ["/b", module_process.PACKAGE_ROOT]


def test_a_plugin_in_the_working_directory_comes_last(traps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (traps / "my_plugin_here.py").write_text("import yaml\nNAME = yaml.__name__\n")
    (module,) = import_plugins(["my_plugin_here"])
    assert module.NAME == "yaml"
    assert sys.path[-1] == str(traps)
    del sys.modules["my_plugin_here"]
    assert not list(traps.glob("*.executed"))
