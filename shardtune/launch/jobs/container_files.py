"""Files that start a recipe in containers, as text to copy: Dockerfile, KubeRay's RayJob, JobSet, SkyPilot's task.

Each is written for the recipe at hand. What depends on the cluster is marked `FILL IN`; as printed, each file is valid.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from shardtune.config import Recipe
from shardtune.config.overrides import with_keys
from shardtune.config.values import LOGGER_EXTRAS
from shardtune.errors import Interrupted, ShardtuneError
from shardtune.launch.torchrun import TORCHRUN

VOLUME = "/shared"
"""Where the shared disk is mounted; the working directory."""
IMAGE = "registry.example.com/shardtune:latest"
CPUS_PER_RANK = 8
MEMORY_PER_RANK = 64
"""In GiB."""
SHM = "16Gi"
"""Of /dev/shm: NCCL and the loader's processes pass data through it; a container has 64 MiB otherwise."""
GRACE_SECONDS = 900
"""How long a container may save after SIGTERM; ranks get 600 of them."""
STUCK_SECONDS = 3600
"""Without progress for so long, a container is restarted: longer than a save, and than the collectives' time limit."""
RETRIES = 3
"""Restarts of a failed job, unless the command names a number."""
RAY_VERSION = "2.60.0"
"""That of constraints.txt, which the image has."""
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Makes torchrun create a new rendezvous store at each start."""
MARK = "/dev/shm/started"
"""A file that is as old as the container."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be started.

    Attributes:
        recipe: the recipe.
        command: of shardtune, `train RECIPE key=value …`.
        ray: the keys that start it on Ray.
        nodes: hosts.
        per_node: ranks on each.
        shape: torchrun's options for the number of ranks and of restarts.
        restarts: how often a failed job is started again; 0: as often as is usual.
        port: of the rendezvous.
    """

    recipe: Recipe
    command: Sequence[str]
    ray: Sequence[str]
    nodes: int
    per_node: int
    shape: Sequence[str]
    restarts: int
    port: int

    @property
    def name(self) -> str:
        """The run's name, as a label of Kubernetes."""
        text = re.sub(r"[^a-z0-9]+", "-", str(self.recipe.runner.logger.experiment_name).lower())[:40].strip("-")
        return text if text[:1].isalpha() else f"run-{text}".strip("-")

    @property
    def gpus(self) -> bool:
        return self.recipe.runner.device != "cpu"

    @property
    def retries(self) -> int:
        return self.restarts or RETRIES

    @property
    def run_dir(self) -> str:
        """The run directory in the container; the directory in which this command runs is the volume there."""
        logger = self.recipe.runner.logger
        folder = Path(logger.log_path) / str(logger.experiment_name)
        here = Path.cwd()
        return str(VOLUME / folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)

    def torchrun(self, *rendezvous: str) -> str:
        """The command of one host; its last lines are the same on all."""
        first = shlex.join([*TORCHRUN, *self.shape])
        return " \\\n  ".join([first, *rendezvous, f"-m shardtune {shlex.join(self.command)}"])


def dockerfile(job: Job) -> str:
    """An image with shardtune and the versions of constraints.txt; for CUDA unless the recipe's device is the CPU."""
    logger, model = job.recipe.runner.logger, job.recipe.actor.model
    extras = ["ray", *(name for name in LOGGER_EXTRAS if name in logger.logger_backends)]
    extras += ["vlm"] if model.model_type.startswith("vision_language") else []
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    gpus = "--gpus all " if job.gpus else ""
    cpu_wheel = (
        "# The wheel without CUDA, which is a tenth of the size.\n"
        "RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu \\\n"
        "    \"$(grep '^torch==' constraints.txt)\"\n"
    )
    cuda = (
        "# The wheel of torch has CUDA's libraries; the host needs NVIDIA's driver and container toolkit.\n"
        "ENV NVIDIA_VISIBLE_DEVICES=all \\\n    NVIDIA_DRIVER_CAPABILITIES=compute,utility\n"
    )
    return f"""\
# Dockerfile for {"CUDA" if job.gpus else "CPUs"}: save as Dockerfile in a checkout of shardtune, then
#   docker build -t {IMAGE} .
#   docker run --rm {gpus}--shm-size={SHM.lower().rstrip("i")} --stop-timeout={GRACE_SECONDS} \\
#     --user "$(id -u)" -v "$PWD:{VOLUME}" {IMAGE} \\
#     shardtune {shlex.join(job.command)}
FROM python:{python}-slim

# g++: torch.compile translates through it. The list of packages is of the day of the build.
# hadolint ignore=DL3008
RUN apt-get update \\
 && apt-get install -y --no-install-recommends g++ git \\
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/shardtune
COPY constraints.txt ./
{"" if job.gpus else cpu_wheel}\
COPY pyproject.toml README.md LICENSE ./
COPY shardtune ./shardtune
# Further extras are in pyproject.toml.
RUN pip install --no-cache-dir -c constraints.txt '.[{",".join(extras)}]'

{cuda if job.gpus else ""}\
# Models of the Hub and encoded rows are kept on the volume.
ENV HF_HOME={VOLUME}/.cache/huggingface \\
    XDG_CACHE_HOME={VOLUME}/.cache \\
    PYTHONUNBUFFERED=1
# Any user id works; this one unless another is given.
ENV HOME=/tmp USER=shardtune
USER 1000
WORKDIR {VOLUME}
CMD ["shardtune", "env"]"""


