"""A process from the server of forks is like one that was started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import fork_server

SCRIPT = """
import json, os, signal, subprocess, sys
if sys.argv[1] == "wait":
    print("here", flush=True)
    signal.pause()
inner = [sys.executable, sys.argv[0], "wait"]
started = subprocess.Popen(inner, stdout=-1, text=True, start_new_session=True)
started.stdout.readline()
started.terminate()
seen = {
    "argv": sys.argv,
    "name": __name__,
    "file": __file__,
    "path": sys.path,
    "directory": os.getcwd(),
    "environment": {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"},
    "input": sys.stdin.read(),
    "child of the one that started it": os.getppid() == int(os.environ["STARTER"]),
    "a session of its own": os.getsid(0) == os.getpid(),
    "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
    "descriptors": sorted(os.listdir("/proc/self/fd"), key=int)[:3],
    "its own child": started.wait(),
}
print(json.dumps(seen))
print("an error", file=sys.stderr)
sys.exit(3)
"""


def outcome(file: Path, *, new_session: bool) -> tuple[int, dict[str, object], str]:
    done = subprocess.run(
        [sys.executable, "-u", str(file), "ä b", "--key=1"],
        input="a line\n",
        cwd=file.parent,
        env={**os.environ, "STARTER": str(os.getpid()), "MORE": "ü"},
        start_new_session=new_session,
        capture_output=True,
        text=True,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("new_session", [False, True])
def test_it_is_as_if_it_were_started(tmp_path: Path, new_session: bool) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    forked = outcome(file, new_session=new_session)
    with fork_server.own_starts():
        started = outcome(file, new_session=new_session)
    assert forked[0::2] == started[0::2]
    assert {name: value for name, value in forked[1].items() if value != started[1][name]} == {}, started
    assert forked[0] == 3
    assert forked[1]["its own child"] == -signal.SIGTERM


def test_it_has_no_threads_and_ends_with_its_error(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text("import os, sys\nassert 'torch' in sys.modules\nraise KeyError(len(os.listdir('/proc/self/task')))")
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "KeyError: 1"


def test_a_signal_is_its_exit_code(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text("import signal\nprint('here', flush=True)\nsignal.pause()")
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen(
            [sys.executable, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(number)
        process.communicate()
        assert process.returncode == -number


@pytest.mark.parametrize("further", [{"HF_HOME": "elsewhere"}, {"PYTHONHASHSEED": "77"}])
def test_what_counts_at_imports_has_a_start_of_its_own(tmp_path: Path, further: dict[str, str]) -> None:
    file = tmp_path / "script.py"
    file.write_text("import sys\nprint('torch' in sys.modules)")
    environment = {**os.environ, **further}
    done = subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
