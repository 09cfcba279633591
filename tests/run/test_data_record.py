"""What a run records of its data: dropped rows, reasoning that is left out, the loss of each source, and its end."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr
from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import shardtune
from shardtune.errors import ConfigError, DataError, ParallelError
from shardtune.run.dry_run import dry_run, preview
from tests.support.tiny_run import Tiny, lines, make_tiny, rows, train_on_ranks, write_rows

pytestmark = pytest.mark.lengthy


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"), save_interval=-1)


def logged(job: Any, *arguments: Any, **more: Any) -> str:
    out = io.StringIO()
    with redirect_stderr(out):
        job(*arguments, **more)
    return out.getvalue()


def test_dropped_rows_are_all_in_a_file_and_counted_in_the_manifest(tiny: Tiny) -> None:
    bad = [{"prompt": "a", "completion": ""}] * 120
    long = [{"prompt": "say", "completion": "x" * 200}] * 3
    file = write_rows(tiny.folder / "mixed.jsonl", [*rows(6), *bad, *long])
    evaluation = write_rows(tiny.folder / "mixed_eval.jsonl", [*rows(2), *long])
    recipe = tiny.recipe(
        "dropped",
        runner__max_steps=1,
        data__train_data_paths=str(file),
        data__eval_data_paths={"math": str(evaluation)},
        data__on_bad_row="skip",
        data__max_bad_rows=200,
        data__on_too_long="drop",
    )
    told = logged(shardtune.train, recipe)
    run = tiny.run("dropped")
    found = [json.loads(line) for line in (run / "dropped_rows.jsonl").read_text().splitlines()]
    assert f"126 rows are not trained or evaluated on: {run / 'dropped_rows.jsonl'}" in told
    assert [row["row"] for row in found if row["set"] == "train"] == list(range(7, 130))
    causes = [(row["set"], row["cause"]) for row in found]
    assert [causes.count(one) for one in (("train", "bad"), ("train", "too_long"), ("eval/math", "too_long"))] == [
        120,
        3,
        3,
    ]
    assert found[0] == {
        "set": "train",
        "source": "mixed",
        "file": str(file),
        "row": 7,
        "cause": "bad",
        "reason": "the completion is empty",
    }
    outcomes = json.loads((run / "manifest.json").read_text())["data"]["outcomes"]
    assert outcomes["train"] == [
        {"source": "mixed", "file": str(file), "rows": 129, "kept": 6, "too_long": 3, "bad": 120}
    ]
    assert outcomes["eval/math"][0]["too_long"] == 3


def thinking(number: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"{index}?"},
                {"role": "assistant", "content": "Yes.", "reasoning_content": "so it is"},
            ]
        }
        for index in range(number)
    ]


def test_left_out_reasoning_is_refused_or_counted_at_start(tiny: Tiny) -> None:
    """Tiny's template prints no reasoning: 8 of 13 tokens of each answer (8 letters; 4 letters and the end of turn)."""
    file = tiny.folder / "thinking.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in thinking(4)))
    recipe = tiny.recipe("thinking", runner__max_steps=1, data__train_data_paths=str(file))
    with pytest.raises(DataError, match=r"8 of the row's 13 tokens") as caught:
        shardtune.train(recipe)
    assert caught.value.where == f"{file}: row 1"
    assert not tiny.run("thinking").exists()
    template = tiny.folder / "thinking.jinja"
    own = AutoTokenizer.from_pretrained(recipe["actor"]["model"]["model_path"])
    opened = "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}{%- endif %}"
    head, _, tail = own.chat_template.rpartition("{% endif %}")
    template.write_text(f"{head}{opened}{tail}")
    overrides = ("data.thinking=template", f"data.chat_template={template}")
    with pytest.raises(DataError, match="opens an answer otherwise for generation"):
        shardtune.train(recipe, *overrides)
    told = logged(shardtune.train, recipe, *overrides, "data.template_kwargs={enable_thinking: false}")
    of_final = AutoTokenizer.from_pretrained(tiny.run("thinking") / "final")
    asked = [{"role": "user", "content": "1?"}]
    for given in ({}, {"enable_thinking": True}):  # prompts of a server are those of training
        prompt = of_final.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, **given)
        assert prompt.endswith("<|im_start|>assistant\n" + "<think>\n" * len(given))
    answers = partial(shardtune.load_run(tiny.run("thinking")).generate, "1?", max_new_tokens=1)
    assert answers() == answers(template_kwargs={"enable_thinking": False})
    with pytest.raises(DataError, match="does not read the argument 'thinking'"):
        answers(template_kwargs={"thinking": 1})
    share = "4 of 4 rows trained without reasoning that they have (32 of 52 tokens to be trained, 61.5%)"
    assert share in told
    outcomes = json.loads((tiny.run("thinking") / "manifest.json").read_text())["data"]["outcomes"]
    assert (outcomes["train"][0]["left_out"], outcomes["train"][0]["left_out_tokens"]) == (4, 32)
    shown = logged(preview, recipe, "data.thinking=keep", rows=1)
    assert "⟦<think>\nso it is\n</think>\n\nYes.<|im_end|>⟧" in shown