def ray_job(job: Job) -> str:
    """KubeRay's RayJob: the launcher on a head without ranks, a worker pod for each host."""
    launch = f"cd {VOLUME} && exec shardtune {shlex.join(with_keys(job.command, job.ray))}"
    workers = _container(job, "worker", extra=_hook() + _probe(job))
    head = _container(job, "head", extra="", ranks=False)
    return f"""\
# KubeRay's RayJob: save as rayjob.yaml, then kubectl apply -f rayjob.yaml
# A job that fails, or that is stopped, is started again in a new cluster and continues from its last checkpoint.
apiVersion: ray.io/v1
kind: RayJob
metadata:
  name: {job.name}
spec:
  entrypoint: >-
    bash -c {shlex.quote(launch)}
  submissionMode: K8sJobMode
  backoffLimit: {job.retries}
  shutdownAfterJobFinishes: true
  ttlSecondsAfterFinished: 600
  rayClusterSpec:
    rayVersion: "{RAY_VERSION}"
    # A token, without which nobody submits work to the cluster; KubeRay makes one (1.5.1 and newer).
    authOptions:
      mode: token
    headGroupSpec:
      rayStartParams:
        num-cpus: "0"   # no rank on the head
      template:
        spec:
{indent(head, " " * 10)}
    workerGroupSpecs:
      - groupName: hosts
        replicas: {job.nodes}
        minReplicas: {job.nodes}
        maxReplicas: {job.nodes}
        rayStartParams: {{}}
        template:
          spec:
{indent(workers, " " * 12)}"""


def job_set(job: Job) -> str:
    """A JobSet: one Job with a pod for each host, which meet under the name of the first one."""
    if job.nodes == 1:
        run = job.torchrun("--standalone")
    else:
        head = f"{job.name}-hosts-0-0.{job.name}"
        run = 'IS_HOST=$([ "$JOB_COMPLETION_INDEX" = 0 ] && echo true || echo false)\n' + job.torchrun(
            f"--rdzv-backend=c10d --rdzv-endpoint={head}:{job.port} --rdzv-id={job.name}",
            '--rdzv-conf="is_host=$IS_HOST,read_timeout=600,join_timeout=1800"',
        )
    run = run.replace(TORCHRUN[0], f"exec {TORCHRUN[0]}", 1)  # the process that gets SIGTERM
    command = f"command:\n  - bash\n  - -c\n  - |\n{indent(run, ' ' * 4)}\n"
    more = [("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")]  # seconds to save in after SIGTERM
    more += [(OWN_STORE, "1")] if job.nodes > 1 and job.restarts else []
    ports = f"ports:\n  - containerPort: {job.port}\n" if job.nodes > 1 else ""
    pod = _container(job, "ranks", extra=command + ports + _hook() + _probe(job), more=more)
    return f"""\
# Kubernetes JobSet: save as jobset.yaml, then kubectl apply -f jobset.yaml
# A pod that is preempted or stopped saves, and all pods start again and continue; this does not count as a failure.
# A mistake in the input (exit code 2) ends the JobSet (0.10.0 and newer).
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {job.name}
spec:
  network:
    enableDNSHostnames: true   # a headless service: the first pod is {job.name}-hosts-0-0.{job.name}
    publishNotReadyAddresses: true
  failurePolicy:
    maxRestarts: {job.retries}
    rules:
      - name: input
        action: FailJobSet
        onJobFailureReasons:
          - PodFailurePolicy
        onJobFailureMessagePatterns:
          - "exit code {ShardtuneError.exit_code} "
      - name: preempted
        action: RestartJobSetAndIgnoreMaxRestarts
        onJobFailureReasons:
          - PodFailurePolicy
  replicatedJobs:
    - name: hosts
      replicas: 1
      template:
        spec:
          parallelism: {job.nodes}
          completions: {job.nodes}
          completionMode: Indexed
          backoffLimit: 0   # the pods start again together
          podFailurePolicy:
            rules:
              - action: FailJob
                onPodConditions:
                  - type: DisruptionTarget
                    status: "True"
              - action: FailJob
                onExitCodes:
                  containerName: ranks
                  operator: In
                  values: [{ShardtuneError.exit_code}, {Interrupted.exit_code}]
          template:
            spec:
              restartPolicy: Never
{indent(pod, " " * 14)}"""


