"""A vision-language model learns what is in pictures; the long form, for eight families, is `bench/vision.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.memorised import memorise

pytestmark = pytest.mark.lengthy


def test_it_learns_pictures_by_heart_and_looks_at_them(tmp_path: Path) -> None:
    found = memorise("llava", tmp_path, count=6, steps=90)
    assert found.exact == 1.0
    assert found.loss < 0.4
    assert found.exchanged > 1.0
