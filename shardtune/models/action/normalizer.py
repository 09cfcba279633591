"""The normalisation of states, actions and images by statistics of the data, for adapters of policies.

The modes, their formulas and the names VISUAL, STATE and ACTION are those of LeRobot's `normalization_mapping`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, overload

import numpy as np
import torch

from shardtune.data.robot.representation import ENTRY, Representation
from shardtune.errors import ConfigError, DataError

IDENTITY, MEAN_STD, MIN_MAX, QUANTILES = "IDENTITY", "MEAN_STD", "MIN_MAX", "QUANTILES"
NEEDS: Mapping[str, Sequence[str]] = {
    IDENTITY: (),
    MEAN_STD: ("mean", "std"),
    MIN_MAX: ("min", "max"),
    QUANTILES: ("q01", "q99"),
}
"""The statistics of each mode: what is subtracted, or the lower end; what is divided by, or the upper end."""
VISUAL, STATE, ACTION = "VISUAL", "STATE", "ACTION"
KINDS: Final = (VISUAL, STATE, ACTION)
EPSILON = 1e-8
IMAGENET: Final = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "min": (0.0,) * 3, "max": (1.0,) * 3}
"""Statistics of images where none are given: the mean and deviation of ImageNet's colours, and the range of pixels."""
MAPPING_KEY = "actor.model.normalization_mapping"


