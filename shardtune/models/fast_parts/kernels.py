"""Fused norms, gated MLPs and rotary embeddings of other libraries (`actor.model.kernels`).

Modules are found by what they are made of, and no table says which formula a model's class has: each library's ways of
one part (an RMSNorm that scales by w, or by 1 + w; rounded before the scale, or after) are all compared with the
module, and the closest one is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import SiLUActivation

from shardtune.errors import ConfigError
from shardtune.models.fast_parts.replacement import Forward, Replacement

Maker = Callable[[nn.Module], Sequence[Forward]]
"""Makes the ways to compute a module of one part."""
SECTION = "actor.model.kernels"
PARTS = ("rms_norm", "swiglu", "rope")
ROTATION = "apply_rotary_pos_emb"
"""The function that rotates queries and keys, by the name that transformers gives it in the file of each model."""
EPSILON = ("variance_epsilon", "eps")
"""Names of the epsilon of an RMSNorm of transformers."""
SWIGLU = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
"""Names of the linear layers of a gated MLP: apart, or gate and up as one."""
HUB_NORM = ("kernels-community/liger-kernels", "LigerRMSNorm", 3)
"""Repository, layer and version of the norm that transformers trains with from the Hub."""


def load_parts(source: str) -> Mapping[str, Maker]:
    """The parts that a source has.

    Raises:
        ConfigError: its library cannot be loaded.
    """
    try:
        made = SOURCES[source]()
    except Exception as problem:  # of a library's import, or of a download
        raise ConfigError(
            f"{SECTION}.source: {source} cannot be loaded: {str(problem).strip().partition(chr(10))[0]}",
            where=f"{SECTION}.source",
            remedy="install the library's own needs, or leave the key out",
        ) from problem
    return {part: made[part] for part in PARTS if part in made}


def find_parts(model: nn.Module, part: str, make: Maker) -> Iterator[Replacement]:
    """The modules of a model that are this part."""
    for name, module in model.named_modules():
        if _IS_PART[part](module):
            yield Replacement(name, module, make(module))


# -- Which modules are which part --------------------------------------------------------------------------------------


def _is_rms_norm(module: nn.Module) -> bool:
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    named = type(module).__name__.removeprefix("FSDP").endswith("RMSNorm")
    return named and weight is not None and weight.ndim == 1 and bool(vars(module).keys() & {*EPSILON})


def _is_swiglu(module: nn.Module) -> bool:
    children = dict(module.named_children())
    gated = any(names <= children.keys() for names in SWIGLU)
    return gated and any(type(child) in (nn.SiLU, SiLUActivation) for child in children.values())


def _rotates(module: nn.Module) -> bool:
    forward = module.forward
    if not isinstance(forward, MethodType) or not isinstance(forward.__func__, FunctionType):
        return False
    own = forward.__func__
    while (inner := _decorated(own)) is not None:
        own = inner
    return ROTATION in own.__code__.co_names and ROTATION in own.__globals__


def _decorated(function: FunctionType) -> FunctionType | None:
    """The function that a decorator's calls; None of one without a decorator."""
    inner = vars(function).get("__wrapped__")
    is_called = any(cell.cell_contents is inner for cell in function.__closure__ or ())
    return inner if isinstance(inner, FunctionType) and is_called else None


_IS_PART: Mapping[str, Callable[[nn.Module], bool]] = {
    "rms_norm": _is_rms_norm,
    "swiglu": _is_swiglu,
    "rope": _rotates,
}


# -- Ways to compute them ----------------------------------------------------------------------------------------------


def _epsilon(norm: nn.Module) -> float:
    return next(float(vars(norm)[name]) for name in EPSILON if name in vars(norm))


