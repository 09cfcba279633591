"""An audit finds what is planted in rows, and nothing else."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shardtune.batch import Sample
from shardtune.config import load_recipe
from shardtune.data.audit import audit as audit_module
from shardtune.data.audit import limits as limits_module
from shardtune.data.audit import scan
from shardtune.data.audit.audit import Options, _lengths, audit
from shardtune.data.audit.findings import Finding, Findings
from shardtune.data.audit.limits import check_limits
from shardtune.data.audit.near import NEAR, Comparison, sketches
from shardtune.data.audit.ngrams import Grams, common_text, mix
from shardtune.data.audit.padding import padding_avoided
from shardtune.data.cache.cache import build_dataset
from shardtune.data.cache.dataset import TokenDataset
from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.encoder import Encoder, FrameOptions, Row, frames_of
from shardtune.data.images.images import read_image, to_fields
from shardtune.data.prepare import PreparedData
from shardtune.data.sources.resolve import resolve_sources
from shardtune.errors import DataError
from tests.support.robot import save_episodes
from tests.support.tiny_run import CHATML, make_tokenizer

WORDS = [f"{a}{b}{c}" for a in "bdfgklm" for b in ("a", "e", "io", "u") for c in ("n", "rst", "l", "mp")]


def quiet(_: str) -> None:
    """Progress is not looked at."""


def sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words))


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **more}


def ordinary(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Different rows, all behind one long system prompt."""
    draw = random.Random(seed)
    system = {"role": "system", "content": "You answer in one sentence, politely, and never without an example."}
    rows = [chat(sentence(draw, 14), sentence(draw, 12)) for _ in range(count)]
    return [{"messages": [system, *row["messages"]]} for row in rows]


def changed(row: Mapping[str, Any], turn: int, old: int, word: str = "elephant") -> dict[str, Any]:
    """The row with one word of a turn replaced."""
    turns = [dict(message) for message in row["messages"]]
    words = turns[turn]["content"].split()
    words[old] = word
    turns[turn]["content"] = " ".join(words)
    return {"messages": turns}


@pytest.fixture
def prepare(tmp_path: Path, data) -> Callable[..., PreparedData]:
    """The prepared data of rows, by set; each set in a file, a list of lists in several."""

    def build(spec: Any, name: str, encoder: Encoder, **options: Any) -> TokenDataset:
        files = spec if isinstance(spec, list) and isinstance(spec[0], list) else [spec]
        paths: list[Path] = []
        for number, rows in enumerate(files):
            if isinstance(rows, Path):
                paths.append(rows)
                continue
            paths.append(tmp_path / f"{name}{number or ''}.jsonl")
            paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources = resolve_sources(
            [str(path) for path in paths], data, frames=frames_of(encoder), name_format=encoder.title, report=quiet
        )
        return build_dataset(sources, encoder, cache_dir=data.cache_dir, report=quiet, **options)

    def run(train: Any, encoder: Encoder | None = None, evals: Any = None, **options: Any) -> PreparedData:
        encoder = encoder or ChatEncoder(make_tokenizer(), CHATML, max_length=400)
        sets = {name: build(rows, name, encoder) for name, rows in (evals or {}).items()}
        return PreparedData(encoder, build(train, "train", encoder, **options), sets)

    return run


def resembled(finding: Finding | None) -> list[str]:
    """What the examples resemble, without the folder."""
    return [] if finding is None else [Path(one.other.row).name for one in finding.examples if one.other is not None]


def audited(prepared: PreparedData, **options: Any) -> Findings:
    return audit(prepared, replace(Options(), **options), None, quiet)


def places(found: Findings, kind: str, name: str = "train") -> list[str]:
    """The rows that are named as examples, without the folder."""
    return [Path(example.row).name for example in found.sets[name].findings[kind].examples]


