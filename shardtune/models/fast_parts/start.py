"""The fast parts of a run: whether they can be used is known before ranks start, how exact they are before training."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec

import torch
from torch import nn

from shardtune.config import Recipe
from shardtune.config.model_names import BUILT_IN
from shardtune.config.schema import ModelConfig
from shardtune.errors import ConfigError
from shardtune.models.attention_implementation import check_attention
from shardtune.models.fast_parts import fp8, kernels
from shardtune.models.fast_parts.replacement import Replacement, compared, plainly
from shardtune.parallel.ranks import Ranks, choose_device

KERNELS = kernels.SECTION
TOKENS = 256
"""Tokens of the row on which fast parts are compared with the plain ones."""
BOUND = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 4e-3}
"""Largest relative error of a kernel: some roundings of the last digit. Many norms round to fp32 in fp64."""
FP8_BOUND = 0.15
"""Largest relative error of a layer in FP8: with three bits of mantissa (of gradients two, tensorwise) 0.03 to 0.07."""
PACKAGES = {
    "liger": ("liger_kernel", "pip install 'shardtune[liger]'"),
    "hub": ("kernels", "pip install 'shardtune[hub-kernels]'"),
}
FP8_CAPABILITY = (8, 9)
"""The first GPUs that multiply FP8: Ada and Hopper."""
INTERPRETED = "TRITON_INTERPRET"
"""The variable of Triton that lets its kernels run on a CPU, slowly."""


def check_available(recipe: Recipe) -> None:
    """Refuse fast parts that this machine lacks, before any rank is started.

    Raises:
        ConfigError: a package is not installed, or the device cannot compute it.
    """
    model = recipe.actor.model
    if model.model_type in BUILT_IN and model.adapter is None and recipe.actor.worker is None:
        check_attention(model.attn_implementation)
    source, scaling = model.kernels.source, model.fp8.scaling
    if source is None and scaling is None:
        return
    device = choose_device(recipe.runner.device, 0)
    if source in PACKAGES:
        package, remedy = PACKAGES[source]
        key = f"{KERNELS}.source"
        if find_spec(package) is None:
            raise _missing(recipe, f"{key}: {source}", f"{package} is not installed", remedy)
        if device.type != "cuda" and not (source == "liger" and os.environ.get(INTERPRETED) == "1"):
            raise _missing(recipe, f"{key}: {source}", f"its kernels need a GPU, not {device.type}", f"leave {key} out")
    if source is not None:
        made = kernels.load_parts(source)
        for part in model.kernels.parts:
            if part not in made:
                key = f"{KERNELS}.parts"
                remedy = f"it has {', '.join(made)}"
                raise ConfigError(f"{KERNELS}.source: {source} has no {part}", where=recipe.where(key), remedy=remedy)
    if scaling is not None:
        key = f"{fp8.SECTION}.scaling"
        if find_spec("torchao") is None:
            raise _missing(recipe, f"{key}: {scaling}", "torchao is not installed", "pip install 'shardtune[fp8]'")
        capable = device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
        if not capable and not model.fp8.emulate:
            raise _missing(
                recipe,
                f"{key}: {scaling}",
                f"this device ({device.type}) multiplies no FP8, as GPUs since Ada and Hopper do",
                f"leave it out; {fp8.SECTION}.emulate: true computes the same roundings, slowly",
            )


def _missing(recipe: Recipe, key: str, why: str, remedy: str) -> ConfigError:
    name = key.partition(":")[0]
    return ConfigError(f"{key} cannot be used: {why}", where=recipe.where(name) or name, remedy=remedy)


class FastParts:
    """The fast parts of a model that has its weights; every rank makes one.

    Args:
        model: sharded or not.
        config: `actor.model`.
    """

    def __init__(self, model: nn.Module, config: ModelConfig) -> None:
        self._model = type(model).__name__.removeprefix("FSDP")
        self._config = config
        self._kernels: dict[str, list[Replacement]] = {}
        source = config.kernels.source
        made = {} if source is None else kernels.load_parts(source)
        for part in config.kernels.parts or made:
            found = list(kernels.find_parts(model, part, made[part]))
            if not found and config.kernels.parts:
                raise self._without(part)
            if found:
                self._kernels[part] = found
        if source is not None and not self._kernels:
            raise self._without("part that it replaces")
        self._layers: list[Replacement] = []
        self._left: list[str] = []
        if config.fp8.scaling is not None:
            self._layers, self._left = fp8.find_layers(model, config.fp8)

    def _without(self, part: str) -> ConfigError:
        return ConfigError(
            f"{KERNELS}.source: {self._config.kernels.source}: {self._model} has no {part}",
            where=f"{KERNELS}.parts",
            remedy="leave it out",
        )

    def start(self, forward: Callable[[], object], ranks: Ranks, dtype: torch.dtype) -> list[str]:
        """Compare each part with the plain one, and use those from now on; every rank calls it.

        Args:
            forward: one of the model, of real rows, without gradients.
            ranks: of the run.
            dtype: of the computation.

        Returns:
            A sentence for each part.

        Raises:
            ConfigError: a part is further from the plain one than rounding explains.
        """
        notes = [self._choose(part, found, forward, ranks, BOUND[dtype]) for part, found in self._kernels.items()]
        if self._layers:
            note = self._choose("fp8", self._layers, forward, ranks, FP8_BOUND)
            left = f"; not in FP8: {'; '.join(self._left)}" if self._left else ""
            notes.append(f"{note}{left}")
            if self._config.fp8.scaling != "rowwise_with_gw_hp":
                notes.append(
                    f"fp8: the scales of {self._config.fp8.scaling} depend on all rows of a micro-batch, and so do the "
                    "numbers of a row; with rowwise_with_gw_hp they do not"
                )
        for found in (*self._kernels.values(), self._layers):
            for one in found:
                one.resume()
        return notes

    def _choose(
        self, part: str, found: list[Replacement], forward: Callable[[], object], ranks: Ranks, bound: float
    ) -> str:
        with compared(found):
            forward()
        by_kind: dict[type[nn.Module], list[Replacement]] = defaultdict(list)
        for one in found:
            by_kind[one.kind].append(one)
        worst, used = (0.0, found[0]), 0
        for alike in by_kind.values():
            measured = [one for one in alike if one.errors]
            if not measured:  # no part of the forward of a row of text, as a vision tower
                continue
            ways = range(len(measured[0].errors))
            errors = [ranks.largest(max(one.errors[way] for one in measured)) for way in ways]
            way = min(ways, key=errors.__getitem__)
            furthest = max(measured, key=lambda one: one.errors[way])
            worst, used = max(worst, (errors[way], furthest), key=lambda pair: pair[0]), used + len(alike)
            if not errors[way] <= bound:
                raise self._refusal(part, errors[way], bound, furthest, furthest.problems[way])
            for one in alike:
                one.chosen = way
        what = f"fp8: {used} linear layers, {self._config.fp8.scaling}"
        if part != "fp8":
            what = f"kernels: {part} of {used} modules by {self._config.kernels.source}"
        if used < len(found):
            what += f" ({len(found) - used} that a row of text does not reach stay as they are)"
        return f"{what}: relative error {worst[0]:.2g}, forward and gradients (at most {bound:.2g}; {worst[1].name})"

    def _refusal(self, part: str, error: float, bound: float, furthest: Replacement, problem: str) -> ConfigError:
        key = f"{fp8.SECTION}.scaling" if part == "fp8" else f"{KERNELS}.parts"
        by = self._config.fp8.scaling if part == "fp8" else f"by {self._config.kernels.source}"
        how = f"fails ({problem})" if problem else f"differs from the plain one by {error:.2g}, more than {bound:.2g}"
        remedy = (
            f"leave such layers out by {fp8.SECTION}.exclude, or set another scaling"
            if part == "fp8"
            else f"leave {part} out: name the others in {KERNELS}.parts"
        )
        return ConfigError(f"{part} {by} {how}: {furthest.name} of {self._model}", where=key, remedy=remedy)

    def without_fp8(self) -> AbstractContextManager[None]:
        """Inside, linear layers compute as they are: scales of FP8 may depend on all rows of a forward."""
        return plainly(self._layers)

    def restore(self) -> None:
        """Give all modules their own forwards."""
        for found in (*self._kernels.values(), self._layers):
            for one in found:
                one.restore()


def fast_parts(model: nn.Module, config: ModelConfig) -> FastParts | None:
    """The fast parts that a recipe names; None where it names none."""
    return FastParts(model, config) if config.kernels.source is not None or config.fp8.scaling is not None else None
