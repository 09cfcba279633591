"""Action models on frames of robot data: what is encoded, trained, measured, saved and done."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

import shardtune
from shardtune.config import load_recipe
from shardtune.data.encoder import RowError
from shardtune.data.images.chat_encoder import IMAGE_STOP, ImageChatEncoder
from shardtune.data.images.images import PROMPT_IMAGES
from shardtune.errors import ConfigError, DataError, ModelError
from shardtune.models.action import settings
from shardtune.models.action.encoder import PADDED, as_stored
from shardtune.models.action.environment import Observation
from shardtune.models.action.openvla import EMPTY_TOKEN
from shardtune.models.action.policy import SETTINGS, ActionSettings, action_class
from shardtune.models.action.tokens import action_statistics
from shardtune.models.action.vision_language_action import VisionLanguageAction
from shardtune.models.find_adapter import find_adapter
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.ranks import run_ranks
from tests.support.robot import DIMENSIONS, frame, save_episodes
from tests.support.tiny_openvla import PATCHES, save_openvla
from tests.support.tiny_vision import save_family
from tests.support.vision import FAMILIES, save_vision_model

CHUNK, BINS = 2, 16
Values = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("actions")
    save_vision_model("llava", made / "llava")
    save_vision_model("qwen2_5_vl", made / "qwen2_5_vl")
    save_family("qwen3_5", made / "qwen3_5")
    save_openvla(made / "openvla")
    save_episodes(made / "light")
    save_episodes(made / "other", 3, seed=9)
    return made


def recipe(folder: Path, kind: str, name: str = "run", **changes: Any) -> Values:
    """`model__key=value` sets a key of actor.model, `runner__key=value` one of runner."""
    appended = {} if kind == "openvla" else {"num_action_bins": BINS, "action_tokens": "appended"}
    values: Values = {
        "runner": {
            "max_steps": 2,
            "device": "cpu",
            "logger": {"log_path": str(folder / "runs"), "experiment_name": name, "logger_backends": ["jsonl"]},
        },
        "actor": {
            "micro_batch_size": 4,
            "global_batch_size": 8,
            "optim": {"lr": 5e-3, "lr_scheduler": "constant"},
            "model": {
                "model_type": "vision_language_action",
                "model_path": str(folder / kind),
                "precision": "fp32",
                "action_chunks_len": CHUNK,
                **appended,
            },
        },
        "data": {
            "train_data_paths": str(folder / "light"),
            "eval_data_paths": str(folder / "other"),
            "num_workers": 0,
            "cache_dir": str(folder / "cache"),
        },
    }
    for key, value in changes.items():
        section, _, key = key.partition("__")
        holder = values["actor"]["model"] if section == "model" else values[section]
        holder[key] = value
    return values


def adapter_of(folder: Path, kind: str, **changes: Any) -> VisionLanguageAction:
    found = find_adapter(load_recipe(recipe(folder, kind, **changes)))
    assert isinstance(found, VisionLanguageAction)
    return found


def row(**changes: Any) -> Values:
    content = (np.array([[0.01, -0.4, 0.0], [0.02, 0.5, 1.0]], np.float32), np.array([False, False]))
    given = {
        "images": {"wrist": {"bytes": as_stored(frame(0.2)).content}},
        "instruction": "Follow the light",
        "state": np.array([0.5, 0.2], np.float32),
        "actions": content[0],
        "action_is_pad": content[1],
        "dataset": "light",
    }
    return {**given, **changes}


# -- which dimensions are normalised -------------------------------------------------------------------------------


@pytest.mark.lengthy
def test_the_recipe_names_dimensions_that_stay_as_they_are(folder: Path) -> None:
    plain = adapter_of(folder, "llava")
    assert plain.notes() == [
        "the actions of light are normalised by their quantiles; dimensions left as they are: 2 (gripper)"
    ]
    for given, mask in (
        ({"x": False, "gripper": True}, [False, True, True]),
        ({"-1": True}, [True, True, True]),
        ([True, True, False], [True, True, False]),
    ):
        adapter = adapter_of(folder, "llava", model__action_normalization_mask=given)
        assert adapter.settings.statistics("light").mask.tolist() == mask
        assert (adapter.actions.cache_key() == plain.actions.cache_key()) == (mask == [True, True, False])
    codec = adapter_of(folder, "llava", model__action_normalization_mask={"gripper": True}).settings.codec("light")
    assert len({tuple(codec.encode(np.full((CHUNK, 3), value))) for value in (0.0, 0.5, 1.0)}) == 3
    for given, what in (
        ({"y": False}, r"leaves dimension 1 \(y\) of light as it is, and its values are from -1.* clipped"),
        ({"griper": False}, "the actions of light have no dimension griper"),
        ([True], "has 1 values, an action of light has 3 dimensions"),
    ):
        with pytest.raises(ConfigError, match=what):
            adapter_of(folder, "llava", model__action_normalization_mask=given)


@pytest.mark.lengthy
def test_a_files_mask_clips_nothing_silently(folder: Path, tmp_path: Path) -> None:
    """A file keeps its mask; a value that it would clip is an error, and no bad row."""
    content = {"robot": {"action": {"q01": [-1.0] * 3, "q99": [1.0] * 3, "mask": [True, False, True]}}}
    (tmp_path / "statistics.json").write_text(json.dumps(content))
    adapter = adapter_of(folder, "llava", model__action_statistics=str(tmp_path / "statistics.json"))
    assert adapter.settings.statistics("robot").mask.tolist() == [True, False, True]
    adapter.encode(row())
    wide = np.array([[0.0, 54.0, 0.0]] * CHUNK)
    with pytest.raises(DataError, match=r"dimension 1 of an action has the magnitude 54, .* robot leave it as it is"):
        adapter.encode(row(actions=wide))
    values = recipe(folder, "llava", "clipped", model__action_statistics=str(tmp_path / "statistics.json"))
    values["data"]["on_bad_row"] = "skip"
    with pytest.raises(DataError, match=r"dimension 1 of an action has the magnitude 1\.\d+, .* it would be clipped"):
        shardtune.train(values)
    assert not (folder / "runs" / "clipped").exists()


# -- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "openvla"])
def test_a_row_is_a_prompt_its_actions_and_an_end(folder: Path, kind: str) -> None:
    adapter = adapter_of(folder, kind)
    sample = adapter.encode(row())
    codec = adapter.settings.codec()
    length = CHUNK * DIMENSIONS
    ids, end = sample.input_ids[-length - 1 : -1], int(sample.input_ids[-1])
    assert ids.tolist() == codec.encode(row()["actions"]).tolist()
    assert sample.loss_weights.tolist() == [0.0] * (len(sample.input_ids) - length - 1) + [1.0] * (length + 1)
    tokenizer: Any = adapter.tokenizer
    text = tokenizer.decode(sample.input_ids[: -length - 1])
    assert end == tokenizer.convert_tokens_to_ids("</s>" if kind == "openvla" else "<|im_end|>")
    if kind == "openvla":
        asked = "In: What action should the robot take to follow the light?\nOut:"
        assert text.endswith(f"{asked}<filler_{EMPTY_TOKEN}>")
        assert sample.input_ids[: PATCHES + 1].tolist() == [1] + [32001] * PATCHES
        assert int(sample.fields[IMAGE_STOP]) == PATCHES + 1
    else:
        assert "What action should the robot take to Follow the light?<|im_end|>\n<|im_start|>assistant\n" in text
        stop = int(sample.fields[IMAGE_STOP])
        inside = adapter.images.token_type_ids(sample.input_ids)
        assert inside[:stop].any()
        assert not inside[stop:].any()


def test_it_answers_conversations_as_the_model_beneath(folder: Path) -> None:
    """What a run of an action model generates from is a turn with its image, not an instruction."""
    encoder = adapter_of(folder, "llava").encoder(with_prompts=False)
    assert isinstance(encoder, ImageChatEncoder)
    image = Image.new("RGB", (32, 32))
    prompt = encoder.prompt([{"role": "user", "content": "<image>What is it?"}], None, [image])
    text = str(encoder.tokenizer.decode(prompt.tokens))
    assert text.endswith("What is it?<|im_end|>\n<|im_start|>assistant\n")
    assert "action" not in text
    plain = encoder.text_prompt("<image>It is", [image])
    assert str(encoder.tokenizer.decode(plain.tokens)).endswith(">It is")
    assert prompt.fields[PROMPT_IMAGES] == plain.fields[PROMPT_IMAGES] == 1


def test_steps_behind_the_end_are_no_targets(folder: Path) -> None:
    adapter = adapter_of(folder, "llava")
    sample = adapter.encode(row(action_is_pad=np.array([False, True])))
    assert sample.loss_weights[-7:].tolist() == [1, 1, 1, 0, 0, 0, 1]
    assert sample.target_weight == 4.0
    assert sample.fields[PADDED].tolist() == [False, True]


@pytest.mark.lengthy
def test_the_prompt_may_be_another_one_and_tell_the_state(folder: Path) -> None:
    plain = adapter_of(folder, "llava", model__action_prompt="Do: {instruction} {x}\nAct:")
    assert "Do: Follow the light {x}\nAct:" in plain.tokenizer.decode(plain.encode(row()).input_ids)
    told = adapter_of(folder, "llava", model__action_state="text")
    statistics = told.settings.norm_stats["light"]["proprio"]
    low, high = (np.array(statistics[name]) for name in ("q01", "q99"))
    normal = np.clip(2 * (np.array([0.5, 0.2], np.float32) - low) / (high - low) - 1, -1, 1)
    numbers = np.digitize(normal, np.linspace(-1, 1, BINS)) - 1
    text = told.tokenizer.decode(told.encode(row()).input_ids)
    assert f"take to Follow the light? State: {numbers[0]} {numbers[1]}.<|im_end|>" in text
    with pytest.raises(ConfigError, match=r"no place for \{instruction\}"):
        adapter_of(folder, "llava", model__action_prompt="Go:").encoder(with_prompts=False)
    with pytest.raises(ConfigError, match=r"no place for \{state\}"):
        adapter_of(folder, "llava", model__action_prompt="{instruction}:", model__action_state="text").encode(row())


def test_rows_that_cannot_be_used(folder: Path) -> None:
    adapter = adapter_of(folder, "llava")
    with pytest.raises(RowError, match=r"nan at \[1, 2\]"):
        adapter.encode(row(actions=np.array([[0, 0, 0], [0, 0, np.nan]], np.float32)))
    with pytest.raises(RowError, match="the instruction is empty"):
        adapter.encode(row(instruction=" "))
    with pytest.raises(DataError, match=r"\[2, 2\] do not have the 3 dimensions"):  # the statistics are at fault
        adapter.encode(row(actions=np.zeros((2, 2), np.float32)))
    with pytest.raises(RowError, match="there is no state"):
        adapter_of(folder, "llava", model__action_state="text").encode(row(state=None))


# -- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.lengthy
def test_what_disagrees_is_an_error(folder: Path) -> None:
    for changes, message in (
        ({"model__action_token_len": 7}, "action_token_len is 7, the actions of light have 3 dimensions"),
        ({"model__unnorm_key": "ligth"}, r"(?s)'ligth'; there are of: light.*did you mean light"),
        ({"model__vocab_size": 32000}, r"actor.model.vocab_size is 32000, the model has \d+"),
        ({"model__hidden_size": 4096}, "actor.model.hidden_size is 4096, the model has 32"),
        ({"model__image_size": [224, 224]}, r"actor.model.image_size is \[224, 224\], the model has \[28, 28\]"),
        ({"model__action_tokens": "last", "model__num_action_bins": 300}, "no 300 ordinary tokens in a row"),
        ({"data__train_data_paths": None, "data__eval_data_paths": None}, "data.train_data_paths is required"),
    ):
        with pytest.raises(ConfigError, match=message):
            adapter_of(folder, "llava", **changes)
    for kind, changes, message in (
        (
            "openvla",
            {"model__num_action_bins": 64},
            "num_action_bins is 64, the model.s config has n_action_bins = 256",
        ),
        ("openvla", {"model__action_tokens": "last", "model__vocab_size": 32064}, "vocab_size is 32064"),
        ("openvla", {"model__unnorm_key": "bridge_orig", "model__action_token_len": 3}, "bridge_orig have 7"),
    ):
        with pytest.raises(ConfigError, match=message):
            adapter_of(folder, kind, **changes)
    fine = adapter_of(
        folder, "openvla", model__vocab_size=32000, model__hidden_size=16, model__image_size=[28, 28],
        model__action_token_len=3, model__unnorm_key="light",
    )  # fmt: skip
    assert fine.settings.unnorm_key == "light"
    assert list(fine.settings.norm_stats) == ["light", "bridge_orig", "two_arms"]


@pytest.mark.lengthy
def test_which_tokens_stand_for_actions(folder: Path) -> None:
    appended = adapter_of(folder, "llava")
    ids = appended.tokenizer.convert_tokens_to_ids([f"<act_{number}>" for number in range(BINS)])
    assert ids == list(range(appended.settings.tokens.first, appended.settings.tokens.top))
    last = adapter_of(folder, "llava", model__action_tokens="last")
    special = set(last.tokenizer.added_tokens_decoder)
    assert last.settings.token_top == min(special)
    assert adapter_of(folder, "openvla").settings.token_top == 32000


def test_statistics_from_a_file(folder: Path, tmp_path: Path) -> None:
    section = {"q01": [-1.0] * 3, "q99": [1.0] * 3, "mask": [True, True, False]}
    (tmp_path / "own.json").write_text(json.dumps({"elsewhere": {"action": section}}))
    adapter = adapter_of(folder, "llava", model__action_statistics=str(tmp_path / "own.json"))
    assert adapter.settings.unnorm_key == "elsewhere"
    assert adapter.settings.statistics().high.tolist() == [1.0] * 3


def test_a_data_set_of_a_files_statistics_may_have_any_name(folder: Path, tmp_path: Path) -> None:
    """Also that of a key of the settings that a run keeps; what is no statistics is one message."""
    section = {"q01": [-1.0] * 3, "q99": [1.0] * 3, "mask": [True, True, False]}
    (tmp_path / "own.json").write_text(json.dumps({"norm_stats": {"action": section}}))
    adapter = adapter_of(folder, "llava", model__action_statistics=str(tmp_path / "own.json"))
    assert adapter.settings.unnorm_key == "norm_stats"
    kept = {"norm_stats": None, "action_token_len": 3, "token_top": 9}
    for content in ({"norm_stats": None}, {"light": {"action": section}, "norm_stats": None}, kept):
        (tmp_path / "own.json").write_text(json.dumps(content))
        with pytest.raises(DataError, match="the file holds no action statistics"):
            adapter_of(folder, "llava", model__action_statistics=str(tmp_path / "own.json"))


def test_statistics_of_the_same_name_stay_and_are_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "llava", tmp_path / "llava")
    content = {"light": {"action": {"q01": [-9.0] * 3, "q99": [9.0] * 3, "mask": [True] * 3}}}
    (tmp_path / "llava" / "dataset_statistics.json").write_text(json.dumps(content))
    adapter = adapter_of(folder, "llava", model__model_path=str(tmp_path / "llava"))
    assert adapter.settings.statistics("light").high.tolist() == [9.0] * 3
    assert "the statistics of light are those saved with the model" in adapter.notes()[-1]


def test_computed_statistics_leave_the_gripper_alone(folder: Path) -> None:
    found = adapter_of(folder, "llava").settings.statistics()
    assert found.mask.tolist() == [True, True, False]


def test_keys_of_actions_are_for_action_models(folder: Path) -> None:
    values = recipe(folder, "llava")
    values["actor"]["model"]["model_type"] = "vision_language"
    with pytest.raises(ConfigError, match=r"actor.model.action_chunks_len has no effect with model_type"):
        load_recipe(values)
    with pytest.raises(ConfigError, match="low_cpu_mem_usage: false has no effect"):
        load_recipe(recipe(folder, "llava", model__low_cpu_mem_usage=False))


def test_data_sets_that_the_base_alone_knows_may_have_actions_of_other_sizes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenVLA has the statistics of its own data sets; those of rows are used, also of a model without its rows."""
    both = [str(folder / "light"), str(folder / "other")]
    adapter = adapter_of(folder, "openvla", data__train_data_paths=both)
    kept = "dimensions left as they are: 2 (gripper)"
    assert adapter.notes() == [f"the actions of light, other are normalised by their quantiles; {kept}"]
    found = adapter.settings
    assert found.action_token_len == DIMENSIONS != len(found.norm_stats["bridge_orig"]["action"]["q01"])  # type: ignore
    assert found.unnorm_key is None
    monkeypatch.setattr(settings, "_computed", lambda *_: None)
    used = settings._statistics(load_recipe(recipe(folder, "openvla")), found)[1]
    assert used == ["light", "other", "two_arms"]  # the last is as long
    with_state = settings._statistics(load_recipe(recipe(folder, "openvla")), replace(found, state="text"))[1]
    assert with_state == ["light", "other"]  # and has no states