def gated_by(multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Maker:
    """Gated MLPs whose activation and product are one function of gate and up; their linear layers are called."""

    def make(module: nn.Module) -> list[Forward]:
        children = dict(module.named_children())

        def apart(x: torch.Tensor) -> torch.Tensor:
            return children["down_proj"](multiply(children["gate_proj"](x), children["up_proj"](x)))

        def as_one(x: torch.Tensor) -> torch.Tensor:
            gate, up = children["gate_up_proj"](x).chunk(2, dim=-1)
            return children["down_proj"](multiply(gate, up))

        return [as_one if "gate_up_proj" in children else apart]

    return make


def rotated_by(rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Maker:
    """Attention layers whose forward calls another function where it names the one of the model's file.

    The layer's forward is made anew with another name in its code, under which the file has the other function, so that
    nothing else that uses the file changes. It has the file's own names, not a copy of them: where torch.compile leaves
    a graph inside such a forward, it finds what it has compiled among those. Layers of a class share the new forward.
    """
    name = f"{ROTATION}_{id(rotate)}"
    forwards: dict[FunctionType, FunctionType] = {}

    def made(own: FunctionType) -> FunctionType:
        code, closure = own.__code__, own.__closure__
        inner = _decorated(own)
        if inner is None:
            code = code.replace(co_names=tuple(name if each == ROTATION else each for each in code.co_names))
            own.__globals__[name] = rotate
        else:
            within = CellType(made(inner))
            closure = tuple(within if cell.cell_contents is inner else cell for cell in closure or ())
        new = FunctionType(code, own.__globals__, own.__name__, own.__defaults__, closure)
        new.__kwdefaults__ = own.__kwdefaults__
        return new

    def make(module: nn.Module) -> list[Forward]:
        bound = module.forward
        assert isinstance(bound, MethodType)
        own = bound.__func__
        assert isinstance(own, FunctionType)
        if own not in forwards:
            forwards[own] = made(own)
        return [MethodType(forwards[own], module)]

    return make


def norms_by(*ways: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]) -> Maker:
    """RMSNorms by functions of input, weight and epsilon."""

    def make(module: nn.Module) -> list[Forward]:
        epsilon = _epsilon(module)

        # Not a `functools.partial`: torch.compile would compile each layer anew, and after eight layers none.
        def by(way: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]) -> Forward:
            def forward(x: torch.Tensor) -> torch.Tensor:
                return way(x, module.get_parameter("weight"), epsilon)

            return forward

        return [by(way) for way in ways]

    return make


# -- Sources -----------------------------------------------------------------------------------------------------------


def _torch() -> dict[str, Maker]:
    """torch's own fused RMSNorm."""

    def by_weight(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, epsilon)

    def by_one_plus_weight(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), epsilon).to(x.dtype)

    return {"rms_norm": norms_by(by_weight, by_one_plus_weight)}


def _liger() -> dict[str, Maker]:
    """Liger's Triton kernels. None of them may write into its inputs, which may be used elsewhere.

    In a compiled layer they are called as they were compared, between its compiled parts.
    """
    liger: Any = import_module("liger_kernel.transformers.functional")
    eager: Any = torch.compiler.disable

    def norm(casting: str, offset: float) -> Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]:
        @eager
        def by(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
            return liger.liger_rms_norm(x, weight, epsilon, offset, casting, False)

        return by

    @eager
    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return liger.liger_rope(q, k, cos, sin)

    norms = [norm(casting, offset) for offset in (0.0, 1.0) for casting in ("llama", "gemma")]
    return {"rms_norm": norms_by(*norms), "swiglu": gated_by(eager(liger.liger_swiglu)), "rope": rotated_by(rotate)}


def _hub() -> dict[str, Maker]:
    """The kernels of the Hub that transformers trains with: an RMSNorm, fetched when it is first used.

    In a compiled layer it is called as Liger's are.
    """
    library: Any = import_module("kernels")
    repository, layer, version = HUB_NORM
    kind: Any = library.LayerRepository(repo_id=repository, layer_name=layer, version=version).load()
    forward: Any = torch.compiler.disable(kind.forward)

    def make(module: nn.Module) -> list[Forward]:
        return [MethodType(forward, module)]

    return {"rms_norm": make}


SOURCES: dict[str, Callable[[], Mapping[str, Maker]]] = {"torch": _torch, "liger": _liger, "hub": _hub}
"""By the name of a source, what imports it and returns its parts."""
