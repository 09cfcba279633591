"""Files and commands that are recognised, and not converted: of launchers, and of programs without a table here."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardtune.config.foreign import llama_factory, swift
from shardtune.errors import ConfigError

HYDRA_SCRIPT = "launch.py"
"""HALOs' script, whose arguments are keys with values (`loss=sft`)."""
NO_TRAINING = {
    "export": "shardtune export RUN FOLDER --merge merges what it trained",
    "chat": "shardtune chat RUN talks to the model",
    "webchat": "shardtune chat RUN talks to the model",
    "eval": "shardtune eval RUN evaluates the model",
    "api": "shardtune export RUN FOLDER writes what vLLM serves",
    "webui": "shardtune train trains by the recipe",
}
"""The other words of `llamafactory-cli`, and what does the same here."""
LAUNCHED = {
    ("distributed_type", "compute_environment"): (
        "accelerate",
        "accelerate launch --config_file {} train.py --config FILE",
    ),
    ("zero_optimization", "zero_allow_untested_optimizer"): ("DeepSpeed", "train.py --deepspeed {} --learning_rate …"),
}
"""Keys of files beside a trainer's own -> whose they are, and the words to convert with them."""


def refuse_launcher(tree: Mapping[str, object], shown: str) -> None:
    """Refuse a file of a launcher, which has no keys of a trainer.

    Raises:
        ConfigError: it is one.
    """
    for marks, (program, words) in LAUNCHED.items():
        if any(mark in tree for mark in marks):
            raise ConfigError(
                f"this is a file of {program}: it starts a run, and the keys of the training are in another one",
                where=shown,
                remedy=f"convert both: shardtune convert {words.format(shown)}",
            )


def refuse_command(words: Sequence[str], given: Sequence[str]) -> None:
    """Refuse a command of ms-swift that does not fine-tune, or of a script with Hydra's `key=value`.

    Args:
        words: the command.
        given: its words behind the launcher and the script.

    Raises:
        ConfigError: it is one.
    """
    if words[:1] == [swift.MEGATRON] and not Path(words[0]).exists():
        raise swift.no_megatron(" ".join(words[:2]))
    if words[:1] == [swift.COMMAND] and "".join(words[1:2]) not in swift.FINE_TUNING:
        raise ConfigError(
            f"{' '.join(words[:2])} is no supervised fine-tuning",
            where=" ".join(words[:2]),
            remedy="convert the command of the training, swift sft or swift pt; then shardtune export, chat and eval "
            "do what swift export, infer and eval are for",
        )
    keys = [word for word in given if "=" in word and not word.startswith("-") and not Path(word).exists()]
    if keys and len(keys) == len(given) and any(Path(word).name == HYDRA_SCRIPT for word in words):
        raise ConfigError(
            f"{HYDRA_SCRIPT} with key=value is HALOs' command, which needs no conversion",
            where=shlex.join(words),
            remedy=f"shardtune train {shlex.join(keys)}",
        )


def refuse_llama_factory(given: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse a command of LLaMA-Factory that does not train, or that trains by its v1 trainer.

    Args:
        given: `llamafactory-cli`, and the words behind it.
        environment: the variables that are set in front of it.

    Raises:
        ConfigError: it is one.
    """
    word = "".join(given[1:2])
    if word in NO_TRAINING:
        raise ConfigError(
            f"{' '.join(given[:2])} trains nothing",
            where=shlex.join(given),
            remedy=f"convert the command of the training, {given[0]} train FILE; then {NO_TRAINING[word]}",
        )
    if environment.get("USE_V1", "0").lower() in ("1", "true", "yes", "on"):
        raise llama_factory.no_v1("USE_V1")