# -- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", ["llava", pytest.param("openvla", marks=pytest.mark.slow)])
def test_trained_measured_saved_and_asked(folder: Path, kind: str) -> None:
    run = shardtune.train(recipe(folder, kind, kind, runner__max_steps=3, runner__best={"monitor": "eval/action_l1"}))
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[-1] < losses[0]
    final = run.dir / "final"
    config = json.loads((final / "config.json").read_text())
    statistics = json.loads((final / "dataset_statistics.json").read_text())
    assert config[SETTINGS]["norm_stats"] == statistics
    assert "light" in statistics
    action_statistics(statistics, "light", DIMENSIONS)
    before = {key: value for key, value in run.metrics.items() if key.startswith("eval/")}
    assert 0 <= before["eval/action_accuracy"] <= 1
    assert {f"eval/action_l1/{number}" for number in range(DIMENSIONS)} <= before.keys()
    assert shardtune.load_run(run.dir).evaluate() == pytest.approx(before, abs=1e-5)
    if kind == "llava":
        plain: Any = AutoModelForImageTextToText.from_pretrained(final)
        assert type(plain).__name__ == config["architectures"][0] == "LlavaForConditionalGeneration"
        assert plain.get_input_embeddings().weight.shape[0] >= config[SETTINGS]["token_top"]
    else:
        assert config["norm_stats"].keys() == {"light", "bridge_orig", "two_arms"}
        assert (final / "preprocessor_config.json").is_file()
        assert config.get("auto_map") is None


