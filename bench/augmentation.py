"""Augmentation beside torchvision's transforms: the same bytes, and what an image costs.

    python bench/augmentation.py [--save]

Where torchvision is installed, every change is compared with it bit by bit, over random images and factors. Rewrites
the section `augmentation` of docs/benchmarks.md; ends with exit code 1 where a byte differs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from results import machine, table, write_section

from shardtune.config.schema.augmentation import AugmentationConfig
from shardtune.data.images.augmentation import Augmentation
from shardtune.data.images.image_changes import ImageChanges, OwnChanges, image_changes

CASES = 40
SIZES = ((96, 96), (224, 224), (480, 640))
ALL = {
    "random_resized_crop": {"scale": [0.8, 0.95]},
    "random_affine": {"degrees": 5.0, "translate": [0.05, 0.05]},
    "color_jitter": {"brightness": 0.2, "contrast": 0.2, "saturation": 0.2, "hue": 0.05},
}


def images(size: tuple[int, int], seed: int) -> torch.Tensor:
    """Two images: one of soft patches, one of noise."""
    draws = torch.Generator().manual_seed(seed)
    small = torch.randint(0, 256, (1, 3, size[0] // 8, size[1] // 8), generator=draws).float()
    soft = torch.nn.functional.interpolate(small, size, mode="bilinear").round().to(torch.uint8)
    return torch.cat([soft, torch.randint(0, 256, (1, 3, *size), generator=draws).to(torch.uint8)])


def calls(size: tuple[int, int], seed: int) -> dict[str, Callable[[ImageChanges, torch.Tensor], torch.Tensor]]:
    """A change of each kind with random factors."""
    draws = np.random.default_rng(seed)
    high, wide = (int(draws.integers(side // 4, side)) for side in size)
    top, left = int(draws.integers(size[0] - high)), int(draws.integers(size[1] - wide))
    degrees, scale, shear = draws.uniform(-90, 90), draws.uniform(0.5, 2), draws.uniform(-30, 30)
    shift = float(draws.integers(-20, 20)), float(draws.integers(-20, 20))
    factor, hue = draws.uniform(0, 3), draws.uniform(-0.5, 0.5)
    return {
        "crop": lambda by, image: by.crop(image, top, left, high, wide),
        "affine": lambda by, image: by.affine(image, degrees, shift, scale, shear),
        "brightness": lambda by, image: by.brightness(image, factor),
        "contrast": lambda by, image: by.contrast(image, factor),
        "saturation": lambda by, image: by.saturation(image, factor),
        "hue": lambda by, image: by.hue(image, hue),
    }


def differing(other: ImageChanges) -> dict[str, int]:
    """By change the bytes that differ from torchvision's, over all sizes and cases."""
    found: dict[str, int] = {}
    for size in SIZES:
        for seed in range(CASES):
            image = images(size, seed)
            for name, call in calls(size, seed).items():
                found[name] = found.get(name, 0) + int((call(OwnChanges(), image) != call(other, image)).sum())
    return found


def milliseconds(size: tuple[int, int]) -> float:
    """Of one image with all changes, on one thread."""
    augment = Augmentation(AugmentationConfig.model_validate(ALL), OwnChanges())
    image, times = images(size, 0)[:1].numpy(), []
    for row in range(60):
        began = time.thread_time()
        augment.row(0, row)(image, "top")
        times.append(time.thread_time() - began)
    return statistics.median(times) * 1e3


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--save", action="store_true", help="write docs/benchmarks.md")
    save = options.parse_args().save
    torch.set_num_threads(1)
    costs = table(["image", "ms"], [[f"{high} x {wide}", f"{milliseconds((high, wide)):.1f}"] for high, wide in SIZES])
    found = [
        f"{machine()}.",
        "",
        "Crop, affine and all four changes of colour of one image, median of the time of its thread:",
        "",
        costs,
    ]
    other, wrong = image_changes(), {}
    if isinstance(other, OwnChanges):
        found += ["", "torchvision is not installed, so nothing was compared with it."]
    else:
        wrong = differing(other)
        rows = [[name, f"{count:,}"] for name, count in wrong.items()]
        heads = ["change", "bytes that differ"]
        about = f"{other.name}, {CASES} cases with random factors for each of these sizes:"
        found += ["", about, "", table(heads, rows)]
    text = "\n".join(found)
    print(text)
    if save:
        write_section("augmentation", text)
    if any(wrong.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
