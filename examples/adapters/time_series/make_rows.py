"""Noisy waves of different lengths with holes in them, as JSON lines in `made/`."""

import json
import math
import random
from pathlib import Path


def row(draw: random.Random) -> dict:
    """A wave; `up` tells whether it rises after its last point."""
    length, period, phase = draw.randrange(12, 40), draw.uniform(6, 14), draw.uniform(0, 7)

    def wave(t: int) -> float:
        return math.sin(phase + 2 * math.pi * t / period)

    values = [round(wave(t) + draw.gauss(0, 0.05), 3) if draw.random() > 0.1 else None for t in range(length)]
    return {"values": values, "up": wave(length) > wave(length - 1)}


def main() -> None:
    made = Path(__file__).with_name("made")
    made.mkdir(exist_ok=True)
    draw = random.Random(0)
    for name, count in (("train", 256), ("heldout", 64)):
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row(draw)) + "\n" for _ in range(count)))


if __name__ == "__main__":
    main()