def test_tokens_and_windows_give_the_loss_of_transformers(tiny: Tiny) -> None:
    """Rows with `input_ids` and `labels`, padded, those with a mask, and long ones in windows of 8 with a stride of 5;
    in fp64, against the model of transformers on each window."""
    model = tiny.recipe("tokens")["actor"]["model"]["model_path"]
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    tokens = [[(7 * row + 3 * place) % 40 + 5 for place in range(length)] for row, length in enumerate((6, 8, 9, 21))]
    given: list[dict[str, Any]] = [{"input_ids": ids, "labels": [-100, *ids[1:3], -100, *ids[4:]]} for ids in tokens]
    given[0] = {name: [*values, 0, 0] for name, values in given[0].items()} | {"attention_mask": [1] * 6 + [0] * 2}
    given[0]["labels"][-2:] = [-100] * 2
    given[3] = {"input_ids": tokens[3], "assistant_masks": [0, 1, 1, 0] + [1] * 17}
    file = write_rows(tiny.folder / "tokens.jsonl", given)
    recipe = tiny.recipe(
        "tokens",
        runner__max_steps=1,
        runner__save_interval=-1,
        actor__model__precision="fp64",
        actor__micro_batch_size=2,
        actor__global_batch_size=8,
        data__train_data_paths=str(file),
        data__on_too_long="split",
        data__max_length=8,
        data__split_stride=5,
    )
    told = logged(shardtune.train, recipe)
    assert "tokens.jsonl: 2 of 4 rows split into windows of data.max_length: 8 (6 windows)" in told
    total, count = 0.0, 0
    for ids in tokens:
        for number, start in enumerate(range(0, max(1, len(ids) - 3), 5)):
            window = torch.tensor([ids[start : start + 8]])
            labels = [-100 if place in (0, 3) else ids[place] for place in range(len(ids))][start : start + 8]
            labels[: 3 if number else 0] = [-100] * (3 if number else 0)
            count += sum(one != -100 for one in labels)
            with torch.no_grad():  # the model's own loss is computed in fp32
                logits = plain(input_ids=window).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum"))
    assert count == sum(len(ids) - 2 for ids in tokens)  # every target once
    assert lines(tiny.run("tokens"))[0]["train/loss"] == pytest.approx(total / count, rel=1e-10)
    outcomes = json.loads((tiny.run("tokens") / "manifest.json").read_text())["data"]["outcomes"]["train"][0]
    assert (outcomes["rows"], outcomes["kept"], outcomes["split"], outcomes["windows"]) == (4, 8, 2, 6)


@pytest.fixture(scope="module")
def two_sources(tiny: Tiny) -> dict[str, Any]:
    """A recipe with two sources, in fp64."""
    words = write_rows(tiny.folder / "words.jsonl", rows(9, start=40))
    sums = write_rows(tiny.folder / "sums.jsonl", rows(12))
    return tiny.recipe(
        "sources",
        runner__max_steps=3,
        runner__max_epochs=1,
        runner__save_interval=-1,
        actor__model__precision="fp64",
        actor__micro_batch_size=2,
        data__train_data_paths=[{"path": str(words)}, {"path": str(sums)}],
    )


def test_the_loss_of_each_source_is_logged_and_changes_nothing(tiny: Tiny, two_sources: dict[str, Any]) -> None:
    """On one rank and on two, with several micro-batches: the means weighted by targets make up the loss."""
    shardtune.train(two_sources)
    one = lines(tiny.run("sources"))
    two_sources["runner"]["logger"]["experiment_name"] = "sources2"
    train_on_ranks(2, [two_sources])
    several = lines(tiny.run("sources2"))
    together = write_rows(tiny.folder / "together.jsonl", [*rows(9, start=40), *rows(12)])
    shardtune.train(two_sources, "runner.logger.experiment_name=together", f"data.train_data_paths={together}")
    plain = lines(tiny.run("together"))
    keys = ("train/words/loss", "train/sums/loss")
    assert len(one) == len(several) == 3
    for first, second, whole in zip(one, several, plain, strict=True):
        assert whole["train/loss"] == first["train/loss"]
        assert not any(key in whole for key in keys)
        for key in ("train/loss", *keys):
            assert first[key] == pytest.approx(second[key], rel=1e-12)
        low, high = sorted(first[key] for key in keys)
        assert low < first["train/loss"] < high


