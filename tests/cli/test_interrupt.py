"""A signal in the middle of an import: one message and the exit code, whatever the imported code makes of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardtune.cli.interrupt import signals_as_usual, stop_at_once
from shardtune.launch.signals import NOTHING_TRAINED
from tests.support.workspace import run_cli

SLOW = """
import time
from pathlib import Path
Path({began!r}).touch()
try:
    time.sleep(60)  # Python's own handler raises here
except BaseException:
    raise NameError("name 'optimizer' is not defined") from None
"""
BRIEF = """
import time
from pathlib import Path
Path({began!r}).touch()
try:
    until = time.monotonic() + 0.6
    while time.monotonic() < until:
        time.sleep(0.1)
except BaseException:
    pass
Path({ended!r}).touch()
"""


def interrupted(command: list[str], began: Path, cwd: Path, number: int = signal.SIGINT) -> tuple[int, str]:
    """Exit code and output of a command that a signal has reached while a module is imported."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what runs in background
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        until = time.monotonic() + 30
        while not began.exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(number)
        told, _ = process.communicate(timeout=30)
        return process.returncode, told
    finally:
        process.kill()


@pytest.mark.parametrize("command", [["eval", "run"], ["plan", "r.yaml"], ["data", "preview", "r.yaml"]])
def test_a_command_that_imports_ends_at_once(command: list[str], tmp_path: Path) -> None:
    began = tmp_path / "began"
    for name in ("torch", "transformers"):
        (tmp_path / f"{name}.py").write_text(SLOW.format(began=str(began)))
    (tmp_path / "r.yaml").write_text("model: {model_path: ./m}\ndata: {train_data_paths: ./r.jsonl}\n")
    (tmp_path / "run").mkdir()
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from shardtune.cli.commands import main; main()"
    exit_code, told = interrupted([sys.executable, "-c", code, *command], began, tmp_path)
    assert (exit_code, told) == (1, "error: interrupted\n")


@pytest.mark.parametrize(
    ("command", "number", "ends"),
    [
        ("eval", signal.SIGINT, (1, "error: interrupted\n")),
        ("eval", signal.SIGTERM, (-signal.SIGTERM, "")),
        ("train", signal.SIGINT, (75, f"{NOTHING_TRAINED}\n")),
        ("train", signal.SIGTERM, (75, f"{NOTHING_TRAINED}\n")),
    ],
)
def test_a_command_that_is_imported_itself_ends_at_once(
    command: str, number: int, ends: tuple[int, str], tmp_path: Path
) -> None:
    began = tmp_path / "began"
    (tmp_path / "typer.py").write_text(SLOW.format(began=str(began)))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from shardtune.cli import main; main()"
    assert interrupted([sys.executable, "-c", code, command, "r.yaml"], began, tmp_path, number) == ends


def test_in_the_middle_of_a_command_the_interrupt_comes_after_the_import(tmp_path: Path) -> None:
    began, ended = tmp_path / "began", tmp_path / "ended"
    (tmp_path / "brief.py").write_text(BRIEF.format(began=str(began), ended=str(ended)))
    (tmp_path / "work.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from shardtune.cli.interrupt import handle_interrupts\n"
        "handle_interrupts()\n"
        "try:\n"
        "    import brief\n"
        "    while True: pass\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    exit_code, told = interrupted([sys.executable, str(tmp_path / "work.py")], began, tmp_path)
    assert (exit_code, told) == (0, "interrupted\n")
    assert ended.exists(), "the import was broken off"


def test_in_the_command_itself_signals_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the training a signal would otherwise end it as if nothing had been trained."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["shardtune", "train"])
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        stop_at_once()
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert run_cli("train", "missing.yaml").code == 2
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signals_as_usual()
        signal.signal(signal.SIGTERM, before)
