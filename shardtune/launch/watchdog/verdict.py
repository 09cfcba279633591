"""Which rank of a stuck run differs from the others, from what each of them has reported."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

SHOWN = 4
"""Ranks that a message describes one by one."""


@dataclass(frozen=True, slots=True)
class StandReport:
    """Where a rank stands once it has made no progress for too long.

    Attributes:
        rank: which one.
        host: its host's name.
        seconds: without progress.
        phase: what it is doing, in words.
        step: optimizer steps done.
        beats: its counter of progress.
        place: where its main thread stands, in words.
        collective: in which it waits; "" outside of one.
        in_users: whether the user's code has called it.
        issued: collectives that the rank has called so far.
        neighbours: the states of the host's other ranks, in words.
        rounds: training steps that have returned.
        begun: training steps that were begun.
        micro_batch: begun in the current step, of `micro_batches`.
    """

    rank: int
    host: str
    seconds: float
    phase: str
    step: int
    beats: int
    place: str
    collective: str = ""
    in_users: bool = False
    issued: int = 0
    neighbours: Mapping[int, str] = field(default_factory=dict)
    rounds: int = 0
    begun: int = 0
    micro_batch: int = 0
    micro_batches: int = 0

    @property
    def position(self) -> tuple[int, int, int]:
        """In training; larger where a rank has come further."""
        return self.rounds, self.begun, self.micro_batch

    @property
    def left_out(self) -> int:
        """Training steps that have returned without being begun."""
        return max(0, self.rounds - self.begun)

    @property
    def position_in_words(self) -> str:
        if self.begun <= self.rounds:
            return f"after step {self.step:,}"
        of = f", micro-batch {self.micro_batch} of {self.micro_batches}" if self.micro_batch else ""
        return f"in step {self.step + 1:,}{of}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StandReport:
        fields = json.loads(text)
        fields["neighbours"] = {int(rank): state for rank, state in fields["neighbours"].items()}
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a stuck run is stuck on.

    Attributes:
        ranks: that differ from the others; empty if none does.
        reason: what they do, completing "rank 1 …".
    """

    ranks: tuple[int, ...]
    reason: str


NOBODY = Verdict((), "")


def judge(reports: Mapping[int, StandReport], silent: Sequence[int]) -> Verdict:
    """The ranks that differ.

    A rank that reports nothing cannot run; one outside of a collective holds up those that wait in one. If all wait:
    a recipe begins a step in each round, so a rank that has left one out differs from its plan, however many ranks
    there are; so does one that is alone in a collective of the user's code. By its place, its position in training and
    its number of collectives a rank differs from a majority: of two ranks neither is right.

    Args:
        reports: by rank.
        silent: ranks that have not reported in time.
    """
    if silent:
        return Verdict(tuple(sorted(silent)), "")
    if len(reports) == 1:
        return Verdict(tuple(reports), "")
    waiting = {rank for rank, report in reports.items() if report.collective}
    outside = reports.keys() - waiting
    if waiting and outside:
        return Verdict(tuple(sorted(outside)), "does not come to the collective in which the others wait")
    if not waiting:
        return _behind(reports)
    return _left_out(reports) or _own_collective(reports) or _minority(reports) or NOBODY


def _behind(reports: Mapping[int, StandReport]) -> Verdict:
    """Of ranks of which none waits, those that have done least."""
    done = {rank: (report.position, report.beats) for rank, report in reports.items()}
    behind = [rank for rank in sorted(done) if done[rank] == min(done.values())]
    return Verdict(tuple(behind), "is behind the others") if len(behind) < len(done) else NOBODY


def _left_out(reports: Mapping[int, StandReport]) -> Verdict | None:
    """Ranks that have left out steps, where the others have not; where all have, a user's worker may mean to."""
    found = {rank: report.left_out for rank, report in reports.items() if report.left_out}
    if not found or len(found) == len(reports):
        return None
    most = max(found.values())
    what = "a training step" if most == 1 else f"{most:,} training steps"
    return Verdict(tuple(sorted(found)), f"has left out {what}, which no other rank has")


