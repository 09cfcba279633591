"""The types of recipe values, with their descriptions for error messages and the reference page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from pydantic_core import InitErrorDetails

FUNCTION_IN_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*(?:\.\w+)*)")
LOSSES = ("dft", "distill")
"""Names of the built-in losses, for `actor.loss`."""
WORKERS = ("sft_trainer",)
"""Names of the built-in workers, for `actor.worker`."""
ENVIRONMENTS = ("reach", "point2d")
"""Names of the built-in environments, for `eval.environment`."""
LOGGERS = ("jsonl", "tensorboard", "wandb", "mlflow", "trackio", "swanlab", "timings", "prometheus")
"""Names of the built-in backends, for `runner.logger.logger_backends`."""
LOGGER_EXTRAS = {
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "swanlab": "swanlab",
    "prometheus": "prometheus_client",
}
"""The backends that need an extra of the same name, and the module that it installs."""
CLASS_IN_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
ENVIRONMENT_OF_OTHERS = re.compile(rf"gymnasium:[\w:./-]+|(?!.*\.py:){CLASS_IN_MODULE.pattern}")
"""An id that gymnasium knows, or a class of an installed package."""
HUB_NAME = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}(?<![.-])(?<!\.git)")
TASK_FILES = (".yaml", ".yml")
"""Endings of the files of an `eval.harness` task."""
HARNESS_OPTIONS: Mapping[str, tuple[type, ...]] = {
    "limit": (int, float),
    "samples": (dict,),
    "num_fewshot": (int,),
    "apply_chat_template": (bool, str),
    "fewshot_as_multiturn": (bool,),
    "system_instruction": (str,),
    "gen_kwargs": (dict, str),
    "log_samples": (bool,),
    "bootstrap_iters": (int,),
    "random_seed": (int,),
    "numpy_random_seed": (int,),
    "torch_random_seed": (int,),
    "fewshot_random_seed": (int,),
    "confirm_run_unsafe_code": (bool,),
}
"""Arguments of the harness's `simple_evaluate`, for `eval.harness_options`, and their types."""
OF_HARNESS_MODEL: Mapping[str, tuple[type, ...]] = {
    "max_length": (int,),
    "truncation": (bool,),
    "add_bos_token": (bool,),
    "prefix_token_id": (int,),
    "softmax_dtype": (str,),
    "enable_thinking": (bool,),
    "think_end_token": (int, str),
    "chat_template_args": (dict,),
}
"""Arguments of the harness's class for models of transformers, likewise."""
PISSA_STEPS = re.compile(r"pissa_niter_[0-9]+")
LORA_INITS = ("gaussian", "orthogonal", "pissa", "olora", "mica")
NEED_DATA = ("eva", "corda", "lora_ga")
SMALLEST, LARGEST = 1e-30, 1e30
OUT_OF_RANGE = "32-bit arithmetic needs 0 or a magnitude from 1e-30 to 1e30"
_LONGEST_NAME = 200
_EXPONENT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")


@dataclass(frozen=True, slots=True)
class Allowed:
    """A description of the allowed values, for `Annotated` types whose type alone is not enough."""

    text: str


def _number(value: object) -> object:
    """YAML 1.1 reads `1e-5` (no dot) as text: exactly that form is converted to a number."""
    if isinstance(value, str) and _EXPONENT.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("not a finite number")
    if isinstance(value, int | float) and not in_range(value):
        raise ValueError(OUT_OF_RANGE)
    return value


def in_range(value: float) -> bool:
    """Whether a number, and products of it with weights and gradients, can be computed with in fp32."""
    return value == 0 or SMALLEST <= abs(value) <= LARGEST


def _arguments(value: object) -> object:
    for argument in value.values() if isinstance(value, Mapping) else ():
        for number in argument if isinstance(argument, list) else [argument]:
            _number(number)
    return value


