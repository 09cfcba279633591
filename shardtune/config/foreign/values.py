"""Values of other trainers as values of ours."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence

from shardtune.config.foreign.table import NoCounterpart

_ADAMW = (
    *(
        "adamw",
        "adamw_hf",
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_torch_xla",
        "adamw_torch_npu_fused",
        "pagedadamw",
    ),
    *("adamw_apex_fused", "paged_adamw_32bit", "paged_adamw", "optimi_adamw"),
)
_EIGHT_BITS = (
    *("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit", "ao_adamw_8bit", "adamw8bit"),
    "pagedadamw8bit",
)
OPTIMIZERS: Mapping[str, Mapping[str, object]] = {
    **{name: {"actor.optim.name": "AdamW"} for name in _ADAMW},
    **{name: {"actor.optim.name": "AdamW", "actor.optim.state_dtype": "int8"} for name in _EIGHT_BITS},
    "adamw_anyprecision": {"actor.optim.name": "AdamW", "actor.optim.state_dtype": "bf16"},
    "fusedadam": {"actor.optim.name": "AdamW"},
    "adam": {"actor.optim.name": "Adam"},
    "sgd": {"actor.optim.name": "SGD"},
    "adagrad": {"actor.optim.name": "Adagrad"},
    "rmsprop": {"actor.optim.name": "RMSprop"},
    "muon": {"actor.optim.name": "Muon"},
}
"""Names of optimizers, in lower case."""
NO_OPTIMIZER = (
    "actor.optim.name is a class of torch.optim, or of a package, package.module:Class, with actor.optim.args; AdamW "
    "is the default, with actor.optim.state_dtype: int8 small"
)
PATTERN = re.compile(r"[\\()\[\]{}|^$*+?]")
"""What a regular expression has, and no name of a module."""
PRECISIONS = {
    **dict.fromkeys(("bfloat16", "bf16"), "bf16"),
    **dict.fromkeys(("float16", "fp16", "half"), "fp16"),
    **dict.fromkeys(("float32", "fp32"), "fp32"),
    **dict.fromkeys(("float64", "fp64"), "fp64"),
}
REPORTS = {name: name for name in ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")}


def is_on(value: object) -> bool:
    """Whether a switch is on; text is read as YAML's words are."""
    return value.strip().lower() in ("true", "yes", "on", "1") if isinstance(value, str) else bool(value)


def number(value: object) -> float | None:
    """A finite number, also one in quotes (`1e-5` is text in YAML 1.1); None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def as_number(value: object) -> object:
    """A number that stands in quotes, without them."""
    given = number(value)
    return value if given is None or not isinstance(value, str) else given


def whole(value: object) -> int | None:
    """A whole number, also as `3.0`; None for anything else."""
    given = number(value)
    return int(given) if given is not None and given == int(given) else None


def listed(value: object) -> list[object]:
    """A list, a text with commas, or one value, as a list."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, Sequence):
        return list(value)
    return [] if value is None else [value]


def optimizer(value: object) -> Mapping[str, object]:
    """Our keys for an optimizer's name."""
    name = str(value).rpartition(".")[2].lower()
    if name not in OPTIMIZERS:
        raise NoCounterpart(f"there is no {value}: {NO_OPTIMIZER}")
    return OPTIMIZERS[name]


def clip(value: object) -> object:
    """The largest norm of the gradient; 0, or infinity, means no clipping."""
    is_off = value is None or number(value) == 0 or str(value).lstrip("+.").lower() in ("inf", "infinity")
    return None if is_off else as_number(value)


def whole_number(remedy: str) -> Callable[[object], object]:
    """A reader of whole numbers >= 1; others have no counterpart."""

    def read(value: object) -> object:
        given = whole(value)
        if given is None or given < 1:
            raise NoCounterpart(remedy)
        return given

    return read


def names(value: object) -> object:
    """A list of names; `all-linear` in any spelling is one word, and a regular expression is text."""
    if isinstance(value, str) and PATTERN.search(value):
        return value
    given = [str(name) for name in listed(value)]
    if len(given) == 1 and PATTERN.search(given[0]):
        return given[0]
    return "all-linear" if [name.replace("_", "-").lower() for name in given] in (["all-linear"], ["all"]) else given


def arguments(value: object) -> dict[str, object]:
    """Arguments given as a mapping, as the JSON text of one, or as text `a=1,b=2`."""
    if isinstance(value, str) and value.strip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    if isinstance(value, Mapping):
        return {str(name): as_number(item) for name, item in value.items()}
    pairs = [part.split("=", 1) for part in str(value or "").replace(" ", "").split(",") if "=" in part]
    return {name: as_number(item) for name, item in pairs}
