"""Scores of lm-evaluation-harness during training are those that it gives `final/`; training is as without it."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from shardtune.config import load_recipe
from shardtune.config.own_code import named_code
from shardtune.errors import ConfigError
from shardtune.evaluate.harness import scores
from shardtune.evaluate.harness_model import _WithoutBars
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.run_context import RunContext
from tests.support.dist.ranks import run_ranks
from tests.support.workspace import make_workspace, run_cli

CHOICE = """\
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choice.jsonl, train: FOLDER/choice.jsonl}}
test_split: test
fewshot_split: train
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """\
task: tiny_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choice.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
ANSWERS = """\
task: tiny_answers
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choice.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["zz"], max_gen_toks: 8, do_sample: false}
filter_list: [{name: all, filter: [{function: take_first}]}]
metric_list: [{metric: exact_match}]
"""
TASKS = {"choice": CHOICE, "rolling": ROLLING, "answers": ANSWERS}
OPTIONS = "eval.harness_options={num_fewshot: 1, limit: 7}"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_workspace(tmp_path_factory.mktemp("harness") / "work")
    questions = [
        {
            "question": f"What is {number}{'?' * (number % 3)}",
            "choices": [" one", " two plus", f" {number}"],
            "answer": number % 3,
            "text": f"{number} words are " * (number * 9 % 31 + 1),
        }
        for number in range(9)
    ]
    (folder / "choice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))
    return folder


def keys(work: Path) -> tuple[str, ...]:
    return (
        f"eval.harness=[{work}/choice.yaml, {work}/rolling.yaml, {work}/answers.yaml]",
        OPTIONS,
        "data.eval_data_paths=null",
    )


def reference(model: Path, work: Path, **model_args: Any) -> dict[str, Any]:
    """The harness's own results for a directory."""
    import lm_eval  # here, as what it imports takes a second
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    lm = HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=4, **model_args)
    found: Any = lm_eval.simple_evaluate(
        lm,
        tasks=[str(work / f"{name}.yaml") for name in TASKS],
        task_manager=TaskManager(include_defaults=False),
        num_fewshot=1,
        limit=7,
        bootstrap_iters=0,
    )
    return found


def agree(found: dict[str, float], results: dict[str, Any]) -> None:
    expected = {f"eval/{name}": value for name, value in scores(results).items()}
    assert expected.keys() == found.keys()
    assert len(expected) == 5
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


def answers(folder: Path) -> list[Any]:
    return [
        [line["resps"], line["target"]]
        for line in map(json.loads, (folder / "harness_tiny_answers.jsonl").read_text().splitlines())
    ]


def ready(recipe: str, given: tuple[str, ...], folder: str) -> SFTWorker:
    """The base model, ready to evaluate."""
    worker = SFTWorker(load_recipe(recipe, given), training=False, report=lambda text: None)
    worker.setup_evaluation(context=RunContext(episodes_dir=Path(folder)))
    return worker


def evaluated(recipe: str, given: tuple[str, ...], folder: str) -> dict[str, float]:
    """The scores of the base model, on this rank."""
    return ready(recipe, given, folder).run_eval()


@pytest.mark.slow
def test_two_ranks_score_as_the_harness_itself(work: Path, tmp_path: Path) -> None:
    """7 questions, one of which two ranks do not share; batches of 4; texts that are longer than the model takes."""
    results = reference(work / "model", work)
    found = run_ranks(evaluated, 2, str(work / "recipe.yaml"), keys(work), str(tmp_path), timeout=300)
    assert found[0] == found[1]
    agree(found[0], results)
    own = {line["doc_id"]: line["resps"] for line in results["samples"]["tiny_answers"]}
    assert [resps for resps, _ in answers(tmp_path)] == [own[number] for number in range(7)]
    assert any(text[0][0] for text in own.values())


@pytest.mark.lengthy
def test_training_is_as_without_and_final_scores_as_the_harness_itself(work: Path) -> None:
    given = [*keys(work), "runner.eval_interval=2", "runner.best.monitor=eval/tiny_choice/acc"]
    ended = run_cli("train", str(work / "recipe.yaml"), *given, f"runner.logger.log_path={work / 'runs'}")
    assert ended.code == 0, ended.err
    assert "it/s" not in ended.err
    place = ("runner.logger.experiment_name=plain", f"runner.logger.log_path={work / 'runs'}")
    plain = run_cli("train", str(work / "recipe.yaml"), *place, keys(work)[2])
    assert plain.code == 0, plain.err
    run = work / "runs" / "demo"
    file = "final/model.safetensors"
    weights, without = load_file(run / file), load_file(work / "runs" / "plain" / file)
    assert all(torch.equal(weights[name], without[name]) for name in weights)
    results = reference(run / "final", work)
    metrics = json.loads((run / "final" / "metrics.json").read_text())
    agree({name: value for name, value in metrics.items() if name.startswith("eval/")}, results)
    logged = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert logged["eval/tiny_choice/acc_norm"] == metrics["eval/tiny_choice/acc_norm"]
    kept = json.loads((run / "samples" / "step_2" / "harness.json").read_text())
    assert kept["results"]["tiny_choice"].keys() == results["results"]["tiny_choice"].keys()
    again = run_cli("eval", str(run))
    agree(json.loads(again.out), results)
    assert answers(run / "samples" / "final") == answers(run / "samples" / "step_2")


