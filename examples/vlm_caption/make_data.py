"""Draw pictures of coloured shapes, and write questions about them as chats with images.

Three files, one JSON object a line, and the pictures beside them:

    train.jsonl       2,000 chats to learn from: several questions about a picture, or about two; some without any
    heldout.jsonl     400 single questions about other pictures
    exchanged.jsonl   the same questions, each with the picture of another row: what can be guessed without looking

A picture holds one or two shapes, each somewhere inside one of its four corners. What makes the held-out score worth
reading: a combination of colour, shape and corner is either in the pictures of `train.jsonl` or in those of
`heldout.jsonl`, never in both.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from PIL import Image, ImageDraw

SIZE = 48  # pixels, both ways
HALF = SIZE // 2
COLOURS = {
    "red": (214, 40, 40),
    "green": (44, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (245, 205, 40),
    "white": (250, 250, 250),
    "black": (15, 15, 15),
}
SHAPES = ("circle", "square", "triangle", "cross")
CORNERS = {"top left": (0, 0), "top right": (HALF, 0), "bottom left": (0, HALF), "bottom right": (HALF, HALF)}
SIDES = {"circle": "none", "square": "four", "triangle": "three", "cross": "twelve"}
HELD_OUT_SHARE = 0.15  # of all things
TRAIN_ROWS, HELDOUT_ROWS = 2_000, 400


@dataclass(frozen=True)
class Thing:
    """A shape of a colour in a corner."""

    colour: str
    shape: str
    corner: str


Picture = tuple[Thing, ...]
Question = tuple[str, str]


@dataclass(frozen=True)
class Chat:
    """Questions with their answers, about pictures that come before the first of them."""

    pictures: tuple[Picture, ...]
    questions: tuple[Question, ...]

    def row(self, files: Sequence[str]) -> dict:
        """The chat as a row; `<image>` is where a picture goes."""
        messages = []
        for number, (question, answer) in enumerate(self.questions):
            before = "<image>" * len(files) if number == 0 else ""
            messages.append({"role": "user", "content": before + question})
            messages.append({"role": "assistant", "content": answer})
        return {"messages": messages, "images": list(files)}


# -- pictures ----------------------------------------------------------------------------------------------------------


def draw_picture(picture: Picture, rng: random.Random) -> Image.Image:
    """Draw the shapes, each of a size and at a place of its own within its corner, on a grey ground."""
    ground = rng.randrange(95, 160)
    image = Image.new("RGB", (SIZE, SIZE), (ground, ground, ground))
    pen = ImageDraw.Draw(image)
    for thing in picture:
        left, top = CORNERS[thing.corner]
        size = rng.randrange(14, 20)
        x, y = left + rng.randrange(1, HALF - size), top + rng.randrange(1, HALF - size)
        shade = tuple(max(0, min(255, value + rng.randrange(-10, 11))) for value in COLOURS[thing.colour])
        draw_shape(pen, thing.shape, (x, y, x + size, y + size), shade)
    return image


def draw_shape(pen: ImageDraw.ImageDraw, shape: str, box: tuple[int, int, int, int], colour: tuple[int, ...]) -> None:
    """Draw one shape into a box."""
    left, top, right, bottom = box
    if shape == "circle":
        pen.ellipse(box, fill=colour)
    elif shape == "square":
        pen.rectangle(box, fill=colour)
    elif shape == "triangle":
        pen.polygon([((left + right) // 2, top), (left, bottom), (right, bottom)], fill=colour)
    else:
        third = (right - left) // 3
        pen.rectangle((left + third, top, right - third, bottom), fill=colour)
        pen.rectangle((left, top + third, right, bottom - third), fill=colour)


# -- questions ---------------------------------------------------------------------------------------------------------


def choose_held_out(rng: random.Random) -> frozenset[Thing]:
    """Choose the things that only held-out pictures may show."""
    things = [Thing(*parts) for parts in product(COLOURS, SHAPES, CORNERS)]
    return frozenset(rng.sample(things, round(HELD_OUT_SHARE * len(things))))


def draw_things(rng: random.Random, allowed: Sequence[Thing]) -> Picture:
    """One or two things that differ in colour, shape and corner."""
    first = rng.choice(allowed)
    if rng.random() < 0.5:
        return (first,)
    while True:
        other = rng.choice(allowed)
        if other.colour != first.colour and other.shape != first.shape and other.corner != first.corner:
            return (first, other)


def questions_about(thing: Thing) -> list[Question]:
    """What can be asked about a thing of a picture; all of it needs a look."""
    return [
        (f"What colour is the {thing.shape}?", thing.colour),
        (f"Where is the {thing.shape}?", thing.corner),
        (f"What shape is {thing.colour}?", thing.shape),
        (f"What is in the {thing.corner} corner?", f"a {thing.colour} {thing.shape}"),
    ]


def one_picture(rng: random.Random, allowed: Sequence[Thing], count: int) -> Chat:
    """`count` questions about a picture."""
    picture = draw_things(rng, allowed)
    asked = [question for thing in picture for question in questions_about(thing)]
    return Chat((picture,), tuple(rng.sample(asked, min(count, len(asked)))))


def two_pictures(rng: random.Random, allowed: Sequence[Thing], count: int) -> Chat:
    """`count` questions about two pictures of one thing each."""
    pictures = tuple((thing,) for thing in rng.sample(allowed, 2))
    asked = []
    for place, (thing,) in zip(("first", "second"), pictures, strict=True):
        asked.append((f"What colour is the shape in the {place} picture?", thing.colour))
        asked.append((f"What shape is in the {place} picture?", thing.shape))
    return Chat(pictures, tuple(rng.sample(asked, min(count, len(asked)))))


def no_picture(rng: random.Random) -> Chat:
    """A question that needs no picture."""
    shape = rng.choice(SHAPES)
    return Chat((), ((f"How many sides has a {shape}?", SIDES[shape]),))


def make(train_rows: int = TRAIN_ROWS, heldout_rows: int = HELDOUT_ROWS, seed: int = 0) -> tuple[list, list]:
    """Make both lists of chats; the same arguments give the same lists on every machine."""
    held_out = choose_held_out(random.Random(f"held out {seed}"))
    rng = random.Random(f"train {seed}")
    things = [Thing(*parts) for parts in product(COLOURS, SHAPES, CORNERS)]
    seen = [thing for thing in things if thing not in held_out]
    unseen = [thing for thing in things if thing in held_out]
    train = []
    for number in range(train_rows):
        if number % 10 == 9:
            train.append(no_picture(rng))
        elif number % 10 >= 7:
            train.append(two_pictures(rng, seen, 4))
        else:
            train.append(one_picture(rng, seen, 4))
    rng = random.Random(f"heldout {seed}")
    heldout = [(two_pictures if number % 5 == 4 else one_picture)(rng, unseen, 1) for number in range(heldout_rows)]
    return train, heldout


# -- files -------------------------------------------------------------------------------------------------------------


def write_pictures(folder: Path, name: str, chats: Sequence[Chat], seed: int = 0) -> list[list[str]]:
    """Draw what the chats are about; returns the files of each, relative to `folder`."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rng, files = random.Random(f"{name} pictures {seed}"), []
    for number, chat in enumerate(chats):
        names = [f"pictures/{name}-{number}-{place}.png" for place in range(len(chat.pictures))]
        for picture, file in zip(chat.pictures, names, strict=True):
            draw_picture(picture, rng).save(folder / file)
        files.append(names)
    return files


def exchanged(files: Sequence[list[str]]) -> list[list[str]]:
    """Each row with the pictures of the next one that has as many."""
    following = {}
    for count in {len(names) for names in files}:
        rows = [row for row, names in enumerate(files) if len(names) == count]
        following |= dict(zip(rows, rows[1:] + rows[:1], strict=True))
    return [files[following[row]] for row in range(len(files))]


def write(path: Path, chats: Sequence[Chat], files: Sequence[list[str]]) -> None:
    """Write one JSON object a line."""
    rows = [chat.row(names) for chat, names in zip(chats, files, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    question, answer = chats[0].questions[0]
    print(f"{path}: {len(rows):,} rows, for example: {question}  {answer}")


def main() -> None:
    """Write the pictures and the three files."""
    parser = argparse.ArgumentParser(description="Draw pictures and write questions about them.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "made", help="directory to write to")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    train, heldout = make(seed=args.seed)
    files = write_pictures(args.out, "train", train, args.seed)
    write(args.out / "train.jsonl", train, files)
    files = write_pictures(args.out, "heldout", heldout, args.seed)
    write(args.out / "heldout.jsonl", heldout, files)
    write(args.out / "exchanged.jsonl", heldout, exchanged(files))


if __name__ == "__main__":
    main()
