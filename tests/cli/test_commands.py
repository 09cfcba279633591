"""The commands as a user types them: help, exit codes, plain output, what each prints and writes."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import shardtune.run.api
from shardtune.cli.prompt_files import read_prompts
from shardtune.config import user_code
from shardtune.data.sources.inference_rows import InferenceRows
from shardtune.errors import ConfigError, Interrupted
from tests.support.workspace import END, Outcome, run_cli, write_rows

COMMANDS = (
    *("train", "eval", "generate", "chat", "export", "push", "models", "env", "data preview", "config explain"),
    "data audit",
)
ANSI = re.compile(r"\x1b\[")
LEARN = [
    "runner.max_steps=200",
    "runner.max_epochs=-1",
    "actor.optim.lr=5e-3",
    "actor.optim.lr_scheduler=constant",
    "data.train_data_paths=few.jsonl",
    "data.eval_data_paths=asked.jsonl",
    "eval.generate=true",
    "eval.max_new_tokens=24",
    "eval.match=numeric",
]


def said(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def learned(work: Path) -> Path:
    """A run that has learned two answers by heart; the third question has no right one."""
    pairs = [("Say one.", "#### 1"), ("Say two.", "#### 2")]
    write_rows(work / "few.jsonl", [said(*pair) for pair in pairs] * 4)
    asked = [*pairs, ("Say one.", "#### 7"), ("Say two.", "#### 2.0")]
    write_rows(work / "asked.jsonl", [said(*pair) for pair in asked])
    ended = run_cli(
        *("train", "recipe.yaml", *LEARN, "eval.answer_pattern='#### (\\S+)'", "runner.logger.experiment_name=learned"),
        "runner.eval_before_training=true",
    )
    assert ended.code == 0, ended.err
    assert "\nbefore training: 0.0 % right  loss " in ended.err
    assert "count as wrong" not in ended.err, "what an untrained model writes needs no explanation"
    assert "\n  Say one.\n    #### 1  [right]\n" in ended.err
    return work / "runs/learned"


# -- help and exit codes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_teaches(command: str) -> None:
    told = run_cli(*command.split(), "--help")
    assert told.code == 0
    assert re.search(rf"Examples.*shardtune {command}", told.out, re.DOTALL)
    assert not ANSI.search(told.out)


@pytest.mark.parametrize("argv", [(), ("--help",), ("data",)])
def test_without_a_command_there_is_help(argv: tuple[str, ...]) -> None:
    told = run_cli(*argv)
    assert (told.code, told.err) == (0, "")
    assert "Usage: shardtune" in told.out


def test_the_help_is_there_at_once() -> None:
    """A third of a second of computing, however busy the machine is; what would make it slower is not even imported."""
    code = (
        "import sys; sys.argv = ['shardtune', '--help']\n"
        "from shardtune.cli.commands import main\ntry: main()\nfinally:\n"
        "  heavy = {'torch', 'transformers', 'hydra', 'omegaconf', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "  sys.stderr.write(','.join(sorted(heavy)))"
    )
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.stderr == ""
    assert 0 < min(seconds) < 1


@pytest.mark.own_start
def test_python_m_shardtune() -> None:
    done = subprocess.run([sys.executable, "-m", "shardtune", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "Usage: shardtune" in done.stdout.replace("python -m shardtune", "shardtune")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("a key", where="here", remedy="do"), 2, "error: a key\n  where:  here\n  remedy: do\n"),
        (Interrupted("stopped after step 3; the same command continues"), 75, "stopped after step 3"),
        (RuntimeError("a bug"), 1, "RuntimeError: a bug"),
        (KeyboardInterrupt(), 1, "error: interrupted\n"),
    ],
)
def test_exit_codes(error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(shardtune.run.api, "train", train)
    monkeypatch.setattr(user_code, "_packages", set())  # others may have loaded a plugin from the tests
    ended = run_cli("train", "recipe.yaml")
    assert ended.code == code
    assert text in ended.err
    assert ("Traceback" in ended.err) == isinstance(error, RuntimeError)


@pytest.mark.parametrize(
    "words", [("recipe.yaml", "a.b=1", "c=2"), ("a.b=1", "recipe.yaml", "c=2"), ("a.b=1", "c=2", "recipe.yaml")]
)
def test_the_recipe_may_stand_anywhere(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(shardtune.run.api, "train", lambda *given, **_: seen.append(given))
    assert run_cli("train", *words).code == 0
    assert seen == [("recipe.yaml", "a.b=1", "c=2")]


# -- what is printed and written -----------------------------------------------------------------------------------


def tree(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


@pytest.mark.lengthy
def test_a_dry_run_writes_nothing(work: Path) -> None:
    before = tree(work)
    ended = run_cli("train", "recipe.yaml", "--dry-run", "runner.logger.experiment_name=never")
    assert ended.code == 0, ended.err
    assert tree(work) == before
    for part in (
        "LlamaForCausalLM",
        "24 rows",
        "⟦It is #### 1<|im_end|>⟧",
        "train.jsonl:2",
        "one step: loss",
        "2 steps",
    ):
        assert part in ended.err
    assert not ANSI.search(ended.err)


def test_the_preview_tells_rows_and_what_became_of_them(work: Path) -> None:
    rows = [said("Hi?", "Ho."), {"messages": [{"role": "user", "content": "?"}]}, said("Long?", "long " * 40)]
    write_rows(work / "mixed.jsonl", rows)
    before = tree(work)
    keys = ("data.train_data_paths=mixed.jsonl", "data.on_bad_row=skip", "data.max_length=100")
    told = run_cli("data", "preview", "recipe.yaml", *keys, "--rows", "1", "--start", "1")
    assert told.code == 0, told.err
    text = told.out + told.err
    for part in (
        "training rows: 2 rows",
        "longest 100",
        "evaluation set eval: 5 rows",
        "1 of 3 rows skipped, not usable: row 2 (the row has no assistant turn",
        "1 of 3 rows cut to data.max_length: 100: row 3 (226 tokens)",
        "mixed.jsonl:3",
        "⟦long long",
    ):
        assert part in text, f"{part!r} is not in\n{text}"
    assert "Ho." not in text
    assert tree(work) == before


@pytest.mark.lengthy
def test_an_audit_ends_with_1_where_a_limit_is_exceeded(work: Path) -> None:
    write_rows(work / "twice.jsonl", [said("Hi?", "Ho."), said("Hi?", "Ho."), said("Who?", "Me, as you see.")])
    argv = ("data", "audit", "recipe.yaml", "data.train_data_paths=twice.jsonl")
    within = run_cli(*argv, "--html", "page.html", "--near", "off", "data.audit.max_near_duplicates=0")
    assert within.code == 0, within.err
    assert "1 row (33.33%) exact duplicates of an earlier row\n    " in within.out
    assert "note: data.audit.max_near_duplicates was not checked" in within.out
    assert "<title>Data of recipe.yaml</title>" in (work / "page.html").read_text()
    beyond = run_cli(*argv, "--json", "data.audit.max_duplicates=0.3")
    assert (beyond.code, json.loads(beyond.out)["limits"][0]["failed"]) == (1, True)
    assert run_cli(*argv, "--near", "perhaps").code == 2
    assert run_cli(*argv, "--html", "nowhere/yet/page.html", "--near", "off").code == 0
    assert (work / "nowhere/yet/page.html").is_file()
    refused = run_cli(*argv, "--html", "recipe.yaml/page.html")
    assert (refused.code, "recipe.yaml is not a directory" in refused.err) == (2, True)


def in_terminal(*argv: str, keys: str = "", **environment: str) -> str:
    """What `shardtune ARGV` prints in a terminal of 100 columns."""
    screen, inside = pty.openpty()
    command = [sys.executable, "-m", "shardtune", *argv]
    variables = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **environment}
    variables = {name: value for name, value in variables.items() if value}
    with subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=inside, env=variables, close_fds=True
    ) as process:
        os.close(inside)
        os.write(screen, keys.encode())
        shown = b""
        while True:
            try:
                part = os.read(screen, 4096)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            shown += part
        process.wait(timeout=60)
    os.close(screen)
    return shown.decode()


def test_a_terminal_gets_color_unless_it_is_not_wanted(work: Path) -> None:
    argv = ("data", "preview", "recipe.yaml", "--rows", "1")
    assert "\x1b[1;32mIt is" in in_terminal(*argv, NO_COLOR="")
    plain = in_terminal(*argv, NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", plain)
    assert "⟦It is #### 1" in plain


@pytest.mark.lengthy
def test_models_and_versions_are_listed() -> None:
    models = run_cli("models")
    assert models.code == 0
    assert re.search(r"causal_lm: .*\n.*\bllama\b.*\bqwen3_moe\b", models.out)
    versions = run_cli("env")
    assert f"torch: {torch.__version__}" in versions.out
    assert f"cuda devices: {torch.cuda.device_count()}" in versions.out


def test_words_that_name_no_model_are_said_to() -> None:
    found = run_cli("models", "qwen3_moe", "zxqj")
    assert found.code == 0
    *models, last = found.out.splitlines()
    assert all(line.startswith("qwen3_moe") for line in models)
    assert last == "none is named like zxqj"


# -- a trained run -------------------------------------------------------------------------------------------------


@pytest.mark.lengthy
def test_evaluation_counts_right_wrong_and_unparsed(learned: Path) -> None:
    metrics = json.loads((learned / "final/metrics.json").read_text())
    assert metrics["eval/eval_accuracy"] == 0.75  # 2.0 is 2; nobody can know the 7
    assert metrics["eval/unparsed"] == 0
    samples = [json.loads(line) for line in (learned / "samples/step_200.jsonl").read_text().splitlines()]
    assert [sample["correct"] for sample in samples] == [True, True, False, True]
    assert samples[0] == {
        "row": f"{learned.parents[1] / 'asked.jsonl'}:1",
        "question": "Say one.",
        "prompt": "<|im_start|>user\nSay one.<|im_end|>\n<|im_start|>assistant\n",
        "reference": "#### 1",
        "answer": "#### 1",
        "correct": True,
    }


def test_evaluating_a_run_again(learned: Path) -> None:
    again = run_cli("eval", "runs/learned")
    assert again.code == 0, again.err
    final = json.loads((learned / "final/metrics.json").read_text())
    measured = json.loads(again.out)
    assert {name: measured[name] for name in measured} == {name: final[name] for name in measured}
    strict = json.loads(run_cli("eval", "runs/learned", "eval.match=exact", "eval.answer_pattern='answer: (.*)'").out)
    assert (strict["eval/eval_accuracy"], strict["eval/unparsed"]) == (0.0, 4.0)
    (learned.parents[1] / "mine.py").write_text("def same(got, wanted): return int(got) <= int(float(wanted))\n")
    mine = json.loads(run_cli("eval", "runs/learned", f"eval.match={learned.parents[1] / 'mine.py'}:same").out)
    assert mine["eval/eval_accuracy"] == 1.0
    untrained = json.loads(run_cli("eval", "recipe.yaml", *LEARN).out)
    assert untrained["eval/eval_accuracy"] == 0.0


def test_prompts_are_answered_in_order(learned: Path) -> None:
    told = run_cli("generate", "runs/learned", "--prompt", "Say two.", "--prompt", "Say one.")
    assert (told.code, told.out) == (0, "#### 2\n#### 1\n")


def test_a_file_of_prompts_is_answered_as_json_lines(learned: Path) -> None:
    file = learned.parents[1] / "prompts.jsonl"
    write_rows(
        file,
        [
            {"question": "Say one.", "answer": "gold"},
            {"prompt": "Say two."},
            {"messages": [said("Say one.", "")["messages"][0]]},
        ],
    )
    called = file.with_name("called.jsonl")
    turns = [{"role": "assistant", "tool_calls": [{"name": "one"}]}, {"role": "tool", "content": "1"}]
    write_rows(called, [{"messages": turns}, {"prompt": "Say one.", "tools": [{"name": "one"}]}])
    assert [question.tools for question in read_prompts(called, InferenceRows())[0]] == [None, [{"name": "one"}]]
    wrong = file.with_name("wrong.jsonl")
    write_rows(wrong, [{"prompt": "Say one.", "tools": 3}])
    refused = run_cli("generate", "runs/learned", "--file", str(wrong))
    assert (refused.code, "tools is int" in refused.err) == (2, True)
    told = run_cli("generate", "runs/learned", "--file", str(file), "--checkpoint", "latest")
    answers = [json.loads(line) for line in told.out.splitlines()]
    assert [answer["answer"] for answer in answers] == ["#### 1", "#### 2", "#### 1"]
    assert (answers[0]["prompt"], answers[0]["reference"]) == ("Say one.", "gold")
    assert 'generate: 1 row has its answer: it is left out of the prompt and written as "reference"' in told.err


def test_draws_repeat_with_their_seed(learned: Path) -> None:
    def draw(seed: int) -> str:
        words = ("--temperature", "3", "--max-new-tokens", "12", "--seed", str(seed))
        return run_cli("generate", "runs/learned", "--prompt", "Say one.", *words).out

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_a_raw_prompt_is_gone_on_from(learned: Path) -> None:
    prompt = "<|im_start|>user\nSay two.<|im_end|>\n<|im_start|>assistant\n####"
    assert run_cli("generate", "runs/learned", "--raw", "--prompt", prompt).out == " 2\n"
    refused = run_cli("generate", "runs/learned", "--raw", "--prompt", prompt, "--system", "Be brief.")
    assert refused.code == 2
    assert "--raw" in refused.err


@pytest.mark.slow
def test_final_stops_at_its_end_of_turn_in_plain_transformers(learned: Path) -> None:
    """In a process that knows nothing of shardtune."""
    code = (
        "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T\n"
        "model, tokenizer = M.from_pretrained(sys.argv[1]), T.from_pretrained(sys.argv[1])\n"
        "turns = [{'role': 'user', 'content': 'Say two.'}]\n"
        "how = {'add_generation_prompt': True, 'return_tensors': 'pt', 'return_dict': True}\n"
        "ids = tokenizer.apply_chat_template(turns, **how)\n"
        "out = model.generate(**ids, max_new_tokens=100, do_sample=False)\n"
        "print(tokenizer.decode(out[0, ids['input_ids'].shape[1]:]), 'shardtune' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(learned / "final")], capture_output=True, text=True)
    assert done.stdout == f"#### 2{END} False\n", done.stderr


def test_an_export_is_a_model_of_its_own(learned: Path, tmp_path: Path) -> None:
    told = run_cli("export", "runs/learned", str(tmp_path / "out"), "--dtype", "bf16")
    assert told.code == 0, told.err
    assert "gives the same logits" in told.out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == END
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Loaded in a new process after the export" in card
    assert "gives the same logits" in card
    for model in (tmp_path / "out", "runs/learned/final"):
        assert run_cli("generate", str(model), "Say two.", "Say one.").out == "#### 2\n#### 1\n"


def test_chat_in_a_terminal(learned: Path) -> None:
    shown = in_terminal("chat", "runs/learned", keys="Say two.\n/reset\nSay one.\n\n", NO_COLOR="1")
    assert re.findall(r"#### \S+", shown) == ["#### 2", "#### 1"], shown


# -- HALOs' command lines ------------------------------------------------------------------------------------------


@pytest.mark.lengthy
def test_config_groups_with_local_paths_train(work: Path) -> None:
    """`loss=sft model=llama datasets=[…]`, HALOs' names, no recipe."""
    data = work / "hub" / "ultrachat"
    data.mkdir(parents=True, exist_ok=True)
    shutil.copy(work / "train.jsonl", data / "train.jsonl")
    words = f"loss=sft model=llama datasets=[{data}] exp_name=halos ++cache_dir={work}/runs lr=1e-3 n_epochs=1".split()
    words += f"++model.name_or_path={work}/model ++model.batch_size=8 model.use_peft=false wandb.enabled=false".split()
    words += ["actor.model.precision=fp32", f"data.cache_dir={work.parent}/cache", "data.max_length=128"]
    ended: Outcome = run_cli("train", *words)
    assert ended.code == 0, ended.err
    run = work / "runs/halos"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]  # 24 rows in steps of 8, once
    assert f"model_path: {work}/model" in (run / "config.yaml").read_text()
    assert (run / "final/model.safetensors").is_file()
