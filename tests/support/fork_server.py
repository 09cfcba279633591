"""A process that has imported what every rank and command imports, and forks one for each that a test starts.

Importing torch and transformers takes some seconds of CPU, and the tests start hundreds of Python processes. While
`install` holds, `subprocess` and `multiprocessing` start those that run this project's code by a fork of a server that
did the imports once. Such a process is like a started one: arguments, environment, directory, files, session, signals,
exit code, parent. What differs is the time to its first line and what `ps` shows, and that the imports are done already
(the tests' own modules are not among them). A test of one of these is marked `own_start`.

How the forked process becomes the child of the one that wants it: the server forks twice and the process in between
ends, so that its child goes to the next "subreaper" above (prctl(2)), which the caller is for that moment. A forked
process may start others, and is not below the server but beside it, so it keeps a copy of the server of its own,
forked before its first line:

    pytest ── server                  pytest's own; waits
       ├───── train (2 ranks)         the launcher of local ranks
       │        ├── server            its copy
       │        ├── train, rank 0 ── server
       │        └── train, rank 1 ── server

With pytest-xdist the processes that run tests come from a server as well, whose imports they share, and what they start
comes from their copies of it. So all of them have one seed for hashes; processes of Ray, and those of tests marked
`own_start`, have others, and with `--own-starts` all do.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

PRELOADED = (
    "pytest",  # which ranks read with the tests' modules
    "torch",
    "torch.distributed.launcher",
    "torch._dynamo",
    "numpy",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2",
    "peft",
    "datasets",
    "pyarrow.parquet",
    "safetensors.torch",
    "shardtune.cli.commands",
    "shardtune.run.api",
    "shardtune.verify.adapter",
    "shardtune.engine.session",
    "shardtune.engine.rank_process",
    "shardtune.training.worker.adapter_worker",
    "shardtune.training.worker.sft_trainer",
)
READ_BY_IMPORTS = (
    "HF_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "XDG_",
    "PYTHON",
    "PYTORCH_",
    "TORCH_HOME",
    "LD_",
    "HOME",
    "MKL_",
)
"""Beginnings of variables that count while modules are imported; where one differs, a process is started as usual."""
NOT_READ = (
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "PYTHONUNBUFFERED",
    "PYTHONBREAKPOINT",
    "XDG_CACHE_HOME",  # Ray sets it, and no test reads the Hub's cache
    "XDG_STATE_HOME",
    "HF_XET_HIGH_PERFORMANCE",  # the import of lm_eval sets it; it is about downloads
)
"""Variables of such names that do not count."""
MODULES = (
    "shardtune",
    "shardtune.launch.torchrun",
    "pytest",
    "torch.distributed.run",
    "accelerate.commands.launch",
    "ipykernel_launcher",
)
"""What `python -m` may run here."""
PIPE_ENDS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
HARMLESS_THREADS = {"jemalloc_bg_thd"}
"""Of the allocator in pyarrow, which sees to forks itself."""
NAME = "tests.support.fork_server"
HIGH = 400
"""File descriptors from here on are out of the way of those that a caller passes on."""
PR_SET_CHILD_SUBREAPER = 36
HASH_SEED = "3"
"""Of a server: none that `shardtune verify` gives a process, so that its hashes differ from this one's."""
LONGEST_FORK = 300.0
"""Seconds within which a server answers, its imports included: one that is stuck ends a test instead of all of them."""
LONGEST_END = 30.0
"""Seconds within which a server ends once its caller does; a process that was forked from that may hold the channel."""
CHECKPOINT_LOGGER = "c10d-NullHandler-dcp_logger"
"""torch's, which makes two records for each tensor that is saved, and has nowhere to write them."""
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Request:
    """A process to become.

    Attributes:
        options: of the interpreter: `-u`, `-W` with its word.
        run: ("-m", module), ("-c", code) or ("", script).
        arguments: behind these.
        targets: the number each descriptor that comes along is to get.
        blocked: signals that are in the caller.
    """

    options: Sequence[str]
    run: tuple[str, str]
    arguments: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    targets: Sequence[int]
    new_session: bool
    blocked: Sequence[int]
    sigint_ignored: bool


# -- The server ------------------------------------------------------------------------------------------------------


