"""The bench for a GPU, as far as a CPU shows it: its parts, how it continues, and its tables."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """Its modules, which import what lies beside them."""
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "bench"))
    names = ("parts", "records", "tables", "branches", "costs", "contender", "doubles")
    yield SimpleNamespace(**{name: importlib.import_module(f"gpu_parts.{name}") for name in names})
    sys.path[:] = before


def test_parts_have_checks_of_different_names(bench: Any, tmp_path: Path) -> None:
    for small in (False, True):
        setting = bench.records.Setting("cuda", small, tmp_path)
        for name, part in bench.parts.PARTS.items():
            names = part.names(setting)
            assert names, name
            assert len(set(names)) == len(names), name


def test_every_branch_of_a_gpu_is_named(bench: Any) -> None:
    """A file that takes another way on a GPU has a check, or a reason why it has none."""
    package = ROOT / "shardtune"
    marked = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if bench.branches.MARKS.search(file.read_text(encoding="utf-8"))
    }
    assert marked == set(bench.branches.FILES)


def test_a_second_call_computes_what_is_missing_and_names_what_died(bench: Any, tmp_path: Path) -> None:
    records, calls = bench.records, []

    def fails(_: Any) -> Any:
        raise ValueError("too small\nfor this")

    part = records.Part(
        "Some",
        lambda _: [
            records.Check("one", lambda _: calls.append("one") or records.within(2e-12, 1e-9, loss=2e-12)),
            records.Check("killed", lambda _: {}),
            records.Check("two", fails),
            records.Check("three", lambda _: [{"what": "a|b", "value": 12345.6}, records.skip("nothing here")]),
            records.Check("late", lambda _: {}, seconds=1e9),
        ],
        ("what", "value", "limit", "loss", "empty"),
    )
    setting = records.Setting("cpu", False, tmp_path)
    kept = records.Records(tmp_path, "some")
    assert kept.pending(part.names(setting)) == ["one", "killed", "two", "three", "late"]
    kept.begin("killed")
    assert kept.unfinished() == "killed"
    kept.add("killed", verdict=records.FAIL, note="exit code -9")
    with kept.file.open("a") as file:
        file.write('{"check": "tw')  # the machine went away in the middle of a line
    with kept.file.open("a") as file:
        file.write("\n")
    for _ in range(2):
        records.compute(part, kept, setting, time.time() + 1000)
    assert calls == ["one"]
    assert kept.pending(part.names(setting)) == ["late"]
    text, failed = bench.tables.page({"some": part}, setting)
    assert failed == ["some: killed", "some: two"]
    assert "| one |  | 2.0e-12 | 1.0e-09 | 2.0e-12 | PASS |  |" in text
    assert "| three | a/b | 12,346 |" in text
    assert "ValueError: too small |" in text
    assert "empty" not in text
    assert "5 lines, 2 failed, 1 left out." in text


def test_the_parts_are_those_of_the_command(bench: Any) -> None:
    """In an order in which the most is known if a machine goes away early."""
    assert list(bench.parts.PARTS)[:3] == ["machine", "branches", "numbers"]
    assert {"costs", "memory", "vision"} < set(bench.parts.PARTS)


def test_kernels_are_named_in_words(bench: Any) -> None:
    names = {"flash_fwd_kernel": "attention", "nvjet_hsh_128x256": "matrix products", "multi_tensor_apply": "updates"}
    for kernel, words in names.items():
        assert bench.costs.kind_of(kernel).startswith(words)
    assert json.dumps(bench.contender.missing("TRL with Liger")).startswith("[")


def test_doubles_stay_doubles_and_bytes_stay_bytes(bench: Any) -> None:
    numbers = torch.linspace(0.0, 1.0, 6, dtype=torch.float64)
    with bench.doubles.Doubles():
        converted = [
            numbers.float(),
            numbers.to(torch.float32),
            numbers.to(dtype=torch.float32),
            torch.softmax(numbers, -1, dtype=torch.float32),
            torch.nn.functional.softmax(numbers, dim=-1, dtype=torch.float32),
        ]
        seen = numbers.view(torch.float32)
    assert {tensor.dtype for tensor in converted} == {torch.float64}
    assert torch.equal(converted[0], numbers)
    assert seen.dtype == torch.float32
    assert len(seen) == 12
    assert numbers.float().dtype == torch.float32


def test_some_checks_of_a_part_are_chosen_by_their_names(bench: Any, tmp_path: Path) -> None:
    records, calls = bench.records, []
    checks = [records.Check(name, lambda _, name=name: calls.append(name) or {}) for name in ("0.6B", "8B", "8B LoRA")]
    part, setting = records.Part("Some", lambda _: checks), records.Setting("cpu", False, tmp_path, "^8B")
    assert part.names(setting) == ["8B", "8B LoRA"]
    records.compute(part, records.Records(tmp_path, "some"), setting, time.time() + 1e6)
    assert calls == ["8B", "8B LoRA"]
    assert setting.words()[setting.words().index("--match") + 1] == "^8B"