@pytest.mark.lengthy
def test_what_is_planted_is_found(prepare) -> None:
    base = ordinary(60)
    train = [
        *base,
        base[3],  # 61, exactly
        changed(base[7], 1, 5),  # 62, another word in the question
        changed(base[8], 2, 5),  # 63, another word in the answer
        chat("What is your name?", "..."),  # 64
        chat("And yours, if I may ask?", ""),  # 65, bad
        chat("How long?", "long " * 100),  # 66, cut
        chat("long " * 100, "No."),  # 67, cut before the answer
        chat(base[9]["messages"][1]["content"], sentence(random.Random(5), 12)),  # 68, the question alone is the same
    ]
    held_out = ordinary(20, seed=1)
    math = [
        *held_out,
        base[11],  # 21, exactly
        changed(base[12], 2, 4),  # 22
        {"messages": [*base[13]["messages"][:2], {"role": "assistant", "content": sentence(random.Random(9), 12)}]},
    ]
    prepared = prepare(train, evals={"math": math, "other": ordinary(20, seed=2)}, on_bad_row="skip")
    found = audited(prepared)
    rows = found.sets["train"].findings
    assert places(found, "duplicates") == ["train.jsonl:61"]
    assert resembled(rows["duplicates"]) == ["train.jsonl:4"]
    assert sorted(places(found, "near_duplicates")) == ["train.jsonl:62", "train.jsonl:63"]
    assert sorted(resembled(rows["near_duplicates"])) == ["train.jsonl:8", "train.jsonl:9"]
    assert all(one.shared is not None and 0.7 <= one.shared < 1 for one in rows["near_duplicates"].examples)
    assert places(found, "near_empty") == ["train.jsonl:64"]
    assert places(found, "bad") == ["train.jsonl:65"]
    assert places(found, "truncated") == places(found, "untrained_end") == ["train.jsonl:66"]
    assert places(found, "no_target") == ["train.jsonl:67"]
    assert rows["near_empty"].examples[0].text.endswith("What is your name? assistant")
    assert rows["near_empty"].examples[0].trained == "..."
    counts = {kind: finding.count for kind, finding in rows.items()}
    expected = dict.fromkeys(counts, 1) | {"too_long": 0, "filtered": 0, "left_out": 0, "near_duplicates": 2}
    assert counts == expected
    assert rows["bad"].share == 1 / 68
    assert rows["duplicates"].share == 1 / 66

    math_found = found.contamination["eval/math"]
    assert [Path(one.row).name for one in math_found.exact.examples] == ["math.jsonl:21"]
    assert math_found.near is not None
    assert [Path(one.row).name for one in math_found.near.examples] == ["math.jsonl:22", "math.jsonl:23"]
    assert resembled(math_found.near) == ["train.jsonl:13", "train.jsonl:14"]
    assert math_found.total.count == 3
    assert found.contamination["eval/other"].total.count == 0
    assert found.sets["eval/math"].findings["duplicates"].count == 0

    total, train_rows = found.sets["train"].total, prepared.train
    assert total.tokens == int(train_rows.lengths.sum())
    assert total.trained_tokens == train_rows.term_weights["ce"].sum()
    lengths = found.sets["train"].lengths
    assert sum(lengths.counts) == len(train_rows)
    assert (lengths.shortest, lengths.longest) == (train_rows.lengths.min(), train_rows.lengths.max())
    assert _lengths(np.array([48, 10, 90, 52])).median == 50
    without = audited(prepared, near=False)
    assert "near_duplicates" not in without.sets["train"].findings
    assert without.contamination["eval/math"].total.count == 1
    assert any("--near off" in note for note in without.notes)


@pytest.mark.lengthy
def test_other_questions_on_one_long_text_are_neither_near_nor_contaminated(prepare) -> None:
    text = sentence(random.Random(8), 50)
    rows = [chat(f"{text} Who comes first?", "Peter and Mary."), chat(f"{text} Where is it?", "In Oslo, I think.")]
    asked = [chat(f"{text} And how does that story end, at last?", "It ends badly."), rows[0]]
    asked.append(chat(f"{text} Who comes first?", "Nobody knows that any more."))
    found = audited(prepare([*ordinary(12), *rows], evals={"math": asked}))
    assert found.sets["train"].findings["near_duplicates"].count == 0
    contamination = found.contamination["eval/math"]
    assert (contamination.exact.count, contamination.near and contamination.near.count) == (1, 1)
    assert Path(contamination.total.examples[1].row).name == "math.jsonl:3"


