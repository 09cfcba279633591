"""What a run of another trainer was started with (accelerate, torchrun, deepspeed), and what its options mean here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardtune.config.foreign.conversion import Conversion, Kind, Line, Outcome, defaults, short
from shardtune.config.foreign.launch_keys import MEGATRON, PREFIXES, SHARDED, SHARING, TABLES
from shardtune.config.foreign.sharding import OFFLOAD, deepspeed
from shardtune.config.foreign.table import Table
from shardtune.config.foreign.values import is_on, number, whole
from shardtune.config.recipe_file import read_file
from shardtune.config.tree import get_value

FILES = ("config_file", "accelerate_config")
SECTIONS = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
"""Sections of accelerate's file whose keys may lack the beginning that its options have."""
KINDS = ("multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm")
"""Flags that replace `distributed_type` of accelerate's file."""
OF_FSDP = ("fsdp_",)
OF_DEEPSPEED = ("zero", "offload_", "gradient_", "deepspeed_config_file", "deepspeed_moe")
OWN = "own keys decide"
GIVE = "give --world-size N, the number of processes on all hosts"


@dataclass(frozen=True, slots=True)
class Launch:
    """A launcher with its options.

    Attributes:
        program: accelerate, torchrun, deepspeed or python.
        options: by name with underscores, as text; True without a value.
        shown: as typed, for the report; "": the options are keys of the trainer's own command.
        variables: the options that stood in variables of the environment, and the names of these.
    """

    program: str
    options: Mapping[str, object]
    shown: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    def name(self, option: str) -> str:
        """The name of an option in the report."""
        if option in self.variables:
            return of_environment(self.variables[option])
        return f"{self.shown} {'-' if len(option) == 1 else '--'}{option}" if self.shown else option


def of_environment(variable: str) -> str:
    """The name of a variable of the environment in the report."""
    return f"{variable} (environment)"


