"""Mixtures of data sets that alignment-handbook and open-r1 write beside the keys of TRL."""

from __future__ import annotations

from collections.abc import Mapping

from shardtune.config.foreign.conversion import Conversion, Kind
from shardtune.config.foreign.rows import EVAL, TRAIN, as_entries, entry, hold_out, split_of
from shardtune.config.foreign.values import listed, number

MIXTURE, MIXER = "dataset_mixture", "dataset_mixer"
SPLITS, CONFIGS = "dataset_splits", "dataset_configs"
READ = ("id", "config", "split", "weight")
OF_EACH = "the same rows in every epoch there, a share that is drawn anew in each here"


def mixture(c: Conversion, evaluates: bool) -> bool:
    """Read the mixture of a configuration.

    Args:
        c: the conversion.
        evaluates: whether there are evaluations.

    Returns:
        whether there is one, which replaces `dataset_name`.
    """
    if c.has(MIXTURE):
        _of_list(c)
    elif c.has(MIXER):
        _of_names(c, evaluates)
    else:
        return False
    return True


def _of_list(c: Conversion) -> None:
    """`dataset_mixture`: a list of data sets, of which rows are held out for evaluation."""
    sets = [one for one in listed(c.get(f"{MIXTURE}.datasets")) if isinstance(one, Mapping)]
    entries = [_entry(c, f"{MIXTURE}.datasets[{place}]", one) for place, one in enumerate(sets)]
    if entries:
        c.put(TRAIN, as_entries(entries), comment=f"{MIXTURE}.datasets")
    c.not_needed("runner.seed is the seed of everything", f"{MIXTURE}.seed")
    hold_out(c, f"{MIXTURE}.test_split_size", entries)
    for name in [name for name in c.given if name.startswith(f"{MIXTURE}.") and name not in c.outcomes]:
        c.record(name, Kind.UNKNOWN, f"no key of {MIXTURE} that is known here")


def _entry(c: Conversion, name: str, given: Mapping[str, object]) -> dict[str, object]:
    options, lost = split_of(given.get("split"))
    weight = number(given.get("weight"))
    share = None if weight == 1 else given.get("weight")
    found = entry(c.path(given.get("id")), name=given.get("config"), weight=share, **options)
    for key in READ:
        if given.get(key) is not None:
            c.record(f"{name}.{key}", Kind.TRANSLATED, f"{TRAIN}: an entry's path, name, split or weight")
        else:
            c.record(f"{name}.{key}", Kind.DEFAULT, "nothing is set")
    c.not_needed("columns that no row format has are ignored", f"{name}.columns")
    if lost:
        c.missing(lost, f"{name}.split")
    if weight is not None and weight < 1:
        c.notes.append(f"{name}.weight: {OF_EACH}")
    return found


def _of_names(c: Conversion, evaluates: bool) -> None:
    """`dataset_mixer`: shares by names, of the splits whose names have `train` in them; `test` is for evaluation."""
    sets = c.get(MIXER)
    shares = {str(name): share for name, share in sets.items()} if isinstance(sets, Mapping) else {}
    splits = [str(one) for one in listed(c.get(SPLITS, ["train", "test"]))]
    configs = listed(c.get(CONFIGS))
    names = dict(zip(shares, configs, strict=False)) if len(configs) == len(shares) else {}
    training = [
        entry(c.path(name), name=names.get(name), split=split, weight=None if number(share) == 1 else share)
        for name, share in shares.items()
        for split in splits
        if "train" in split
    ]
    tests = [
        entry(c.path(name), name=names.get(name), split=split)
        for name in shares
        for split in splits
        if "train" not in split and "test" in split
    ]
    for ours, entries in ((TRAIN, training), (EVAL, tests if evaluates else [])):
        if entries:
            c.put(ours, as_entries(entries), comment=f"{MIXER}, {SPLITS}")
    for name in (MIXER, SPLITS, CONFIGS):
        c.record(name, Kind.TRANSLATED, f"{TRAIN}, {EVAL}: an entry's path, name, split or weight")
    if configs and not names:
        c.missing("an entry's name is its configuration: {path: …, name: …}", CONFIGS)
    if any((number(share) or 0.0) < 1 for share in shares.values()):
        c.notes.append(f"{MIXER}: a share below 1 is {OF_EACH}")
