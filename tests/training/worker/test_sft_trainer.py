"""HALOs' trainer: its batches, its numbers (those of the built-in worker), what a subclass may do, and a whole run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import shardtune
from shardtune.config import load_recipe
from shardtune.errors import ConfigError, Interrupted, ModelError
from shardtune.run.choose_worker import make_worker
from shardtune.training.worker.task_answers import Generated
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import quiet, recipe, save_model, save_rows, whole
from tests.support.tiny_run import Tiny, assert_same_tensors, lines, make_tiny, signal_after

KEYS = {"target_combined_input_ids", "target_combined_attention_mask", "target_labels", "target_weights"}
EXACT = 1e-10
STEPS = 4


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and 33 ragged conversations, of which some turns weigh less than others."""
    folder = tmp_path_factory.mktemp("trainer")
    rows = save_rows(folder / "rows.jsonl")
    changed = [json.loads(line) for line in rows.read_text().splitlines()]
    for row in changed[::5]:
        row["messages"][1]["loss_weight"] = 0.25
    rows.write_text("".join(json.dumps(row) + "\n" for row in changed))
    return save_model("dense", folder / "model"), rows


def settings(made: tuple[Path, Path], **changes: Any) -> dict[str, Any]:
    """Four steps of eight rows, and an evaluation set with answers to generate."""
    common = {
        "runner__max_steps": STEPS,
        "data__eval_split": 0.2,
        "eval__generate": True,
        "eval__max_new_tokens": 4,
        "eval__num_samples": 3,
    }
    return recipe(*made, **{**common, **changes})


def trainer(made: tuple[Path, Path], **changes: Any) -> shardtune.SFTTrainer:
    """The trainer, set up, on one rank."""
    worker = shardtune.SFTTrainer(load_recipe(settings(made, **changes)), report=quiet)
    worker.setup()
    return worker