def observations(count: int) -> list[Observation]:
    state = np.zeros(2, np.float32)
    return [
        Observation(images={"wrist": frame(0.3 * n - 0.5)}, instruction="Follow" + " on" * n, state=state)
        for n in range(count)
    ]


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", pytest.param("openvla", marks=pytest.mark.slow)])
def test_the_policy_answers_a_batch_as_each_alone(folder: Path, kind: str) -> None:
    worker = SFTWorker(load_recipe(recipe(folder, kind, f"policy-{kind}")), training=False, report=lambda _: None)
    worker.setup_evaluation()
    adapter = worker.adapter
    assert isinstance(adapter, VisionLanguageAction)
    torch.manual_seed(0)
    with torch.no_grad():  # new rows of the embedding are alike, and between equal logits rounding would choose
        for parameter in worker.inner_model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    policy = adapter.policy(worker.root, torch.device("cpu"))
    seen = observations(3)
    together = policy(seen)
    assert together.shape == (3, CHUNK, DIMENSIONS)
    assert len(np.unique(together.round(6), axis=0)) == 3
    assert np.array_equal(together, np.concatenate([policy([one]) for one in seen]))
    low, high = adapter.settings.statistics().low, adapter.settings.statistics().high
    assert (together[..., :2] >= low[:2] - 1e-6).all()
    assert (together[..., :2] <= high[:2] + 1e-6).all()