def serve(channel: socket.socket) -> Request:
    """Fork for each request; returns in the forked process, what it is to become, and ends with the channel."""
    while True:
        request, given = _receive(channel)
        if request is None:
            os._exit(0)
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            for number in given:
                os.close(number)
            continue
        between = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.0002)
        copy = _become(request, given, channel)
        if copy is None:
            return request
        channel = copy


def _become(request: Request, given: Sequence[int], channel: socket.socket) -> socket.socket | None:
    """Take descriptors, environment and directory; returns a channel in the copy of the server, None in the process."""
    global _client
    away = [_high(number) for number in given]
    answer = _high(channel.fileno())
    keep = sorted({*away, answer, *request.targets})
    for number, target in zip(away, request.targets, strict=True):
        os.dup2(number, target, inheritable=True)
    for number in away:
        os.close(number)
    keep = [0, 1, 2, *(number for number in keep if number not in away and number > 2)]
    for low, high in zip(keep, [*keep[1:], 4096], strict=True):
        os.closerange(low + 1, high)
    channel.detach()
    if request.new_session:
        os.setsid()
    here, there = socket.socketpair()
    if not os.fork():
        here.close()
        os.close(answer)
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        for number in request.targets:
            if number > 2:
                os.close(number)
        os.close(null)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        kept = socket.socket(fileno=_high(there.fileno()))
        there.close()
        return kept
    there.close()
    own = socket.socket(fileno=_high(here.fileno()))
    here.close()
    _client = Client(own, dict(os.environ))
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.directory)
    signal.signal(signal.SIGINT, signal.SIG_IGN if request.sigint_ignored else signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
    os.write(answer, os.getpid().to_bytes(8, "big"))
    os.close(answer)
    return None


def _high(number: int) -> int:
    import fcntl

    return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, HIGH)


def _receive(channel: socket.socket) -> tuple[Request | None, list[int]]:
    numbers = array.array("i")
    try:
        head, extra, _, _ = channel.recvmsg(8, socket.CMSG_SPACE(64 * numbers.itemsize))
    except ConnectionError:
        return None, []
    if not head:
        return None, []
    for level, kind, content in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
    left, parts = int.from_bytes(head, "big"), []
    while left:
        part = channel.recv(left)
        if not part:  # the caller has ended in the middle of a request
            return None, list(numbers)
        left -= len(part)
        parts.append(part)
    request = Request(**json.loads(b"".join(parts)))
    return request, list(numbers)


def run_as_main(request: Request, tail: Sequence[str]) -> None:
    """What the interpreter does once it is up."""
    import random
    import runpy
    import tempfile

    import numpy
    import torch

    tempfile.tempdir = None  # TMPDIR may differ
    random.seed()
    numpy.random.seed()
    threads = request.environment.get("OMP_NUM_THREADS", "")
    if threads != "1":
        torch.set_num_threads(int(threads) if threads.isdigit() else os.cpu_count() or 1)
    for option in request.options:
        if option == "-u":
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    if request.environment.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    filters = [word for before, word in zip(request.options, request.options[1:], strict=False) if before == "-W"]
    warnings._processoptions(filters)  # type: ignore[attr-defined]
    how, what = request.run
    first = {"-m": os.getcwd(), "-c": "", "": str(Path(what).resolve().parent)}[how]
    paths = filter(None, request.environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [*([] if "-P" in request.options else [first]), *paths, *tail]
    importlib.invalidate_caches()
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.argv[:] = [how or what, *request.arguments]
    if how == "-m":
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
        return
    if how == "":
        main.__file__ = what
    exec(compile(Path(what).read_bytes() if how == "" else what, what if how == "" else "<string>", "exec"), vars(main))


def _end(run: Callable[[], None]) -> NoReturn:
    """Run, then end as the interpreter does, but without taking thousands of modules down, which takes a second."""
    code: object = 0
    try:
        run()
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit((code or 0) & 255)


def without_servers(processes: Sequence[int]) -> list[int]:
    """Those that run and are not a copy of the server: the output of such a copy goes nowhere."""
    found = []
    for pid in processes:
        with contextlib.suppress(FileNotFoundError):  # a process that has ended
            outputs = {os.readlink(f"/proc/{pid}/fd/{number}") for number in (0, 1, 2)}
            found += [pid] if outputs != {os.devnull} else []
    return found


def rest_garbage() -> None:
    """Leave what is imported out of later collections of garbage, and let these be rare: they took 7 % of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def threads_here() -> set[str]:
    """The names of this process's threads but its first."""
    tasks = Path("/proc/self/task")
    found = [task for task in tasks.iterdir() if task.name != str(os.getpid())]
    return {(task / "comm").read_text().strip() for task in found}


def no_fsync(descriptor: int | IO[Any]) -> None:
    """Instead of `os.fsync`."""


# -- Its callers -----------------------------------------------------------------------------------------------------


@dataclass
class Client:
    """The calling end of a server's channel.

    Attributes:
        environment: that the server's imports were done in.
        owner: the process that may use it; forked ones may not.
    """

    channel: socket.socket
    environment: Mapping[str, str]
    owner: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fork(self, request: Request, numbers: Sequence[int]) -> int:
        """The number of the new child, which gets these descriptors."""
        global _client
        content = json.dumps(asdict(request)).encode()
        with self.lock:
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))]
                self.channel.sendmsg([len(content).to_bytes(8, "big")], rights)
                self.channel.sendall(content)
                answer = self.channel.recv(8)
            except TimeoutError:
                self.channel.close()  # a late answer would be taken for that of the next request
                _client = None
                raise
            finally:
                _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        assert answer, "the server of forks has ended"
        child = int.from_bytes(answer, "big")
        parent = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1]
        assert int(parent) == os.getpid(), f"{child} is not a child of this process: its exit code would not be seen"
        return child


