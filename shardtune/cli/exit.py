"""How a command ends: the message and the exit code of an error."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn, TypeGuard

import typer

from shardtune.errors import (
    FULL,
    CheckpointError,
    ConfigError,
    Interrupted,
    ShardtuneError,
    disk_error,
    lost_a_peer,
    printable,
)
from shardtune.launch.exit_codes import note_exit_code
from shardtune.launch.signals import ignore, ignored

UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
"""click's class of parse errors, from the copy of click that typer uses; typed as its subclass."""


def _as_users(error: BaseException) -> BaseException:
    """An error of the user's own code, or of a disk, as an error in the user's input; any other as it is."""
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return error  # at once: what follows imports modules
    from shardtune.cli.out_of_memory import explain_out_of_memory
    from shardtune.config.user_code import user_fault
    from shardtune.launch.local import RankFailed

    if isinstance(error, SystemExit):
        return _left_by_exit(error)
    if error.__cause__ is not None and lost_a_peer(error.__cause__):  # the user can do nothing about it
        return error.__cause__
    if isinstance(error, (ShardtuneError, Interrupted, RankFailed)) or lost_a_peer(error):
        return error
    if _is_of_output(error):
        return CheckpointError(
            f"what is printed cannot be written: {os.strerror(error.errno or 0)}",
            where="the output of this command",
            remedy="make room where it is redirected to",
        )
    return error if explain_out_of_memory(error) else (user_fault(error) or disk_error(error) or error)


def _ended_input(error: BaseException) -> BaseException:
    """The EOFError (a file that ends too early) which the command line takes for an interrupt; others as they are."""
    return error.__cause__ if isinstance(error, typer.Abort) and isinstance(error.__cause__, EOFError) else error


def _left_by_exit(error: SystemExit) -> ConfigError:
    """The error for code that ends the process in the middle of a command; other ranks would wait for it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else None
    rank = f", on rank {os.environ['RANK']}" if "RANK" in os.environ else ""
    return ConfigError(
        f"sys.exit({'' if error.code is None else repr(error.code)}) was called before the command had ended",
        where=None if where is None else where + rank,
        remedy="raise an exception there instead; a callback may request a stop",
    )


def wrong_usage(error: typer.BadParameter) -> ConfigError:
    """The error for a command line that cannot be parsed."""
    command = error.ctx.command_path if error.ctx is not None else "shardtune"
    params: list[Any] = [*error.ctx.command.params] if error.ctx is not None else []
    arguments = [param for param in params if param.required and param.param_type_name == "argument"]
    needed = [param.metavar or param.name.upper() for param in arguments]
    usage = f"{' '.join([command, *needed])}; " if needed else ""
    return ConfigError(
        error.format_message(),
        where=" ".join(["shardtune", *sys.argv[1:]]),
        remedy=f"{usage}{command} --help lists its arguments",
    )


def end(error: BaseException) -> NoReturn:
    """Print an error once, or report it to the launcher, and leave with its exit code."""
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        leave(1)  # nobody reads any more, as in `shardtune --help | head`
    with ignored():  # torchrun sends SIGTERM to the other ranks as soon as one has failed
        code = _print(error)
    leave(code)


def _print(error: BaseException) -> int:
    """Print an error once, or report it to the launcher; returns its exit code."""
    error = _as_users(_ended_input(error))
    rank = os.environ.get("RANK", "0")
    launched = "SHARDTUNE_REPORT_DIR" in os.environ
    code = 1
    if isinstance(error, (ShardtuneError, Interrupted)):
        code, text = error.exit_code, str(error)
    elif isinstance(error, (KeyboardInterrupt, typer.Abort)):
        text = "interrupted"
    else:
        code, text = _explain(error)
    if launched and _reported(int(rank), error, text):
        return code
    if launched or rank == "0" or not (isinstance(error, Interrupted) and error.together):
        kind = "" if isinstance(error, Interrupted) else "error: "
        prefix = f"rank {rank}: " if "RANK" in os.environ else ""
        with suppress(OSError):
            print(f"{prefix}{kind}{printable(text)}", file=sys.stderr)
    return code


def _reported(rank: int, error: BaseException, text: str) -> bool:
    """Report an error to the launcher, which shows it; returns whether that could be written."""
    from shardtune.launch.local import write_report

    try:
        write_report(rank, error, text)
    except OSError:  # the disk of temporary files is full as well
        return False
    return True


def _explain(error: BaseException) -> tuple[int, str]:
    """Exit code and message of an error that is not in the user's input."""
    from shardtune.cli.out_of_memory import explain_out_of_memory
    from shardtune.launch.local import RankFailed

    if isinstance(error, RankFailed):
        return error.exit_code, str(error)
    if lost_a_peer(error):
        from shardtune.launch.watchdog.watchdog import ended_peers

        who = ended_peers() or "another rank"
        return 1, f"{who} has ended; its error is the cause ({str(error).strip().splitlines()[-1][:200]})"
    return 1, explain_out_of_memory(error) or "".join(traceback.format_exception(error))


def _is_of_output(error: BaseException) -> TypeGuard[OSError]:
    """Whether what failed is printing, as the disk of a redirected output is full."""
    if not isinstance(error, OSError) or error.errno not in FULL or error.filename is not None:
        return False
    try:
        print(flush=True)
    except OSError:
        _print_nowhere()
        return True
    return False


def _print_nowhere() -> None:
    """Send what is still to be printed to nowhere: the end of the process would fail at it once more."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def leave(code: int) -> NoReturn:
    """End the process; a rank without an orderly shutdown of the interpreter.

    The threads of its process group may hang or abort in a shutdown, and other ranks must not wait for it. A signal in
    the shutdown changes nothing: a stop that was repeated, once all is saved, would end with another code.
    """
    note_exit_code(code)
    atexit.register(ignore)
    with suppress(OSError):  # a terminal or a parent that is gone
        sys.stderr.flush()
        sys.stdout.flush()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        os._exit(code)
    sys.exit(code)
