"""`data.augmentation`: random changes of training images, by the names and ranges of torchvision's transforms."""

from __future__ import annotations

from shardtune.config.schema.section import Section, key, section
from shardtune.config.values import Change, Degrees, Hue, Ratio, Share, Shift


class RandomResizedCropConfig(Section):
    """A part of the image, resized to the whole image's size."""

    scale: Share = key([1.0, 1.0], "The share of the image's area that is kept, [smallest, largest].")
    ratio: Ratio = key(
        [1.0, 1.0],
        "By how much the part's ratio of width to height differs from the image's, [smallest, largest]; for square "
        "images it is torchvision's `ratio`.",
    )


class ColorJitterConfig(Section):
    """Changes of colour, in random order."""

    brightness: Change = key(0.0, "Factors from 1 - x to 1 + x, or [smallest, largest].")
    contrast: Change = key(0.0, "Factors from 1 - x to 1 + x, or [smallest, largest].")
    saturation: Change = key(0.0, "Factors from 1 - x to 1 + x, or [smallest, largest].")
    hue: Hue = key(0.0, "Shifts from -x to x, x up to 0.5, or [smallest, largest]; 1 is the whole circle of colours.")


class RandomAffineConfig(Section):
    """A rotation about the image's middle, a shift, a change of scale and a shear; what comes into view is black."""

    degrees: Degrees = key(0.0, "Rotations from -x to x degrees, or [smallest, largest].")
    translate: Shift = key([0.0, 0.0], "The largest shifts, as shares of [width, height].")
    scale: Ratio = key([1.0, 1.0], "The change of scale, [smallest, largest].")
    shear: Degrees = key(0.0, "Shears along the width from -x to x degrees, or [smallest, largest].")


class AugmentationConfig(Section):
    """Off unless a range is given. Drawn for each row of training by seed, position and row; never in evaluation."""

    random_resized_crop: RandomResizedCropConfig = section(
        RandomResizedCropConfig, "As torchvision's RandomResizedCrop, resized to the image's own size."
    )
    random_affine: RandomAffineConfig = section(RandomAffineConfig, "As torchvision's RandomAffine, bilinear.")
    color_jitter: ColorJitterConfig = section(ColorJitterConfig, "As torchvision's ColorJitter.")
    same_for_cameras: bool = key(
        False,
        "Draw once for all cameras of a row, as for a stereo pair; false: once for each. The frames that a policy sees "
        "of one camera are always changed alike.",
    )

    @property
    def is_on(self) -> bool:
        """Whether anything is changed."""
        off = AugmentationConfig(same_for_cameras=self.same_for_cameras)
        return self != off