_client: Client | None = None


def start_server() -> None:
    """Start this process's server, if it is to have one and has none: what it imports is not waited for."""
    global _client
    if not _starts_servers or (_client is not None and _client.owner == os.getpid()):
        return
    here, there = socket.socketpair()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": HASH_SEED}
    command = [sys.executable, __file__, str(there.fileno())]
    with there:
        server = _real_popen(
            command,
            pass_fds=[there.fileno()],
            env={**environment, "ARROW_DEFAULT_MEMORY_POOL": "system"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    here.settimeout(LONGEST_FORK)
    _client = Client(here, environment)

    def end() -> None:
        if os.getpid() == owner:
            here.close()
            try:
                server.wait(LONGEST_END)
            except subprocess.TimeoutExpired:
                server.kill()

    owner = os.getpid()
    atexit.register(end)


def _real_popen(command: Sequence[str], **keys: object) -> subprocess.Popen[bytes]:
    global _bypass
    _bypass = True
    try:
        return subprocess.Popen(command, **keys)  # type: ignore[call-overload]
    finally:
        _bypass = False


_bypass = False


@contextlib.contextmanager
def own_starts() -> Iterator[None]:
    """Meanwhile this process starts others as usual."""
    global _bypass
    before, _bypass = _bypass, True
    try:
        yield
    finally:
        _bypass = before


def _usable(environment: Mapping[str, str]) -> Client | None:
    """The server, where a process with this environment may come from it."""
    if _bypass or sys.platform != "linux" or os.path.exists("/dev/nvidiactl"):
        return None
    if _client is None:
        start_server()
    if _client is None or _client.owner != os.getpid():
        return None
    seeds = {None, os.environ.get("PYTHONHASHSEED"), _client.environment.get("PYTHONHASHSEED")}
    same = _counting(environment) == _counting(_client.environment)
    return _client if same and environment.get("PYTHONHASHSEED") in seeds else None


def _counting(environment: Mapping[str, str]) -> dict[str, str]:
    """An empty variable is none."""
    read = (name for name in environment if name.startswith(READ_BY_IMPORTS) and name not in NOT_READ)
    return {name: environment[name] for name in read if environment[name]}


def _understood(args: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, str], tuple[str, ...]] | None:
    """Options, what is run, and arguments of a command that starts Python on this project's code; else None."""
    if not args or args[0] != sys.executable:
        return None
    options: list[str] = []
    rest = list(args[1:])
    while rest and rest[0] in ("-u", "-B", "-P", "-W"):
        options += [rest.pop(0)]
        if options[-1] == "-W":
            options += [rest.pop(0)]
    if len(rest) >= 2 and rest[0] == "-m" and (rest[1] in MODULES or rest[1].startswith("shardtune.")):
        return tuple(options), ("-m", rest[1]), tuple(rest[2:])
    if len(rest) >= 2 and rest[0] == "-c" and rest[1].startswith((SPAWN, XDIST)):
        return tuple(options), ("-c", rest[1]), tuple(rest[2:])
    if rest and rest[0].endswith(".py"):
        return tuple(options), ("", rest[0]), tuple(rest[1:])
    return None


SPAWN = "from multiprocessing.spawn import spawn_main;"
XDIST = "import sys;exec(eval(sys.stdin.readline()))"
"""How pytest-xdist starts a process that runs tests."""
_starts_servers = False


def install() -> Callable[[], None]:
    """Start processes by the server from now on; returns what undoes that."""
    global _starts_servers
    from multiprocessing import util

    if _client is not None:  # this process is from a server, which has done that

        def without_own() -> None:
            """Of its copy of the server nothing is to be undone."""

        return without_own

    execute, spawn = subprocess.Popen._execute_child, util.spawnv_passfds  # type: ignore[attr-defined]
    signature = inspect.signature(execute)

    def execute_child(*args: object) -> None:
        given = signature.bind(*args).arguments
        popen, words = given["self"], given["args"]
        environment = dict(os.environ) if given["env"] is None else given["env"]
        simple = (
            isinstance(words, list | tuple)
            and not given["shell"]
            and given["preexec_fn"] is None
            and given["close_fds"]
            and given["umask"] < 0
            and given.get("process_group", -1) == -1
            and not any(given[name] is not None for name in ("gid", "gids", "uid"))
        )
        understood = _understood([os.fspath(word) for word in words]) if simple else None
        ends = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        files = [number if end == -1 else end for number, end in enumerate(ends)]
        client = None
        if understood is not None:
            client = _usable(environment)
        if understood is None or client is None:
            execute(*args)
            return
        passed = sorted(given["pass_fds"])
        request = Request(
            *understood,
            environment=dict(environment),
            directory=os.path.abspath(given["cwd"] or os.curdir),
            targets=(0, 1, 2, *passed),
            new_session=bool(given["start_new_session"]),
            blocked=_blocked(),
            sigint_ignored=_ignores_sigint(),
        )
        pid = client.fork(request, [*files, *passed])
        if pid is None:
            execute(*args)
            return
        popen.pid, popen._child_created = pid, True
        popen._close_pipe_fds(
            *(given[n] for n in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )

    def spawnv_passfds(path: bytes | str, args: Sequence[str], passfds: Sequence[int]) -> int:
        words = [sys.executable, *(os.fsdecode(word) for word in args[1:])]
        understood = _understood(words)
        client = _usable(os.environ) if understood and words[-1] == "--multiprocessing-fork" else None
        if understood is not None and client is not None:
            passed = sorted(map(int, passfds))
            request = Request(
                *understood,
                environment=dict(os.environ),
                directory=os.getcwd(),
                targets=(0, 1, 2, *passed),
                new_session=False,
                blocked=_blocked(),
                sigint_ignored=_ignores_sigint(),
            )
            return client.fork(request, [0, 1, 2, *passed])
        return spawn(path, args, passfds)

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]
    util.spawnv_passfds = spawnv_passfds
    _starts_servers = True

    def undo() -> None:
        global _starts_servers
        subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]
        util.spawnv_passfds = spawn
        _starts_servers = False

    return undo


def _blocked() -> tuple[int, ...]:
    return tuple(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def _ignores_sigint() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def main() -> None:
    """The server: import, wait, and become what is wanted."""
    global _starts_servers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    known = sum(1 for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)
    tail = sys.path[1 + known :]
    sys.path.pop(0)
    for name in PRELOADED:
        importlib.import_module(name)
    import torch
    import typer.main
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from shardtune.cli.commands import app

    get_checkpoint_conversion_mapping("llama")  # compiles some hundred patterns, of all models
    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(app)  # makes the options of all commands
    assert threads_here() <= HARMLESS_THREADS, f"a fork would lose the threads {threads_here()}"
    assert not torch.cuda.is_initialized()
    sys.modules[NAME] = sys.modules["__main__"]  # where a forked process finds its copy of the server
    install()
    _starts_servers = False
    os.fsync = no_fsync
    logging.getLogger(CHECKPOINT_LOGGER).setLevel(logging.ERROR)
    rest_garbage()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    _end(lambda: run_as_main(request, tail))


if __name__ == "__main__":
    main()
