"""Draw pictures of coloured shapes, and write questions about them as chats with images.

Three files, one JSON object a line, and the pictures beside them:

    train.jsonl       6,000 chats to learn from: about one picture, about two, and some without any
    heldout.jsonl     400 questions about pictures that were drawn anew
    exchanged.jsonl   the same questions, each with the picture of another row: what can be guessed without looking

A picture shows a shape somewhere inside one of its four corners. Its size, place, shade and ground are drawn at random,
so no two pictures are alike.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

SIZE = 32  # pixels, both ways
HALF = SIZE // 2
COLOURS = {"red": (205, 40, 40), "green": (40, 165, 60), "blue": (40, 60, 205), "yellow": (195, 170, 30)}
SHAPES = ("square", "ring", "bar")
CORNERS = {"top left": (0, 0), "top right": (HALF, 0), "bottom left": (0, HALF), "bottom right": (HALF, HALF)}
CORNERS_OF = {"square": "four", "ring": "none", "bar": "four"}
TRAIN_ROWS, HELDOUT_ROWS = 6_000, 400


@dataclass(frozen=True)
class Picture:
    """A shape of a colour in a corner."""

    colour: str
    shape: str
    corner: str


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
    """Draw the shape, of a size and at a place of its own within its corner, on a grey ground."""
    ground = rng.randrange(163, 169)
    image = Image.new("RGB", (SIZE, SIZE), (ground, ground, ground))
    left, top = CORNERS[picture.corner]
    size = rng.randrange(11, 15)
    x, y = left + rng.randrange(HALF - size), top + rng.randrange(HALF - size)
    shade = tuple(value + rng.randrange(-20, 21) for value in COLOURS[picture.colour])
    draw_shape(ImageDraw.Draw(image), picture.shape, (x, y, x + size, y + size), shade)
    return image


def draw_shape(pen: ImageDraw.ImageDraw, shape: str, box: tuple[int, int, int, int], colour: tuple[int, ...]) -> None:
    """Draw one shape into a box."""
    left, top, right, bottom = box
    if shape == "square":
        pen.rectangle(box, fill=colour)
    elif shape == "ring":
        pen.ellipse(box, outline=colour, width=3)
    else:
        pen.rectangle((left, top + 4, right, bottom - 4), fill=colour)


# -- questions ---------------------------------------------------------------------------------------------------------


def any_picture(rng: random.Random) -> Picture:
    """A picture of anything."""
    return Picture(rng.choice(list(COLOURS)), rng.choice(SHAPES), rng.choice(list(CORNERS)))


def one_picture(rng: random.Random, count: int) -> Chat:
    """`count` questions about a picture."""
    picture = any_picture(rng)
    asked = [
        ("What colour is it?", picture.colour),
        ("What shape is it?", picture.shape),
        ("Where is it?", picture.corner),
        ("What is in the picture?", f"a {picture.colour} {picture.shape}"),
    ]
    return Chat((picture,), tuple(rng.sample(asked, count)))


def two_pictures(rng: random.Random) -> Chat:
    """A question about one of two pictures."""
    pictures = any_picture(rng), any_picture(rng)
    name, picture = rng.choice(list(zip(("first", "second"), pictures, strict=True)))
    asked = [
        (f"What colour is the {name} one?", picture.colour),
        (f"What shape is the {name} one?", picture.shape),
    ]
    return Chat(pictures, (rng.choice(asked),))


def no_picture(rng: random.Random) -> Chat:
    """A question that needs no picture."""
    shape = rng.choice(SHAPES)
    return Chat((), ((f"How many corners has a {shape}?", CORNERS_OF[shape]),))


def make(train_rows: int = TRAIN_ROWS, heldout_rows: int = HELDOUT_ROWS, seed: int = 0) -> tuple[list, list]:
    """Make both lists of chats; the same arguments give the same lists on every machine."""
    rng = random.Random(f"train {seed}")
    train = []
    for number in range(train_rows):
        if number % 20 == 19:
            train.append(no_picture(rng))
        else:
            train.append(two_pictures(rng) if number % 5 == 4 else one_picture(rng, 1 + number % 2))
    rng = random.Random(f"heldout {seed}")
    heldout = [two_pictures(rng) if number % 5 == 4 else one_picture(rng, 1) for number in range(heldout_rows)]
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