def _own_collective(reports: Mapping[int, StandReport]) -> Verdict | None:
    """Ranks that wait in a collective of the user's code, or, if most do, those that do not."""
    users = {rank for rank, report in reports.items() if report.in_users}
    if not users or len(users) == len(reports):
        return None
    if 2 * len(users) > len(reports):
        others = sorted(reports.keys() - users)
        return Verdict(tuple(others), "has not called the collective of your own code in which the others wait")
    return Verdict(tuple(sorted(users)), "waits in a collective of your own code, which the others have not called")


def _minority(reports: Mapping[int, StandReport]) -> Verdict | None:
    """Ranks in which something differs from what it is in most of them."""
    facts: tuple[tuple[Callable[[StandReport], object], str], ...] = (
        (lambda report: report.place, "waits in another collective than the others"),
        (lambda report: report.position, "is at another position in training than the others"),
        (lambda report: report.issued, "has called another number of collectives than the others"),
    )
    for of, reason in facts:
        common, count = Counter(map(of, reports.values())).most_common(1)[0]
        if len(reports) / 2 < count < len(reports):
            return Verdict(tuple(rank for rank in sorted(reports) if of(reports[rank]) != common), reason)
    return None


def describe(verdict: Verdict, reports: Mapping[int, StandReport], states: Mapping[int, str], *, num_ranks: int) -> str:
    """The message of a verdict: who differs, and where some ranks stand.

    Args:
        verdict: of the run.
        reports: by rank.
        states: of the ranks that have not reported, in words.
        num_ranks: of the run.
    """
    first = next(iter(reports.values()))
    several = num_ranks > 1
    what = f"no progress for {max(report.seconds for report in reports.values()):.0f} s in {first.phase}"
    what += f", after step {first.step:,}" if first.step else ""
    if verdict.reason:
        what += f": {_names(verdict.ranks)} {verdict.reason}"
    elif states and several:
        what += f": {_names(verdict.ranks)} {_common(states[rank] for rank in verdict.ranks)}"
    elif several and not verdict.ranks:
        what += f": {_undecided(reports.values())}"
    described = verdict.reason == "" and len(set(states.values())) == 1
    chosen = [] if described else [*verdict.ranks[:SHOWN]]
    chosen += [rank for rank in sorted(reports) if rank not in verdict.ranks][: SHOWN - len(chosen) or 1]
    lines, differing = [what], _differing(reports.values())
    for rank in chosen:
        where = states.get(rank, "has reported nothing")
        if rank in reports:
            where = ", ".join([*(of(reports[rank]) for of in differing), reports[rank].place])
        host = f" on {reports[rank].host}" if rank in reports and len({r.host for r in reports.values()}) > 1 else ""
        lines.append(f"  rank {rank}{host} {where}" if several else f"  it {where}")
    return "\n".join(lines)


def _differing(reports: Iterable[StandReport]) -> list[Callable[[StandReport], str]]:
    """What is not the same on all ranks, each as the words for one of them."""
    found = list(reports)
    words: list[Callable[[StandReport], str]] = [
        lambda report: report.position_in_words,
        lambda report: f"in {report.phase}",
    ]
    if all(report.collective for report in found):  # otherwise they differ by the ones that are waited in
        words.append(lambda report: f"after {report.issued:,} collectives")
    return [of for of in words if len({of(report) for report in found}) > 1]


def _undecided(reports: Iterable[StandReport]) -> str:
    """Of ranks of which none is known to be the cause."""
    found = list(reports)
    waiting = [report for report in found if report.collective]
    if not waiting or (len({report.place for report in found}) == 1 and not _differing(found)):
        return "no rank differs from the others"
    return (
        "the ranks have parted, and nothing shows which of them is where it should be (in a backward pass it may be a "
        "loss that leaves out, on some ranks, what a part of the model returned: multiply that by 0 instead)"
    )


def _common(states: Iterable[str]) -> str:
    found = list(dict.fromkeys(states))
    return found[0] if len(found) == 1 else "have reported nothing"


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:SHOWN]) + (", …" if len(ranks) > SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
