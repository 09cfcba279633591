"""No test asks the network for anything, and none leaves a process group behind; processes start quickly."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import pytest

from tests.support import fork_server

os.environ["HF_HUB_OFFLINE"] = "1"
# Tests are of the CPU, on up to 8 ranks, for which a machine may lack GPUs; `make gpu` is for these.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Processors have been met that divide four doubles at once with errors of 1e-10 now and then, where division of two is
# exact (`shardtune env` looks for that). torch's plain kernels divide two, so a test fails by its own fault alone.
os.environ.setdefault("ATEN_CPU_CAPABILITY", "default")
with contextlib.suppress(OSError):
    # oneDNN, which computes convolutions and GELU, divides eight floats. With AVX-512 it is needed for bf16, which none
    # of these processors has.
    if "avx512f" not in Path("/proc/cpuinfo").read_text():
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "SSE41")
# Kernels that torch.compile has made for the processor's own instructions do not compile with the plain ones.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"torchinductor_tests_{os.getuid()}")))
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (Ray's own name), or Ray's processes wait for those of all other tests
os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112 (or it starts processes that no test uses)
LONGEST = (
    "tests/launch/ray/test_ranks.py",
    "tests/launch/test_nodes.py",
    "tests/launch/test_signals.py",
    "tests/run/test_layout_changes.py",
    "tests/engine/test_backends.py",
    "tests/engine/test_ranks.py",
    "tests/parallel/test_layouts.py",
    "tests/run/test_lora_runs.py",
    "tests/verify/test_adapter.py",
    "tests/examples/test_adapters.py",
    "tests/models/test_causal_lm.py",
    "tests/training/test_parity.py",
)
"""Files of tests by the time that they take, the longest first; of two of them `make test-slow` runs nearly all."""
_refused: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--own-starts", action="store_true", help="start every process as a user does: takes longer")
    parser.addoption("--quick", action="store_true", help="skip what starts a process or trains, once it comes to that")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each process begins with some of the longest files: none of them is still alone at the end.

    pytest-xdist gives each of N processes one N-th of the list, in its order. With 3 processes, 30 tests and the long
    files a, b, c, d of 2 tests each, the list is [a a d d + 6 others, b b + 8 others, c c + 8 others].
    """
    if config.getoption("quick"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("lengthy")])
        items[:] = [item for item in items if not item.get_closest_marker("lengthy")]
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    starts: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for number, file in enumerate(LONGEST):
        starts[number % workers] += [item for item in items if item.nodeid.startswith(file)]
    others = [item for item in items if not item.nodeid.startswith(LONGEST)]
    size = -(-len(items) // workers)
    ordered: list[pytest.Item] = []
    for start in starts:
        taken = max(0, size - len(start))
        ordered += start + others[:taken]
        others = others[taken:]
    items[:] = ordered + others


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> Generator[None]:
    """The processes of pytest-xdist come from one server, too: they share what it has imported."""
    given = session.config.getoption
    apart = given("own_starts") or given("quick") or not given("numprocesses", None)
    undo = None if apart or "PYTEST_XDIST_WORKER" in os.environ else fork_server.install()
    yield
    if undo is not None:
        undo()


def pytest_collection_finish() -> None:
    """Every run ends with a collection of garbage, which need not look through torch and all tests each time."""
    fork_server.rest_garbage()


def pytest_unconfigure() -> None:
    """Or triton's bindings, which torch's builds for GPUs bring, print thirty lines below the result."""
    from shardtune.cli.starting import unfreeze_bindings

    unfreeze_bindings()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The same for what a file of tests has imported."""
    if nextitem is not None and nextitem.path != item.path:
        fork_server.rest_garbage()


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """A group that stays open makes the next training in this process one of several ranks, and hangs a fork."""
    yield
    import torch.distributed as dist

    left = dist.is_initialized()
    if left:
        dist.destroy_process_group()  # the next test is not to blame
    assert not left


@pytest.fixture(autouse=True)
def _no_plugin_is_left() -> Iterator[None]:
    """A plugin that a test loads into this process, and that replaces a method, is none of the next test's."""
    from shardtune.training.worker.base import FSDPSftWorker

    original = FSDPSftWorker.run_training
    yield
    FSDPSftWorker.run_training = original


@pytest.fixture(scope="session", autouse=True)
def _quick_starts(pytestconfig: pytest.Config) -> Iterator[None]:
    if pytestconfig.getoption("own_starts") or pytestconfig.getoption("quick"):
        yield
        return
    undo = fork_server.install()
    yield
    undo()


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests train with is not noted as the developer's own code."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session", autouse=True)
def _quick(pytestconfig: pytest.Config) -> Iterator[None]:
    """With `--quick`, a test ends as skipped where it would start a process or train: at an optimizer's first step."""

    def refuse(why: str) -> Callable[..., NoReturn]:
        def refused(*_: object, **__: object) -> NoReturn:
            test, phase = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[::2]
            _refused.add(test)
            if phase == "(setup)":  # of a fixture, whose error the module's other tests get too
                _refused.add(test.partition("::")[0])
            pytest.skip(why)

        return refused

    with pytest.MonkeyPatch.context() as patch:
        if pytestconfig.getoption("quick"):
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            patch.setattr(subprocess.Popen, "_execute_child", refuse("starts a process"))
            patch.setattr(BaseProcess, "start", refuse("starts a process"))
            patch.setattr("shardtune.training.worker.base.FSDPSftWorker.setup", refuse("trains"))
            register_optimizer_step_pre_hook(refuse("trains"))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skipped it is also where the code under test made another error of that."""
    report = yield
    names = {item.nodeid} if report.when == "call" else {item.nodeid, item.nodeid.partition("::")[0]}
    if report.failed and names & _refused:
        report.outcome, report.longrepr = "skipped", (__file__, 0, "Skipped: starts a process or trains")
    return report


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """What tests write need not outlast a power cut; a run of eight saves waits 140 times for that."""
    original, os.fsync = os.fsync, fork_server.no_fsync
    yield
    os.fsync = original


@pytest.fixture(autouse=True)
def _own_starts(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test marked `own_start` gets processes that are started, not forked."""
    if request.node.get_closest_marker("own_start"):
        with fork_server.own_starts():
            yield
    else:
        yield
