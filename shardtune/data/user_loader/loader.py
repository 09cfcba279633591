"""Training steps from a user's own iterable of batches: the batches of each rank, and how a run resumes in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
from pydantic import JsonValue
from torch.utils.data import DataLoader

from shardtune.batch import TOKENS
from shardtune.data.loader.protocol import DataState, Step, supervised
from shardtune.data.user_loader.batch import SameFields, UserBatch, fingerprint, num_tokens, rows_agreed, tokens_of
from shardtune.data.user_loader.errors import (
    between_batches,
    data_changed,
    indivisible,
    making,
    no_length,
    other_batches,
    ranks_differ,
    too_large,
    what_differs,
    wrong_length,
)
from shardtune.data.user_loader.position import LoaderRecord, merged, of_rank
from shardtune.data.user_loader.rng import LoaderRng
from shardtune.data.user_loader.state_json import NotPlain, StatefulLoader, decode, encode
from shardtune.errors import ConfigError, DataError, counted
from shardtune.parallel.ranks import Ranks

Weigh = Callable[[Sequence[object]], list[Mapping[str, float]]]
"""Batches, at least one, to the weight of each in each term of the loss. All ranks call it together."""


@runtime_checkable
class SizedLoader(Protocol):
    """A loader that can be iterated once per epoch and has a number of batches."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[object]: ...


