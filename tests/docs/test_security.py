"""Each threat of docs/security.md has a test that exists."""

from __future__ import annotations

import ast
import re

from tests.support.doc_blocks import ROOT


def test_each_line_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| threat")]
    assert len(rows) >= 12
    for row in rows:
        *_, cell = row.strip("|").split("|")
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", cell)
        assert named, row
        for file, function in named:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert not function or function in functions, f"{file} has no {function}"
