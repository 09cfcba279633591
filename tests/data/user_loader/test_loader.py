"""A user's own loader: what a mean loss means as a sum, and which batch is whose."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from shardtune.data.loader.step_loader import DataState, Step
from shardtune.data.user_loader.batch import fingerprint, targets_of
from shardtune.data.user_loader.loader import BatchLoader
from shardtune.data.user_loader.position import LoaderRecord
from shardtune.errors import CheckpointError, ConfigError, DataError
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.weights import Weights
from shardtune.training.step import optimizer_step
from shardtune.training.train_output import TERM
from tests.parallel.test_fsdp2 import group
from tests.support.dist.ranks import run_ranks

ALONE = Ranks(0, 1, torch.device("cpu"))
BATCHES, ROWS = 7, 2


def batches(count: int = BATCHES) -> list[dict[str, torch.Tensor]]:
    """Batches of two rows with ragged numbers of targets; the fourth has none."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        labels = torch.randint(0, 9, (ROWS, 6), generator=generator)
        labels[torch.rand(labels.shape, generator=generator) < number / count] = -100
        if number == 3:
            labels[:] = -100
        made.append({"input_ids": torch.randint(0, 9, (ROWS, 6), generator=generator), "labels": labels})
    return made


def weigh(given: Sequence[Any]) -> list[Mapping[str, float]]:
    return [{TERM: targets_of(batch, shifted=False)} for batch in given]


def loader(
    items: Any = None,
    ranks: Ranks = ALONE,
    size: int = 4,
    *,
    sharded: bool = False,
    num_samples: int | None = None,
    said: list[str] | None = None,
) -> BatchLoader:
    told: list[str] = [] if said is None else said
    return BatchLoader.of(
        batches() if items is None else items,
        {"sharded": sharded, "num_samples": num_samples},
        ranks=ranks,
        global_batch_size=size,
        micro_batch_size=ROWS,
        weigh=weigh,
        seed=3,
        report=told.append,
    )


def one_epoch(made: BatchLoader) -> list[Step]:
    return list(islice(made.steps(DataState()), made.num_steps(0)))


@pytest.mark.parametrize("size", [2, 4, 10, 100])
def test_the_steps_that_are_left_are_those_to_come(size: int) -> None:
    made = loader(size=size)
    steps = one_epoch(made)
    assert [made.steps_left(step.state) for step in steps] == list(range(len(steps), 0, -1))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9)).double()


def mean_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """As models compute it: 0 / 0 where nothing is a target."""
    return nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def take_step(step: Step, model: nn.Module, ranks: Ranks) -> tuple[float, float, torch.Tensor]:
    """Loss, norm and (averaged over ranks by hand, as nothing is sharded here) gradient."""
    weights = Weights(model, model, "fp64", ALONE)
    kept: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def keep(*_: Any) -> None:
        kept.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))

    optimizer.register_step_pre_hook(keep)
    result = optimizer_step(
        lambda batch: mean_loss(model, batch.fields),
        step.micro_batches,
        step.denominators,
        weights,
        optimizer,
        ranks,
        draws=(0, 0, 0),
        clip=None,
    )
    gradient = kept[0]
    if ranks.mesh is not None:
        torch.distributed.all_reduce(gradient)
    return result.loss, result.gradient_norm, gradient


def big_batch(numbers: list[int]) -> tuple[float, torch.Tensor]:
    """Loss and gradient of some batches as one."""
    model = net()
    chosen = [batches()[number] for number in numbers]
    loss = mean_loss(model, {key: torch.cat([batch[key] for batch in chosen]) for key in chosen[0]})
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), torch.cat([gradient.flatten() for gradient in gradients])


def on_ranks(sharded: bool) -> list[tuple[float, torch.Tensor]]:
    """(loss, gradient) of each step of an epoch, each from the same weights."""
    ranks = group()
    items = batches()[ranks.rank :: ranks.world_size] if sharded else batches()
    made = loader(items, ranks, size=ROWS * ranks.world_size * 2, sharded=sharded)
    told = []
    for step in one_epoch(made):
        loss, _, gradient = take_step(step, net(), ranks)
        told.append((loss, gradient))
    return told


