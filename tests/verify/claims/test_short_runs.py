"""How a shortened run ends, and what it needs on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardtune.verify.claims.resume import repeatable
from shardtune.verify.claims.short_runs import Attempt, ShortRuns
from shardtune.verify.result import Failed, Skipped
from tests.verify.claims.test_evidence import line

TORCH = (
    "RuntimeError: cumsum_cuda_kernel does not have a deterministic implementation, but you set "
    "'torch.use_deterministic_algorithms(True)'."
)


@pytest.mark.parametrize(
    ("on_gpu", "deterministic", "changed"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_on_a_gpu_kernels_that_repeat_their_bits_are_chosen(on_gpu: bool, deterministic: bool, changed: bool) -> None:
    runner = SimpleNamespace(deterministic=deterministic)
    runs: Any = SimpleNamespace(on_gpu=on_gpu, recipe=SimpleNamespace(runner=runner))
    changes, how = repeatable(runs)
    assert changes == ({"runner.deterministic": True} if changed else {})
    assert ("with runner.deterministic=true" in how) == changed


@pytest.mark.parametrize(("text", "error"), [(TORCH, Skipped), ("RuntimeError: another one", Failed)])
def test_where_there_is_no_such_kernel_nothing_is_compared(text: str, error: type[Exception], tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    run: Any = SimpleNamespace(name="whole", summary="whole, 1 rank, fp32")
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", f"import sys; sys.stderr.write({text!r} + chr(10)); sys.exit(1)"],
            stderr=stream,
        )
        with pytest.raises(error) as caught:
            Attempt(run, process, output, 0.0, False, stream).wait()
    assert "RuntimeError: " in str(caught.value)


def test_a_continuation_that_is_refused_names_the_frozen_weights_that_changed(tmp_path: Path) -> None:
    (tmp_path / "rank0.jsonl").write_text(json.dumps(json.loads(line(1, 0, 1)) | {"changed": ["a.weight"]}) + "\n")
    run: Any = SimpleNamespace(name="stopped", summary="stopped, 1 rank, fp64", recorded=tmp_path)
    output = tmp_path / "output.txt"
    with output.open("wb") as stream:
        process = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.exit(2)"])
        with pytest.raises(Failed, match=r"stopped changes a weight that is frozen, in step 1: a\.weight"):
            Attempt(run, process, output, 0.0, True, stream).wait()


def test_a_line_of_any_process_is_found(tmp_path: Path) -> None:
    runs: Any = object.__new__(ShortRuns)
    for name, text in (("a", "one\n"), ("b", "two\ndata: it draws anew\n"), ("c", "data: it draws anew\n")):
        (tmp_path / name).write_text(text)
    runs._attempts = [SimpleNamespace(output=tmp_path / name) for name in "abc"]
    assert (runs.said("draws"), runs.said("three")) == (["data: it draws anew"], [])
