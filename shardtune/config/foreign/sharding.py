"""FSDP and DeepSpeed settings of transformers and Axolotl: models are sharded anyway, so few of them are needed."""

from __future__ import annotations

import json
from collections.abc import Mapping

from shardtune.config.foreign.conversion import Conversion
from shardtune.config.foreign.table import NoCounterpart, NotNeeded, Table, To
from shardtune.config.foreign.values import is_on, listed

OFFLOAD = "actor.fsdp_config.cpu_offload"


def is_resharded(value: object) -> bool:
    """`reshard_after_forward`, also by the name of a strategy of FSDP1."""
    return value in ("FULL_SHARD", "HYBRID_SHARD") or is_on(value)


def _strategy(value: object) -> bool:
    """`sharding_strategy` of FSDP1, by its name or number."""
    names = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"}
    name = names.get(str(value), str(value).upper())
    if name in ("FULL_SHARD", "SHARD_GRAD_OP"):
        return name == "FULL_SHARD"
    if name.startswith("HYBRID_SHARD"):
        raise NoCounterpart("actor.parallel.data_replicate: N, the number of hosts")
    raise NoCounterpart("actor.training_backend: ddp, for a whole copy on each rank")


FSDP_CONFIG: Table = {
    f"fsdp_config.{prefix}{name}": To(key, read)
    for prefix in ("", "fsdp_")
    for name, key, read in (
        ("offload_params", OFFLOAD, is_on),
        ("reshard_after_forward", "actor.fsdp_config.reshard_after_forward", is_resharded),
        ("sharding_strategy", "actor.fsdp_config.reshard_after_forward", _strategy),
        ("transformer_layer_cls_to_wrap", "actor.fsdp_config.wrap", listed),
        ("activation_checkpointing", "actor.model.gradient_checkpointing", is_on),
    )
} | {
    "fsdp_config": NotNeeded("FSDP2 needs no further settings here"),
    "fsdp": NotNeeded("models are sharded with FSDP2 anyway; actor.training_backend: ddp for whole copies"),
    "deepspeed": NotNeeded("models are sharded with FSDP2, like ZeRO 3"),
}


def sharding(c: Conversion) -> None:
    """Read what FSDP and DeepSpeed move to the host."""
    if "offload" in str(c.get("fsdp", "")):
        c.put(OFFLOAD, True, "fsdp", comment="fsdp: offload")
    deepspeed(c, "deepspeed")


def deepspeed(c: Conversion, name: str) -> None:
    """Read what the configuration of DeepSpeed, the value of a key or its file, moves to the host."""
    given = c.get(name)
    if given is None:
        return
    found = given if isinstance(given, Mapping) else _file(c, str(given))
    if found is None:
        why = "models are sharded with FSDP2, like ZeRO 3; the file is not at hand: if it offloads, "
        c.not_needed(f"{why}{OFFLOAD}: true", name)
        return
    zero = found.get("zero_optimization")
    parts = [zero.get(f"offload_{part}") for part in ("param", "optimizer")] if isinstance(zero, Mapping) else []
    devices = [part.get("device") for part in parts if isinstance(part, Mapping)]
    c.not_needed("models are sharded with FSDP2, like ZeRO 3", name)
    for part, ours in (("optimizer", "actor.optim.name"), ("scheduler", "actor.optim.lr_scheduler")):
        section = found.get(part)
        if isinstance(section, Mapping):
            kind = section.get("type", section)
            c.notes.append(f"{name}: its {part} ({kind}) replaces the one of {c.trainer}; compare {ours} of the recipe")
    if "cpu" in devices or "nvme" in devices:
        c.put(OFFLOAD, True, name, comment=f"{name}: zero_optimization offloads")


def _file(c: Conversion, name: str) -> Mapping[str, object] | None:
    file = c.target / c.path(name)
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