def test_a_policy_acts_between_packed_rows_as_before_them(folder: Path) -> None:
    """Layers with a state compute packed rows one by one, and an observation as a whole."""
    worker = SFTWorker(load_recipe(recipe(folder, "qwen3_5", "state", model__precision="fp64")), report=lambda _: None)
    worker.setup()
    adapter = worker.adapter
    assert isinstance(adapter, VisionLanguageAction)
    assert adapter.sharing.packs
    assert adapter.sharing.mixes
    worker.model.eval()
    policy, seen = adapter.policy(worker.root, worker.device), observations(2)
    before = policy(seen)
    rows = worker.prepared.evals[""]
    with torch.no_grad():
        worker.root.evaluate(adapter.collate([rows.row(0), rows.row(1)], [0, 1], {"ce": 1.0}))
    assert np.array_equal(policy(seen), before)


@pytest.mark.lengthy
def test_metrics_are_those_of_what_the_policy_would_choose(folder: Path) -> None:
    """One row at a time, by the model's own logits for the true tokens before."""
    worker = SFTWorker(load_recipe(recipe(folder, "llava", "metrics")), training=False, report=lambda _: None)
    worker.setup_evaluation()
    adapter, model = worker.adapter, worker.inner_model
    assert isinstance(adapter, VisionLanguageAction)
    rows = worker.prepared.evals[""]
    codec, statistics = adapter.settings.codec(), adapter.settings.statistics()
    right, off, off_real, count = 0, 0.0, np.zeros(DIMENSIONS), 0
    for index in range(len(rows)):
        sample = rows.row(index)
        batch = adapter.collate([sample], [index], {"ce": sample.target_weight})
        positions = torch.arange(sample.length - 1 - CHUNK * DIMENSIONS, sample.length - 1) - 1
        with torch.no_grad():
            logits = adapter.logits(model, batch, positions)
        tokens = adapter.settings.tokens
        chosen = (logits[:, tokens.first : tokens.top].argmax(-1) + tokens.first).numpy()
        real = np.repeat(~sample.fields[PADDED], DIMENSIONS)
        truth = sample.input_ids[-1 - CHUNK * DIMENSIONS : -1]
        right += int(((chosen == truth) & real).sum())
        normal = codec.normalised(chosen)[~sample.fields[PADDED]]
        actions = sample.fields["actions"][~sample.fields[PADDED]]
        off += float(np.abs(normal - np.clip(statistics.normalise(actions), -1, 1)).sum())
        off_real += np.abs(statistics.unnormalise(normal) - actions).sum(0)
        count += int((~sample.fields[PADDED]).sum())
    found = worker.run_eval()
    assert found["eval/action_accuracy"] == pytest.approx(right / (count * DIMENSIONS))
    assert found["eval/action_l1"] == pytest.approx(off / (count * DIMENSIONS), rel=1e-5)
    for dimension in range(DIMENSIONS):
        assert found[f"eval/action_l1/{dimension}"] == pytest.approx(off_real[dimension] / count, rel=1e-5)
    assert count < len(rows) * CHUNK  # some steps are behind an episode's end