@pytest.mark.lengthy
def test_nothing_depends_on_how_rows_are_read(prepare, monkeypatch) -> None:
    """Small blocks, several sources and a view: the arrays are those of single rows."""
    base = ordinary(40)
    prepared = prepare([base[:15], [*base[15:], base[0], changed(base[20], 1, 3)]])
    whole = audited(prepared)
    monkeypatch.setattr(scan, "BLOCK_TOKENS", 300)
    monkeypatch.setattr(scan, "BLOCK_ROWS", 2)
    assert audited(prepared) == whole
    assert [one.kinds["duplicates"] for one in whole.sets["train"].sources.values()] == [0, 1]
    train, held_out = prepared.train.split_by_hash(0.4)
    for rows in (prepared.train, train, held_out):
        seen = []
        for start, block in rows.blocks(500, 3):
            for place in range(len(block)):
                sample = rows.row(start + place)
                span = slice(*block.offsets[place : place + 2].tolist())
                assert block.tokens[span].tolist() == sample.input_ids.tolist()
                assert block.trained[span].tolist() == (sample.loss_weights > 0).tolist()
                seen.append(start + place)
        assert seen == list(range(len(rows)))
        label, number = rows.locate(2).rsplit(":", 1)
        file = [one.label for one in rows.report.files].index(label)
        assert rows.find(file, int(number)) == 2
    assert train.find(0, 10_000) is None


def test_near_duplicates_are_those_of_a_comparison_of_all_pairs(prepare) -> None:
    draw = random.Random(3)
    base = ordinary(40, seed=4)
    more = [changed(row, draw.randrange(1, 3), draw.randrange(12), draw.choice(WORDS)) for row in base[:20]]
    more = [*more, *(changed(row, 2, 3, "perhaps") for row in more[:10])]
    prepared = prepare([*base, *more])
    rows = prepared.train
    compare = Comparison(rows, np.zeros(len(rows), np.uint64), common_text(rows)).similarity
    groups = list(range(len(rows)))
    for row in range(len(rows)):
        for other in range(row):
            if compare(row, other) >= NEAR:
                groups = [groups[other] if group == groups[row] else group for group in groups]
    expected = len(rows) - len(set(groups))
    assert expected > 20
    found = audited(prepared).sets["train"].findings
    assert found["near_duplicates"].count + found["duplicates"].count == expected


class Unending(ChatEncoder):
    """An encoder that does not train the end of a turn; a template without one is refused where rows are encoded."""

    def encode(self, row: Row) -> Sample:
        sample = super().encode(row)
        weights = np.where(np.isin(sample.input_ids, self.stop_token_ids), 0, sample.loss_weights).astype(np.float32)
        return replace(sample, loss_weights=weights)

    def cache_key(self) -> str:
        return f"unending {super().cache_key()}"


def test_short_rows_are_candidates_if_they_are_alike_and_not_otherwise() -> None:
    """12 n-grams in 64 bins: 11 that are the same nearly always give a band in common, 12 others nearly never do."""
    draw = np.random.default_rng(0)
    one = draw.integers(0, 2**63, (300, 12)).astype(np.uint64)
    near, other = one.copy(), draw.integers(0, 2**63, (300, 12)).astype(np.uint64)
    near[:, 3] = other[:, 3]

    def bands(hashes: np.ndarray) -> np.ndarray:
        rows = np.repeat(np.arange(300), 12)
        found, enough = sketches(Grams(mix(hashes.reshape(-1)), rows, np.ones(len(rows), bool)), 300)
        assert enough.all()
        return found

    common = [(bands(one) == bands(rows)).any(axis=1).sum() for rows in (near, other)]
    assert common[0] > 290
    assert common[1] < 10


def test_an_end_of_turn_that_is_not_trained_is_found(prepare) -> None:
    rows = ordinary(12)
    found = audited(prepare(rows, Unending(make_tokenizer(), CHATML, max_length=400)))
    assert found.sets["train"].findings["untrained_end"].count == 12
    assert places(found, "untrained_end")[0] == "train.jsonl:1"
    everything = ChatEncoder(make_tokenizer(), CHATML, max_length=400, train_on="all")
    assert audited(prepare(rows, everything)).sets["train"].findings["untrained_end"].count == 0
    cut = ChatEncoder(make_tokenizer(), CHATML, max_length=200, train_on="all")
    assert audited(prepare(rows, cut)).sets["train"].findings["untrained_end"].count == 12


