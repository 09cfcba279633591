"""What of a service can be checked before training: its package, and credentials where it needs any."""

from __future__ import annotations

import configparser
import netrc
import os
import socket
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from shardtune.config.secrets import without_secrets
from shardtune.config.values import LOGGER_EXTRAS, LOGGERS
from shardtune.errors import ConfigError
from shardtune.training.experiment.user_class import KEY, load_class

CONNECT_SECONDS = 10.0
WITHOUT_SERVICE = ("offline", "disabled", "dryrun")
"""Modes of Weights & Biases that need no key."""


def check_services(names: Sequence[str]) -> None:
    """Refuse, before training, what `runner.logger.logger_backends` names and cannot be used here.

    Raises:
        ConfigError: a package or a key is missing, a server cannot be reached, or a class cannot be used.
    """
    check_installed(names)
    if "wandb" in names and not _wandb_can_start():
        raise ConfigError(
            "Weights & Biases has no API key",
            where=KEY,
            remedy="wandb login, or set WANDB_API_KEY; or WANDB_MODE=offline, which logs into the run directory for "
            "`wandb sync`",
        )
    if "mlflow" in names:
        _check_mlflow()
    for name in names:
        if name not in LOGGERS:
            load_class(name)


def check_installed(names: Sequence[str]) -> None:
    """Refuse a backend whose package is not installed."""
    for name in names:
        if name in LOGGER_EXTRAS and find_spec(LOGGER_EXTRAS[name]) is None:
            raise ConfigError(
                f"{KEY} names {name}, but {LOGGER_EXTRAS[name]} is not installed",
                where=KEY,
                remedy=f"pip install 'shardtune[{name}]', or leave it out",
            )


def _wandb_can_start() -> bool:
    """Whether Weights & Biases needs no key, or has one where its package looks for one."""
    stored = dict(_wandb_settings())
    mode = os.environ.get("WANDB_MODE") or ("offline" if stored.get("disabled") == "true" else stored.get("mode"))
    if mode in WITHOUT_SERVICE or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    if stored.get("api_key") or stored.get("identity_token_file"):
        return True
    given = os.environ.get("NETRC")
    files = [Path(given)] if given else [Path("~/.netrc"), Path("~/_netrc")]
    return any(_has_entry(file.expanduser(), _wandb_host(stored.get("base_url"))) for file in files)


def _wandb_settings() -> Iterator[tuple[str, str]]:
    """The settings in the files that `wandb offline` and `wandb login --host` write; the working directory's last."""
    folder = os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")
    for file in (Path(folder).expanduser() / "settings", Path("wandb/settings")):
        parser = configparser.ConfigParser()
        try:
            parser.read(file)
        except (configparser.Error, UnicodeDecodeError):
            continue
        if parser.has_section("default"):
            yield from parser.items("default", raw=True)


def _wandb_host(stored: str | None) -> str:
    import wandb  # pyright: ignore[reportMissingImports]

    return urlsplit(os.environ.get("WANDB_BASE_URL") or stored or str(wandb.Settings().base_url)).hostname or ""


def _has_entry(file: Path, host: str) -> bool:
    try:
        return netrc.netrc(file).authenticators(host) is not None
    except OSError:
        return False
    except (netrc.NetrcParseError, UnicodeDecodeError):  # the package decides what it can read of it
        return True


def _check_mlflow() -> None:
    """Refuse a tracking server that does not answer (MLflow would retry for minutes), or a store it cannot open."""
    from mlflow import MlflowClient, get_tracking_uri  # pyright: ignore[reportMissingImports]

    uri = str(get_tracking_uri())
    parts = urlsplit(uri)
    try:
        if parts.scheme in ("http", "https"):
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname or "", port), CONNECT_SECONDS).close()
        else:
            MlflowClient()
    except Exception as error:  # of any kind: each store has its own
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            without_secrets(f"MLflow cannot use its tracking URI {uri}: {why}"),
            where=KEY,
            remedy="set MLFLOW_TRACKING_URI to a server that runs (http://host:5000); sqlite:///mlflow.db, without a "
            "server, needs the whole package: pip install mlflow",
        ) from error