class BatchLoader:
    """Cuts a user's loader into optimizer steps.

    Every rank iterates over the same batches, and batch i of a step belongs to rank i mod ranks; a loader that is
    already sharded yields this rank's batches alone, on some ranks perhaps fewer. A resumed run puts a loader that has
    a state back where it was, and goes through the epoch's first batches of any other again.

    Args:
        loader: yields batches, anew at each `iter`.
        ranks: over which a step's batches are spread; every rank builds its loader and iterates over it.
        batches_per_rank: of one step, on each rank.
        rows_per_batch: rows of a full batch.
        weigh: computes the weights of batches.
        sharded: whether the loader yields this rank's batches alone.
        num_samples: of the data, where that is known.
        seed: of the run; what a loader draws is a function of it, the epoch and the batch's number.
        report: receives messages for the user.
    """

    def __init__(
        self,
        loader: SizedLoader,
        ranks: Ranks,
        *,
        batches_per_rank: int,
        rows_per_batch: int,
        weigh: Weigh,
        sharded: bool = False,
        num_samples: int | None = None,
        seed: int = 0,
        report: Callable[[str], None] = print,
    ) -> None:
        self._loader = loader
        self._ranks = ranks
        self._rows = rows_per_batch
        self._weigh = weigh
        self._sharded = sharded
        self._num_samples = num_samples
        self._draws = LoaderRng(loader, seed)
        self._report = report
        # Counted in turns: one batch of the loader, or one of each rank where it is sharded. A step of 24 rows, on four
        # ranks two batches of 3 rows each, takes 2 turns of 12 rows if it is sharded, otherwise 8 turns of 3 rows.
        self._turns_per_step = batches_per_rank if sharded else batches_per_rank * ranks.num_data_ranks
        self._rows_per_turn = rows_per_batch * ranks.num_data_ranks if sharded else rows_per_batch
        self._turns = int(ranks.largest(len(loader))) if sharded else len(loader)
        self._fields = SameFields()
        self._first = ""
        self._seen = ""
        self._last: object = None
        self._compared = False
        self._ready: tuple[int, int, Iterator[object]] | None = None
        self._resumed: LoaderRecord | None = None  # until a step is taken

    @classmethod
    def of(
        cls,
        loader: object,
        info: Mapping[str, Any],
        *,
        ranks: Ranks,
        global_batch_size: int | None,
        micro_batch_size: int | None,
        weigh: Weigh,
        seed: int,
        report: Callable[[str], None] = print,
    ) -> BatchLoader:
        """A user's loader under a recipe; sizes that do not divide are refused with the nearest that do."""
        if not isinstance(loader, SizedLoader):
            raise no_length(loader)
        try:
            batches = len(loader)
        except TypeError as error:  # as of a DataLoader over a stream
            raise no_length(loader) from error
        if not batches:
            raise DataError("the loader has no batch", where="build_dataloader", remedy="give it rows to yield")
        if global_batch_size is None or micro_batch_size is None:
            raise ConfigError(
                "a worker with a loader of its own needs actor.global_batch_size and actor.micro_batch_size in rows",
                where="actor.global_batch_size",
                remedy="set both, and build the loader with batch_size=self.cfg.actor.micro_batch_size",
            )
        sharded, unit = bool(info.get("sharded")), micro_batch_size * ranks.num_data_ranks
        if global_batch_size % unit and not sharded:
            raise indivisible(global_batch_size, micro_batch_size, ranks.num_data_ranks)
        batches_per_rank = max(1, round(global_batch_size / unit))
        if batches_per_rank * unit != global_batch_size:
            report(f"a step holds {batches_per_rank * unit} rows, the nearest to {global_batch_size} that divides")
        return cls(
            loader,
            ranks,
            batches_per_rank=batches_per_rank,
            rows_per_batch=micro_batch_size,
            weigh=weigh,
            sharded=sharded,
            num_samples=info.get("num_samples"),
            seed=seed,
            report=report,
        )

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse, on one rank, a step that could not be spread over so many."""
        step = self._turns_per_step * self._rows_per_turn
        if step % (self._rows * num_ranks) and not self._sharded:
            raise indivisible(step, self._rows, num_ranks)

    @property
    def num_samples(self) -> int:
        """Rows of an epoch: as declared, or else as many as full batches hold."""
        announced = None if self._sharded else self._num_samples
        return self.rows_per_epoch if announced is None else announced

    @property
    def last_batch(self) -> object:
        """The last batch that was taken; None before the first."""
        return self._last

    @property
    def rows_per_epoch(self) -> int:
        return self._turns * self._rows_per_turn

    def num_steps(self, epoch: int) -> int:
        return -(-self._turns // self._turns_per_step)

    def steps_left(self, state: DataState) -> int:
        """Optimizer steps from a position to the end of its epoch."""
        return -(-(self._turns - state.rows_consumed // self._rows_per_turn) // self._turns_per_step)

    def steps(self, state: DataState) -> Iterator[Step[UserBatch]]:
        """Steps without end from `state` on."""
        epoch, (done, left_over) = state.epoch, divmod(state.rows_consumed, self._rows_per_turn)
        if left_over and self._resumed is None:
            raise between_batches(state.rows_consumed, self._rows_per_turn)
        while True:
            batches = self._enter(epoch, done)
            while done < self._turns:
                turns = min(self._turns_per_step, self._turns - done)
                taken = list(islice(batches, turns))
                before, done = done, done + turns
                if not self._sharded and len(taken) < turns:
                    raise wrong_length(f"ended after {before + len(taken)} batches", self._turns)
                if done == self._turns and next(batches, None) is not None:
                    raise wrong_length("yields more batches", self._turns)
                after = DataState(epoch + 1, 0) if done == self._turns else self._state(epoch, done)
                yield self._step(taken, turns, self._state(epoch, before), after)
            epoch, done = epoch + 1, 0

    def _state(self, epoch: int, done: int) -> DataState:
        return DataState(epoch, done * self._rows_per_turn)

    # Iterating over the loader.

    def _enter(self, epoch: int, done: int) -> Iterator[object]:
        """An epoch's batches from number `done` on."""
        ready, self._ready = self._ready, None
        if ready is not None and ready[0] == epoch and ready[1] <= done:
            _, at, batches = ready
        else:
            at, batches = 0, self._pass(epoch)
        for _ in islice(batches, done - at):
            pass
        return batches

    def _pass(self, epoch: int, first: int = 0) -> Iterator[object]:
        """The batches that the loader yields from its current position, which is before number `first` of an epoch.

        Random draws depend on a batch's number, not on where the pass begins.
        """
        batches = self._draws.begin(epoch)
        self._seen = self._seen if first else ""
        for number in count(first):
            self._draws.before(epoch, number)
            try:
                with making(number):
                    batch = next(batches)
            except StopIteration:
                return
            self._fields.check(batch, number)
            digest = fingerprint(batch)
            if (epoch, number) == (0, 0) and not self._first:
                self._first = digest
            self._seen = fingerprint([self._seen, digest])
            self._last = batch
            yield batch

    def _step(self, batches: list[object], turns: int, state: DataState, after: DataState) -> Step[UserBatch]:
        """A step of the batches taken in so many turns, of which a sharded loader may have fewer."""
        if self._last is None:
            raise DataError("the loader yields no batch", where="build_dataloader", remedy="give every rank rows")
        self._compare_ranks(batches)
        self._resumed = None
        *weights, of_last = self._weigh([*batches, self._last])
        terms = list(of_last)
        pairs = list(zip(batches, weights, strict=True))
        # A mean over no targets is 0 / 0: a batch without any repeats another with weight 0, as does a missing batch.
        spare = next((batch for batch, weight in pairs if any(weight.values())), self._last)
        filler = UserBatch(spare, dict.fromkeys(terms, 0.0), counts=False)
        if not self._sharded:
            # Of batches 0 to 6 on three ranks, rank 1 has 1 and 4, and one filler up to ceil(7 / 3) = 3.
            pairs = pairs[self._ranks.data_rank :: self._ranks.num_data_ranks]
            turns = -(-turns // self._ranks.num_data_ranks)
        made = [UserBatch(batch, weight) if any(weight.values()) else filler for batch, weight in pairs]
        made += [filler] * (turns - len(made))
        sums = [sum(weight[term] for weight in weights) for term in terms]
        tokens = float(sum(tokens_of(batch) for batch in batches))
        if self._sharded:
            *sums, tokens = self._ranks.sum([*sums, tokens])
        denominators = dict(zip(terms, sums, strict=True))
        return Step(
            state=state,
            after=after,
            rows=np.empty(0, dtype=np.int64),
            micro_batches=tuple(made),
            denominators=denominators,
            num_tokens=int(tokens),
            num_targets=supervised(denominators, TOKENS),
            unit="samples" if num_tokens(self._last) is None else "tokens",
        )

    def _compare_ranks(self, batches: Sequence[object]) -> None:
        """At the first step, check that batches have the recipe's size and are on the right ranks."""
        if self._compared:
            return
        self._compared = True
        size = rows_agreed(batches[0]) if batches else None
        if size is not None and size > self._rows:
            raise too_large(size, self._rows)
        if size is not None and size < self._rows and self._turns > 1:
            self._report(f"the loader yields batches of {counted(size, 'row')}, actor.micro_batch_size is {self._rows}")
        hashes = self._ranks.gather(fingerprint(batches[0]) if batches else "")
        alike = len(set(hashes)) == 1
        if not self._sharded and not alike:
            raise ranks_differ()
        if self._sharded and alike and len(hashes) > 1:
            self._report(
                "the loader is declared sharded, but begins with the same batch on every rank: rows come twice"
            )

    # Resuming.

    def state_dict(self) -> Mapping[str, JsonValue]:
        return self.record().to_json()

    def load_state_dict(self, saved: Mapping[str, JsonValue], state: DataState, *, allow_changed: bool) -> None:
        self.resume(state, LoaderRecord.from_json(saved), allow_changed=allow_changed)

    def record(self) -> LoaderRecord:
        """The loader's record for a checkpoint; all ranks call it."""
        if self._resumed is not None:
            return self._resumed
        entries = self._ranks.gather((self._first, self._seen, self._draws.own_seeds, self._own_state()))
        firsts, seen, seeds, states = ([entry[part] for entry in entries] for part in range(4))
        return replace(
            self._identity(),
            first_batch=merged(firsts) if any(firsts) else (),
            seen=merged(seen) if any(seen) else (),
            own_seeds=merged(seeds) if any(seeds) else (),
            states=None if any(state is None for state in states) else merged(states),
        )

    def _identity(self) -> LoaderRecord:
        return LoaderRecord(self._turns, self._num_samples, self._rows, self._ranks.num_data_ranks, self._sharded)

    def _own_state(self) -> JsonValue:
        """The loader's own state, encoded; None if it has none that can be saved."""
        if not isinstance(self._loader, StatefulLoader) or self._last is None:
            return None
        try:
            return encode(self._loader.state_dict())
        except NotPlain as problem:
            self._report(
                f"the loader's own state is not kept ({problem}): a resumed run goes through its batches again"
            )
            return None

    def resume(self, state: DataState, saved: LoaderRecord, *, allow_changed: bool) -> None:
        """Go to the position of a checkpoint; all ranks call it.

        Args:
            state: the position in the data.
            saved: the loader's record.
            allow_changed: go on even if the data has changed.

        Raises:
            CheckpointError: the data is not that of the checkpoint.
        """
        self._ready = None  # of an earlier `resume`
        now, rank = self._identity(), self._ranks.rank
        alike = saved.cut_alike(now)
        firsts, seen, states = (saved.first_batch, saved.seen, saved.states) if alike else ((), (), None)
        if states is not None and len(states) not in (1, now.ranks):
            states = None
        changes = saved.changes(now)
        if firsts and not changes and self._first_now() != of_rank(firsts, rank):
            changes.append("the first batch: other content")
        changes = list(dict.fromkeys(change for found in self._ranks.gather(changes) for change in found))
        if changes and not allow_changed:
            raise data_changed(changes)
        self._first = of_rank(firsts, rank) if firsts else ""
        done, left_over = divmod(state.rows_consumed, self._rows_per_turn)
        if left_over or (saved.sharded and not alike):
            self._report("batches or ranks are cut otherwise now: some rows of this epoch may come twice or not at all")
        if alike and len(saved.own_seeds) in (1, now.ranks) and of_rank(saved.own_seeds, rank) != self._draws.own_seeds:
            self._report("a generator that the loader holds was seeded otherwise: what it draws from here on is new")
        if states is not None and not changes and isinstance(self._loader, StatefulLoader):
            self._ready = None
            self._restore(self._loader, decode(of_rank(states, rank)), done)
            self._seen = of_rank(seen, rank) if seen else ""
            self._ready = state.epoch, done, self._pass(state.epoch, done)
        elif done:
            self._report(
                f"the loader keeps no state: going through the first {done} batches of epoch {state.epoch} again"
            )
            expected = of_rank(seen, rank) if seen and not changes else ""
            differs = self._replay(state.epoch, done) != expected and bool(expected)
            self._check_same(state.epoch, done, differs, allow_changed)
        elif state.epoch and firsts and not changes:  # no batch of this epoch shows whether it would be the same
            self._check_same(state.epoch, done, self._first_now() != self._first, allow_changed)
        self._resumed = replace(now, first_batch=firsts, seen=seen, own_seeds=saved.own_seeds, states=states)

    def _restore(self, loader: StatefulLoader, state: object, done: int) -> None:
        """Restore the loader's own state."""
        loader.load_state_dict(state)
        if not isinstance(loader, DataLoader):
            return
        if not done:  # the state is of the end of a pass; the next one's order comes from the epoch, not from the state
            iter(loader)
        if loader.num_workers and (done or loader.persistent_workers):
            self._report(
                "the loader's state does not hold what its processes draw: a random transform goes on otherwise"
            )

    def _first_now(self) -> str:
        """A hash of the current first batch of the first epoch; `_enter` may go on behind it."""
        batches = self._pass(0)
        batch = next(batches, None)
        if batch is None:
            return ""
        self._ready = 0, 1, batches
        return fingerprint(batch)

    def _replay(self, epoch: int, done: int) -> str:
        """Iterate over an epoch's first batches again; returns their hash."""
        batches = self._enter(epoch, done)
        self._ready = epoch, done, batches
        return self._seen

    def _check_same(self, epoch: int, done: int, differs: bool, allow_changed: bool) -> None:
        """Refuse a loader that yields other batches now than before on any rank; all ranks call it."""
        if not self._ranks.largest(float(differs)):
            return
        if not allow_changed:
            raise other_batches(epoch, done)
        self._report(f"{what_differs(epoch, done)} (allowed by runner.allow_changes)")