@pytest.mark.parametrize("sharded", [False, True], ids=["same batches everywhere", "sharded"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ragged_targets_give_the_loss_and_gradient_of_one_big_batch(ranks: int, sharded: bool) -> None:
    """Seven batches: the last step lacks some, and three ranks' sharded loaders do not even have as many."""
    cuts = {1: [[0, 1], [2, 3], [4, 5], [6]], 2: [[0, 1, 2, 3], [4, 5, 6]], 3: [[0, 1, 2, 3, 4, 5], [6]]}[ranks]
    told = [on_ranks(sharded)] if ranks == 1 else run_ranks(on_ranks, ranks, sharded)
    for steps in told:
        assert len(steps) == len(cuts)
        for (loss, gradient), numbers in zip(steps, cuts, strict=True):
            wanted_loss, wanted_gradient = big_batch(numbers)
            assert loss == pytest.approx(wanted_loss, abs=1e-12)
            torch.testing.assert_close(gradient, wanted_gradient, rtol=0, atol=1e-12)


# -- Resuming ----------------------------------------------------------------------------------------------------------


def noisy(items: list[int]) -> dict[str, torch.Tensor]:
    """A collate function that draws in this process."""
    return {"rows": torch.tensor(items), "noise": torch.rand(len(items))}


def plain(generator: torch.Generator | None = None, rows: int = 11, **options: Any) -> DataLoader:
    made: Any = list(range(rows))
    return DataLoader(made, batch_size=ROWS, shuffle=True, collate_fn=noisy, generator=generator, **options)


class Cursor:
    """A loader with a state of its own: each epoch it begins one row further on, which nobody could guess."""

    def __init__(self, rows: int = 11) -> None:
        self.rows, self.passes, self.place = rows, 0, 0

    def __len__(self) -> int:
        return -(-self.rows // ROWS)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        if self.place >= self.rows:  # the pass before has come to its end
            self.passes, self.place = self.passes + 1, 0
        while self.place < self.rows:
            rows = (torch.arange(self.place, min(self.place + ROWS, self.rows)) + self.passes) % self.rows
            self.place += ROWS
            yield {"rows": rows, "noise": torch.rand(len(rows))}

    def state_dict(self) -> dict[Any, Any]:
        return {"place": torch.tensor(self.place), 1: (self.passes, None)}

    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        self.place, self.passes = int(state_dict["place"]), state_dict[1][0]


class Deaf(Cursor):
    """Its state holds what JSON cannot."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self.place, self.passes = 0, 0
        yield from super().__iter__()

    def state_dict(self) -> dict[Any, Any]:
        return {"self": self}


def own_generator() -> DataLoader:
    return plain(torch.Generator().manual_seed(5))


def lasting() -> DataLoader:
    """Its processes, in which it draws, outlive an epoch."""
    return plain(num_workers=2, persistent_workers=True)


def sampler_in_a_sampler() -> DataLoader:
    rows: Any = list(range(11))
    sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(5))
    return DataLoader(rows, batch_sampler=BatchSampler(sampler, ROWS, drop_last=False), collate_fn=noisy)


class Drawing(Dataset[float]):
    """Draws from generators of its own."""

    def __init__(self, seed: int = 5) -> None:
        self.own = random.Random(seed)
        self.old = np.random.RandomState(seed)
        self.new = np.random.default_rng(seed)

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> float:
        return index + self.own.random() + float(self.old.random()) + float(self.new.random())


def drawing() -> DataLoader:
    return DataLoader(Drawing(), batch_size=ROWS, shuffle=True, collate_fn=noisy)


class Restored(DataLoader[Any]):
    """As torchdata's loader: a state is taken in at the next `iter`; one of a pass's end leaves the loader there."""

    generator: torch.Generator
    taken = 0
    given: dict[str, Any] | None = None

    def __iter__(self) -> Any:
        given, self.given = self.given, None
        if given is not None:
            self.generator.set_state(given["generator"])
        self.before = self.generator.get_state()
        source = super().__iter__()
        self.taken = 0 if given is None or given["taken"] == len(self) else given["taken"]
        for _ in islice(source, self.taken):
            pass
        return self._rest(source)

    def _rest(self, source: Iterator[Any]) -> Iterator[Any]:
        for batch in source:
            self.taken += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken, "generator": self.before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.given = state_dict


def restored() -> DataLoader:
    rows: Any = list(range(11))
    generator = torch.Generator().manual_seed(5)
    return Restored(rows, batch_size=ROWS, shuffle=True, collate_fn=noisy, generator=generator)


def same_steps(one: Sequence[Step], other: Sequence[Step]) -> bool:
    """Bitwise the same batches, at the same places."""
    return [(step.state, step.after) for step in one] == [(step.state, step.after) for step in other] and all(
        fingerprint(mine.fields) == fingerprint(theirs.fields)
        for step, twin in zip(one, other, strict=True)
        for mine, theirs in zip(step.micro_batches, twin.micro_batches, strict=True)
    )


def through_json(record: LoaderRecord) -> LoaderRecord:
    return LoaderRecord.from_json(json.loads(json.dumps(record.to_json())))


def resume_everywhere(make: str) -> list[list[str]]:
    """Stop after each of six steps, and go on with a new loader; returns what was said at each."""
    ranks, told = group(), []
    for number in range(1, 7):
        first = loader(globals()[make](), ranks, 4 * ranks.world_size)
        whole = first.steps(DataState())
        done = list(islice(whole, number))[-1]
        record = through_json(first.record())
        said: list[str] = []
        second = loader(globals()[make](), ranks, 4 * ranks.world_size, said=said)
        second.resume(done.after, record, allow_changed=False)
        assert second.record() == record or record.states is None
        assert same_steps(list(islice(second.steps(done.after), 4)), list(islice(whole, 4))), number
        told.append(said)
    return told


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "make",
    [
        "plain",
        "own_generator",
        pytest.param("lasting", marks=pytest.mark.slow),
        "sampler_in_a_sampler",
        "drawing",
        "restored",
        "Cursor",
        "Deaf",
    ],
)
def test_a_run_that_goes_on_sees_the_rest_with_the_same_draws(make: str) -> None:
    """Three steps an epoch on one rank: stops in the middle and at the end of one."""
    told = resume_everywhere(make)
    again = "the loader keeps no state: going through the first"
    if make in ("Cursor", "restored"):
        assert told == [[]] * 6
    else:
        assert [any(again in line for line in said) for said in told] == [True, True, False] * 2
    if make != "lasting":  # the ranks of a test may start no processes
        run_ranks(resume_everywhere, 2, make)


def test_an_epochs_order_is_its_own() -> None:
    steps = list(islice(loader(own_generator()).steps(DataState()), 6))
    first, second = (
        torch.cat([b.fields["rows"] for step in half for b in step.micro_batches]) for half in halves(steps)
    )
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(11))
    assert first.tolist() != second.tolist()
    other = next(loader(plain(torch.Generator().manual_seed(6))).steps(DataState()))
    assert not same_steps(steps[:1], [other])  # the user's own seed counts


def halves(steps: list[Step]) -> tuple[list[Step], list[Step]]:
    return steps[:3], steps[3:]


def test_samplers_are_told_the_epoch() -> None:
    told: list[int] = []

    class Told(list):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    list(islice(loader(Told(batches())).steps(DataState()), 5))
    assert told == [0, 1]


def test_a_state_that_cannot_be_kept_is_said() -> None:
    said: list[str] = []
    made = loader(Deaf(), said=said)
    next(made.steps(DataState()))
    assert made.record().states is None
    assert said == [
        "the loader's own state is not kept (its state holds a Deaf): a resumed run goes through its batches again"
    ]


@pytest.mark.parametrize(
    ("items", "num_samples", "says"),
    [
        (batches(6), 14, "batches of an epoch: 7 -> 6"),
        (batches(), 13, "num_samples: 14 -> 13"),
        (batches()[::-1], 14, "the first batch: other content"),
    ],
    ids=["fewer batches", "fewer samples", "other rows"],
)
def test_data_that_changed_is_refused_saying_what(items: Any, num_samples: int, says: str) -> None:
    first = loader(num_samples=14)
    state = next(first.steps(DataState())).after
    record = through_json(first.record())
    changed = loader(items, num_samples=num_samples)
    with pytest.raises(CheckpointError, match=f"not what this run was trained on so far:\n    {says}") as error:
        changed.resume(state, record, allow_changed=False)
    assert "runner.allow_changes=[data.train_data_paths]" in str(error.value)
    changed.resume(state, record, allow_changed=True)
    assert next(changed.steps(state)).state == state


def test_a_row_that_changed_among_those_trained_on_is_noticed() -> None:
    """Neither the first batch nor the last one that was trained on."""
    first = loader(num_samples=14)
    state = list(islice(first.steps(DataState()), 2))[-1].after
    record = through_json(first.record())
    items = batches()
    items[1]["input_ids"] = items[1]["input_ids"] + 1
    with pytest.raises(CheckpointError, match="the first 4 batches of epoch 0 are not those that were trained on"):
        loader(items, num_samples=14).resume(state, record, allow_changed=False)


def test_a_generator_that_is_not_seeded_is_mentioned() -> None:
    first = loader(DataLoader(Drawing(1), batch_size=ROWS, collate_fn=noisy))
    state = list(islice(first.steps(DataState()), 3))[-1].after
    said: list[str] = []
    second = loader(DataLoader(Drawing(2), batch_size=ROWS, collate_fn=noisy), said=said)
    with pytest.raises(CheckpointError, match="first batch"):
        second.resume(state, through_json(first.record()), allow_changed=False)
    second.resume(state, through_json(first.record()), allow_changed=True)
    assert said == ["a generator that the loader holds was seeded otherwise: what it draws from here on is new"]


def test_a_loader_that_yields_other_batches_when_it_is_gone_through_again_is_refused() -> None:
    class Whim(list):
        passes = 0

        def __iter__(self) -> Iterator[Any]:
            Whim.passes += 1
            yield from [self[0], *reversed(self[1:])] if Whim.passes > 1 else super().__iter__()

    first = loader(Whim(batches()))
    state = next(first.steps(DataState())).after
    with pytest.raises(CheckpointError, match="the first 2 batches of epoch 0 are not those that were trained on"):
        loader(Whim(batches())).resume(state, first.record(), allow_changed=False)


class Passes(list):
    """Its order depends on how often it was gone through, as that of a sampler that counts its epochs itself."""

    def __init__(self, items: list[Any]) -> None:
        super().__init__(items)
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter([self[(place + self.passes) % len(self)] for place in range(len(self))])


def test_what_a_loader_counts_itself_is_the_same_in_the_first_epoch_and_refused_later() -> None:
    """At the end of an epoch too, where no batch could be compared."""
    first = loader(Passes(batches()))
    whole = list(islice(first.steps(DataState()), 8))
    for number in (1, 2, 3, 4, 8, 9):
        first = loader(Passes(batches()))
        state = list(islice(first.steps(DataState()), number))[-1].after
        said: list[str] = []
        second, record = loader(Passes(batches()), said=said), through_json(first.record())
        if not state.epoch:
            second.resume(state, record, allow_changed=False)
            assert same_steps(list(islice(second.steps(state), 4)), whole[number : number + 4])
            continue
        done = state.rows_consumed // ROWS
        what = f"the first {done} batches of epoch" if done else "yields other batches each time it is gone through"
        with pytest.raises(CheckpointError, match=what):
            second.resume(state, record, allow_changed=False)
        second = loader(Passes(batches()), said=said)
        second.resume(state, record, allow_changed=True)
        assert what in said[-1]
        assert next(second.steps(state)).state == state


def test_a_record_is_kept_until_a_step_is_taken() -> None:
    first = loader()
    state = next(first.steps(DataState())).after
    record = first.record()
    second = loader()
    second.resume(state, record, allow_changed=False)
    assert second.record() == record
    next(second.steps(state))
    assert second.record() != record


# -- What is refused ---------------------------------------------------------------------------------------------------


def test_loaders_without_a_length_are_refused() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            yield from range(3)

    for items in (iter([]), DataLoader(Stream())):
        with pytest.raises(DataError, match="without a length"):
            loader(items)
    with pytest.raises(DataError, match="the loader has no batch"):
        loader([])


@pytest.mark.parametrize(
    ("length", "says"), [(9, "ended after 7 batches, its length is 9"), (5, "yields more batches")]
)
def test_a_loader_that_does_not_hold_its_length_is_an_error(length: int, says: str) -> None:
    class Odd(list):
        def __len__(self) -> int:
            return length

    with pytest.raises(DataError, match=says):
        list(islice(loader(Odd(batches())).steps(DataState()), 5))


def test_batches_larger_than_the_recipe_says_are_refused() -> None:
    large = [{"input_ids": torch.zeros(5, 3), "labels": torch.zeros(5, 3)}] * 2
    with pytest.raises(ConfigError, match=r"batches of 5 rows, actor\.micro_batch_size is 2") as error:
        next(loader(large).steps(DataState()))
    assert "batch_size=self.cfg.actor.micro_batch_size" in str(error.value)
    images = [{"pixel_values": torch.zeros(40, 3), "labels": torch.zeros(2, 3)}] * 2  # laid end to end
    assert next(loader(images).steps(DataState())).denominators == {TERM: 12.0}
    said: list[str] = []
    small = [{"labels": torch.zeros(1, 3)}] * 3
    next(loader(small, said=said).steps(DataState()))
    assert said == ["the loader yields batches of 1 row, actor.micro_batch_size is 2"]


def on_unlike_ranks(sharded: bool) -> str:
    """The first step where each rank's loader draws by itself, or where sharded ones are alike."""
    ranks = group()
    items = batches() if sharded or not ranks.rank else batches()[::-1]
    said: list[str] = []
    try:
        next(loader(items, ranks, sharded=sharded, said=said).steps(DataState()))
    except DataError as error:
        return str(error)
    return " ".join(said)


def test_ranks_that_do_not_see_what_they_should_are_told() -> None:
    for told in run_ranks(on_unlike_ranks, 2, False):
        assert "the loader yields other batches on each rank" in told
        assert '{"sharded": True}' in told
    for told in run_ranks(on_unlike_ranks, 2, True):
        assert told.endswith("begins with the same batch on every rank: rows come twice")


def test_a_step_is_checked_for_ranks_to_come() -> None:
    made = loader(size=12)
    made.check_ranks(3)
    with pytest.raises(ConfigError, match=r"12 is not divisible by micro_batch_size = 2 times 4 ranks") as error:
        made.check_ranks(4)
    assert "set actor.global_batch_size to 8 or 16, or actor.micro_batch_size to 1, or start 3 ranks" in str(
        error.value
    )
    loader(size=12, sharded=True).check_ranks(4)


def test_an_epoch_has_as_many_rows_as_announced() -> None:
    assert (loader(num_samples=13).num_samples, loader().num_samples) == (13, 14)


def test_a_sharded_loader_need_not_divide() -> None:
    said: list[str] = []
    made = loader(size=5, sharded=True, said=said)
    assert len(next(made.steps(DataState())).micro_batches) == 2
    assert said == ["a step holds 4 rows, the nearest to 5 that divides"]
