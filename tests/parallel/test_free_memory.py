"""The memory that is free: a container's limit counts, and cached parts of files do not count as used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardtune.parallel import free_memory
from shardtune.parallel.free_memory import free_bytes, host_bytes


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limit_counts(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    top = tmp_path / "groups" / ("memory" if version == 1 else "")
    (top / "outer" / "inner").mkdir(parents=True)
    limit, used = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
    for folder, value in ((top / "outer", "5000"), (top / "outer" / "inner", "max")):
        (folder / f"memory.{limit}").write_text(value)
        (folder / f"memory.{used}").write_text("3000\n")
        (folder / "memory.stat").write_text("anon 1000\ninactive_file 500\n")
    (tmp_path / "own").write_text("7:memory:/outer/inner\n" if version == 1 else "0::/outer/inner\n")
    monkeypatch.setattr(free_memory, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(free_memory, "OWN", tmp_path / "own")
    assert (host_bytes(), free_bytes(torch.device("cpu"))) == (5000, 5000 - 3000 + 500)


def test_without_control_groups_it_is_the_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(free_memory, "OWN", tmp_path / "own")
    assert 0 < free_bytes(torch.device("cpu")) <= host_bytes()
