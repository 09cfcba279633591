"""Mistakes in what is watched and matched, in plugins, and in runs that are to go on; and in the other commands."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from tests.support.bad_input.case import Case, Prepare, cut, going_on, remove, with_keys, write
from tests.support.workspace import make_model, make_tokenizer, rows, write_rows


def other_model(work: Path) -> None:
    make_model(259, hidden_size=16).save_pretrained(work / "other")
    make_tokenizer().save_pretrained(work / "other")


def torn_checkpoint(work: Path) -> None:
    file = next((work / "runs/done/checkpoints/global_step_2/model").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-64])


def other_data(work: Path) -> None:
    write_rows(work / "train.jsonl", rows(24, first=7))


def in_place_of(name: str) -> Prepare:
    """A directory where the run keeps a file or link."""

    def prepare(work: Path) -> None:
        place = work / "runs/done" / name
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
        place.mkdir(parents=True)

    return prepare


def foreign(work: Path) -> None:
    """The run's recipe names code that leaves a trace where it is executed."""
    (work / "theirs.py").write_text("from pathlib import Path\nPath('executed').touch()\n")
    config = work / "runs/done/config.yaml"
    values = yaml.safe_load(config.read_text())
    values["plugins"] = [str(work / "theirs.py")]
    config.write_text(yaml.safe_dump(values))


RUN: list[Case] = [
    going_on(
        "a directory named latest", says="checkpoints/latest is a directory", prepare=in_place_of("checkpoints/latest")
    ),
    going_on("a directory named best", says="checkpoints/best is a directory", prepare=in_place_of("checkpoints/best")),
    with_keys(
        "a metric nobody emits",
        "runner.best.monitor=eval/acuracy",
        says="eval/acuracy | runner.best.monitor | eval/token_accuracy",
    ),
    with_keys(
        "a metric of a set that is not there",
        "runner.early_stop={enabled: true, monitor: eval/math/loss}",
        "runner.eval_interval=1",
        says="eval/math/loss | runner.early_stop.monitor | eval/loss",
    ),
    with_keys(
        "an accuracy without answers",
        "runner.best.monitor=eval/eval_accuracy",
        says="eval/eval_accuracy | eval/loss | eval.generate",
    ),
    with_keys(
        "a pattern without a group",
        "eval.generate=true",
        "eval.answer_pattern='####'",
        says="'####' | eval.answer_pattern | at least one group",
    ),
    with_keys(
        "a pattern that does not compile",
        "eval.generate=true",
        "eval.answer_pattern='(a'",
        says="'(a' | eval.answer_pattern | does not compile",
    ),
    with_keys(
        "a matching function that is not there",
        "eval.generate=true",
        "eval.match=mine.py:same",
        says="'same' | mine.py | eval.match | equal",
        prepare=write("mine.py", "def equal(a, b): return a == b\n"),
    ),
    with_keys(
        "a matching function without a file",
        "eval.generate=true",
        "eval.match=mine.py:same",
        says="eval.match | mine.py | check the name",
    ),
    with_keys("a plugin that is not there", "plugins=[mine.py]", says="plugins | mine.py | check the name"),
    with_keys(
        "a plugin that does not import",
        "plugins=[mine.py]",
        says="mine.py | ImportError | mine.py:2 | plugins",
        prepare=write("mine.py", "\nfrom math import sine\n"),
    ),
    with_keys(
        "a plugin with a slip",
        "plugins=[mine.py]",
        says="mine.py | SyntaxError | plugins",
        prepare=write("mine.py", "def f(:\n"),
    ),
    with_keys(
        "a module nobody installed", "plugins=[never_heard_of]", says="never_heard_of | plugins | importable module"
    ),
    with_keys("a CUDA device that is not there", "runner.device=cuda", says="cuda | runner.device | auto"),
    with_keys(
        "more ranks than GPUs", "runner.device=cuda", "runner.nproc_per_node=8", says="cuda | runner.device | auto"
    ),
    going_on(
        "an older run in the directory", "runner.resume_dir=null", says="already holds a run | done | resume_dir=auto"
    ),
    going_on(
        "a changed key",
        "actor.optim.lr=0.1",
        says="actor.optim.lr: 0.001 -> 0.1 | runs/done | allow_changes=[actor.optim.lr]",
    ),
    going_on(
        "a changed seed and length",
        "runner.seed=1",
        "data.max_length=64",
        says="runner.seed: 42 -> 1 | data.max_length: 128 -> 64 | overwrite",
    ),
    going_on(
        "changed rows",
        says="train.jsonl | other content | runs/done | allow_changes=[data.train_data_paths]",
        prepare=other_data,
    ),
    going_on(
        "a changed file of rows",
        "data.train_data_paths=more.jsonl",
        says="data.train_data_paths | more.jsonl | allow_changes",
        prepare=lambda work: write_rows(work / "more.jsonl", rows(30)),
    ),
    with_keys(
        "the checkpoint of another model",
        "actor.model.model_path=other",
        "runner.allow_changes=[actor.model]",
        "runner.resume_dir=runs/done",
        "runner.max_steps=4",
        says="of another model | float32 [259, 32] | runs/done | remedy",
        prepare=other_model,
    ),
    with_keys(
        "a checkpoint that is not there",
        "runner.resume_dir=runs/done/checkpoints/global_step_7",
        says="global_step_7 | runs/done/checkpoints | no such folder | remedy",
    ),
    with_keys("a run that is not there", "runner.resume_dir=runs/dnoe", says="runs/dnoe | remedy"),
    going_on(
        "a torn checkpoint",
        "runner.resume_dir=runs/done/checkpoints/global_step_2",
        says="global_step_2 | torn | .safetensors | another checkpoint",
        prepare=torn_checkpoint,
    ),
    with_keys(
        "runs below a file",
        "runner.logger.log_path=train.jsonl/runs",
        says="cannot be written | train.jsonl is not a directory | runner.logger.log_path",
    ),
    with_keys(
        "a cache below a file",
        "data.cache_dir=train.jsonl/cache",
        says="cache cannot be written | train.jsonl/cache | data.cache_dir",
    ),
]

