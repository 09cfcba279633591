"""`shardtune act`: the next actions of a policy for one observation."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from shardtune.cli.arguments import Checkpoint, Trust
from shardtune.errors import ConfigError

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


def act(
    run: Target,
    image: Images = None,
    state: State = None,
    instruction: Annotated[str, typer.Option(help="The task in words.")] = "",
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

    policy = load_policy(run, checkpoint=checkpoint, trust=trust or ())
    images = _images(image or [], policy.cameras)
    observation = {"images": images, "instruction": instruction, "state": numbers}
    actions = policy.predict_action_chunk(observation)
    value = {"value": policy.value(observation)} if policy.has_values else {}
    if as_json:
        typer.echo(json.dumps({"actions": actions.tolist(), **value}))
        return
    if value:
        typer.echo(f"value {value['value']:.6g}", err=True)
    for action in actions:
        typer.echo(" ".join(f"{value:.6g}" for value in action))


def _numbers(text: str) -> list[float]:
    try:
        found = json.loads(text if text.lstrip().startswith("[") else f"[{text}]")
        return [float(value) for value in found]
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{text!r} is no list of numbers", where="--state", remedy="write it like --state 0.1,0.2"
        ) from error


def _images(words: list[str], cameras: tuple[str, ...] | None) -> dict[str, str]:
    """Files by camera; a single one needs no name if the model has one camera, or knows none by name."""
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
        found[name] = file
    return found