def test_a_model_in_memory_has_to_have_actions(folder: Path) -> None:
    plain: Any = AutoModelForImageTextToText.from_pretrained(folder / "llava")
    with pytest.raises(ModelError, match="LlavaForConditionalGeneration in memory has no actions"):
        find_adapter(load_recipe(recipe(folder, "llava")), model=plain)


def test_settings_stay_as_they_are(folder: Path) -> None:
    adapter = adapter_of(folder, "llava")
    assert ActionSettings.of(adapter.config) == adapter.settings


def test_other_cameras_than_those_of_the_data_are_refused(folder: Path) -> None:
    """Their names are kept with the model, and an observation has to show these and no others."""
    worker = SFTWorker(load_recipe(recipe(folder, "llava", "cameras")), training=False, report=lambda _: None)
    adapter = worker.adapter
    assert isinstance(adapter, VisionLanguageAction)
    assert adapter.settings.cameras == ("wrist",)
    assert ActionSettings.of(adapter.config).cameras == ("wrist",)
    (seen,) = observations(1)
    adapter.actions.observed(seen)
    for images in ({"front": seen["images"]["wrist"]}, {**seen["images"], "front": seen["images"]["wrist"]}, {}):
        with pytest.raises(ConfigError, match="the model was trained with wrist"):
            adapter.actions.observed(Observation(images=images, instruction="Go", state=seen["state"]))
        with pytest.raises(RowError, match=r"it shows .*, the first frame of the training data wrist"):
            adapter.encode(row(images=images))