@dataclass(frozen=True, eq=False)
class Scale:
    """The normalisation of one kind of values, x, dimension by dimension:

    | mode | `normalise` | `unnormalise` |
    |---|---|---|
    | IDENTITY | x | x |
    | MEAN_STD | (x - mean) / (std + 1e-8) | x std + mean |
    | MIN_MAX | 2 (x - min) / (max - min) - 1 | (x + 1) / 2 (max - min) + min |
    | QUANTILES | 2 (x - q01) / (q99 - q01) - 1 | (x + 1) / 2 (q99 - q01) + q01 |

    A difference of 0 (a constant dimension) is replaced by 1e-8. Nothing is clipped.

    Attributes:
        mode: one of these.
        statistics: float64 [dimensions] by name, or [channels, 1, 1] for images; at least those of the mode.
        mask: bool [dimensions]: dimensions that are normalised, others stay as they are; None: all.
    """

    mode: str
    statistics: Mapping[str, np.ndarray]
    mask: np.ndarray | None = None

    @classmethod
    def of(
        cls, mode: str, statistics: Mapping[str, object], mask: Sequence[bool] | None = None, *, where: str = ""
    ) -> Self:
        """Checked.

        Args:
            mode: in capital or small letters.
            statistics: numbers per dimension by name; further names (`mask`, `count`) are not read.
            mask: truth values per dimension.
            where: of the statistics, for errors.

        Raises:
            ConfigError: there is no such mode.
            DataError: statistics that are missing, differ in shape, are not finite, or have an upper end below the
                lower one.
        """
        name = mode_named(mode)
        kept = {key: statistics[key] for names in NEEDS.values() for key in names if key in statistics}
        for key in NEEDS[name]:
            if key not in kept:
                raise DataError(
                    f"{name} needs {' and '.join(NEEDS[name])}, and the statistics have {', '.join(kept) or 'neither'}",
                    where=where or None,
                    remedy="give these, or another mode (model.normalization_mapping)",
                )
        found = {key: _numbers(key, values, where) for key, values in kept.items()}
        shapes = {values.shape for values in found.values()}
        chosen = None if mask is None else np.asarray(mask, dtype=bool)
        if len(shapes) > 1 or (chosen is not None and shapes and chosen.shape not in shapes):
            listed = {key: list(values.shape) for key, values in found.items()}
            listed |= {} if chosen is None else {"mask": list(chosen.shape)}
            raise DataError(
                f"the statistics have different shapes: {', '.join(f'{key} {shape}' for key, shape in listed.items())}",
                where=where or None,
                remedy="give one number, and one truth value of the mask, for each dimension",
            )
        if name != IDENTITY:
            _check_order(name, found, where)
        return cls(name, found, chosen)

    @property
    def dimensions(self) -> int | None:
        """How many; None where nothing is known of them (IDENTITY)."""
        return next((values.shape[0] for values in self.statistics.values()), None)

    @overload
    def normalise(self, values: torch.Tensor) -> torch.Tensor: ...
    @overload
    def normalise(self, values: np.ndarray | Sequence[float]) -> np.ndarray: ...
    def normalise(self, values: Any) -> Any:
        """Values [..., dimensions] in the units of the data to normalised ones.

        A tensor gives a tensor on its device, anything else an array. The dtype is that of the values, at least
        float32.

        Raises:
            DataError: another number of dimensions.
        """
        return self._applied(values, inverse=False)

    @overload
    def unnormalise(self, values: torch.Tensor) -> torch.Tensor: ...
    @overload
    def unnormalise(self, values: np.ndarray | Sequence[float]) -> np.ndarray: ...
    def unnormalise(self, values: Any) -> Any:
        """The reverse: normalised values [..., dimensions] to the units of the data."""
        return self._applied(values, inverse=True)

    def _applied(self, values: Any, *, inverse: bool) -> Any:
        if values is None:
            raise DataError(
                "there are no values to normalise: a state, or an action, is None",
                where="normalisation",
                remedy="give each row and each observation a state, as the training data have it",
            )
        given = _as_float(values)
        if self.mode == IDENTITY:
            return given
        first, second = (self.statistics[name] for name in NEEDS[self.mode])
        shape = first.shape
        if given.ndim < len(shape) or given.shape[-len(shape)] != shape[0]:
            raise DataError(
                f"values of shape {list(given.shape)} do not have the {shape[0]} dimensions of the statistics",
                where="normalisation",
                remedy="give [..., dimensions] (images: [..., channels, height, width]) as in the training data",
            )
        if isinstance(given, np.ndarray):
            found = self._formula(given.astype(np.float64), first, second, inverse=inverse)
            return (found if self.mask is None else np.where(self.mask, found, given)).astype(given.dtype)
        low, high = (torch.from_numpy(one).to(given) for one in (first, second))
        found = self._formula(given, low, high, inverse=inverse)
        return found if self.mask is None else torch.where(torch.from_numpy(self.mask).to(given.device), found, given)

    def _formula(self, x: Any, first: Any, second: Any, *, inverse: bool) -> Any:
        """`NEEDS`' two statistics applied; arrays or tensors alike."""
        if self.mode == MEAN_STD:
            return x * second + first if inverse else (x - first) / (second + EPSILON)
        width = second - first
        width = width + EPSILON * (width == 0)
        return (x + 1.0) / 2.0 * width + first if inverse else 2.0 * (x - first) / width - 1.0

    @property
    def constant(self) -> list[int]:
        """The dimensions that are normalised and have no width, so that 1e-8 takes its place."""
        if self.mode == IDENTITY:
            return []
        first, second = (self.statistics[name] for name in NEEDS[self.mode])
        width = second if self.mode == MEAN_STD else second - first
        return np.flatnonzero((width == 0) & (True if self.mask is None else self.mask)).tolist()

    def to_json(self) -> dict[str, Any]:
        """`{"mode": …, "mean": […], …, "mask": […]}`."""
        values = {name: numbers.tolist() for name, numbers in self.statistics.items()}
        return {"mode": self.mode, **values, **({} if self.mask is None else {"mask": self.mask.tolist()})}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str = "") -> Self:
        """The reverse of `to_json`; raises as `of`."""
        return cls.of(str(content.get("mode")), content, content.get("mask"), where=where)


class Pixels(Scale):
    """The normalisation of images: [..., channels, height, width], RGB.

    Values are from 0 to 1; uint8 values are divided by 255 first. Statistics are per channel.
    """

    @classmethod
    def of(
        cls, mode: str, statistics: Mapping[str, object], mask: Sequence[bool] | None = None, *, where: str = ""
    ) -> Self:
        wanted = {name for names in NEEDS.values() for name in names} & statistics.keys()
        shaped = {name: _numbers(name, statistics[name], where).reshape(-1, 1, 1) for name in wanted}
        return super().of(mode, shaped, mask, where=where)

    def _applied(self, values: Any, *, inverse: bool) -> Any:
        if values.dtype in (np.uint8, torch.uint8):
            values = (values.astype(np.float32) if isinstance(values, np.ndarray) else values.float()) / 255
        return super()._applied(values, inverse=inverse)


