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
        ConfigError: names the code; or what is trusted and is none of it.
    """
    trusted, code = [*trusted], named_code(recipe)
    refuse_unnamed(trusted, code, place)
    unknown = {
        name: key
        for name, key in code.items()
        if not any(is_same_code(word, name) for word in trusted) and not _is_recorded(name)
    }
    if unknown:
        raise ConfigError(
            "the run would execute code that you have not trained with: "
            + ", ".join(f"{name} ({key})" for name, key in unknown.items()),
            where=str(place),
            remedy="read it; to execute it, name it: " + " ".join(f"--trust {name}" for name in unknown),
        )


def is_same_code(word: str, name: str) -> bool:
    """Whether a word of `--trust` is a file, module or model that is named elsewhere."""
    paths = (str(Path(word).expanduser().resolve()), str(Path(name).resolve()))
    return word == name or word == paths[1] or paths[0] in (name, paths[1])


def refuse_unnamed(trusted: Iterable[str], code: Iterable[str], place: str | Path) -> None:
    """Refuse consent to what would not be executed, such as a misspelt file.

    Args:
        trusted: files, modules and models that the user consents to.
        code: what would be executed.
        place: the file or model that names it.

    Raises:
        ConfigError: names the first word that is none of it.
    """
    code = [*code]
    for word in trusted:
        if not any(is_same_code(word, name) for name in code):
            raise ConfigError(
                f"{word} is no code that {place} names, so that nothing of it would be executed",
                where=f"--trust {word}",
                remedy=f"leave it out, or write what is named there: {', '.join(code)}" if code else "leave it out",
            )


def _is_recorded(name: str) -> bool:
    try:
        return _record(name).is_file()
    except OSError:
        return False


def _record(name: str) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return Path(state) / "shardtune" / "own_code" / hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
