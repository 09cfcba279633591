"""`make venv` installs with uv, with pip's settings, and with pip where uv does not."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

FILE = Path(__file__).parents[1] / "tools/install.py"
LISTED = """\
:env:.extra-index-url='https://env.example/simple'
global.extra-index-url='file:///one/simple\\nfile:///two/simple'
global.index-url='https://index.example/simple'
global.timeout='60'
install.find-links='/wheels /more wheels'
"""


@pytest.fixture
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_settings_of_pip_are_those_of_uv(install: ModuleType) -> None:
    assert install.settings(LISTED) == {
        "UV_DEFAULT_INDEX": "https://index.example/simple",
        "UV_INDEX": "https://env.example/simple",
        "UV_FIND_LINKS": "/wheels,/more,wheels",
    }
    assert install.settings(LISTED.partition("\n")[2])["UV_INDEX"] == "file:///one/simple file:///two/simple"
    assert install.settings("") == {}


@pytest.mark.parametrize("failing", ["", "config list", "install --quiet", "uv pip install"])
def test_where_uv_fails_pip_installs(install: ModuleType, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    ran: list[str] = []

    def run(command: tuple[str, ...], **_: Any) -> SimpleNamespace:
        ran.append(" ".join(command))
        return SimpleNamespace(returncode=int(bool(failing) and failing in ran[-1]), stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    assert install.main("constraints.txt") == 0
    by = "-m pip" if failing else "-m uv pip"
    assert by in ran[-1]
    assert ran[-1].endswith("-c constraints.txt -e .[dev]")
    assert len([command for command in ran if command.endswith("-e .[dev]")]) == (2 if "uv" in failing else 1)
