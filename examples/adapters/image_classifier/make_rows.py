"""Pictures of eight by eight pixels with a bar in one of four directions, as JSON lines in `made/`."""

import json
import random
from pathlib import Path

SIZE = 8
DIRECTIONS = ((0, 1), (1, 0), (1, 1), (1, -1))


def row(draw: random.Random, label: int) -> dict:
    """A bright bar through a random place of a noisy picture."""
    picture = [[draw.randrange(64) for _ in range(SIZE)] for _ in range(SIZE)]
    down, right = DIRECTIONS[label]
    top, left = draw.randrange(2, SIZE - 2), draw.randrange(2, SIZE - 2)
    for step in range(-SIZE, SIZE):
        r, c = top + step * down, left + step * right
        if 0 <= r < SIZE and 0 <= c < SIZE:
            picture[r][c] = draw.randrange(160, 256)
    return {"picture": picture, "label": label}


def main() -> None:
    made = Path(__file__).with_name("made")
    made.mkdir(exist_ok=True)
    draw = random.Random(0)
    for name, count in (("train", 256), ("heldout", 64)):
        rows = [row(draw, number % len(DIRECTIONS)) for number in range(count)]
        (made / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))


if __name__ == "__main__":
    main()
