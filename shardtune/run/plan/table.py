"""A plan in lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shardtune.errors import counted
from shardtune.run.plan.plan import Plan
from shardtune.run.plan.solve import Change
from shardtune.run.status import duration


def gigabytes(size: float) -> str:
    """In GB (1e9 bytes)."""
    return f"{size / 1e9:,.2f} GB"


def lines(plan: Plan) -> Iterator[str]:
    """The plan, a line each."""
    hardware, work, parameters = plan.hardware, plan.work, plan.parameters
    device = ("GPU" if hardware.on_cuda else "CPU rank") + ("s" if hardware.num_ranks > 1 else "")
    layout = f", {plan.layout}" if hardware.num_ranks > 1 else ""
    yield from _aligned(
        [
            ("parameters", f"{parameters.total:,}, {parameters.trained:,} trained"),
            ("ranks", f"{hardware.num_ranks} {device}{layout}"),
            ("rows", work.source),
            ("step", _step(plan)),
            ("run", _run(plan)),
            ("time", _time(plan)),
        ]
    )
    yield ""
    if plan.memory is None:
        yield "memory of the fullest rank: unknown"
    else:
        yield "memory of the fullest rank, at the fullest moment of a step:"
        parts = sorted(plan.memory.items(), key=lambda part: -part[1])
        reserve = "CUDA context, communication, gaps (estimate)" if hardware.on_cuda else "Python and torch (estimate)"
        rows = [(name, gigabytes(size)) for name, size in parts if size >= SHOWN]
        rest = sum(size for _, size in parts if size < SHOWN)
        rows += [("less than 5 MB each", gigabytes(rest))] if rest else []
        rows += [("together", gigabytes(plan.peak or 0.0)), (reserve, gigabytes(plan.reserve))]
        rows += [("in host memory besides", gigabytes(plan.host))] if plan.host else []
        yield from (f"  {line}" for line in _aligned(rows, right=True))
    yield verdict(plan)
    yield from (f"note: {note}" for note in plan.notes)


SHOWN = 5e6
"""Bytes of a category that has a line of its own."""


def verdict(plan: Plan) -> str:
    """Whether the plan fits, in words."""
    if plan.needed is None:
        return "fits: unknown"
    if plan.available is None:
        return f"needs {gigabytes(plan.needed)} a rank; --gpu-memory 80G compares it with a GPU's"
    word = "fits" if plan.fits else "does NOT fit"
    return f"{word}: {gigabytes(plan.needed)} of {gigabytes(plan.available)} a rank"


def _step(plan: Plan) -> str:
    work = plan.work
    each = "" if work.micro_batch_tokens is None else f" of at most {work.micro_batch_tokens:,} tokens"
    several = "es" if work.micro_batches > 1 else ""
    return f"{counted(round(work.step_tokens), 'token')}; a rank: {work.micro_batches} micro-batch{several}{each}"


def _run(plan: Plan) -> str:
    work = plan.work
    if work.steps is None:
        return "unknown number of steps: name rows in data.train_data_paths, or give --tokens"
    return f"{counted(work.steps, 'step')}, {work.tokens or 0:,.0f} tokens"


def _time(plan: Plan) -> str:
    if plan.rate is None or plan.step_seconds is None:
        return "unknown: give --tokens-per-second, --rate-from RUN or --mfu"
    whole = "" if plan.seconds is None else f", {'under 1 s' if plan.seconds < 1 else duration(plan.seconds)} in all"
    step = f"{plan.step_seconds:{',.2f' if plan.step_seconds >= 1 else '.3g'}} s"
    rate = f"{plan.rate.tokens_per_second:,.0f} tokens/s ({plan.rate.source})"
    return f"{step} a step{whole}, at {rate}"


def _aligned(rows: Sequence[tuple[str, str]], *, right: bool = False) -> Iterator[str]:
    first = max(len(name) for name, _ in rows)
    second = max(len(text) for _, text in rows) if right else 0
    yield from (f"{name:<{first}}  {text:>{second}}" for name, text in rows)


def change_lines(plan: Plan, changes: Iterable[Change]) -> Iterator[str]:
    """What fits, a few lines each, as it is found."""
    yield ""
    number = 0
    for number, change in enumerate(changes, 1):
        yield f"{number}. {' '.join(change.overrides)}"
        yield f"   {verdict(change.plan)}; {'; '.join(option.effect for option in change.options)}"
    if not number:
        yield "nothing has to change" if plan.fits else "no change was found that fits: more or larger GPUs are needed"
