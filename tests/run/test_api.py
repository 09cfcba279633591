"""`shardtune.train` from Python: objects in memory, a `Run` back, errors raised; and the options of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pandas
import pytest
import torch
from datasets import Dataset
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

import shardtune
from shardtune.errors import CheckpointError, ConfigError, DataError
from shardtune.evaluate.generate import Sampling
from shardtune.run.run import Run
from shardtune.run.train_rank import deterministic
from shardtune.training.utilisation import Utilisation
from tests.support.tiny_run import Tiny, lines, make_model, make_tiny, make_tokenizer, rows


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("train"), save_interval=-1)


@pytest.mark.lengthy
def test_objects_in_memory_train_as_files_do(tiny: Tiny) -> None:
    recipe = tiny.recipe("files", data__eval_data_paths={"math": str(tiny.folder / "eval.jsonl")})
    shardtune.train(recipe)
    given = tiny.recipe("memory")
    del given["actor"]["model"]["model_path"], given["data"]["train_data_paths"]
    run = shardtune.train(
        OmegaConf.create(given),
        "actor.optim.lr=1e-3",
        model=make_model(make_tokenizer()),
        tokenizer=make_tokenizer(),
        train_data=rows(21),
        eval_data={"math": Dataset.from_list(rows(7, start=100))},
    )
    assert lines(run.dir) == lines(tiny.run("files"))
    assert run.dir == tiny.run("memory")
    assert run.metrics["step"] == 8
    assert run.metrics["train/loss"] == lines(run.dir)[-1]["train/loss"]
    final = json.loads((run.dir / "final/metrics.json").read_text())
    assert run.metrics["eval/math/loss"] == final["eval/math/loss"]
    assert run.evaluate(eval_data={"math": rows(7, start=100)}) == {
        key: value for key, value in final.items() if key.startswith("eval/")
    }
    answers = run.generate(["say 1", "say 2"], sampling=Sampling(max_new_tokens=3))
    assert len(answers) == 2
    assert (run.export(tiny.folder / "exported") / "model.safetensors").exists()
    again = shardtune.load_run(run.dir / "final")
    assert again.dir == run.dir


def test_a_model_in_memory_is_whole_again_afterwards(tiny: Tiny) -> None:
    recipe = tiny.recipe("handed-back", runner__max_steps=2)
    del recipe["actor"]["model"]["model_path"]
    model = make_model(make_tokenizer())
    before, attention = model.get_input_embeddings().weight.detach().clone(), model.config._attn_implementation
    changes = ("actor.model.precision=bf16", "actor.model.gradient_checkpointing=true", "runner.final_dtype=fp32")
    run = shardtune.train(recipe, *changes, model=model, tokenizer=make_tokenizer())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not torch.equal(model.get_input_embeddings().weight, before)
    assert (model.config._attn_implementation, model.is_activation_checkpointing) == (attention, False)
    ids = torch.arange(5)[None]
    final = AutoModelForCausalLM.from_pretrained(run.dir / "final", attn_implementation=attention)
    assert torch.equal(model.eval()(ids).logits, final.eval()(ids).logits)
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] > 5
    again = shardtune.train(
        recipe, *changes, "runner.logger.experiment_name=again", model=model, tokenizer=make_tokenizer()
    )
    assert again.metrics["step"] == 2


def test_rows_in_memory_that_changed_are_refused(tiny: Tiny) -> None:
    recipe = tiny.recipe("changed", runner__max_steps=2)
    del recipe["data"]["train_data_paths"]
    shardtune.train(recipe, train_data=rows(21))
    with pytest.raises(shardtune.errors.CheckpointError, match="training data is not"):
        shardtune.train(recipe, "runner.max_steps=3", train_data=rows(21, start=1))
    assert shardtune.train(recipe, "runner.max_steps=3", train_data=rows(21)).metrics["step"] == 3


def test_errors_are_raised(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"actor\.optim\.learning"):
        shardtune.train(tiny.recipe("wrong"), "actor.optim.learning=1")
    with pytest.raises(DataError):
        shardtune.train(tiny.recipe("wrong"), "data.train_data_paths=nowhere.jsonl")
    with pytest.raises(ConfigError, match="objects in memory train on one rank"):
        shardtune.train(tiny.recipe("wrong"), "runner.nproc_per_node=2", train_data=rows(3))
    assert not tiny.run("wrong").exists()


def test_a_path_is_no_object_in_memory(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"the text model(.|\n)*actor.model.model_path=model"):
        shardtune.train(tiny.recipe("wrong"), model="model")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"a Linear(.|\n)*actor.model.adapter: file.py:Class"):
        shardtune.train(tiny.recipe("wrong"), model=torch.nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"the text model(.|\n)*actor.tokenizer.tokenizer_model=model"):
        shardtune.SFTWorker(tiny.recipe("wrong"), tokenizer="model")  # pyright: ignore[reportArgumentType]
    assert not tiny.run("wrong").exists()


def test_a_model_without_values_and_overrides_that_are_no_text(tiny: Tiny) -> None:
    with shardtune.init_empty_weights():
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny.folder / "model"))
    with pytest.raises(ConfigError, match="weights without values"):
        shardtune.train(tiny.recipe("meta"), model=empty)
    override: Any = {"runner.max_epochs": 1}
    with pytest.raises(ConfigError, match="an override is a dict"):
        shardtune.train(tiny.recipe("dict"), override)


def test_a_run_that_is_none_or_is_gone(tiny: Tiny) -> None:
    for wrong in (3, None, ["a"]):
        for call in (shardtune.load_run, Run):
            with pytest.raises(ConfigError, match="is no path"):
                call(cast(Any, wrong))
    for gone in (Run(str(tiny.folder / "nowhere")), Run(tiny.folder / "nowhere")):
        for use in (lambda gone=gone: gone.metrics, gone.evaluate, lambda gone=gone: gone.generate("a")):
            with pytest.raises(CheckpointError, match="is not a run directory"):
                use()
    for prompt in (None, 3):
        with pytest.raises(ConfigError, match=r"the prompt is a (NoneType|int), neither text nor"):
            Run(tiny.folder).generate(cast(Any, prompt))


def test_a_model_without_tokenizer_files(tiny: Tiny) -> None:
    bare = tiny.folder / "bare"
    make_model(make_tokenizer()).save_pretrained(bare)
    with pytest.raises(shardtune.errors.ModelError, match=r"holds no tokenizer(.|\n)*actor.tokenizer.tokenizer_model"):
        shardtune.train(tiny.recipe("bare", actor__model__model_path=str(bare)))


def test_a_table_of_pandas_trains_as_its_rows(tiny: Tiny) -> None:
    frame = pandas.DataFrame(rows(21))
    frame["score"] = [float("nan"), *range(20)]
    recipe = tiny.recipe("frame", runner__max_steps=2)
    for name, given in (("frame", frame), ("rows of it", rows(21))):
        shardtune.train({**recipe}, f"runner.logger.experiment_name='{name}'", train_data=given)
    assert lines(tiny.run("frame")) == lines(tiny.run("rows of it"))
    frame.loc[3, "completion"] = float("nan")
    for given in (frame, frame.to_dict("records")):
        with pytest.raises(DataError, match=r"its completion is null(.|\n)*row 4"):
            shardtune.train(tiny.recipe("missing"), train_data=given)
    assert not tiny.run("missing").exists()


def test_how_answers_are_sampled(tiny: Tiny) -> None:
    run = shardtune.train(tiny.recipe("sampled", runner__max_steps=1))
    whole = Sampling(max_new_tokens=3, temperature=0.8, top_p=0.9, seed=4)
    by_name = run.generate("say 1", max_new_tokens=3, temperature=0.8, top_p=0.9, seed=4)
    assert by_name == run.generate("say 1", sampling=whole)
    with pytest.raises(ConfigError, match="sampling and seed are both given"):
        run.generate("say 1", sampling=whole, seed=1)


def test_save_interval_minus_one_saves_at_the_end(tiny: Tiny) -> None:
    run = shardtune.train(tiny.recipe("end", runner__save_interval=-1))
    assert [path.name for path in (run.dir / "checkpoints").glob("global*")] == ["global_step_8"]
    state = run.dir / "final/training_state"
    assert sorted(path.name for path in state.iterdir()) == ["optimizer", "worker.json"]
    assert (run.dir / "FINAL").resolve() == run.dir / "final"


def test_a_profile_is_written_for_its_steps(tiny: Tiny, capfd: pytest.CaptureFixture[str]) -> None:
    run = shardtune.train(tiny.recipe("profile", runner__profile_steps=[3, 4], runner__max_steps=5))
    trace = json.loads((run.dir / "profile/steps_3-4_rank_0.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert "aten::embedding" in names
    assert sum(event.get("name") == "Optimizer.step#AdamW.step" for event in trace["traceEvents"]) == 2
    cut = shardtune.train(tiny.recipe("cut", runner__profile_steps=[2, 9], runner__max_steps=3))
    assert [file.name for file in (cut.dir / "profile").iterdir()] == ["steps_2-3_rank_0.json"]
    assert "no trace" not in capfd.readouterr().err
    shardtune.train(tiny.recipe("cut", runner__profile_steps=[2, 3], runner__max_steps=4))
    assert "[2, 3] are no steps of this run (its only step is 4): no trace is made" in capfd.readouterr().err


def test_deterministic_is_on_while_training(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    original = torch.optim.AdamW.step

    def step(self, *given, **known):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return original(self, *given, **known)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    shardtune.train(tiny.recipe("deterministic", runner__deterministic=True, runner__max_steps=2))
    shardtune.train(tiny.recipe("not", runner__max_steps=2))
    assert seen == [True, True, False, False]
    torch.use_deterministic_algorithms(True, warn_only=True)
    with deterministic(True):
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    assert lines(tiny.run("deterministic")) == lines(tiny.run("not"))


def test_utilisation_is_logged_where_the_peak_is_known(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardtune.training.utilisation.peak_flops", lambda device, precision: 1e9)
    run = shardtune.train(tiny.recipe("mfu", runner__max_steps=1))
    metrics = run.metrics
    model = make_model(make_tokenizer())
    counted = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    mean = metrics["train/tokens"] / 6
    per_token = 6 * counted + 6 * 2 * 16 * mean
    assert metrics["perf/mfu"] == pytest.approx(metrics["perf/tokens_per_second"] * per_token / 1e9)
    assert Utilisation.known(model, torch.device("cpu"), "bf16", 2) == Utilisation(counted, 2, 16, 2e9)


@pytest.mark.lengthy
def test_resuming_costs_the_same_whatever_was_done(tiny: Tiny, tmp_path: Path) -> None:
    """Of a long log only the end is read."""
    from shardtune.training.loggers import cut_back

    file = tmp_path / "metrics.jsonl"
    with file.open("w") as out:
        for step in range(1, 100_001):
            out.write(json.dumps({"step": step, "train/loss": 1.0}) + "\n")
    reads: list[int] = []
    original = open

    def counted(*given, **known):
        opened = original(*given, **known)
        read = opened.read
        opened_read = lambda size=-1: reads.append(size) or read(size)  # noqa: E731
        return _Proxy(opened, opened_read)

    class _Proxy:
        def __init__(self, inner, read):
            self._inner, self.read = inner, read

        def __getattr__(self, name):
            return getattr(self._inner, name)

        def __enter__(self):
            return self

        def __exit__(self, *given):
            self._inner.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.open", counted)
        cut_back(file, 99_990)
    assert sum(reads) < 2_000_000
    assert json.loads(file.read_text().splitlines()[-1])["step"] == 99_990