def follow(recipes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each recipe's run: the metrics of its steps, of evaluation at the end, and the weights."""
    found = []
    for values in recipes:
        worker = make_worker(load_recipe(dict(values)), report=quiet)
        worker.setup()
        steps = []
        while not worker.finished:
            steps.append(worker.run_training())
        evaluated = worker.run_eval()
        weights = {name: whole(parameter) for name, parameter in worker.weights.parameters.items()}
        found.append({"steps": steps, "eval": evaluated, "weights": weights})
        worker.release()
    return found


def resumed(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """As `follow`, stopped after two steps and continued by another worker."""
    first = make_worker(load_recipe(dict(values)), report=quiet)
    first.setup()
    steps = [first.run_training() for _ in range(2)]
    first.save_checkpoint(folder, 2)
    first.release()
    second = make_worker(load_recipe(dict(values)), report=quiet)
    second.setup()
    assert second.load_checkpoint(folder) == 2
    while not second.finished:
        steps.append(second.run_training())
    weights = {name: whole(parameter) for name, parameter in second.weights.parameters.items()}
    second.release()
    return {"steps": steps, "weights": weights}


def in_ranks(recipes: Sequence[Mapping[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Each recipe's run, then the last one's with a break."""
    return [*follow(recipes), resumed(recipes[-1], folder)]


def timeless(steps: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Metrics without those of time and memory."""
    return [{key: value for key, value in step.items() if not key.startswith("perf/")} for step in steps]


# -- the numbers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(made: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The built-in worker on one rank; the trainer on one and two, in forwards of several sizes."""

    def cut(rows: int, **more: Any) -> dict[str, Any]:
        return settings(made, actor__worker="sft_trainer", actor__micro_batch_size=rows, **more)

    alone = follow(
        [settings(made), cut(8), cut(3), cut(8, actor__max_tokens_per_micro_batch=256, data__max_length=256)]
    )
    ranks = run_ranks(in_ranks, 2, [cut(4), cut(1)], tmp_path_factory.mktemp("checkpoint"))
    assert [timeless(run["steps"]) for run in ranks[0]] == [timeless(run["steps"]) for run in ranks[1]]
    names = ("worker", "1x8", "1x3", "1xtokens", "2x4", "2x1", "2x1 resumed")
    return dict(zip(names, [*alone, *ranks[0]], strict=True))


@pytest.mark.lengthy
@pytest.mark.parametrize("name", ["1x8", "1x3", "1xtokens", "2x4", "2x1"])
def test_the_numbers_are_those_of_the_built_in_worker(runs: dict[str, dict[str, Any]], name: str):
    wanted, found = runs["worker"], runs[name]
    assert len(found["steps"]) == STEPS
    for own, built_in in zip(found["steps"], wanted["steps"], strict=True):
        for key in ("train/loss", "train/grad_norm", "train/tokens", "train/supervised_tokens", "train/learning_rate"):
            assert own[key] == pytest.approx(built_in[key], rel=EXACT), key
        assert own["loss/train"] == pytest.approx(own["train/loss"], rel=EXACT)
        assert own["logps/train"] == pytest.approx(-own["train/loss"], rel=EXACT)
    for key in ("eval/loss", "eval/perplexity", "eval/eval_accuracy", "eval/unparsed"):
        assert found["eval"][key] == pytest.approx(wanted["eval"][key], rel=EXACT), key
    assert found["eval"]["loss/eval"] == pytest.approx(found["eval"]["eval/loss"], rel=EXACT)
    assert found["eval"]["logps/eval"] == -found["eval"]["loss/eval"]
    assert found["eval"]["loss/sample"] == pytest.approx(runs["1x8"]["eval"]["loss/sample"], rel=EXACT)
    for parameter, value in wanted["weights"].items():
        assert float((found["weights"][parameter] - value).abs().max()) < EXACT, parameter


def test_two_ranks_resume_bitwise(runs: dict[str, dict[str, Any]]):
    whole_run, continued = runs["2x1"], runs["2x1 resumed"]
    assert timeless(continued["steps"]) == timeless(whole_run["steps"])
    assert all(torch.equal(continued["weights"][name], value) for name, value in whole_run["weights"].items())


def test_the_logged_loss_is_the_token_mean_of_the_steps_rows(made: tuple[Path, Path], runs: dict[str, dict[str, Any]]):
    """Recomputed row by row with the model's own forward: no factor of batch or length is in it."""
    worker = trainer(made, actor__micro_batch_size=3, eval__generate=False)
    model = AutoModelForCausalLM.from_pretrained(made[0], dtype=torch.float64)
    step = worker.loader.step(worker.data_state)
    total = weight = 0.0
    rows = worker.prepared.train
    assert rows is not None
    for index in step.rows.tolist():
        sample = rows.row(index)
        ids = torch.tensor(sample.input_ids.tolist())
        logits = model(input_ids=ids[None]).logits[0, :-1].detach()
        logps = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        weights = torch.tensor(sample.loss_weights[1:].tolist(), dtype=torch.float64)
        total, weight = total - float((logps * weights).sum()), weight + float(weights.sum())
    assert len(step.rows) == 8
    assert len(step.micro_batches) == 3
    for name in ("1x8", "1x3", "2x1"):
        first = runs[name]["steps"][0]
        assert first["loss/train"] == pytest.approx(total / weight, rel=EXACT)
        assert first["train/loss"] == pytest.approx(total / weight, rel=EXACT)


# -- batches and get_batch_metrics -----------------------------------------------------------------------------------


def test_a_batch_is_padded_rows_with_their_prompts_masked(made: tuple[Path, Path]):
    worker = trainer(made, actor__micro_batch_size=3, eval__generate=False)
    batch = worker.loader.step(worker.data_state).micro_batches[0]
    assert set(batch.fields) == KEYS
    assert {tuple(tensor.shape) for tensor in batch.fields.values()} == {(3, batch["target_labels"].shape[1])}
    dataset = worker.prepared.train
    assert dataset is not None
    tokenizer = AutoTokenizer.from_pretrained(made[0])
    for place, row in enumerate(batch.rows):
        sample, length = dataset.row(row), int(batch["target_combined_attention_mask"][place].sum())
        assert batch["target_combined_input_ids"][place, :length].tolist() == sample.input_ids.tolist()
        assert not batch["target_combined_attention_mask"][place, length:].any()
        assert (batch["target_labels"][place, length:] == -100).all()
        answers = tokenizer.decode([label for label in batch["target_labels"][place].tolist() if label >= 0])
        said = [turn["content"] for turn in json.loads(_line(made[1], dataset.locate(row)))["messages"][1::2]]
        assert answers == "".join(f"{text}<|im_end|>" for text in said)
    assert {0.0, 0.25, 1.0} >= set(batch["target_weights"].unique().tolist())


def _line(file: Path, place: str) -> str:
    """The text of the row that `file:row N` or the like names."""
    number = int("".join(character for character in place.rpartition(" ")[2].rpartition(":")[2] if character.isdigit()))
    return file.read_text().splitlines()[number - 1]


def test_modes(made: tuple[Path, Path]):
    worker = trainer(made, eval__generate=False)
    batch = dict(worker.loader.step(worker.data_state).micro_batches[0].fields)
    trained, metrics = worker.get_batch_metrics(batch)
    assert trained.requires_grad
    assert set(metrics) == {"loss/train", "logps/train"}
    for mode in ("eval", "sample"):
        loss, metrics = worker.get_batch_metrics(batch, mode=mode)
        assert not loss.requires_grad
        assert float(loss) == pytest.approx(float(trained.detach()), rel=EXACT)
        assert float(metrics[f"loss/{mode}"]) == pytest.approx(float(loss), rel=EXACT)
        assert 2 * metrics[f"logps/{mode}"].item() == pytest.approx(-2 * float(loss), rel=EXACT)
    with pytest.raises(ModelError, match=r"no mode 'test'(.|\n)*train, eval, sample"):
        worker.get_batch_metrics(batch, "test")
    assert worker.use_reference_model is False


def test_samples_are_the_models_own_answers(made: tuple[Path, Path]):
    """`loss/sample` is the mean over the tokens it wrote, recomputed row by row."""
    worker = trainer(made, eval__num_samples=3, actor__eval_micro_batch_size=2)
    found = worker.run_eval()
    told: list[Any] = []
    generate = worker._padded_task.answers.generate

    def keep(*arguments: Any) -> Generated:
        generated = generate(*arguments)
        told.extend(zip(generated.prompts, generated.answers, strict=True))
        return generated

    worker._padded_task.answers.generate = keep
    worker.run_eval()
    model = AutoModelForCausalLM.from_pretrained(made[0], dtype=torch.float64)
    total = tokens = 0.0
    for prompt, answer in told:
        ids = torch.tensor([*prompt.tolist(), *answer])
        logps = model(input_ids=ids[None]).logits[0].detach().log_softmax(-1)
        total += sum(float(logps[len(prompt) + place - 1, token]) for place, token in enumerate(answer))
        tokens += len(answer)
    assert len(told) == 3
    assert found["loss/sample"] == pytest.approx(-total / tokens, rel=EXACT)
    assert found["logps/sample"] == -found["loss/sample"]
    assert found["loss/sample"] < found["loss/eval"]  # its own greedy answers are likelier than others'


def test_a_certain_token_stays_in_the_denominator(made: tuple[Path, Path]):
    """A model so sure of some targets that their log-probability is exactly 0."""
    worker = trainer(made, eval__generate=False)
    labels = torch.tensor([[-100, 3, 5, 7]])
    logits = torch.zeros(1, 4, 264, dtype=torch.float64)
    logits[0, 0, 3] = logits[0, 1, 5] = 1e4
    worker.model = lambda **_: SimpleNamespace(logits=logits)  # pyright: ignore[reportAttributeAccessIssue]
    ids = labels.clamp(min=0)
    batch = {"target_combined_input_ids": ids, "target_combined_attention_mask": ids, "target_labels": labels}
    loss, metrics = worker.get_batch_metrics(batch)
    uniform = float(torch.tensor(264.0, dtype=torch.float64).log())
    assert float(loss) == pytest.approx(uniform / 3, rel=EXACT)
    assert float(metrics["loss/train"]) == float(loss)


def test_a_batch_without_targets_is_zero_and_harmless(made: tuple[Path, Path]):
    worker = trainer(made, eval__generate=False)
    batch = dict(worker.loader.step(worker.data_state).micro_batches[0].fields)
    batch["target_labels"] = torch.full_like(batch["target_labels"], -100)
    loss, metrics = worker.get_batch_metrics(batch)
    assert loss.item() == 0.0
    assert float(metrics["loss/train"]) == 0
    loss.backward()
    gradients = [p.grad for p in worker.weights.parameters.values() if p.grad is not None]
    assert gradients
    assert all(torch.isfinite(gradient).all() and not gradient.any() for gradient in gradients)


# -- batches of the caller's own -------------------------------------------------------------------------------------


class Batches:
    """Given batches, anew in each epoch."""

    def __init__(self, batches: Sequence[Mapping[str, torch.Tensor]]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter([dict(batch) for batch in self._batches])


def test_iterables_of_batches_train_and_evaluate(made: tuple[Path, Path], tmp_path: Path):
    """The rows of the recipe's first step, as a loader of one's own yields them, and one batch without a target."""
    source = trainer(made, actor__micro_batch_size=4, eval__generate=False)
    wanted = source.run_training()
    source.release()
    source = trainer(made, actor__micro_batch_size=4, eval__generate=False)
    batches = [dict(batch.fields) for batch in source.loader.step(source.data_state).micro_batches]
    masked = {**batches[0], "target_labels": torch.full_like(batches[0]["target_labels"], -100)}
    values = settings(made, actor__micro_batch_size=4, actor__global_batch_size=12, data__eval_split=0)
    values["eval"] = {}
    values["runner"] |= {"logger": {"log_path": str(tmp_path), "experiment_name": "own", "logger_backends": ["jsonl"]}}
    values["runner"]["max_steps"] = 1
    del values["data"]["train_data_paths"]
    given = Batches([batches[0], masked, batches[1]])
    own = shardtune.SFTTrainer(values, train_dataset=given, eval_dataset=given, report=quiet)
    own.setup()
    before = own.run_eval()
    found = own.run_training()
    for key in ("train/loss", "train/grad_norm", "train/supervised_tokens", "loss/train", "logps/train"):
        assert found[key] == pytest.approx(wanted[key], rel=EXACT), key
    assert found["train/tokens"] == wanted["train/tokens"] + int(masked["target_combined_attention_mask"].sum())
    assert before["eval/loss"] == before["loss/eval"] == pytest.approx(wanted["train/loss"], rel=EXACT)
    own.release()
    again = shardtune.SFTTrainer(own.recipe, train_dataset=given, eval_dataset=given, report=quiet)
    assert shardtune.SFTRunner(own.recipe, again).run()["eval/loss"] < before["eval/loss"]
    assert again.step == 1


# -- a run -----------------------------------------------------------------------------------------------------------


MINE = '''
import shardtune


class MyTrainer(shardtune.SFTTrainer):
    """Twice the loss of the parent, and the rows."""

    def get_batch_metrics(self, batch, mode="train"):
        loss, metrics = super().get_batch_metrics(batch, mode)
        rows = len(batch["target_labels"])
        return 2 * loss, {f"rows/{mode}": (rows, 1), f"loss/{mode}": metrics[f"loss/{mode}"], "twice": 2 * loss}


class Careless(shardtune.SFTTrainer):
    def get_batch_metrics(self, batch, mode="train"):
        return batch["chosen_labels"].sum(), {}
'''


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """With dropout, so that the random draws count."""
    tiny = make_tiny(tmp_path_factory.mktemp("runs"), dropout=0.2)
    (tiny.folder / "mine.py").write_text(MINE)
    return tiny


def of_trainer(tiny: Tiny, name: str, **changes: Any) -> dict[str, Any]:
    return tiny.recipe(
        name, actor__worker="sft_trainer", data__eval_data_paths=str(tiny.folder / "eval.jsonl"), **changes
    )


@pytest.mark.lengthy
def test_a_run_resumes_bitwise_and_its_final_loads(tiny: Tiny):
    run = shardtune.train(of_trainer(tiny, "whole"))
    stopped = of_trainer(tiny, "stopped", runner__save_interval=-1)
    with signal_after(5), pytest.raises(Interrupted):
        shardtune.train(stopped)
    shardtune.train(stopped)
    last = "checkpoints/global_step_8"
    assert_same_tensors(tiny.run("whole") / last, tiny.run("stopped") / last)
    told = lines(tiny.run("whole"))
    assert lines(tiny.run("stopped")) == told
    assert all(line["loss/train"] == pytest.approx(line["train/loss"], rel=1e-6) for line in told)
    final = tiny.run("whole") / "FINAL"
    for name in ("model.safetensors", "tokenizer.json", "training_state/worker.json"):
        assert (final / name).is_file(), name
    scored = json.loads((final / "metrics.json").read_text())
    assert scored["loss/eval"] == pytest.approx(scored["eval/loss"], rel=1e-6)
    assert scored["eval/loss"] == pytest.approx(told[-1]["eval/loss"], rel=1e-6)
    assert run.evaluate()["logps/eval"] == pytest.approx(-scored["eval/loss"], rel=1e-6)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    assert model(**tokenizer("say 7", return_tensors="pt")).logits.isfinite().all()
    assert len(run.generate("say 7")) == 1


def test_a_subclass_in_a_file_trains_its_own_loss(tiny: Tiny):
    keys = {"actor__worker": f"{tiny.folder / 'mine.py'}:MyTrainer", "runner__max_steps": 2}
    evaluated = {"data__eval_data_paths": str(tiny.folder / "eval.jsonl"), "runner__best__monitor": "rows/eval"}
    shardtune.train(tiny.recipe("mine", **keys, **evaluated))
    first, last = lines(tiny.run("mine"))
    assert first["train/loss"] == pytest.approx(2 * first["loss/train"], rel=1e-6)
    assert first["train/twice"] == pytest.approx(first["train/loss"], rel=1e-6)
    assert first["rows/train"] == 3
    assert last["rows/eval"] == pytest.approx(7 / 3)
    assert last["eval/loss"] == pytest.approx(2 * last["loss/eval"], rel=1e-6)


def test_a_key_that_no_batch_has_names_those_that_it_has(tiny: Tiny):
    worker = f"{tiny.folder / 'mine.py'}:Careless"
    with pytest.raises(shardtune.errors.DataError, match=r"'chosen_labels'(.|\n)*target_combined_input_ids"):
        shardtune.train(tiny.recipe("careless", actor__worker=worker))


@pytest.mark.parametrize(
    ("key", "value"),
    [("actor__label_smoothing", 0.1), ("actor__z_loss", 1e-4), ("eval__metrics", ["mine.py:MyTrainer"])],
)
def test_keys_that_the_trainer_would_ignore_are_refused(tiny: Tiny, key: str, value: Any):
    changes = {key: [f"{tiny.folder}/{value[0]}"] if isinstance(value, list) else value}
    with pytest.raises(ConfigError, match=rf"{key.replace('__', '.')} is not for SFTTrainer(.|\n)*get_batch_metrics"):
        shardtune.train(of_trainer(tiny, "refused", **changes))


def test_a_model_with_a_balance_loss_is_refused(tmp_path: Path, made: tuple[Path, Path]):
    moe = save_model("mixtral", tmp_path / "moe")
    with pytest.raises(ConfigError, match=r"balance loss(.|\n)*output_router_logits: false"):
        shardtune.SFTTrainer(load_recipe(settings((moe, made[1]))), report=quiet)


def test_an_unknown_monitor_is_refused_before_training(tiny: Tiny):
    with pytest.raises(ConfigError, match=r"eval/token_accuracy(.|\n)*logps/eval"):
        shardtune.train(of_trainer(tiny, "monitored", runner__best__monitor="eval/token_accuracy"))


@pytest.mark.parametrize("name", ["save", "eval", "get_batch_samples", "sample"])
def test_methods_that_halos_calls_by_itself_are_refused(tiny: Tiny, name: str) -> None:
    kind = type("Own", (shardtune.SFTTrainer,), {name: lambda self: None})
    with pytest.raises(ConfigError, match=rf"Own\.{name} would never be called(.|\n)*leave it out"):
        kind(load_recipe(of_trainer(tiny, "named")), report=quiet)


class Helping(shardtune.SFTTrainer):
    """Has a method of its own by such a name."""

    def sample(self) -> dict[str, float]:
        return {}

    def run_eval(self) -> dict[str, float]:
        return {**super().run_eval(), **self.sample()}
