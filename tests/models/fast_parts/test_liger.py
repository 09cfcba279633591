"""Liger's kernels beside the modules that they replace, in Triton's interpreter (`make test-fast-parts`)."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.fast_parts.test_replacement import gradients, started, tiny

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is off: make test-fast-parts", allow_module_level=True)
triton: Any = pytest.importorskip("triton")
tl: Any = pytest.importorskip("triton.language")
pytest.importorskip("liger_kernel")


@triton.jit
def rsqrt(x):  # type: ignore[no-untyped-def]
    return tl.rsqrt(x)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton's interpreter lacks: numbers as arguments become tensors, and a reciprocal root exists."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    own = interpreter._implicit_cvt

    def converted(argument: Any) -> Any:
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return own(argument)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)
    monkeypatch.setattr(importlib.import_module("liger_kernel.ops.rms_norm"), "rsqrt", rsqrt)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_its_parts_are_within_rounding(family: str) -> None:
    model = tiny(family)
    expected = gradients(model)
    found, notes = started(model, "liger")
    parts = [note.split()[1] for note in notes]
    assert parts == (
        ["rms_norm", "swiglu", "rope"] if family == "qwen3" else ["rms_norm", "rope"]
    )  # Gemma's is a GeGLU
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-5)
    found.restore()


def test_its_parts_have_their_numbers_in_compiled_layers() -> None:
    """Between the compiled parts of a layer they are called as they are."""
    model = tiny("qwen3")
    model.model.layers = model.model.layers[:1]
    started(model, "liger")
    expected = gradients(model)
    for layer in model.model.layers:
        layer.compile(dynamic=True, backend="eager")
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-6, atol=1e-7)