@dataclass(frozen=True, slots=True, eq=False)
class Normalizer:
    """The normalisation of a data set's rows for a policy.

    An adapter that derives from `ActingAdapter` declares its modes, and has the statistics of its training data as
    `self.normalizer`, in `encode` and when acting:

        class MyPolicy(ActingAdapter):
            normalization_mapping = {"STATE": "MEAN_STD", "ACTION": "MIN_MAX"}  # what is not named is IDENTITY

            def encode(self, row):
                state = self.normalizer.state.normalise(row["state"])  # float32 [S]
                actions = self.normalizer.actions.normalise(row["actions"])  # float32 [C, A]
                return Sample(fields={"state": state, "actions": actions})

            def policy(self, root, device):
                def act(observations):
                    states = np.stack([self.normalizer.state.normalise(one["state"]) for one in observations])
                    found = root.act(torch.from_numpy(states).to(device))  # [observations, C, A], normalised
                    return self.normalizer.actions.unnormalise(found.cpu()).numpy()

                return act

    Without a run:

        normalizer = Normalizer.of({"action": {"min": [0, -2], "max": [100, 2]}}, {"ACTION": "MIN_MAX"})
        normalizer.actions.normalise(np.array([50.0, 2.0]))  # [0.0, 1.0]
        Normalizer.from_json(json.loads(json.dumps(normalizer.to_json())))  # the same

    Attributes:
        scales: by name: `actions`, `state` (where the data have one), `images`, and `images.<camera>` where cameras
            have statistics of their own.
        representation: of the actions that the statistics are of; None: they are absolute.
    """

    scales: Mapping[str, Scale]
    representation: Representation | None = None

    @classmethod
    def of(
        cls,
        statistics: Mapping[str, Any],
        mapping: Mapping[str, str],
        *,
        action_mask: Sequence[bool] | None = None,
        state_mask: Sequence[bool] | None = None,
        where: str = "statistics",
    ) -> Normalizer:
        """From the statistics of a data set.

        Args:
            statistics: one entry of `dataset_statistics.json`, as `data.action_statistics.Statistics.to_json` gives it:
                `action`, perhaps `proprio`, each with lists mean, std, min, max, q01, q99; also `images` (per channel,
                by default `IMAGENET`) and `images.<camera>`.
            mapping: VISUAL, STATE, ACTION to a mode; IDENTITY where it names none.
            action_mask, state_mask: the dimensions that are normalised; None: all.
            where: of the statistics, for errors.

        Raises:
            ConfigError: unknown names in the mapping.
            DataError: statistics that are missing or cannot be used.
        """
        modes = checked_mapping(mapping)
        scales: dict[str, Scale] = {
            "actions": Scale.of(modes[ACTION], statistics.get("action", {}), action_mask, where=f"{where}: action")
        }
        if "proprio" in statistics:
            scales["state"] = Scale.of(modes[STATE], statistics["proprio"], state_mask, where=f"{where}: proprio")
        elif modes[STATE] == IDENTITY:
            scales["state"] = Scale(IDENTITY, {})
        images = {"images": IMAGENET, **{name: one for name, one in statistics.items() if name.startswith("images")}}
        for name, one in images.items():
            scales[name] = Pixels.of(modes[VISUAL], one, where=f"{where}: {name}")
        return cls(scales, Representation.from_json(statistics.get(ENTRY)))

    @property
    def actions(self) -> Scale:
        """Of actions [..., A]."""
        return self.scales["actions"]

    @property
    def state(self) -> Scale:
        """Of states [..., S].

        Raises:
            DataError: the data have no state.
        """
        if "state" not in self.scales:
            raise DataError(
                "the training data have no state, so there are no statistics to normalise one by",
                where="Normalizer.state",
                remedy="name its column (data.columns: {state: …}), or leave the state out of the policy",
            )
        return self.scales["state"]

    @property
    def images(self) -> Scale:
        """Of the images of all cameras, [..., 3, height, width]: from 0 to 1, or uint8."""
        return self.scales["images"]

    def camera(self, name: str) -> Scale:
        """Of the images of one camera: its own statistics where there are some, otherwise those of all."""
        return self.scales.get(f"images.{name}", self.images)

    @property
    def mapping(self) -> dict[str, str]:
        """The modes of VISUAL, STATE and ACTION."""
        state = self.scales["state"].mode if "state" in self.scales else None
        found = {VISUAL: self.images.mode, STATE: state, ACTION: self.actions.mode}
        return {kind: mode for kind, mode in found.items() if mode is not None}

    def constant(self) -> list[str]:
        """What is to be said of dimensions of actions and states that are the same in all frames, a sentence each."""
        found = []
        for name in ("actions", "state"):
            scale = self.scales.get(name)
            if scale is not None and (numbers := scale.constant):
                value, many = scale.statistics[NEEDS[scale.mode][0]][numbers[0]], len(numbers) > 1
                listed = f"dimension{'s' if many else ''} {', '.join(map(str, numbers))} of the {name}"
                found.append(
                    f"{listed} {'are' if many else 'is'} constant ({'the first: ' if many else ''}{value:g}): what "
                    f"differs from that, in other rows or when acting, is divided by {EPSILON:g}"
                )
        return found

    @property
    def digest(self) -> str:
        """A hash of all that it depends on; part of the cache's key of encoded rows."""
        return hashlib.blake2b(json.dumps(self.to_json(), sort_keys=True).encode(), digest_size=16).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The modes, statistics and masks by name, as `normalizer.json` has them for each data set."""
        found = {name: scale.to_json() for name, scale in self.scales.items()}
        form = self.representation
        return found if form is None else {**found, ENTRY: form.to_json(len(form.given or ()))}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str = "normalizer") -> Normalizer:
        """The reverse of `to_json`.

        Raises:
            DataError: content of another form.
        """
        for name in ("actions", "images"):
            if not isinstance(content.get(name), Mapping):
                raise DataError(f"the normalizer has no {name!r}", where=where, remedy="write what to_json gives")
        kinds = {name: Pixels if name.startswith("images") else Scale for name in content if name != ENTRY}
        scales = {name: kind.from_json(content[name], f"{where}: {name}") for name, kind in kinds.items()}
        return cls(scales, Representation.from_json(content.get(ENTRY)))


def mode_named(mode: str) -> str:
    """The mode of a name in capital or small letters.

    Raises:
        ConfigError: there is none.
    """
    found = mode.upper()
    if found not in NEEDS:
        raise ConfigError(
            f"there is no normalisation {mode!r}", where=MAPPING_KEY, remedy=f"give one of {', '.join(NEEDS)}"
        )
    return found


def checked_mapping(mapping: Mapping[str, str]) -> dict[str, str]:
    """The mode of each kind of values; IDENTITY for one that the mapping does not name.

    Raises:
        ConfigError: a kind or a mode is not known.
    """
    given = {str(kind).upper(): mode_named(str(mode)) for kind, mode in mapping.items()}
    for kind in given:
        if kind not in KINDS:
            raise ConfigError(
                f"there is no {kind!r} to normalise", where=MAPPING_KEY, remedy=f"the names are {', '.join(KINDS)}"
            )
    return {kind: given.get(kind, IDENTITY) for kind in KINDS}


def _as_float(values: Any) -> np.ndarray | torch.Tensor:
    """Values in a dtype of floating-point numbers of at least 32 bits."""
    if isinstance(values, torch.Tensor):
        return values.to(torch.promote_types(values.dtype, torch.float32))
    array = np.asarray(values)
    is_float = array.dtype.kind == "f" and array.dtype.itemsize >= 4
    return array if is_float else array.astype(np.float32)


def _numbers(name: str, values: object, where: str) -> np.ndarray:
    """One statistic as an array."""
    try:
        found = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} is no list of numbers: {error}", where=where or None) from error
    if not found.ndim or not np.isfinite(found).all():
        raise DataError(f"{name} is {values!r:.80}, not a list of finite numbers", where=where or None)
    return found


def _check_order(mode: str, found: Mapping[str, np.ndarray], where: str) -> None:
    """Refuse a negative deviation, and an upper end below the lower one."""
    first, second = NEEDS[mode]
    wrong = found[second] < (0 if mode == MEAN_STD else found[first])
    if wrong.any():
        at = int(np.argmax(wrong))
        what = f"{second} is {found[second].flat[at]}"
        what += "" if mode == MEAN_STD else f", {first} is {found[first].flat[at]}"
        raise DataError(f"dimension {at}: {what}", where=where or None, remedy="compute the statistics anew")
