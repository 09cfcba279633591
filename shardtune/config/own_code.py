"""Consent to the code of users: a recipe's runs with its command, a run directory's only if this user trained with it.

A run directory may come from someone else, and its `config.yaml` names files that would be imported. Training records
the code that a recipe names, by path, in the user's state directory; what is not recorded there needs consent by name.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from shardtune.config.paths import FUNCTION_KEYS, MODEL_KEYS, TASK_KEY
from shardtune.config.schema import Recipe
from shardtune.config.tree import get_value
from shardtune.config.values import ENVIRONMENT_OF_OTHERS, FUNCTION_IN_FILE, TASK_FILES
from shardtune.errors import ConfigError


def named_code(recipe: Recipe) -> dict[str, str]:
    """The code outside this package that a recipe executes: file, module or model -> the key that names it."""
    tree = recipe.to_dict()
    found = dict.fromkeys(recipe.plugins, "plugins")
    for key in FUNCTION_KEYS:
        value = get_value(tree, key)
        for text in value if isinstance(value, list) else [value]:
            match = FUNCTION_IN_FILE.fullmatch(text) if isinstance(text, str) else None
            if match is not None:
                found.setdefault(match["file"], key)
            elif isinstance(text, str) and ENVIRONMENT_OF_OTHERS.fullmatch(text):  # gymnasium imports modules, too
                found.setdefault(text, key)
    for name in recipe.eval.harness:  # a task's YAML file may name functions of a file beside it
        if name.endswith(TASK_FILES):
            found.setdefault(name, TASK_KEY)
    if recipe.actor.model.trust_remote_code:
        models = (get_value(tree, key) for key in MODEL_KEYS)
        found |= {model: "actor.model.trust_remote_code" for model in models if isinstance(model, str)}
    return found


def record_own_code(recipe: Recipe) -> None:
    """Note that this user trains with the code that a recipe names; where that cannot be written, consent is needed."""
    for name in named_code(recipe):
        with suppress(OSError):
            record = _record(name)
            record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            record.write_text(name + "\n", encoding="utf-8")


def require_consent(recipe: Recipe, trusted: Iterable[str], place: Path) -> None:
    """Refuse to execute code that the recipe of a run directory names, and this user neither trained with nor named.

    Args:
        recipe: of the run.
        trusted: files, modules and models that the user consents to.
        place: the recipe's file.

    Raises:
        ConfigError: names the code.
    """
    named = [*trusted]
    known = {*named, *(str(Path(name).expanduser().resolve()) for name in named)}
    unknown = {
        name: key
        for name, key in named_code(recipe).items()
        if not {name, str(Path(name).resolve())} & known and not _is_recorded(name)
    }
    if unknown:
        raise ConfigError(
            "the run would execute code that you have not trained with: "
            + ", ".join(f"{name} ({key})" for name, key in unknown.items()),
            where=str(place),
            remedy="read it; to execute it, name it: " + " ".join(f"--trust {name}" for name in unknown),
        )


def _is_recorded(name: str) -> bool:
    try:
        return _record(name).is_file()
    except OSError:
        return False


def _record(name: str) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return Path(state) / "shardtune" / "own_code" / hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
