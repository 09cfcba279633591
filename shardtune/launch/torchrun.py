"""torchrun with the exit codes and messages of this package: `python -m shardtune.launch.torchrun OPTIONS …`.

The options, the agent and the meeting of the hosts are torchrun's own, which turns every exit code of a rank into 1 and
prints a traceback when a signal stops it. Here a run that was stopped and has saved ends with 75, one that is stuck
with 76, a mistake in the input with 2, and what a rank has printed of its error is all there is. SIGUSR1 and SIGUSR2,
which end torchrun's agent alone, are passed on to the ranks like SIGTERM, and ranks have ten minutes to save.
--max-restarts starts ranks again that were lost, but none that were stopped or that found a mistake.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from shardtune.errors import Interrupted, ShardtuneError
from shardtune.launch.exit_codes import EXIT_DIR, read_exit_codes
from shardtune.launch.first_host import FirstHostWatch
from shardtune.launch.local import RanksStuck
from shardtune.launch.signals import LAUNCHER_PID

if TYPE_CHECKING:
    from argparse import Namespace

TORCHRUN = ("python", "-m", "shardtune.launch.torchrun")
"""The words that take the place of `torchrun` in a command."""
PORT = 29400
"""Of the first host's store, where --rdzv-endpoint has none: torchrun's default."""
LOG_LEVELS = {"LOGLEVEL": "CRITICAL", "TORCH_CPP_LOG_LEVEL": "FATAL"}
"""Of the agent, unless they are set: the messages here replace its tables, tracebacks and frames of C++."""
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
STOPPED = frozenset({Interrupted.exit_code, *(-signal.Signals[name] for name in SIGNALS.split(","))})
"""Exit codes of ranks that a signal has stopped."""
SAVE_SECONDS = 600
"""How long the ranks may take after a signal, unless --shutdown-timeout says otherwise; torchrun gives them 30."""
JOIN_SECONDS = 300
"""How long hosts wait for each other, unless --rdzv-conf says otherwise: as long as ranks do; torchrun waits 600."""


def final_code(codes: Sequence[int | None]) -> int:
    """The exit code of a launch, from those of its ranks; None for one that was killed.

    75, after which the same command goes on, if ranks were stopped; others that then fail follow from that, unless they
    were killed while they saved.
    """
    for cause in (ShardtuneError.exit_code, RanksStuck.exit_code):
        if cause in codes:
            return cause
    if STOPPED.intersection(codes) and not {None, -signal.SIGKILL}.intersection(codes):
        return Interrupted.exit_code
    return 0 if codes and not any(code != 0 for code in codes) else 1


def main() -> NoReturn:
    """Run torchrun with the arguments of the command line; never returns."""
    quiet = {name: level for name, level in LOG_LEVELS.items() if name not in os.environ}
    os.environ |= quiet  # read by torch when it is imported; ranks do not get them
    from torch.distributed.run import parse_args

    for name in quiet:
        del os.environ[name]
    if "LOGLEVEL" in quiet:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    arguments = _with_defaults(parse_args(sys.argv[1:]), os.environ)
    for name in SIGNALS.split(","):  # the agent's own handlers follow, before it starts ranks
        signal.signal(signal.Signals[name], _stopped_before_ranks)
    with tempfile.TemporaryDirectory(prefix="shardtune-exits-") as folder:
        os.environ |= {EXIT_DIR: folder, LAUNCHER_PID: str(os.getpid())}
        code, message = _run(arguments, Path(folder))
    if message:
        print(message, file=sys.stderr)
    sys.exit(code)


def _stopped_before_ranks(number: int, frame: FrameType | None) -> NoReturn:
    print("stopped: before any rank was started; the same command continues", file=sys.stderr, flush=True)
    os._exit(Interrupted.exit_code)


def _with_defaults(arguments: Namespace, environment: Mapping[str, str]) -> Namespace:
    if arguments.signals_to_handle == "SIGTERM,SIGINT,SIGHUP,SIGQUIT":
        arguments.signals_to_handle = SIGNALS
    if "shutdown_timeout" not in vars(arguments):  # torch 2.11 has no such option
        from torch.distributed.elastic.multiprocessing import PContext

        PContext.close.__defaults__ = (None, SAVE_SECONDS)
    elif arguments.shutdown_timeout is None and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in environment:
        arguments.shutdown_timeout = SAVE_SECONDS
    if not arguments.standalone and "join_timeout" not in arguments.rdzv_conf:
        timeouts = f"join_timeout={JOIN_SECONDS},read_timeout={JOIN_SECONDS}"
        arguments.rdzv_conf = ",".join(filter(None, [arguments.rdzv_conf, timeouts]))
    return arguments


def _run(arguments: Namespace, folder: Path) -> tuple[int, str]:
    """Run the agent; the exit code, and a message where no rank has printed one."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousTimeoutError,
    )
    from torch.distributed.run import run

    _end_where_no_restart_helps()
    watch = _watch_first_host(arguments, folder)
    try:
        run(arguments)
    except ChildFailedError as failed:
        codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        return _outcome({**codes, **read_exit_codes(folder)}, failed.get_first_failure()[0])
    except SignalException as stopped:
        code = _noted_code(arguments, folder)
        name = signal.Signals(stopped.sigval).name
        return code, f"error: after {name} not every rank has ended in order" if code == 1 else ""
    except RendezvousTimeoutError:
        return 1, _not_met(f"not all hosts have come to {arguments.rdzv_endpoint} in time")
    except RendezvousClosedError:
        return _noted_code(arguments, folder), "error: the ranks of another host have ended, and none is started again"
    except RendezvousConnectionError as error:
        if watch is None:
            return 1, _not_met(str(error))
        if not watch.met:
            return 1, _not_met(f"{arguments.rdzv_endpoint}, where the hosts meet, has not answered in time")
        code = _noted_code(arguments, folder)
        return code, _first_host_lost(arguments) if code == 1 else ""
    finally:
        if watch is not None:
            watch.end()
    return 0, ""


