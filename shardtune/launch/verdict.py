"""Which rank of a stuck run differs from the others, from what each of them has reported."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
        rounds: its iterations of the loop.
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

    @property
    def progress(self) -> tuple[int, int]:
        """Larger where a rank has come further."""
        return self.rounds, self.beats

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


def judge(reports: Mapping[int, StandReport], silent: Sequence[int]) -> Verdict:
    """The ranks that differ.

    A rank that reports nothing cannot run; one outside of a collective holds up those that wait in one; of ranks that
    all wait, the one in a collective of the user's code, in another than most, or behind the others differs.

    Args:
        reports: by rank.
        silent: ranks that have not reported in time.
    """
    if silent:
        return Verdict(tuple(sorted(silent)), "")
    waiting = {rank for rank, report in reports.items() if report.collective}
    outside = reports.keys() - waiting
    if len(reports) == 1:
        return Verdict(tuple(reports), "")
    if waiting and outside:
        return _verdict(outside, "does not come to the collective in which the others wait")
    if not waiting:
        least = min(report.progress for report in reports.values())
        behind = {rank for rank, report in reports.items() if report.progress == least}
        return _verdict(behind if len(behind) < len(reports) else (), "is behind the others")
    users = {rank for rank, report in reports.items() if report.in_users}
    if len(users) < len(reports) and users:
        return _verdict(users, "waits in a collective of your own code, which the others have not called")
    places = Counter(report.place for report in reports.values())
    common, count = places.most_common(1)[0]
    if count > len(reports) / 2 and len(places) > 1:
        others = {rank for rank, report in reports.items() if report.place != common}
        return _verdict(others, "waits in another collective than the others")
    most = max(report.rounds for report in reports.values())  # a rank that leaves out a step has fewer beats in it
    ahead = {rank for rank, report in reports.items() if report.rounds == most}
    if len(ahead) < len(reports):
        return _verdict(ahead, "is past the collective in which the others wait")
    fewest = min(report.issued for report in reports.values())
    behind = {rank for rank, report in reports.items() if report.issued == fewest}
    return _verdict(behind if len(behind) < len(reports) else (), "has called fewer collectives than the others")


def _verdict(ranks: set[int] | tuple[int, ...], reason: str) -> Verdict:
    return Verdict(tuple(sorted(ranks)), reason if ranks else "")


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
        what += ": no rank differs from the others"
    described = verdict.reason == "" and len(set(states.values())) == 1
    chosen = [] if described else [*verdict.ranks[:SHOWN]]
    chosen += [rank for rank in sorted(reports) if rank not in verdict.ranks][: SHOWN - len(chosen) or 1]
    lines = [what]
    for rank in chosen:
        where = reports[rank].place if rank in reports else states.get(rank, "has reported nothing")
        host = f" on {reports[rank].host}" if rank in reports and len({r.host for r in reports.values()}) > 1 else ""
        lines.append(f"  rank {rank}{host} {where}" if several else f"  it {where}")
    return "\n".join(lines)


def _common(states: Iterable[str]) -> str:
    found = list(dict.fromkeys(states))
    return found[0] if len(found) == 1 else "have reported nothing"


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:SHOWN]) + (", …" if len(ranks) > SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
