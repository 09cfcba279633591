"""FSDP and DeepSpeed settings of transformers and Axolotl: models are sharded anyway, so few of them are needed."""

from __future__ import annotations

import json
from collections.abc import Mapping

from shardtune.config.foreign.conversion import Conversion
from shardtune.config.foreign.table import NotNeeded, Table, To
from shardtune.config.foreign.values import is_on, listed

OFFLOAD = "actor.fsdp_config.cpu_offload"


def is_resharded(value: object) -> bool:
    """`reshard_after_forward`, also by the name of a strategy of FSDP1."""
    return value in ("FULL_SHARD", "HYBRID_SHARD") or is_on(value)


FSDP_CONFIG: Table = {
    f"fsdp_config.{prefix}{name}": To(key, read)
    for prefix in ("", "fsdp_")
    for name, key, read in (
        ("offload_params", OFFLOAD, is_on),
        ("reshard_after_forward", "actor.fsdp_config.reshard_after_forward", is_resharded),
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
    given = c.get("deepspeed")
    if given is None:
        return
    found = given if isinstance(given, Mapping) else _file(c, str(given))
    if found is None:
        why = "models are sharded with FSDP2, like ZeRO 3; the file is not at hand: if it offloads, "
        c.not_needed(f"{why}{OFFLOAD}: true", "deepspeed")
        return
    zero = found.get("zero_optimization")
    parts = [zero.get(f"offload_{part}") for part in ("param", "optimizer")] if isinstance(zero, Mapping) else []
    devices = [part.get("device") for part in parts if isinstance(part, Mapping)]
    c.not_needed("models are sharded with FSDP2, like ZeRO 3", "deepspeed")
    if "cpu" in devices or "nvme" in devices:
        c.put(OFFLOAD, True, "deepspeed", comment="deepspeed: zero_optimization offloads")


def _file(c: Conversion, name: str) -> Mapping[str, object] | None:
    file = c.target / c.path(name)
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
