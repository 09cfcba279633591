"""All parts, in the order in which they are computed."""

from __future__ import annotations

from gpu_parts import branches, costs, machine, memory, numbers, speed, vision
from gpu_parts.records import Part

PARTS: dict[str, Part] = {
    "machine": machine.PART,
    "branches": branches.PART,
    "numbers": numbers.PART,
    **dict(list(speed.parts().items())[:2]),
    "costs": costs.PART,
    "memory": memory.PART,
    **dict(list(speed.parts().items())[2:]),
    "vision": vision.PART,
}