class Pictures:
    """An encoder of a user's own: letters as tokens, and an image."""

    title = staticmethod(lambda row: "pictures")

    def encode(self, row: Row) -> Sample:
        ids = np.frombuffer(row["text"].encode(), np.uint8).astype(np.int32)
        weights = np.ones(len(ids), np.float32)
        fields = to_fields([read_image(row["image"], Path("/"))], 0) if "image" in row else {"x": np.array(row["x"])}
        return Sample(ids, weights, fields=fields, size=1)

    def fit(self, sample: Sample) -> Sample:
        return sample

    def weights(self, sample: Sample) -> Mapping[str, float]:
        return {"loss": 1.0}

    def at(self, folder: Path) -> Pictures:
        return self

    def cache_key(self) -> str:
        return "pictures"


def test_images_count_by_content(prepare, tmp_path: Path) -> None:
    for name, color in (("a", "red"), ("b", "red"), ("c", "blue")):
        Image.new("RGB", (8, 8), color).save(tmp_path / f"{name}.png")
    text = sentence(random.Random(0), 20)
    rows = [{"text": text, "image": str(tmp_path / f"{name}.png")} for name in "abc"]
    Image.new("RGB", (8, 8), "green").save(tmp_path / "d.png")
    held_out = [{"text": text[:-4] + "much", "image": str(tmp_path / f"{name}.png")} for name in "bd"]
    more = {"text": text[:-4] + "else", "image": rows[2]["image"]}
    found = audited(prepare([*rows, more], Pictures(), evals={"math": held_out}))
    near = found.contamination["eval/math"].near
    assert near is not None
    assert [Path(one.row).name for one in near.examples] == ["math.jsonl:1"]
    assert places(found, "duplicates") == ["train.jsonl:2"]
    assert places(found, "near_duplicates") == ["train.jsonl:4"]
    assert any("names no end-of-turn" in note for note in found.notes)
    assert "untrained_end" not in found.sets["train"].findings


def test_rows_of_fields_are_compared_by_them(prepare) -> None:
    rows = [{"text": "", "x": [1.5, 2.5]}, {"text": "", "x": [1.5, 2.0]}, {"text": "", "x": [1.5, 2.5]}]
    found = audited(prepare(rows, Pictures(), evals={"one": rows[1:2]}))
    assert places(found, "duplicates") == ["train.jsonl:3"]
    assert found.sets["train"].findings["duplicates"].examples[0].text == "x float64 [2]"
    assert found.contamination["eval/one"].total.count == 1
    assert found.sets["train"].total.trained_share is None
    assert set(found.sets["train"].total.kinds) & {"near_empty", "near_duplicates", "untrained_end"} == set()
    assert any("fields and no tokens" in note for note in found.notes)


class Frames(Pictures):
    """An encoder of robot data."""

    frames = FrameOptions(1)

    def encode(self, row: Row) -> Sample:
        return Sample(fields={"state": np.asarray(row["state"]), "actions": np.asarray(row["actions"])}, size=1)


def test_an_evaluation_frame_whose_episode_is_trained_is_contaminated(prepare, tmp_path: Path) -> None:
    one, other = save_episodes(tmp_path / "one", 3), save_episodes(tmp_path / "other", 2, seed=1)
    prepared = prepare(one, Frames(), evals={"same": one, "new": other})
    first, rest = prepared.train.select(np.array([0])), prepared.evals["same"].select(np.array([1]))
    found = audited(PreparedData(prepared.encoder, first, {"same": rest, "new": prepared.evals["new"]}))
    assert found.contamination["eval/same"].exact.count == 1
    assert found.contamination["eval/new"].total.count == 0
    assert any("robot data" in note for note in found.notes)


def test_padding_is_counted_over_an_epoch(prepare) -> None:
    rows = prepare([chat("a" * n, "b") for n in (1, 5, 2, 7)]).train
    recipe = load_recipe({"data": {"train_data_paths": "x", "shuffle": False}, "model": {"model_path": "m"}},
                         files_must_exist=False)  # fmt: skip
    found = padding_avoided(recipe, rows)
    assert (found.rows_per_micro_batch, found.padding) == (2, 4 + 5)
    assert found.tokens == int(rows.lengths.sum())
    assert found.saved == 9 / (9 + found.tokens)


