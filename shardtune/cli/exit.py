"""How a command ends: what is said of an error, and the exit code that tells which kind it is."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any, NoReturn

import typer

from shardtune.errors import ConfigError, Interrupted, ShardtuneError

UsageError: Any = typer.BadParameter.__mro__[1]
"""A command line that cannot be read: click's class, of whichever copy of click typer uses."""


def _as_users(error: BaseException) -> BaseException:
    """A mistake in the user's own code as one of the user's mistakes."""
    from shardtune.cli.out_of_memory import explain_out_of_memory
    from shardtune.config.user_code import user_fault
    from shardtune.launch.local import RankFailed, lost_a_peer

    if isinstance(error, (ShardtuneError, Interrupted, RankFailed)) or lost_a_peer(error):
        return error
    return error if explain_out_of_memory(error) else (user_fault(error) or error)


def wrong_usage(error: Any) -> ConfigError:
    """A command line that cannot be read, in the form of all other mistakes."""
    command = error.ctx.command_path if error.ctx is not None else "shardtune"
    return ConfigError(
        error.format_message(),
        where=" ".join(["shardtune", *sys.argv[1:]]),
        remedy=f"{command} --help shows what it takes",
    )


def end(error: BaseException) -> NoReturn:
    """Say what went wrong, once, and leave with the exit code that tells which kind it is."""
    error = _as_users(error)
    rank = int(os.environ.get("RANK", "0"))
    launched = "SHARDTUNE_REPORT_DIR" in os.environ
    code = 1
    if isinstance(error, (ShardtuneError, Interrupted)):
        code, text = error.exit_code, str(error)
    elif isinstance(error, (KeyboardInterrupt, typer.Abort)):
        text = "interrupted"
    else:
        text = _explain(error)
    if launched and not isinstance(error, Interrupted):
        from shardtune.launch.local import write_report

        write_report(rank, error, text)
    elif not launched or rank == 0:
        kind = "stopped" if isinstance(error, Interrupted) else "error"
        prefix = f"rank {rank}: " if "RANK" in os.environ and not launched else ""
        print(f"{prefix}{kind}: {text}", file=sys.stderr)
    leave(code)


def _explain(error: BaseException) -> str:
    """What is shown of an error that is not the user's to mend."""
    from shardtune.cli.out_of_memory import explain_out_of_memory
    from shardtune.launch.local import RankFailed, lost_a_peer

    if isinstance(error, RankFailed):
        return str(error)
    if lost_a_peer(error):
        return f"another rank has ended; what it says is the cause ({str(error).strip().splitlines()[-1][:200]})"
    return explain_out_of_memory(error) or "".join(traceback.format_exception(error))


def leave(code: int) -> NoReturn:
    """End the process; a rank without taking the interpreter down.

    The threads of its process group may be beyond an orderly end (they abort the process), and others must not wait.
    """
    sys.stderr.flush()
    sys.stdout.flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(code)
    sys.exit(code)