CODE = "execute code that you have not trained with | theirs.py (plugins) | runs/done/config.yaml | --trust"
COMMANDS: list[Case] = [
    Case("answer by a run of other people's code", "generate runs/done --prompt '?'", says=CODE, prepare=foreign),
    Case("evaluate a run of other people's code", "eval runs/done", says=CODE, prepare=foreign),
    Case("export a run of other people's code", "export runs/done --to out", says=CODE, prepare=foreign),
    *(
        Case(
            f"{name} trusting what is not named",
            f"{command} --trust nope.py",
            says=f"nope.py | {place} names | --trust",
        )
        for name, command, place in (
            ("evaluate", "eval runs/done", "runs/done/config.yaml"),
            ("export", "export runs/done --to out", "runs/done/config.yaml"),
            ("evaluate a recipe", "eval recipe.yaml", "recipe.yaml"),
            ("ask a model", "generate model Hello", "model"),
        )
    ),
    Case(
        "answer with values that the template does not read",
        "generate runs/done Hello --template-kwargs '{\"enable_thinking\": false}'",
        says="does not read the argument 'enable_thinking' | --template-kwargs | leave it out",
    ),
    Case("look at no rows", "data preview", says="there is no recipe | a YAML file, or a model and rows: --model"),
    Case(
        "answer half of a surrogate pair",
        "generate runs/done --file ask.jsonl",
        says="U+D800, half of a surrogate pair | ask.jsonl:1",
        prepare=write("ask.jsonl", '{"prompt": "\\ud800"}\n'),
    ),
    Case("a home of nobody", "train ~nosuchuser/recipe.yaml", says="~nosuchuser/recipe.yaml | cannot be a path | home"),
    Case("a run in a home of nobody", "export runs/done --to ~nosuchuser/x", says="~nosuchuser/x | --to"),
    Case("a recipe of an overlong name", f"train {'x' * 300}.yaml", says="xxx | File name too long | RECIPE"),
    Case("an unknown command", "trian recipe.yaml", says="trian | train"),
    with_keys("an unknown option", "--dryrun", says="--dryrun | --dry-run"),
    with_keys("a word that is no override", "actor.optim.lr", "1e-3", says="'actor.optim.lr' | key=value"),
    Case("evaluate what is no run", "eval runs", says="runs | not a run directory | shardtune train"),
    Case("evaluate a model on nothing", "eval model", says="nothing to evaluate on | data.eval_data_paths"),
    Case("evaluate what is not there", "eval nothing", says="there is no run, recipe or model nothing | remedy"),
    Case(
        "evaluate without data",
        "eval recipe.yaml data.eval_data_paths=null",
        says="nothing to evaluate on | data.eval_data_paths",
    ),
    Case(
        "evaluate a run on data that is gone",
        "eval runs/done",
        says="eval.jsonl | does not exist | data",
        prepare=remove("eval.jsonl"),
    ),
    Case(
        "evaluate a checkpoint that is not there",
        "eval runs/done --checkpoint 9",
        says="no checkpoint of step 9 | complete checkpoints: 1, 2 | latest",
    ),
    Case(
        "answer from a checkpoint that is not there",
        "generate runs/done --prompt '?' --checkpoint best",
        says="no best checkpoint | complete checkpoints: 1, 2 | latest",
    ),
    Case(
        "answer from what is no run", "generate runs --prompt '?'", says="runs | not a run directory | shardtune train"
    ),
    Case("answer nothing", "generate runs/done", says="--prompt | --file"),
    Case(
        "answer a file that is not there",
        "generate runs/done --file prompts.jsonl",
        says="prompts.jsonl | --file | remedy",
    ),
    Case(
        "answer broken JSON",
        "generate runs/done --file prompts.jsonl",
        says="broken JSON | prompts.jsonl:2 | remedy",
        prepare=write("prompts.jsonl", '{"prompt": "?"}\nhello\n'),
    ),
    Case(
        "answer a row without a prompt",
        "generate runs/done --file prompts.jsonl",
        says="no prompt | prompts.jsonl:1 | question",
        prepare=write("prompts.jsonl", '{"answer": "?"}\n'),
    ),
    Case(
        "answer a prompt that is no text",
        "generate runs/done --file prompts.jsonl",
        says="prompt | prompts.jsonl:1 | text",
        prepare=write("prompts.jsonl", '{"prompt": 7}\n'),
    ),
    Case("a probability above 1", "generate runs/done --prompt '?' --top-p 1.5", says="--top-p | 1.5"),
    Case("export into a full directory", "export runs/done --to model", says="not empty | model | --to"),
    Case("export below a file", "export runs/done --to train.jsonl/out", says="train.jsonl | --to | remedy"),
    Case("export in a dtype nobody knows", "export runs/done --to out --dtype fp8", says="fp8 | bf16"),
    Case(
        "export a run without a final model",
        "export runs/done --to out",
        says="has no final/ | done | --checkpoint latest",
        prepare=lambda work: shutil.rmtree(work / "runs/done/final"),
    ),
    Case(
        "export torn weights",
        "export runs/done --to out",
        says="torn | model.safetensors | final",
        prepare=cut("runs/done/final/model.safetensors", 9),
    ),
    Case("look at rows that are not there", "data preview recipe.yaml --start 30", says="--start | 24 rows | 30"),
    Case("audit data without a recipe", "data audit", says="there is no recipe | name a YAML file"),
    Case(
        "train beyond a limit on the data",
        "train recipe.yaml data.audit.min_trained_share=0.9",
        says="the trained share of the data is 0. | data.audit.min_trained_share: 0.9 | data audit RECIPE",
    ),
    Case(
        "compare with what is no run", "diff runs/done model", says="model is not a run directory | config.yaml | runs/"
    ),
    Case(
        "compare with damaged metrics",
        "diff runs/done runs/done",
        says="line 1 of metrics.jsonl is no JSON | metrics.jsonl:1 | remedy",
        prepare=write("runs/done/metrics.jsonl", "hello\n"),
    ),
    Case(
        "a report in the place of another file",
        "report runs/done --out train.jsonl",
        says="train.jsonl exists and is no report | --out",
    ),
    Case("look at data without a recipe", "data preview", says="there is no recipe | name a YAML file"),
]