# -- limits --------------------------------------------------------------------------------------------------------


def limited(data: Any, **limits: float) -> Any:
    return load_recipe(
        {
            "data": {"train_data_paths": "x", "audit": limits, "cache_dir": str(data.cache_dir)},
            "model": {"model_path": "m"},
        },
        files_must_exist=False,
    )


def test_limits_on_outcomes_cost_no_pass_over_rows(prepare, data, monkeypatch) -> None:
    prepared = prepare([*ordinary(7), chat("long " * 100, "No."), chat("?", "long " * 100), chat("?", "")],
                       on_bad_row="skip")  # fmt: skip
    monkeypatch.setattr(limits_module, "audit", lambda *_: pytest.fail("the rows were read"))
    check_limits(limited(data, max_dropped=0.2, max_truncated=0.125, max_without_target=0.1), prepared, quiet)
    with pytest.raises(DataError, match=r"dropped of the data is 0\.2 \(2 rows\), more than data\.audit\.max_dropped"):
        check_limits(limited(data, max_dropped=0.19), prepared, quiet)
    with pytest.raises(DataError, match=r"(?s)max_truncated: 0\.1.*train\.jsonl:9 \(\d+ tokens\)"):
        check_limits(limited(data, max_truncated=0.1), prepared, quiet)
    with pytest.raises(DataError, match=r"(?s)train\.jsonl:8 \(cut before the answer\).*data audit RECIPE"):
        check_limits(limited(data, max_without_target=0), prepared, quiet)


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        ({"max_duplicates": 0.04}, r"duplicates of the data is 0\.0\d+ \(1 row\).*train\.jsonl:21.* as .*jsonl:1$"),
        ({"max_near_duplicates": 0.04}, r"near duplicates .*train\.jsonl:22"),
        ({"max_near_empty": 0.0}, r"near empty .*train\.jsonl:23"),
        ({"max_contamination": 0.4}, r"contamination of the data is 0\.5 \(1 row\).*math\.jsonl:2"),
        ({"min_trained_share": 0.9}, r"the trained share of the data is 0\.\d+, less than"),
    ],
)  # fmt: skip
def test_each_limit_refuses_what_is_beyond_it(prepare, data, limit, says) -> None:
    base = ordinary(20)
    train = [*base, base[0], changed(base[4], 2, 3), chat("Yes?", "!")]
    prepared = prepare(train, evals={"math": [ordinary(1, seed=6)[0], base[5]]})
    with pytest.raises(DataError) as caught:
        check_limits(limited(data, **limit), prepared, quiet)
    assert re.search(says, str(caught.value), re.DOTALL | re.MULTILINE)
    name = next(iter(limit))
    check_limits(limited(data, **{name: 0.0 if name.startswith("min") else 0.6}), prepared, quiet)


@pytest.mark.lengthy
def test_an_audit_at_start_is_kept(prepare, data, monkeypatch) -> None:
    prepared, runs = prepare(ordinary(12), evals={"math": ordinary(2, seed=1)}), []
    original = audit_module.audit
    monkeypatch.setattr(limits_module, "audit", lambda *given: runs.append(1) or original(*given))
    for limits in ({"max_duplicates": 0.5}, {"max_untrained_ends": 0.1}, {"max_near_duplicates": 0.5}):
        for _ in range(2):
            check_limits(limited(data, **limits), prepared, quiet)
    assert len(runs) == 2  # with n-grams and without
    for kept in Path(data.cache_dir).glob("audits/*.json"):
        kept.write_text(kept.read_text().replace('"share": 0.0', '"share": 0.5'))
    check_limits(limited(data, max_duplicates=0.1), prepared, quiet)
    assert len(runs) == 3


def test_a_limit_on_what_rows_do_not_have_is_refused(prepare, data) -> None:
    fields = prepare([{"text": "", "x": [1.0]}], Pictures())
    for name, why in (("max_near_duplicates", "no tokens"), ("min_trained_share", "no tokens"),
                      ("max_contamination", "no evaluation rows")):  # fmt: skip
        with pytest.raises(DataError, match=f"data.audit.{name} has no meaning here.*{why}"):
            check_limits(limited(data, **{name: 0.5}), fields, quiet)
