"""How a command ends: the message and the exit code of an error."""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

import typer

from shardtune.errors import ConfigError, Interrupted, ShardtuneError

UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
"""click's class of parse errors, from the copy of click that typer uses; typed as its subclass."""


def _as_users(error: BaseException) -> BaseException:
    """An error in the user's own code as an error in the user's input; any other as it is."""
    from shardtune.cli.out_of_memory import explain_out_of_memory
    from shardtune.config.user_code import user_fault
    from shardtune.launch.local import RankFailed, lost_a_peer

    if isinstance(error, (ShardtuneError, Interrupted, RankFailed)) or lost_a_peer(error):
        return error
    return error if explain_out_of_memory(error) else (user_fault(error) or error)


def wrong_usage(error: typer.BadParameter) -> ConfigError:
    """The error for a command line that cannot be parsed."""
    command = error.ctx.command_path if error.ctx is not None else "shardtune"
    return ConfigError(
        error.format_message(),
        where=" ".join(["shardtune", *sys.argv[1:]]),
        remedy=f"{command} --help lists its arguments",
    )


def end(error: BaseException) -> NoReturn:
    """Print an error once, or report it to the launcher, and leave with its exit code."""
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
    """The message of an error that is not in the user's input."""
    from shardtune.cli.out_of_memory import explain_out_of_memory
    from shardtune.launch.local import RankFailed, lost_a_peer

    if isinstance(error, RankFailed):
        return str(error)
    if lost_a_peer(error):
        return f"another rank has ended; its error is the cause ({str(error).strip().splitlines()[-1][:200]})"
    return explain_out_of_memory(error) or "".join(traceback.format_exception(error))


def leave(code: int) -> NoReturn:
    """End the process; a rank without an orderly shutdown of the interpreter.

    The threads of its process group may hang or abort in a shutdown, and other ranks must not wait for it.
    """
    sys.stderr.flush()
    sys.stdout.flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(code)
    sys.exit(code)