@pytest.mark.lengthy
def test_an_error_of_the_harness_ends_all_ranks(work: Path, tmp_path: Path) -> None:
    """With the generators of random numbers as they were, which the harness has seeded."""
    given = (*keys(work), "eval.harness_options={gen_kwargs: {max_gen_toks: 900}}")
    worker = ready(str(work / "recipe.yaml"), given, str(tmp_path))
    before = generators()
    with pytest.raises(ConfigError, match="900 tokens, and the model takes 256"):
        worker.run_eval()
    assert generators() == before
    assert run_ranks(problem_of, 2, str(work / "recipe.yaml"), given, str(tmp_path)) == ["ConfigError"] * 2


def generators() -> tuple[object, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def problem_of(recipe: str, given: tuple[str, ...], folder: str) -> str:
    try:
        evaluated(recipe, given, folder)
    except ConfigError as error:
        return type(error).__name__
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "sequence"])
def test_ranks_that_share_a_model_score_as_the_harness_itself(work: Path, tmp_path: Path, layout: str) -> None:
    results = reference(work / "model", work)
    given = (*keys(work), f"actor.parallel.{layout}=2")
    found = run_ranks(evaluated, 2, str(work / "recipe.yaml"), given, str(tmp_path), timeout=300)
    assert found[0] == found[1]
    agree(found[0], results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("lora", ["actor.model.is_lora=true", "actor.model.lora.init=gaussian", "actor.optim.lr=0.05"]),
        ("padded", ["actor.worker=sft_trainer"]),
        ("alone", ["actor.model.attn_implementation=eager"]),
    ],
)
def test_other_forms_of_training(work: Path, name: str, given: list[str]) -> None:
    place = (f"runner.logger.experiment_name={name}", f"runner.logger.log_path={work / 'runs'}")
    ended = run_cli("train", str(work / "recipe.yaml"), *keys(work), *given, *place)
    assert ended.code == 0, ended.err
    final = work / "runs" / name / "final"
    results = reference(work / "model", work, peft=str(final)) if name == "lora" else reference(final, work)
    metrics = json.loads((final / "metrics.json").read_text())
    agree({key: value for key, value in metrics.items() if key.startswith("eval/")}, results)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["eval.harness=[FOLDER/absent.yaml]"], "there is no .*absent.yaml"),
        (["eval.harness=[FOLDER/broken.yaml]"], "the task .*broken.yaml cannot be loaded"),
        (["eval.harness=[FOLDER/choice.yaml]", "eval.harness_options={fewshot: 5}"], "fewshot.* is none of limit"),
        (["eval.harness=[FOLDER/choice.yaml]", "eval.harness_options={limit: many}"], "limit is 'many'"),
        (["eval.harness_options={limit: 5}"], "no effect without eval.harness"),
        (["eval.harness=[FOLDER/choice.yaml]", "model.model_type=vision_language"], "takes images"),
        (["eval.harness=[FOLDER/choice.yaml, FOLDER/choice.yaml]"], "choice.yaml"),
        (
            ["eval.harness=[FOLDER/choice.yaml]", "runner.best.monitor=eval/tiny_choice/f1"],
            "use one of .*eval/tiny_choice/acc",
        ),
    ],
)
def test_mistakes_end_before_training(work: Path, given: list[str], message: str) -> None:
    text = CHOICE.replace("FOLDER/choice.jsonl", str(work / "nothing.jsonl"))
    (work / "broken.yaml").write_text(text)
    name = "runner.logger.experiment_name=mistaken"
    typed = [text.replace("FOLDER", str(work)) for text in given]
    ended = run_cli("train", str(work / "recipe.yaml"), *typed, name, f"runner.logger.log_path={work / 'runs'}")
    assert ended.code == 2
    assert re.search(message, " ".join(ended.err.split())), ended.err
    assert not (work / "runs" / "mistaken").exists()


def test_a_task_of_ones_own_is_code(work: Path) -> None:
    """A YAML file may name functions of a Python file: it runs in another's run directory only with consent."""
    recipe = load_recipe(str(work / "recipe.yaml"), [f"eval.harness=[{work}/choice.yaml, hellaswag]"])
    assert named_code(recipe) == {str(work / "choice.yaml"): "eval.harness"}


def test_scores_have_no_standard_errors() -> None:
    results = {
        "results": {"a": {"alias": "a", "acc,none": 0.5, "acc_stderr,none": 0.1, "f1,strict": 1, "x,none": "N/A"}},
        "groups": {"g": {"acc,none": 0.25}},
    }
    assert scores(results) == {"a/acc": 0.5, "a/f1/strict": 1.0, "g/acc": 0.25}


def test_progress_bars_alone_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    passed = _WithoutBars(sys.stderr)
    for text in ("before\n", "\r 50%|█████     | 1/2 [00:00<00:00, 10.1it/s]", "\n", "line", "\n", "\r\x1b[2Kstatus"):
        passed.write(text)
    assert capsys.readouterr().err == "before\nline\n\r\x1b[2Kstatus"