def test_cameras_are_those_of_the_first_row_that_the_transform_gives(folder: Path, tmp_path: Path) -> None:
    code = 'def own(row):\n    return {**row, "images": {"hand": 0}} if 6 / row["frame"] else row'
    (tmp_path / "own.py").write_text(code)
    changes = {"data__transform": f"{tmp_path}/own.py:own", "data__on_bad_row": "skip"}
    assert adapter_of(folder, "llava", **changes).settings.cameras == ("hand",)


# -- several ranks, stored parts -----------------------------------------------------------------------------------


def trained_and_asked(folder: str, changes: Values) -> tuple[list[float], np.ndarray, float]:
    """Losses of two steps, the policy's answers, and how far they are off."""
    worker = SFTWorker(load_recipe(recipe(Path(folder), "llava", "ranks", **changes)), report=lambda _: None)
    worker.setup()
    losses = [worker.run_training()["train/loss"] for _ in range(2)]
    adapter = worker.adapter
    assert isinstance(adapter, VisionLanguageAction)
    worker.model.eval()
    answers = adapter.policy(worker.root, worker.device)(observations(3))
    return losses, answers, worker.run_eval()["eval/action_l1"]


@pytest.mark.lengthy
@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_ranks_train_and_act_as_one(folder: Path, lora: bool) -> None:
    """Sharded by FSDP2, the model generates inside the call that gathers its weights."""
    changes = {"model__is_lora": lora}
    losses, answers, off = trained_and_asked(str(folder), changes)
    both = run_ranks(trained_and_asked, 2, str(folder), changes)
    for found_losses, found_answers, found_off in both:
        assert found_losses == pytest.approx(losses, rel=1e-5)
        assert np.abs(found_answers - answers).max() < 1e-6
        assert found_off == pytest.approx(off, rel=1e-5)


