"""Compiles the kernel of Adam's updates for GPUs that need not be there, as its caller starts it; prints what came out.

Run as `python -m tests.support.compiled_adam 80 90`, with the numbers of generations of NVIDIA's GPUs, without
TRITON_INTERPRET.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from shardtune.optim import fused_adam
from tests.optim.test_fused_adam import stepped

KINDS = [("fp32", "int8"), ("fp32", "bf16"), ("bf16", "int8"), ("bf16", "bf16"), ("bf16", "fp32")]
"""Of weights, and of moments."""


class Driver:
    """What Triton looks up of the machine before it compiles."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:  # by which kernels are kept
        return self._target.arch

    def get_current_stream(self, device: int) -> int:
        return device


class Compiled:
    """In the place of the kernel: compiles where it would be started."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self._kernel = fused_adam.kernel()

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def start(*arguments: object, **options: object) -> None:
            self.found.append(self._kernel.warmup(*arguments, grid=grid, **options))

        return start


def described(name: str, kernel: Any, generation: int) -> dict[str, Any]:
    """What a compiled kernel needs and does."""
    ptx, binary = kernel.asm["ptx"], kernel.asm["cubin"]
    tools = Path(importlib.import_module("triton").__file__ or "").parent / "backends/nvidia/bin"
    file = Path(f"{name}.cubin")
    file.write_bytes(binary)
    used = subprocess.run([tools / "cuobjdump", "-res-usage", file], capture_output=True, text=True, check=True).stdout
    facts = dict(word.split(":") for word in used.split() if word.count(":") == 1 and word[-1] != ":")
    return {
        "name": name,
        "target": f".target sm_{generation}" in ptx,
        "contracted": ptx.count("fma."),
        "approximate": ptx.count(".approx"),
        "local": int(facts["LOCAL"]),
        "registers": int(facts["REG"]),
    }


def main() -> None:
    compiler = importlib.import_module("triton.backends.compiler")
    driver = importlib.import_module("triton.runtime").driver
    compiled = Compiled()
    for generation in map(int, sys.argv[1:]):
        driver.set_active(Driver(compiler.GPUTarget("cuda", generation, 32)))
        for weights, state in KINDS:
            compiled.found.clear()
            with mock.patch.object(fused_adam, "kernel", return_value=compiled):
                stepped("AdamW", state, weights == "bf16", one_pass=True, weight_decay=0.1)
            for number, kernel in enumerate({id(each): each for each in compiled.found}.values()):
                print(json.dumps(described(f"{generation}-{weights}-{state}-{number}", kernel, generation)))


if __name__ == "__main__":
    main()
