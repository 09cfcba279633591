"""Publishing a trained model on the Hugging Face Hub, with a model card; private unless the user says otherwise."""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import disable_progress_bars

from shardtune.checkpoint.checksums import CHECKSUMS, directory_faults, relative_files
from shardtune.checkpoint.verified import described
from shardtune.config.paths import user_path
from shardtune.config.secrets import without_secrets
from shardtune.config.values import HUB_NAME
from shardtune.errors import CheckpointError, ConfigError, ShardtuneError
from shardtune.run.final import TRAINING_STATE
from shardtune.run.identity import FINAL, MANIFEST, read_manifest
from shardtune.run.model_card import CARD, HERE, RunRecord, is_unedited, make_card, signed

KEY = "runner.push_to_hub"
WEIGHTS = re.compile(r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Weights that an earlier push may have left, and that would be loaded in place of the new ones or beside them."""
REFUSED = (401, 403, 404)
Report = Callable[[str], None]


class PushError(ShardtuneError):
    """The Hub cannot be reached or failed; the same command may succeed later."""

    exit_code = 1


def push(
    source: str | Path,
    repo: str,
    *,
    public: bool = False,
    revision: str | None = None,
    replace_card: bool = False,
    report: Report = print,
) -> str:
    """Publish a run's `final/`, or an exported directory, in one commit.

    Args:
        source: a run directory, or one that `shardtune export` wrote.
        repo: `owner/name`; made if it does not exist.
        public: whether anyone may read a repository that is made, or may already read one that exists.
        revision: the branch, which is made if it does not exist; None: main.
        replace_card: replace a `README.md` of the repository that somebody has written or edited.
        report: receives lines about what is done.

    Returns:
        The address of the commit.

    Raises:
        CheckpointError: there is no model in the directory, or its weights are damaged.
        ConfigError: no token, offline, no permission, or the repository is public and `public` is not set.
        PushError: the Hub cannot be reached or failed.
    """
    directory, record = _model_in(user_path(source, "RUN").absolute())
    names = [name for name in relative_files(directory) if _is_published(name)]
    faults = directory_faults(directory, content=True)
    damaged = {name: faults[name] for name in names if name in faults and name.endswith(".safetensors")}
    if damaged:
        raise CheckpointError(
            f"{directory} is damaged, and is not published: {described(damaged)}",
            where=str(directory),
            remedy="the command that trained the run writes final/ again from its last checkpoint",
        )
    check_push(repo, public=public, where="REPO")
    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(token=get_token())
    with _hub_errors(f"publishing {directory} as {repo}", "REPO"):
        made = api.create_repo(repo, private=not public, exist_ok=True)
        if public and api.model_info(repo).private:
            report(f"{repo} exists and is private, and stays so: --public is for one that is made; see its settings")
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        there = set(api.list_repo_files(repo, revision=revision))
        card = _card(directory, record, repo)
        operations: list[Any] = [CommitOperationAdd(name, str(directory / name)) for name in names if name != CARD]
        before = _card_of(api, repo, revision) if CARD in there else None
        if _may_replace(before, card, own=(directory / CARD).exists(), forced=replace_card):
            operations.append(CommitOperationAdd(CARD, card.encode()))
        elif before != card:
            report(
                f"the {CARD} of {repo} was written or edited by somebody and stays as it is; "
                "--replace-card puts the run's card in its place"
            )
        old = sorted(name for name in there - set(names) if WEIGHTS.fullmatch(name))
        operations += [CommitOperationDelete(name) for name in old]
        if old:
            report(f"of an earlier push, removed: {', '.join(old)}")
        done = api.create_commit(repo, operations, commit_message="Upload by shardtune", revision=revision)
    report(f"{made} has {len(operations) - len(old)} files of {directory}")
    return str(done.commit_url)


def check_push(repo: str | None, *, public: bool = False, where: str = KEY) -> None:
    """Refuse, before any work, a repository that cannot be pushed to; None is none to push to.

    Raises:
        ConfigError: no such name, no token, offline, no permission, or the repository is public and `public` is not
            set.
        PushError: the Hub cannot be reached.
    """
    if repo is None:
        return
    if not HUB_NAME.fullmatch(repo):
        raise ConfigError(f"{repo!r} is no name on the Hub", where=where, remedy="write owner/name")
    if is_offline_mode():
        raise ConfigError(
            "HF_HUB_OFFLINE is set, so nothing can be published",
            where=where,
            remedy="unset it, or publish later, where there is a network: shardtune push RUN REPO",
        )
    token = get_token()
    if token is None:
        raise ConfigError(
            "there is no token for the Hub", where=where, remedy="hf auth login, or set HF_TOKEN; one that may write"
        )
    api = HfApi(token=token)
    with _hub_errors(f"looking up {repo} at {api.endpoint}", where):
        known = api.whoami()
        role = known.get("auth", {}).get("accessToken", {}).get("role")
        if role == "read":
            raise ConfigError(
                "the token may only read", where=where, remedy="make one that may write, then hf auth login"
            )
        try:
            is_private = bool(api.model_info(repo).private)
        except RepositoryNotFoundError:  # or the token may not see it
            owners = [known["name"], *(group["name"] for group in known.get("orgs", ()))]
            if repo.partition("/")[0] not in owners and role == "write":
                raise ConfigError(
                    f"the token is of {owners[0]}, who cannot make {repo}",
                    where=where,
                    remedy=f"choose another owner: {', '.join(owners)}",
                ) from None
            return
    if not is_private and not public:
        raise ConfigError(
            f"{repo} exists and is public, so anyone could read what is pushed",
            where=where,
            remedy="choose another name, or push by hand: shardtune push RUN REPO --public",
        )


def push_final(run_dir: Path, repo: str, report: Report) -> None:
    """Publish the model of a run that has just ended; a failure is reported with the command that tries again."""
    try:
        report(f"pushed: {push(run_dir, repo, report=report)}")
    except Exception as error:  # of any kind: the run is complete, and stays so
        what = error.what if isinstance(error, ShardtuneError) else f"{type(error).__name__}: {_first_line(error)}"
        report(
            f"the run is complete, but its model was not pushed to {repo}: {without_secrets(what, get_token())}\n"
            f"  to push it: {push_command(run_dir, repo)}"
        )


def push_command(run_dir: Path, repo: str) -> str:
    return f"shardtune push {shlex.quote(str(run_dir))} {repo}"


def _model_in(source: Path) -> tuple[Path, RunRecord | None]:
    """The directory with the model, and the record of its run; None for an exported directory."""
    run_dir = source.parent if source.name in (FINAL, "FINAL") and (source.parent / MANIFEST).exists() else source
    manifest = read_manifest(run_dir) if run_dir.is_dir() else {}
    if manifest:
        if "finished" not in manifest or not (run_dir / FINAL).is_dir():
            raise CheckpointError(
                f"{run_dir} is not finished, so it has no {FINAL}/ to publish",
                where="RUN",
                remedy=f"finish it with the command that started it, or publish a checkpoint: shardtune export "
                f"{run_dir} --checkpoint latest --to DIR, then shardtune push DIR REPO",
            )
        return run_dir / FINAL, RunRecord.read(run_dir, manifest)
    if not any(source.glob("*.safetensors")):
        raise CheckpointError(
            f"{source} is neither a run directory nor one with a model",
            where="RUN",
            remedy="give runs/<experiment_name>, or what shardtune export wrote",
        )
    return source, None


def _is_published(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return parts[0] not in (TRAINING_STATE, CHECKSUMS) and not any(part.startswith(".") for part in parts)


def _card(directory: Path, record: RunRecord | None, repo: str) -> str:
    """The card of the directory, if it has one, otherwise that of the run."""
    if (directory / CARD).exists():
        text = (directory / CARD).read_text(encoding="utf-8")
        return signed(text.replace(HERE, repo)) if is_unedited(text) else text
    if record is not None:
        return make_card(record, directory, title=repo.partition("/")[2], repo=repo)
    return signed(f"---\ntags:\n- shardtune\n---\n\n# {repo.partition('/')[2]}\n")


def _card_of(api: HfApi, repo: str, revision: str | None) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = api.hf_hub_download(repo, CARD, revision=revision, local_dir=folder)
        return Path(file).read_text(encoding="utf-8")


def _may_replace(before: str | None, card: str, *, own: bool, forced: bool) -> bool:
    """Whether the card of a repository may be replaced: it is none that somebody wrote, or the user wrote the new one.

    Args:
        before: the card of the repository; None: it has none.
        card: the new one.
        own: whether the new one is a file of the directory.
        forced: `--replace-card`.
    """
    return before is None or is_unedited(before) or forced or (own and not is_unedited(card))


@contextmanager
def _hub_errors(doing: str, where: str) -> Iterator[None]:
    """Turn errors of the Hub and the network into one message, without the token."""
    try:
        yield
    except ShardtuneError:
        raise
    except Exception as error:  # of any kind: the HTTP library has its own
        token = get_token()
        text = without_secrets(_first_line(error), token)
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status in REFUSED or isinstance(error, (RepositoryNotFoundError, RevisionNotFoundError)):
            raise ConfigError(
                f"{doing} failed: {text}",
                where=where,
                remedy="check the name, and that the token (hf auth whoami) may write there",
            ) from None
        raise PushError(
            f"{doing} failed: {type(error).__name__}: {text}",
            where=where,
            remedy="run the same command again; what has been uploaded is not uploaded twice",
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