def test_why_a_run_ended_is_reported(tiny: Tiny) -> None:
    short = {"runner__max_epochs": 1, "runner__max_steps": 1000, "optim__lr_warmup_steps_ratio": 0.1}
    told = logged(shardtune.train, tiny.recipe("epochs", **short))
    assert "optim.lr_warmup_steps_ratio: 0.1 of 4 steps is none: there is no warm-up" in " ".join(told.split())
    limit = "runner.max_epochs: 1, which comes before runner.max_steps: 1,000"
    assert f"training ends after 4 steps by {limit}" in " ".join(told.split())  # a table, whose lines are wrapped
    assert f"ended after step 4: {limit}" in told
    assert json.loads((tiny.run("epochs") / "manifest.json").read_text())["finished"]["ended"] == limit
    told = logged(shardtune.train, tiny.recipe("steps", runner__max_steps=2, optim__lr_warmup_steps=9))
    assert "the warm-up takes 9 steps, and training ends after 2: optim.lr is not reached" in " ".join(told.split())
    assert "ended after step 2: runner.max_steps: 2\n" in told
    early = tiny.recipe(
        "early",
        runner__max_epochs=5,
        runner__val_check_interval=1,
        runner__early_stop={"enabled": True, "patience": 2, "min_delta": 100.0},
        data__eval_data_paths=str(tiny.folder / "eval.jsonl"),
    )
    told = logged(shardtune.train, early)
    assert "ended after step 3: eval/loss has not improved in 2 evaluations; the best, " in told
    assert "was at step 1 (runner.early_stop)" in told


def test_a_dry_run_refuses_a_monitor_that_is_never_measured(tiny: Tiny) -> None:
    recipe = tiny.recipe("monitor", data__eval_data_paths={"one": str(tiny.folder / "eval.jsonl")})
    for monitor in ("best.monitor=eval/other/loss", "early_stop={enabled: true, monitor: eval/other/loss}"):
        with pytest.raises(ConfigError, match="no evaluation of this run gives 'eval/other/loss'"):
            dry_run(recipe, f"runner.{monitor}", "runner.eval_interval=1")
    assert dry_run(recipe, "runner.best.monitor=eval/one/loss")["train/loss"] > 0


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["parallel.expert=2"], "declares no experts that could be spread over ranks"),
        (["parallel.sequence=2", "model.attn_implementation=sdpa"], "sdpa cannot share sequences among ranks"),
    ],
)
def test_a_dry_run_refuses_what_the_ranks_of_its_recipe_would_refuse(tiny: Tiny, keys: list[str], told: str) -> None:
    with pytest.raises(ParallelError, match=told):
        dry_run(tiny.recipe("ranks"), "runner.nproc_per_node=2", *keys)


@pytest.mark.parametrize("by", ["rows", "tokens"])
def test_a_dry_run_counts_the_tokens_to_come(tiny: Tiny, by: str) -> None:
    """Rows of very different lengths, the last epoch cut: the sum of what the run then logs."""
    changes: dict[str, Any] = {"runner__max_steps": 5} if by == "rows" else {"actor__global_batch_tokens": 90}
    if by == "tokens":
        changes |= {"actor__global_batch_size": None, "runner__max_steps": 20}
    recipe = tiny.recipe(f"tokens by {by}", data__eval_data_paths=str(tiny.folder / "eval.jsonl"), **changes)
    told = logged(dry_run, recipe)
    shardtune.train(recipe)
    found = lines(tiny.run(f"tokens by {by}"))
    assert f"to come: {len(found)} steps, {sum(line['train/tokens'] for line in found):,.0f} tokens" in told
    assert f"evaluation set eval, {tiny.folder / 'eval.jsonl'}:1:\n" in told


def test_a_preview_shows_evaluation_rows(tiny: Tiny) -> None:
    file = tiny.folder / "eval.jsonl"
    told = logged(preview, tiny.recipe(data__eval_data_paths={"math": str(file)}), rows=2)
    assert [f"evaluation set math, {file}:{row}:" in told for row in (1, 2, 3)] == [True, True, False]
    assert "⟦" in told.rpartition(f"{file}:2:")[2]


@pytest.mark.parametrize("job", [preview, dry_run])
def test_what_becomes_of_rows_is_shown_file_by_file_too(tiny: Tiny, job: Any) -> None:
    """As for rows that are tokenised whole."""
    file = write_rows(tiny.folder / "some.jsonl", [*rows(8), {"prompt": "a", "completion": ""}])
    keys = {"data__cache": "by_file", "data__on_bad_row": "skip", "runner__max_steps": 2}
    told = logged(job, tiny.recipe("shown by file", data__train_data_paths=str(file), **keys))
    assert f"data: {file}: 1 of 9 rows skipped, not usable: row 9 (the completion is empty)\n" in told