def _end_where_no_restart_helps() -> None:
    """Let the agent end after a stop or a mistake in the input, as if its --max-restarts were used up."""
    from torch.distributed.elastic.multiprocessing import PContext, RunProcsResult
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    wait = PContext.wait

    def checked(self: PContext, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        result = wait(self, timeout, period)
        codes = [] if result is None else [failure.exitcode for failure in result.failures.values()]
        # The first has ended by itself; the agent has stopped others because of that.
        if result is not None and (codes[:1] == [Interrupted.exit_code] or ShardtuneError.exit_code in codes):
            raise ChildFailedError(self.name, result.failures)
        return result

    PContext.wait = checked


def _watch_first_host(arguments: Namespace, folder: Path) -> FirstHostWatch | None:
    """A watch over the host at which several hosts meet; None for one host, and for another backend than c10d."""
    if arguments.standalone or arguments.rdzv_backend != "c10d" or not arguments.rdzv_endpoint:
        return None
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    def leave() -> NoReturn:
        code = _noted_code(arguments, folder)
        shutil.rmtree(folder, ignore_errors=True)
        if code == 1:
            print(_first_host_lost(arguments), file=sys.stderr, flush=True)
        os._exit(code)

    def report(met: bool) -> None:
        what = "the other hosts to come to" if met else "an answer from"
        print(f"waiting for {what} {arguments.rdzv_endpoint}, where the hosts meet", file=sys.stderr, flush=True)

    return FirstHostWatch(*parse_rendezvous_endpoint(arguments.rdzv_endpoint, PORT), leave, report)


def _not_met(what: str) -> str:
    return (
        f"error: {what}\n"
        "  remedy: start the command on every host, with an --rdzv-endpoint that all of them reach; --rdzv-conf "
        "join_timeout=… has the seconds"
    )


def _first_host_lost(arguments: Namespace) -> str:
    return (
        f"error: the first host is lost: no connection to {arguments.rdzv_endpoint}, where the hosts meet\n"
        "  remedy: start the same command again on every host, with an --rdzv-endpoint that all of them reach: "
        "it continues from the last checkpoint"
    )


def _noted_code(arguments: Namespace, folder: Path) -> int:
    """The exit code of a launch, from what the ranks of this host have noted."""
    from torch.distributed.run import determine_local_world_size

    found = read_exit_codes(folder)
    silent = determine_local_world_size(arguments.nproc_per_node) - len(found)
    return final_code([*found.values(), *[None] * silent])


def _outcome(codes: dict[int, int], first: int) -> tuple[int, str]:
    """The exit code of a launch of which a rank has failed, and a message on a rank that could print none.

    The agent has stopped the other ranks then, so that they were stopped does not count.
    """
    if codes[first] not in STOPPED:
        codes = {rank: code for rank, code in codes.items() if code not in STOPPED}
    code = final_code([*codes.values()])
    killed = {rank: -each for rank, each in codes.items() if each < 0}
    if code == 1 and killed:
        rank, number = next(iter(killed.items()))
        return code, f"error: rank {rank} was ended by {signal.Signals(number).name}; the other ranks have been ended"
    return code, ""


if __name__ == "__main__":
    main()