@dataclass(slots=True)
class Started:
    """The options of a launcher with the keys of its file, and the processes that they start.

    Attributes:
        launch: the launcher.
        values: by the names of its options; a flag replaces a key of the file.
        names: of the values, in the report.
        replaced: keys of the file that a flag replaces, by their name in the report.
        processes: on all hosts; None: not known.
        hosts: the number of hosts.
        counted: the options that say how many processes there are.
    """

    launch: Launch
    values: dict[str, object]
    names: dict[str, str]
    replaced: dict[str, object] = field(default_factory=dict)
    processes: int | None = None
    hosts: int = 1
    counted: tuple[str, ...] = ()

    @property
    def each(self) -> int:
        """The processes of one host."""
        return max(1, (self.processes or 1) // self.hosts)


def started(launch: Launch) -> Started:
    """Read the file that the options name, and count the processes.

    Raises:
        ConfigError: the file is there and cannot be read.
    """
    found = Started(launch, dict(launch.options), {name: launch.name(name) for name in launch.options})
    file = _file(launch)
    for shown, name, value in _keys(file) if file is not None else ():
        if name in found.values:
            found.replaced[shown] = value
        else:
            found.values[name], found.names[name] = value, shown
    found.processes, found.hosts, counted = _COUNTS[launch.program](found.values)
    found.counted = tuple(name for name in counted if name in found.values)
    return found


def _file(launch: Launch) -> Path | None:
    given = next((str(launch.options[name]) for name in FILES if name in launch.options), "")
    file = Path(given).expanduser()
    return file if given and file.is_file() else None


def _keys(file: Path) -> Iterator[tuple[str, str, object]]:
    """The keys of a file of accelerate: the name in the report, that of the option, and the value."""
    for name, value in read_file(file).tree.items():
        if not isinstance(value, Mapping) or not value:
            yield f"{file.name} {name}", name, value
            continue
        for key, inner in value.items():
            start = SECTIONS.get(name, "")
            yield f"{file.name} {name}.{key}", str(key) if str(key).startswith(start) else f"{start}{key}", inner


def _count(value: object) -> int | None:
    """A number of processes or hosts; None for a word, for `1:4`, and for -1."""
    text = str(value)
    fewest, _, most = text.partition(":")
    found = whole(fewest) if most in ("", fewest) and not isinstance(value, bool) else None
    return found if found is not None and found > 0 else None


_Counted = tuple[int | None, int, tuple[str, ...]]


def _of_accelerate(values: Mapping[str, object]) -> _Counted:
    alone = 1 if str(values.get("distributed_type", "")).upper() in ("NO", "FALSE") else None
    total, hosts = _count(values.get("num_processes", alone)), _count(values.get("num_machines", 1))
    return total, hosts or 1, ("num_processes", "num_machines")


def _of_torchrun(values: Mapping[str, object]) -> _Counted:
    each, hosts = _count(values.get("nproc_per_node", 1)), _count(values.get("nnodes", 1))
    return each * hosts if each and hosts else None, hosts or 1, ("nproc_per_node", "nnodes")


def _of_deepspeed(values: Mapping[str, object]) -> _Counted:
    names = ("num_gpus", "num_accelerators", "num_nodes", "include")
    if "include" in values:
        nodes = [node.partition(":")[2] for node in str(values["include"]).split("@")]
        slots = [slot for node in nodes for slot in node.split(",")]
        return len(slots) if all(slot.isdigit() for slot in slots) else None, len(nodes), names
    each = _count(values.get("num_gpus", values.get("num_accelerators")))
    hosts = _count(values.get("num_nodes", None if "hostfile" in values else 1))
    left_out = "exclude" in values
    return each * hosts if each and hosts and not left_out else None, hosts or 1, names


def _of_python(values: Mapping[str, object]) -> _Counted:
    return None, 1, ()


_COUNTS: Mapping[str, Callable[[Mapping[str, object]], _Counted]] = {
    "accelerate": _of_accelerate,
    "torchrun": _of_torchrun,
    "deepspeed": _of_deepspeed,
    "python": _of_python,
}


def sharing(found: Started) -> int:
    """How many of the processes have the same rows, as they divide a model or its sequences."""
    sizes = [whole(found.values.get(name)) for name in SHARING if _divides(found)]
    return math.prod(max(1, size or 1) for size in sizes)


def _divides(found: Started) -> bool:
    """Whether accelerate reads the sizes: those of a file always, flags with their switch alone."""
    of_file = any(name in found.values and name not in found.launch.options for name in SHARING)
    return is_on(found.values.get("use_parallelism_config", of_file))


def precision_of(found: Started) -> str:
    """What the launcher sets mixed precision to; "" for nothing, and for FP8."""
    kind = str(found.values.get("mixed_precision", "")).lower()
    return kind if kind in ("bf16", "fp16") else ""


def apply(c: Conversion, found: Started, *, is_counted: bool) -> None:
    """Write what the launcher sets into a recipe whose other keys are read, and record its options.

    Args:
        c: the conversion.
        found: the launcher's options.
        is_counted: whether the number of processes is the launcher's, and not `--world-size`.
    """
    flat = Conversion(found.launch.program, found.values, c.base, c.target)
    _processes(flat, found, is_counted)
    if found.launch.program == "accelerate":
        _accelerate(c, flat, found)
    elif found.launch.program == "python":
        flat.not_needed("it is for Python", *found.values)
    flat.translate(_table(found))
    _merge(c, flat, found)
    c.notes += flat.notes
    if "mixed_precision" in found.values:
        del c.outcomes[found.names["mixed_precision"]]
        _precision(c, found.names["mixed_precision"], str(found.values["mixed_precision"]).lower())
    if found.hosts > 1:
        c.notes.append(
            f"there were {found.hosts} hosts: start each with torchrun --nnodes {found.hosts} … -m shardtune train, "
            "with the same options as before (docs/getting-started.md)"
        )


def _table(found: Started) -> Table:
    table = TABLES[found.launch.program]
    if found.launch.program != "accelerate":
        return table
    begun = {
        name: entry
        for name in found.values
        for start, entry in PREFIXES.items()
        if name.startswith(start) and name not in table
    }
    return {**table, **begun}


def _processes(flat: Conversion, found: Started, is_counted: bool) -> None:
    for name in found.counted:
        if not is_counted:
            flat.not_needed("--world-size replaces it", name)
        elif found.processes is None:
            flat.missing(GIVE, name)
        else:
            word = "process" if found.processes == 1 else "processes"
            line = f"{found.processes} {word}, for the rows of a step; runner.nproc_per_node: {found.each}"
            flat.record(name, Kind.TRANSLATED, line)


def _accelerate(c: Conversion, flat: Conversion, found: Started) -> None:
    """The options of accelerate that mean something together."""
    is_lost = _file(found.launch) is None and any(name in found.values for name in FILES)
    for name in FILES:
        if is_lost:
            flat.missing(
                f"the file is not at hand: {GIVE}; its mixed_precision is actor.model.precision, and if it offloads, "
                f"{OFFLOAD}: true",
                name,
            )
        else:
            flat.record(name, Kind.TRANSLATED, "its keys are listed, with its name")
    if not any(name in found.values for name in (*FILES, "num_processes")):
        c.notes.append("accelerate launch without --config_file reads a default file, which is not read here")
    kind = str(flat.get("distributed_type", "NO")).upper()
    if kind.startswith(("MEGATRON", "XLA", "TPU")):
        flat.missing(
            MEGATRON.remedy if kind.startswith("MEGATRON") else "runs are on CUDA, or on a CPU", "distributed_type"
        )
    else:
        flat.not_needed(SHARDED.why, "distributed_type")
    if not _divides(found):
        names = [name for name in found.values if name.startswith("parallelism_config_")]
        flat.not_needed("use_parallelism_config is off, so it has no effect", *names)
    if not is_lost and not _is_used(flat, "use_fsdp", "FSDP"):
        names = [name for name in found.values if name.startswith(OF_FSDP) and name != "fsdp_config"]
        flat.not_needed("without use_fsdp, or distributed_type: FSDP, it has no effect", *names)
    if not is_lost and not _is_used(flat, "use_deepspeed", "DEEPSPEED"):
        names = [name for name in found.values if name.startswith(OF_DEEPSPEED)]
        flat.not_needed("without use_deepspeed, or distributed_type: DEEPSPEED, it has no effect", *names)
        return
    deepspeed(flat, "deepspeed_config_file")
    for name in ("offload_optimizer_device", "offload_param_device"):
        if str(flat.get(name, "none")).lower() in ("cpu", "nvme"):
            flat.put(OFFLOAD, True, name)
        else:
            flat.not_needed("nothing is moved to the host", name)
    for name, theirs, default in (
        ("gradient_accumulation_steps", "gradient_accumulation_steps", 1),
        ("gradient_clipping", "max_grad_norm", 1.0),
    ):
        own = c.get(theirs, default)
        if flat.get(name, "auto") == "auto" or number(flat.get(name)) == number(own):
            flat.not_needed(f"{theirs} of {c.trainer} is the same", name)
        else:
            flat.missing(f"the recipe is made of {theirs} of {c.trainer}, {short(own)}: they have to agree", name)


def _is_used(flat: Conversion, switch: str, kind: str) -> bool:
    if is_on(flat.get(switch)):
        return True
    is_replaced = any(is_on(flat.get(name)) for name in KINDS)
    return not is_replaced and str(flat.get("distributed_type", "")).upper() == kind


def _merge(c: Conversion, flat: Conversion, found: Started) -> None:
    """Add lines and outcomes; a line of the trainer's own keys stays."""
    c.beside |= {found.names[name]: value for name, value in found.values.items()} | found.replaced
    for given, outcome in flat.outcomes.items():
        option = given if given in found.values else given.partition(".")[0].partition("[")[0]
        kind, text, key = outcome.kind, outcome.text, outcome.text.partition(":")[0]
        wanted = flat.lines[key].value if key in flat.lines else get_value(defaults(), key)
        if kind in (Kind.TRANSLATED, Kind.DEFAULT) and key in c.lines and c.lines[key].value != wanted:
            kind, text = Kind.NOT_NEEDED, f"{c.trainer}'s {OWN}: {key}: {short(c.lines[key].value)}"
        name = found.names[option]
        c.outcomes[name] = Outcome(name, found.values[option], kind, text)
    for key, line in flat.lines.items():
        c.lines.setdefault(key, Line(line.value, f"{found.launch.program}: {line.comment}"))
    for name, value in found.replaced.items():
        c.outcomes[name] = Outcome(name, value, Kind.NOT_NEEDED, "a flag replaces it")


def _precision(c: Conversion, name: str, kind: str) -> None:
    """Record mixed precision, which transformers reads where neither bf16 nor fp16 is set."""
    own = next((key for key in ("bf16", "fp16") if is_on(c.get(key))), None)
    if c.trainer not in ("TRL", "LLaMA-Factory") or own or kind in ("no", "false", ""):
        c.not_needed(f"{c.trainer}'s {OWN}" + (f": {own}" if own else ""), name)
    elif c.trainer == "TRL" and c.get("bf16") is None:
        if kind == "bf16":
            c.record(name, Kind.DEFAULT, "actor.model.precision: bf16")
        else:
            c.missing(
                "TRL computes in bf16 unless bf16: false is given, whatever the launcher has; otherwise write "
                + ("actor.model.fp8.scaling: tensorwise" if kind == "fp8" else f"actor.model.precision: {kind}"),
                name,
            )
    elif kind in ("bf16", "fp16"):
        c.record(name, Kind.TRANSLATED, f"actor.model.precision: {kind}")
    else:
        c.missing("actor.model.fp8.scaling: docs/fast-parts.md; actor.model.precision is bf16", name)
