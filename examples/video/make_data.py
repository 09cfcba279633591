"""Clips of a disc that moves, as MP4 files, with a question each; the model is that of examples/vlm_caption."""

import argparse
import json
import random
import runpy
import shutil
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw

SIZE, LENGTH, RATE = 32, 8, 4  # pixels both ways, frames, frames per second
WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
QUESTION = "Which way does it move?"


def clip(way: str, draw: random.Random) -> list[Image.Image]:
    """A disc that crosses the picture."""
    x, y = WAYS[way]
    aside = draw.randint(8, 24)
    found = []
    for number in range(LENGTH):
        along = 4 + 24 * number / (LENGTH - 1)
        place = along if x + y > 0 else SIZE - along
        centre = (place, aside) if x else (aside, place)
        image = Image.new("RGB", (SIZE, SIZE), (165, 165, 165))
        box = [centre[0] - 4, centre[1] - 4, centre[0] + 4, centre[1] + 4]
        ImageDraw.Draw(image).ellipse(box, fill=draw.choice([(205, 40, 40), (40, 60, 205)]))
        found.append(image)
    return found


def write_clip(file: Path, images: list[Image.Image]) -> None:
    with av.open(str(file), "w") as container:
        stream = container.add_stream("mpeg4", rate=RATE)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = SIZE, SIZE, "yuv420p", 400_000
        stream.time_base = Fraction(1, RATE)
        for image in images:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(image), format="rgb24")))
        container.mux(stream.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("made"))
    parser.add_argument("--rows", type=int, default=400)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    out, draw = args.out.absolute(), random.Random(0)
    for name, count in (("train", args.rows), ("heldout", max(4, args.rows // 8))):
        with (out / f"{name}.jsonl").open("w") as rows:
            for number in range(count):
                way = draw.choice(list(WAYS))
                file = out / f"{name}-{number}.mp4"
                write_clip(file, clip(way, draw))
                rows.write(json.dumps({"video": str(file), "question": QUESTION, "answer": way}) + "\n")
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": " ".join(WAYS)}]
    (out / "words.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    maker = runpy.run_path(str(Path(__file__).resolve().parents[1] / "vlm_caption" / "make_model.py"))
    tokenizer = maker["make_tokenizer"](out / "words.jsonl")
    shutil.rmtree(out / "model", ignore_errors=True)
    maker["make_processor"](tokenizer).save_pretrained(out / "model")
    maker["make_model"](tokenizer, 0).save_pretrained(out / "model")


if __name__ == "__main__":
    main()
