"""A Slurm cluster on this machine: a controller and a few nodes, each in a network namespace of its own.

Nothing of a Slurm that the machine may have is used but its programs: the configuration, the state and the logs lie in
a temporary folder, and the only addresses are those of the namespaces.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.dist.hosts import Host, hosts, why_not

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
NODE_LOST_SECONDS = 10
"""A node that does not answer for so long is down (SlurmdTimeout; Slurm's default is 300)."""
KILL_SECONDS = 30
"""Between the signal that ends a job and its end (KillWait, Slurm's default)."""
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={controller}({controller_address})
SlurmctldPort=6817
SlurmdPort=6818
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout={lost}
KillWait={kill}
MinJobAge=3600
ReturnToService=2
MailProg=/bin/true
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName={nodes} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=usual Nodes={nodes} Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=30 PreemptMode=REQUEUE
PartitionName=urgent Nodes={nodes} MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
"""


def why_no_slurm() -> str | None:
    """Why this machine cannot run a Slurm cluster; None where it can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"Slurm is not installed: there is no {', '.join(missing)}" if missing else why_not()


class Slurm:
    """A running cluster.

    Attributes:
        nodes: those that jobs run on.
        folder: of the configuration and the logs.
    """

    def __init__(self, controller: Host, nodes: Sequence[Host], folder: Path) -> None:
        self._controller = controller
        self.nodes = list(nodes)
        self.folder = folder
        self._environment = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
            "PYTHONDONTWRITEBYTECODE": "",
        }

    def begin(self) -> None:
        """Start the controller and the nodes, and wait until they are idle."""
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                controller=self._controller.name,
                controller_address=self._controller.address,
                nodes=",".join(node.name for node in self.nodes),
                lost=NODE_LOST_SECONDS,
                kill=KILL_SECONDS,
                folder=self.folder,
            )
        )
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # unused; not searched for in /sys
        (self.folder / "state").mkdir()
        self._daemon(self._controller, "slurmctld")
        for node in self.nodes:
            self.begin_node(node)
        self.wait_for(lambda: all(self.node_state(node) == "IDLE" for node in self.nodes), 30)

    def begin_node(self, node: Host) -> None:
        """Start a node's slurmd, for the first time or after `Host.lose_power`."""
        node.plug_in()
        (self.folder / f"spool-{node.name}").mkdir(exist_ok=True)
        self._daemon(node, "slurmd", "-N", node.name)

    def _daemon(self, host: Host, program: str, *words: str) -> None:
        with (self.folder / f"{program}-{host.name}.out").open("a") as file:
            command = (shutil.which(program) or program, "-D", "-f", str(self.folder / "slurm.conf"), *words)
            host.start(command, self._environment, stdout=file, stderr=subprocess.STDOUT)

    def run(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """What a command that a user types on the controller writes."""
        given = {**self._environment, **(environment or {})}
        process = self._controller.start(command, given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said, _ = process.communicate(timeout=60)
        if process.returncode:
            raise AssertionError(f"{' '.join(command)} ended with {process.returncode}: {said}")
        return said

    def version(self) -> str:
        return self.run("sinfo", "--version").strip()

    def submit(self, script: Path, *options: str) -> int:
        """`sbatch`; returns the job's number."""
        # As a user with an activated environment; sbatch passes it on.
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        directory = ("--chdir", str(script.parent))
        said = self.run("sbatch", "--parsable", *directory, *options, str(script), environment={"PATH": path})
        return int(said.split(";")[0])

    def node_state(self, node: Host) -> str:
        return self._field(self.run("scontrol", "show", "node", "--oneliner", node.name), "State")

    def job(self, number: int | str, field: str = "JobState") -> str:
        """A field of a job as `scontrol show job` prints it."""
        return self._field(self.run("scontrol", "show", "job", "--oneliner", str(number)), field)

    @staticmethod
    def _field(text: str, name: str) -> str:
        found = re.search(rf"(?:^|\s){name}=(\S*)", text)
        assert found, f"no {name} in {text}"
        return found[1]

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> float:
        """Wait; returns the seconds it took."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > seconds:
                raise AssertionError(f"it did not come to that within {seconds} s\n{self.logs()}")
            time.sleep(0.3)
        return time.monotonic() - began

    def logs(self) -> str:
        """The ends of the daemons' logs, for messages of failed assertions."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text()[-3000:]}" for file in files)

    def restore(self) -> None:
        """End all jobs, and start the nodes that are down: for the next scenario after a failed one."""
        self.run("scancel", "--user=root")
        for node in self.nodes:
            if not node.processes():
                self.begin_node(node)
        self.wait_for(lambda: all(self.node_state(node) == "IDLE" for node in self.nodes), 90)


@contextmanager
def slurm(number: int, folder: Path) -> Iterator[Slurm]:
    """A cluster of some nodes, for a while; at the end nothing of it is left.

    Args:
        number: of nodes.
        folder: empty, for its files.
    """
    with hosts(number + 1) as made:
        *nodes, controller = made
        cluster = Slurm(controller, nodes, folder)
        cluster.begin()
        yield cluster