def _count_or_unlimited(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and (value == -1 or value >= 1):
        return value
    raise ValueError("neither -1 nor positive")


def _interval(value: object) -> object:
    return value if value == "epoch" else _count_or_unlimited(value)


def _step_window(value: object) -> object:
    steps = value if isinstance(value, list) and all(type(step) is int for step in value) else None
    if steps == [] or (steps is not None and len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        return steps
    raise ValueError("not a window")


def _function_in_file(value: object) -> object:
    if isinstance(value, str) and FUNCTION_IN_FILE.fullmatch(value):
        return value
    raise ValueError("not file.py:name")


def _match(value: object) -> object:
    return value if value in ("exact", "numeric") else _function_in_file(value)


def _loss(value: object) -> object:
    return value if value in LOSSES else _function_in_file(value)


def _worker(value: object) -> object:
    return value if value in WORKERS else _function_in_file(value)


def _environment(value: object) -> object:
    if value in ENVIRONMENTS or (isinstance(value, str) and ENVIRONMENT_OF_OTHERS.fullmatch(value)):
        return value
    return _function_in_file(value)


def _logger(value: object) -> object:
    if value in LOGGERS or (isinstance(value, str) and CLASS_IN_MODULE.fullmatch(value)):
        return value
    return _function_in_file(value)


def _hub_name(value: object) -> object:
    if isinstance(value, str) and HUB_NAME.fullmatch(value):
        return value
    raise ValueError("not a name on the Hub")


def _harness_options(value: object) -> object:
    known = {**HARNESS_OPTIONS, **OF_HARNESS_MODEL}
    for name, given in value.items() if isinstance(value, Mapping) else ():
        kinds = known.get(name)
        if kinds is None:
            raise ValueError(f"{name!r} is none of {', '.join(known)}")
        if not isinstance(given, kinds) or (isinstance(given, bool) and bool not in kinds):
            raise ValueError(f"{name} is {given!r}, not of type {' or '.join(kind.__name__ for kind in kinds)}")
    return value


def _action_mask(value: object) -> object:
    mask = {str(name): each for name, each in value.items()} if isinstance(value, Mapping) else value
    values = list(mask.values()) if isinstance(mask, dict) else mask
    if not isinstance(values, list) or not values or not all(isinstance(each, bool) for each in values):
        raise ValueError("not true or false for each dimension")
    return mask


def _answer_pattern(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError("not text")
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise ValueError(f"it does not compile: {error}") from error
    if groups < 1:
        raise ValueError("it has no group")
    return value


def _run_name(value: object) -> object:
    if isinstance(value, str) and value.strip() and not value.startswith(("/", "~")) and ".." not in value.split("/"):
        if "\0" in value or max(len(name.encode(errors="replace")) for name in value.split("/")) > _LONGEST_NAME:
            raise ValueError("no file system has such a name")
        return value.rstrip("/")
    raise ValueError("not a directory name")


def _distinct(value: object) -> object:
    if isinstance(value, list) and len({str(item) for item in value}) < len(value):
        raise ValueError("it names an entry twice")
    return value


def _image_size(value: object) -> object:
    if isinstance(value, list) and len(value) == 2 and all(type(side) is int and side >= 1 for side in value):
        return value
    raise ValueError("not a height and a width")


def _range_within(low: float, high: float, around: float | None = None) -> Callable[[object], object]:
    """A check of [smallest, largest] between two bounds; of a number, too, that stands for a range `around` a value."""

    def checked(value: object) -> object:
        numbers = value if isinstance(value, list) else [value]
        found = [float(one) for one in numbers if isinstance(one, int | float) and not isinstance(one, bool)]
        if len(found) < len(numbers):
            raise ValueError("not numbers")
        if around is not None and not isinstance(value, list):
            if not 0 <= found[0] <= high - around:
                raise ValueError(f"not from 0 to {high - around:g}")
            return found[0]
        if len(found) != 2 or not low <= found[0] <= found[1] <= high:
            raise ValueError(f"not [smallest, largest] from {low:g} to {high:g}")
        return found

    return checked


def _shift(value: object) -> object:
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(type(one) in (int, float) and 0 <= one <= 1 for one in value)
    ):
        return [float(one) for one in value]
    raise ValueError("not two shares")


def _reduce(value: object) -> object:
    return "every" if value == "every micro-batch" else value


def _texts(value: object) -> object:
    if isinstance(value, list) and value and all(isinstance(item, str) and item for item in value):
        return value
    raise ValueError("not a list of names")


def _text_or_texts(value: object) -> object:
    return value if (isinstance(value, str) and value) or value == [] else _texts(value)


def _patterns(value: object) -> object:
    for each in value if isinstance(value, list) else [value]:
        _regular_expression(each)
    return _text_or_texts(value)


def _layer_numbers(value: object) -> object:
    numbers = value if isinstance(value, list) else [value]
    if numbers and all(type(number) is int and number >= 0 for number in numbers):
        return value
    raise ValueError("not the numbers of layers")


def _checkpointing(value: object) -> object:
    if isinstance(value, bool) or value == "selective":
        return value
    raise ValueError("not a way of activation checkpointing")


def _lora_init(value: object) -> object:
    if isinstance(value, bool) or value in LORA_INITS or (isinstance(value, str) and PISSA_STEPS.fullmatch(value)):
        return value
    if value in NEED_DATA:
        raise ValueError(f"{value} needs a pass over data, which is not supported")
    if value == "loftq":
        raise ValueError("loftq needs the kernels of bitsandbytes")
    raise ValueError("not one of PEFT's initialisers")


def _regular_expression(value: object) -> object:
    if isinstance(value, str) and value:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"it does not compile: {error}") from error
    return value


Text = Annotated[str, Field(min_length=1), Allowed("text")]
Number = Annotated[float, BeforeValidator(_number)]
Scale = Annotated[Number, Field(gt=0)]
Arguments = Annotated[dict[str, object], BeforeValidator(_arguments)]
Count = Annotated[int, Field(ge=1)]
RankCount = Annotated[int, Field(ge=1, le=1_000_000)]
CountOrUnlimited = Annotated[int, BeforeValidator(_count_or_unlimited), Allowed("-1, or a whole number >= 1")]
Interval = Annotated[int | str, BeforeValidator(_interval), Allowed('-1, a whole number >= 1, or "epoch"')]
StepWindow = Annotated[
    list[int], BeforeValidator(_step_window), Allowed("[], or [first, last] with 1 <= first <= last")
]
RunName = Annotated[
    str, BeforeValidator(_run_name), Allowed('the name of a directory: text without ".." and without a leading "/"')
]
FunctionInFile = Annotated[str, BeforeValidator(_function_in_file), Allowed("file.py:name")]
LossName = Annotated[str, BeforeValidator(_loss), Allowed(f"{', '.join(LOSSES)}, or file.py:name")]
Worker = Annotated[str, BeforeValidator(_worker), Allowed(f"{', '.join(WORKERS)}, or file.py:Class")]
EnvironmentName = Annotated[
    str,
    BeforeValidator(_environment),
    Allowed(f"{', '.join(ENVIRONMENTS)}, gymnasium:ID, package.module:Class, or file.py:Class"),
]
LoggerName = Annotated[
    str, BeforeValidator(_logger), Allowed(f"{', '.join(LOGGERS)}, package.module:Class, or file.py:Class")
]
HubName = Annotated[str, BeforeValidator(_hub_name), Allowed("owner/name")]
HarnessOptions = Annotated[
    dict[str, object],
    BeforeValidator(_harness_options),
    Allowed(f"a mapping with any of: {', '.join([*HARNESS_OPTIONS, *OF_HARNESS_MODEL])}"),
]
Match = Annotated[str, BeforeValidator(_match), Allowed("exact, numeric, or file.py:function")]
AnswerPattern = Annotated[
    str, BeforeValidator(_answer_pattern), Allowed("a regular expression with at least one group")
]
NamePattern = Annotated[str, Field(min_length=1), BeforeValidator(_regular_expression), Allowed("a regular expression")]
Names = Annotated[list[str], BeforeValidator(_texts), Allowed("a list of names")]
NamePatterns = Annotated[
    str | list[str], BeforeValidator(_patterns), Allowed("a regular expression, or a list of names")
]
LayerNumbers = Annotated[
    int | list[int], BeforeValidator(_layer_numbers), Allowed("a whole number >= 0, or a list of them")
]
LoraInit = Annotated[
    bool | str,
    BeforeValidator(_lora_init),
    Allowed(f"true, false, {', '.join(LORA_INITS)}, pissa_niter_ and a number"),
]
Checkpointing = Annotated[bool | str, BeforeValidator(_checkpointing), Allowed("true, false, selective")]
ImageSize = Annotated[list[int], BeforeValidator(_image_size), Allowed("[height, width], two whole numbers >= 1")]
ActionMask = Annotated[
    list[bool] | dict[str, bool],
    BeforeValidator(_action_mask),
    Allowed("a list of true and false, or a mapping of dimensions, by name or number, to true or false"),
]
Share = Annotated[list[float], BeforeValidator(_range_within(0.01, 1)), Allowed("[smallest, largest], 0.01 to 1")]
Ratio = Annotated[list[float], BeforeValidator(_range_within(0.1, 10)), Allowed("[smallest, largest], 0.1 to 10")]
Change = Annotated[
    float | list[float],
    BeforeValidator(_range_within(0, 10, around=1)),
    Allowed("a number from 0 to 9, or [smallest, largest], 0 to 10"),
]
Hue = Annotated[
    float | list[float],
    BeforeValidator(_range_within(-0.5, 0.5, around=0)),
    Allowed("a number from 0 to 0.5, or [smallest, largest], -0.5 to 0.5"),
]
Degrees = Annotated[
    float | list[float],
    BeforeValidator(_range_within(-180, 180, around=0)),
    Allowed("a number from 0 to 180, or [smallest, largest], -180 to 180"),
]
Shift = Annotated[list[float], BeforeValidator(_shift), Allowed("[of the width, of the height], 0 to 1")]
Distinct = BeforeValidator(_distinct)
Reduce = BeforeValidator(_reduce)


def one_or_more(entry: type[BaseModel], *, named: bool) -> BeforeValidator:
    """Checks a data source: text, one `entry`, a list of both, and with `named` a mapping of set name to any of these.

    A mapping that holds `path` is one entry; every other mapping names sets.
    """

    def single(value: object, at: tuple[int | str, ...]) -> object:
        if isinstance(value, str) and value.strip():
            return value
        if isinstance(value, Mapping):
            return _validated(entry, value, at)
        if isinstance(value, entry):
            return value
        raise ValueError(f"{value!r} is neither text nor an entry with a path")

    def several(value: object, at: tuple[int | str, ...] = ()) -> object:
        if isinstance(value, list):
            if not value:
                raise ValueError("the list is empty")
            return [single(item, (*at, index)) for index, item in enumerate(value)]
        return single(value, at)

    def check(value: object) -> object:
        if named and isinstance(value, Mapping) and "path" not in value:
            if not value:
                raise ValueError("the mapping names no set")
            return {_set_name(name): several(item, (name,)) for name, item in value.items()}
        return several(value)

    return BeforeValidator(check)


def _set_name(name: object) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"a set's name is letters, digits, '_', '-' and '.', not {name!r}")
    return name


def _validated(entry: type[BaseModel], value: object, at: tuple[int | str, ...]) -> BaseModel:
    """Validate one entry; an error carries the entry's place among the others."""
    try:
        return entry.model_validate(value)
    except ValidationError as error:
        lines = [
            InitErrorDetails(type=line["type"], loc=(*at, *line["loc"]), input=line["input"], ctx=line.get("ctx", {}))
            for line in error.errors()
        ]
        raise ValidationError.from_exception_data(error.title, lines) from error


def escape_interpolation(value: object) -> object:
    r"""Escape `${` for OmegaConf: a backslash before it, and backslashes already there doubled (`\${` -> `\\\${`)."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    if isinstance(value, dict):
        return {name: escape_interpolation(item) for name, item in value.items()}
    if isinstance(value, list):
        return [escape_interpolation(item) for item in value]
    return value
