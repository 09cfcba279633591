"""The claim that what a run leaves is the trained model for programs that know nothing of this package."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardtune.errors import counted
from shardtune.launch.module_process import module_command
from shardtune.verify.claims import plain_reader
from shardtune.verify.claims.checkpoints import gap_of
from shardtune.verify.claims.short_runs import ShortRuns
from shardtune.verify.result import Failed

EXACT = 1e-6
"""The difference allowed between logits, over the largest: both sides do the same arithmetic on the same weights."""
REORDERED = 1e-4
"""The same where an adapter is added to the weights on one side only, in fp32."""
MERGED = 1e-6
"""The difference allowed between merged weights and those that PEFT merges, over the largest of a tensor."""
TIE = 1e-5
"""Two tokens whose logits differ by less, over the largest, are equally likely: either may be the answer."""
TITLES = {"final": "final/", "exported": "an exported directory", "merged": "one with the adapter merged"}
REMEDY = (
    "look at what of yours writes or changes files of the model: a plugin, an override of save_pretrained, a model "
)
REMEDY += "or tokenizer class; if there is nothing, please report this with the output of shardtune env"
TOKENS = "input_ids"
"""The one input of a row that is not made of its images."""
Part = dict[str, Any]


def check_export(runs: ShortRuns) -> str:
    """What a run leaves and exports, read by transformers and PEFT alone, is the trained model."""
    run = runs.uninterrupted("whole")
    folder = runs.folder / "export"
    folder.mkdir()
    own_command = module_command("shardtune.run.facts.facts", str(run.directory), str(folder))
    runs.program("export", own_command, remedy="shardtune export RUN DIRECTORY shows the same error")
    runs.program(
        "what plain transformers reads",
        [sys.executable, "-P", str(Path(plain_reader.__file__)), str(folder)],
        remedy=REMEDY,
    )
    return compared(torch.load(folder / "own.pt"), torch.load(folder / "plain.pt"))


def compared(own: Part, found: Mapping[str, Part]) -> str:
    """What plain programs found in directories beside what the trained model gives, in a sentence.

    Args:
        own: what `shardtune/run/facts` writes.
        found: what `plain_reader.py` writes.

    Raises:
        Failed: with the first difference.
    """
    notes, seen = list(own["notes"]), dict[str, str]()
    apart = _largest_gap(own["directories"], found)
    for name, plain in found.items():
        directory, title = own["directories"][name], TITLES[name]
        seen |= _same_weights(title, directory, plain)
        seen |= _same_labels(title, directory, plain)
        seen |= _same_logits(title, directory, plain, apart)
        if own["text"] is not None:
            seen |= _same_text(title, own["text"], plain["text"])
        if "answers" in plain:
            seen |= _same_answers(title, own, plain, only_adapter=directory["adapter"])
        seen |= _same_inputs(title, own["inputs"], plain.get("inputs"), notes)
    if own["unusable"] is not None:
        raise _differs("final/", f"cannot be loaded by shardtune: {own['unusable']}", "weights")
    in_files = all(part["kind"] == "files" for part in own["directories"].values())
    how = "read by safetensors" if in_files else "loaded by transformers"
    how += " and PEFT" if "merged" in found and not in_files else ""
    places = ", ".join(TITLES[name] for name in found)
    left_out = f"; not compared: {'; '.join(dict.fromkeys(notes))}" if notes else ""
    return f"{places}, {how} without shardtune: {', '.join(seen.values())}{left_out}"


def _same_weights(title: str, own: Part, plain: Part) -> dict[str, str]:
    """Tensors, bit by bit."""
    for name in plain.get("missing", ()):
        if name in (own.get("tensors") or {}):
            raise _differs(title, f"has no weight {name}, which transformers fills with random numbers", name)
    for name, (there, here) in plain.get("shapes", {}).items():
        raise _differs(title, f"has the weight {name} in the shape {[*there]} and not {[*here]}", name)
    if own.get("shared") is not None and own["shared"] != plain["shared"]:
        apart = [group for group in own["shared"] if group not in plain["shared"]]
        what = (
            f"{' and '.join(apart[0])} are one tensor in training" if apart else f"{plain['shared'][0]} are one tensor"
        )
        raise _differs(title, f"ties other weights: {what}{' and two there' if apart else ' there'}", "config.json")
    mine, its = own.get("tensors"), plain.get("tensors")
    if own.get("loaded_otherwise") is not None:
        name = own["loaded_otherwise"]
        raise _differs(title, f"gives another {name} by safetensors.torch.load_model than the trained one", name)
    gap, name = plain.get("merge", (0.0, ""))
    if gap > MERGED:
        raise Failed(
            f"the merged weights {name} differ from those that PEFT merges by {gap:.2g} of their size",
            where=f"one with the adapter merged: {name}",
            remedy=REMEDY,
        )
    if mine is None or its is None:
        return {}
    differing = sorted(mine.keys() ^ its.keys())
    if differing:
        where = "the model has and it lacks" if differing[0] in mine else "it has and the model lacks"
        raise _differs(title, f"has other tensors: {where} {differing[0]}", differing[0])
    differing = sorted(name for name in mine if tuple(mine[name]) != tuple(its[name]))
    if differing:
        name = differing[0]
        kinds = f" ({mine[name][0]} and {its[name][0]})" if mine[name][0] != its[name][0] else ""
        what = f"{len(differing)} of {len(mine)} tensors have other bits than the trained ones, {name} first{kinds}"
        raise _differs(title, f"is not the trained model: {what}", name)
    kind = "tensors of the adapter" if own["adapter"] else "tensors"
    return {kind: f"{len(mine)} {kind} bit by bit"}


def _largest_gap(own: Mapping[str, Part], found: Mapping[str, Part]) -> float:
    """The largest difference of logits in all directories, see `gap_of`."""
    pairs = [
        zip(own[name]["logits"], plain["logits"], strict=True) for name, plain in found.items() if "logits" in plain
    ]
    return max((gap_of(mine, its) for logits in pairs for mine, its in logits), default=0.0)


def _same_labels(title: str, own: Part, plain: Part) -> dict[str, str]:
    """The names of the classes of a classifier, in their order."""
    mine, its = own.get("labels") or {}, plain.get("labels") or {}
    if not mine or mine == its:
        return {}
    number = next(number for number in [*mine, *its] if mine.get(number) != its.get(number))
    what = f"calls class {number} {its.get(number)!r}, which is {mine.get(number)!r} in training"
    raise _differs(title, what, "config.json: id2label")


def _same_logits(title: str, own: Part, plain: Part, largest: float) -> dict[str, str]:
    """Logits on rows of the recipe."""
    if "logits" not in own:
        return {}
    close = REORDERED if own["reordered"] else EXACT
    for number, (mine, its) in enumerate(zip(own["logits"], plain["logits"], strict=True), 1):
        gap = gap_of(mine, its)
        if not gap <= close:
            raise _differs(
                title, f"gives other logits on row {number} than the trained model: they differ by {gap:.2g}", "logits"
            )
    exact = f"within {largest:.1g}" if largest else "the same bits"
    return {"logits": f"logits on {counted(len(own['logits']), 'row')} {exact}"}


def _same_answers(title: str, own: Part, plain: Part, *, only_adapter: bool) -> dict[str, str]:
    """Greedy answers, and the tokens at which a model stops."""
    stops = plain["stops"] if isinstance(plain["stops"], list) else [plain["stops"]]
    lacking = [token for token in own["stops"] if token not in stops]
    if lacking and not only_adapter:  # an adapter's directory has no settings of generation that PEFT reads
        raise _differs(title, f"does not stop at token {lacking[0]}, which ends a trained answer", "eos_token_id")
    further = [token for token in stops if token is not None and token not in own["may_stop"]]
    if further:
        what = f"stops at token {further[0]} too, which ends no answer of the base model and no trained one"
        raise _differs(title, what, "eos_token_id")
    for number, (mine, (its, worse)) in enumerate(zip(own["answers"], plain["answers"], strict=True), 1):
        if mine != its and not worse <= TIE:
            place = next((i for i, pair in enumerate(zip(mine, its, strict=False)) if pair[0] != pair[1]), "the end")
            raise _differs(
                title,
                f"answers prompt {number} otherwise than shardtune: token {place}, logits {worse:.2g} apart",
                "answers",
            )
    count = len(own["answers"])
    return {"answers": f"{count} greedy answers alike"} if count else {}


def _same_text(title: str, own: Part, plain: Part) -> dict[str, str]:
    """Tokens of texts, special tokens, rendered conversations."""
    if own["special"] != plain["special"]:
        name = next(
            n for n in {**own["special"], **plain["special"]} if own["special"].get(n) != plain["special"].get(n)
        )
        what = f"{name} {own['special'].get(name, 'none')} in training and {plain['special'].get(name, 'none')} there"
        raise _differs(title, f"has another special token: {what}", "tokenizer_config.json")
    for mine, its in zip(own["conversations"], plain["conversations"], strict=True):
        if mine != its:
            place = next((i for i, pair in enumerate(zip(mine, its, strict=False)) if pair[0] != pair[1]), -1)
            at = len(mine) if place < 0 else place
            shown = f"{mine[at : at + 30]!r} in training and {its[at : at + 30]!r} there"
            raise _differs(title, f"renders a conversation otherwise: at character {at} {shown}", "chat_template.jinja")
    if (own["template"] or None) != (plain["template"] or None):
        raise _differs(title, "has another chat template than training", "chat_template.jinja")
    for number, (mine, its) in enumerate(zip(own["ids"], plain["ids"], strict=True), 1):
        if mine != its:
            raise _differs(title, f"splits text {number} into other tokens: {mine[:8]} and {its[:8]}", "tokenizer.json")
    rendered = f" and {len(own['conversations'])} rendered conversations" if own["conversations"] else ""
    return {"text": f"the tokens of {len(own['ids'])} texts{rendered} alike"}


def _same_inputs(
    title: str, own: Sequence[Mapping[str, torch.Tensor]], plain: object, notes: list[str]
) -> dict[str, str]:
    """What the processor makes of images."""
    if not own or plain is None:
        return {}
    if isinstance(plain, str):
        notes.append(f"the processor's inputs, as transformers cannot load it here ({plain.strip().splitlines()[0]})")
        return {}
    assert isinstance(plain, list)
    both = {name for mine, its in zip(own, plain, strict=True) for name in mine.keys() & its.keys()}
    lacking = sorted({name for mine in own for name in mine} - both)
    if not both - {TOKENS}:
        notes.append(f"the processor's inputs, as {title} makes no {' and no '.join(lacking)}")
        return {}
    for number, (mine, its) in enumerate(zip(own, plain, strict=True), 1):
        for name, tensor in mine.items():
            if name in its and not gap_of(tensor, its[name]) <= EXACT:
                what = f"makes other {name} of row {number} than training: {gap_of(tensor, its[name]):.2g} apart"
                raise _differs(title, what, "processor_config.json")
    return {"inputs": f"the processor's inputs for {counted(len(own), 'row')} with images alike"}


def _differs(title: str, what: str, where: str) -> Failed:
    return Failed(f"{title} {what}", where=f"{title}: {where}", remedy=REMEDY)