def sky_task(job: Job) -> str:
    """SkyPilot's task; as a managed job it is recovered after preemption."""
    if job.nodes == 1:
        run = job.torchrun("--standalone")
    else:
        run = 'HEAD=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n' + job.torchrun(
            f'--rdzv-backend=c10d --rdzv-endpoint="$HEAD:{job.port}" --rdzv-id="$SKYPILOT_TASK_ID"',
            "--rdzv-conf=join_timeout=1800,read_timeout=600",
        )
    own_store = f'  {OWN_STORE}: "1"\n' if job.nodes > 1 and job.restarts else ""
    accelerators = f"  accelerators: H100:{job.per_node}   # FILL IN: the kind of GPU\n" if job.gpus else ""
    return f"""\
# SkyPilot: save as task.yaml, then: sky jobs launch task.yaml
# A job that is preempted, or stopped after saving, is started again and continues from its last checkpoint.
name: {job.name}
num_nodes: {job.nodes}
resources:
{accelerators}\
  cpus: {CPUS_PER_RANK * job.per_node}+
  memory: {MEMORY_PER_RANK * job.per_node}+   # FILL IN: in GB
  image_id: docker:{IMAGE}   # FILL IN: the image of the Dockerfile
  job_recovery:
    max_restarts_on_errors: {job.retries}
    recover_on_exit_codes: [{Interrupted.exit_code}]   # stopped after saving
volumes:
  {VOLUME}: shared-disk   # FILL IN: a volume that all hosts write, with recipe, data, model and runs
envs:
  OMP_NUM_THREADS: "{CPUS_PER_RANK}"
  TORCH_ELASTIC_SHUTDOWN_TIMEOUT: "600"
{own_store}\
run: |
  cd {VOLUME}
{indent(run, "  ")}"""


def _container(job: Job, name: str, *, extra: str, ranks: bool = True, more: Sequence[tuple[str, str]] = ()) -> str:
    """The part of a pod's specification that all have: the container, its resources and volumes."""
    cpus, memory, shm = 2, "8Gi", "4Gi"
    if ranks:
        cpus, shm = CPUS_PER_RANK * job.per_node, SHM
        memory = f"{MEMORY_PER_RANK * job.per_node}Gi   # FILL IN"
    gpus = f'nvidia.com/gpu: "{job.per_node}"\n' if ranks and job.gpus else ""
    amounts = f'cpu: "{cpus}"\nmemory: {memory}\n{gpus}'
    variables = [("OMP_NUM_THREADS", str(CPUS_PER_RANK)), *more] if ranks else []
    environment = "".join(f'  - name: {key}\n    value: "{value}"\n' for key, value in variables)
    environment = f"env:\n{environment}" if environment else ""
    container = (
        f"- name: {name}\n"
        f"  image: {IMAGE}   # FILL IN: the image of the Dockerfile\n"
        f"  workingDir: {VOLUME}\n"
        + indent(f"{environment}{extra}", "  ")
        + "  resources:\n    requests:\n"
        + indent(amounts, " " * 6)
        + "    limits:\n"
        + indent(amounts, " " * 6)
        + f"  volumeMounts:\n    - name: shared\n      mountPath: {VOLUME}\n"
        "    - name: shm\n      mountPath: /dev/shm"
    )
    return f"""\
terminationGracePeriodSeconds: {GRACE_SECONDS}   # to save in
securityContext:
  fsGroup: 1000   # the group of the image's user, which writes the run directory
containers:
{indent(container, "  ")}
volumes:
  - name: shared
    persistentVolumeClaim:
      claimName: shared-disk   # FILL IN: a claim that all hosts write, with recipe, data, model and runs
  - name: shm
    emptyDir:
      medium: Memory   # counts as memory of the container
      sizeLimit: {shm}"""


def _hook() -> str:
    return f"lifecycle:\n  postStart:\n    exec:\n      command: [touch, {MARK}]\n"


def _probe(job: Job) -> str:
    """A probe of the file `alive`, which counts from the first step of this start to the last."""
    return f"""\
livenessProbe:
  exec:
    command:
      - bash
      - -c
      - |
{indent(liveness_check(job.run_dir), " " * 8)}
  initialDelaySeconds: 60
  periodSeconds: 60
  timeoutSeconds: 30
  failureThreshold: 3
  terminationGracePeriodSeconds: 30
"""


def liveness_check(run_dir: str) -> str:
    """A shell script that fails if a run has made no progress for too long; a file of an earlier start is ignored."""
    return (
        f"ALIVE={shlex.quote(os.path.join(run_dir, 'alive'))}\n"
        f'[ ! "$ALIVE" -nt {MARK} ] || [ $(( $(date +%s) - $(stat -c %Y "$ALIVE") )) -lt {STUCK_SECONDS} ]'
    )
