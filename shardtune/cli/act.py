"""`shardtune act`: the next actions of a policy for one observation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from shardtune.cli.arguments import Checkpoint, Trust
from shardtune.cli.json_text import json_text
from shardtune.cli.results import results_alone
from shardtune.errors import ConfigError, ShardtuneError

Target = Annotated[
    str,
    typer.Argument(
        metavar="RUN_OR_FINAL",
        help="A run of a model that acts, or a directory with its weights: final/, a copy of it, an export, or one in "
        "OpenVLA's format.",
    ),
]
Images = Annotated[
    list[str] | None,
    typer.Option("--image", metavar="[CAMERA=]FILE", help="The image of a camera; may be repeated."),
]
State = Annotated[
    str | None, typer.Option(metavar="NUMBERS", help="The robot's state: numbers with commas, or a JSON list.")
]


OPTIONS = {
    "observation['images']": "--image",
    "observation['state']": "--state",
    "observation['instruction']": "--instruction",
}
"""The option of each part of an observation."""
GIVE = "give --image [CAMERA=]FILE for each camera, and --state and --instruction where the model takes them"
WRITE_STATE = "write it like --state 0.1,0.2"
REMEDIES = {"--image": "give --image [CAMERA=]FILE with an image that can be read", "--state": WRITE_STATE}


def act(
    run: Target,
    image: Images = None,
    state: State = None,
    instruction: Annotated[str | None, typer.Option(help="The task in words.")] = None,
    unnorm_key: Annotated[
        str | None,
        typer.Option(metavar="DATASET", help="Of a model with the statistics of several data sets: whose it acts by."),
    ] = None,
    checkpoint: Checkpoint = "final",
    as_json: Annotated[
        bool, typer.Option("--json", help='Print {"actions": [[…], …]}, and "value" of a model that has values.')
    ] = False,
    trust: Trust = None,
) -> None:
    """Print the next actions for an observation, one per line, in the units of the training data.

    The value of a model with a value head is printed to stderr, or with --json.

    The training data need not be there. For whole episodes: shardtune eval RUN eval.environment=NAME.

    **Examples**

    ```text
    shardtune act runs/vla-flow --image top.png --state 0.1,0.2 --instruction "Go to the red disc"
    shardtune act my_policy --image wrist=a.png --image top=b.png --instruction "Lift it" --json
    ```
    """
    numbers = None if state is None else _numbers(state)
    from shardtune.run.policy import load_policy

    with results_alone(), _options_in_errors():
        policy = load_policy(run, checkpoint=checkpoint, unnorm_key=unnorm_key, trust=trust or ())
    images = _images(image or [], policy.cameras, policy.spare_cameras)
    _refuse_unread({"state": state, "instruction": instruction}, policy.unread)
    observation = {"images": images, "instruction": instruction or "", "state": numbers}
    with results_alone(), _options_in_errors():
        actions = policy.predict_action_chunk(observation)
        value = {"value": policy.value(observation)} if policy.has_values else {}
    if as_json:
        typer.echo(json_text({"actions": actions.tolist(), **value}))
        return
    if value:
        typer.echo(f"value {value['value']:.6g}", err=True)
    for action in actions:
        typer.echo(" ".join(f"{value:.6g}" for value in action))


@contextmanager
def _options_in_errors() -> Iterator[None]:
    """Errors on a part of the observation, or on its data set, name the option that gives it."""
    try:
        yield
    except ShardtuneError as error:
        from shardtune.models.action.tokens import UNNORM_KEY
        from shardtune.run.trained_policy import FORM

        place = error.where or ""
        if place == UNNORM_KEY:
            raise type(error)(error.what, where="--unnorm-key", remedy="choose one of them") from error
        if not place.startswith("observation"):
            raise
        option = OPTIONS.get(place, ", ".join(OPTIONS.values()))
        remedy = REMEDIES.get(option, GIVE) if error.remedy == FORM else error.remedy
        raise type(error)(error.what, where=option, remedy=remedy) from error


def _refuse_unread(given: dict[str, str | None], unread: tuple[str, ...]) -> None:
    for part in unread:
        if given[part] is not None:
            raise ConfigError(
                f"the model does not read the {part} of an observation", where=f"--{part}", remedy=f"leave --{part} out"
            )


def _numbers(text: str) -> list[float]:
    try:
        found = json.loads(text if text.lstrip().startswith("[") else f"[{text}]")
        return [float(value) for value in found]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{text!r} is no list of numbers", where="--state", remedy=WRITE_STATE) from error


def _images(words: list[str], cameras: tuple[str, ...] | None, spare: int) -> dict[str, str]:
    """Files by camera, of which `spare` may be missing; a single one needs no name if the model has one camera, or
    knows none by name."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, file = word.partition("=")
        if not equals:
            known = list(cameras or ("image",))
            if len(words) > 1 or len(known) > 1:
                raise ConfigError(
                    f"{word}: it is not known of which camera this image is",
                    where="--image",
                    remedy=f"write CAMERA=FILE; the cameras are {', '.join(known)}"
                    if cameras
                    else "write CAMERA=FILE, with the names of the training data",
                )
            name, file = known[0], word
        if name in found:
            raise ConfigError(f"there are two images of the camera {name}", where="--image", remedy="give one")
        found[name] = file
    if cameras is not None and (found.keys() - set(cameras) or len(found) < len(cameras) - spare):
        shown, known = (", ".join(names) or "no camera" for names in (found, cameras))
        raise ConfigError(
            f"the images are of {shown}, the model was trained with {known}",
            where="--image",
            remedy=" ".join(f"--image {camera}=FILE" for camera in cameras) or "give none",
        )
    return found