@pytest.mark.lengthy
def test_a_value_head_that_is_there_stays(folder: Path, tmp_path: Path) -> None:
    """A directory with one is trained on; supervised rows say nothing of values."""
    base: Any = AutoModelForImageTextToText.from_pretrained(folder / "llava")
    first = adapter_of(folder, "llava", model__action_tokens="last")
    replace(first.settings, value_sizes=(8,)).write_to(base.config)
    policy = action_class(type(base))(base.config)
    policy.load_state_dict(base.state_dict(), strict=False)
    policy.save_pretrained(tmp_path / "base")
    first.processor.save_pretrained(tmp_path / "base")
    values = recipe(folder, "llava", "valued", model__model_path=str(tmp_path / "base"), model__action_tokens="auto")
    values["actor"]["optim"] = {**values["actor"]["optim"], "groups": [{"pattern": "value_head", "lr": 0.25}]}
    worker = SFTWorker(load_recipe(values), report=lambda _: None)
    worker.setup()
    worker.run_training()
    stored = {id(tensor): name for name, tensor in worker.weights.trainable().items()}
    rates = {stored[id(p)]: group["lr"] for group in worker.optimizer.param_groups for p in group["params"]}
    others = {rate for name, rate in rates.items() if "value_head" not in name}
    assert {rate for name, rate in rates.items() if "value_head" in name} == {0.25}
    assert others == {5e-3}
    worker.export(tmp_path / "trained", "fp32")
    loaded: Any = action_class(type(base)).from_pretrained(tmp_path / "trained")
    before = policy.value_head.state_dict()
    assert before.keys() == loaded.value_head.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in loaded.value_head.state_dict().items())
    assert not torch.equal(policy.lm_head.weight, loaded.lm_head.weight)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_and_acts(tmp_path: Path, family: str) -> None:
    save_vision_model(family, tmp_path / family)
    save_episodes(tmp_path / "light")
    save_episodes(tmp_path / "other", 3, seed=9)
    worker = SFTWorker(load_recipe(recipe(tmp_path, family, family)), report=lambda _: None)
    worker.setup()
    assert np.isfinite([worker.run_training()["train/loss"] for _ in range(2)]).all()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in worker.inner_model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    worker.model.eval()
    adapter = worker.adapter
    assert isinstance(adapter, VisionLanguageAction)
    policy = adapter.policy(worker.root, worker.device)
    together = policy(observations(3))
    assert np.array_equal(together, np.concatenate([policy([one]) for one in observations(3)]))
    # The likeliest token may be one for all (Gemma 3's tied embeddings repeat one), but not its probability.
    seen, *_, other = observations(3)
    shown: list[Observation] = [seen, {**seen, "images": other["images"]}, {**seen, "instruction": "Stop"}]
    inputs = [adapter.policy_inputs([adapter.actions.observed(one)]) for one in shown]
    logits = [worker.root.act(one, {"do_sample": False}).logits[:, 0] for one in inputs]
    assert min(float((logits[0] - one).abs().max()) for one in logits[1:]) > 1e-3


@pytest.mark.parametrize(
    "changes",
    [
        {"data__system_prompt": "You are a robot."},
        {"data__train_on": "all"},
        {"data__thinking": "strip"},
        {"data__ignored_keys": ["id"]},
        {"data__on_prompt_mismatch": "accept"},
        {"data__chat_template": "chatml", "model__action_prompt": "do {instruction}"},
    ],
)
def test_keys_about_conversations_are_refused(folder: Path, changes: Values) -> None:
    key = next(iter(changes)).replace("__", ".")
    with pytest.raises(ConfigError, match=f"{key} has no effect"):
        adapter_of(folder, "llava", **changes)
