"""Ready policies: LeRobot's names and files, training equal to a plain loop, acting in a fresh process.

`bench/lerobot_policies.py` compares actions and losses with LeRobot itself.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load, load_file, save_file

import shardtune
from shardtune.batch import LossSum
from shardtune.config import load_recipe
from shardtune.data.cache.cache import build_dataset
from shardtune.data.encoder import FrameOptions, RowError
from shardtune.data.robot.lerobot_writer import write_lerobot
from shardtune.data.robot.pictures import encode_image
from shardtune.data.sources.resolve import resolve_sources
from shardtune.errors import ConfigError, ModelError
from shardtune.models.action.chunks import ObservationHistory
from shardtune.models.find_adapter import find_adapter
from shardtune.models.policies.policy import Policy, PolicyEncoder
from shardtune.models.policies.resnet import FrozenBatchNorm, ResNet, feature_size
from shardtune.parallel.meta_init import init_empty_weights
from shardtune.training.worker.adapter_task import episodes
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.verify.adapter import verify_adapter
from tests.support import robot
from tests.support.chosen import slow_except
from tests.support.robot import OPTIONS, save_episodes

POLICIES = sorted(OPTIONS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("policies")
    save_episodes(made / "light")
    save_episodes(made / "other", 3, seed=9)
    return made


def recipe(folder: Path, kind: str, name: str = "run", **model: Any) -> dict[str, Any]:
    logger = {"log_path": str(folder / "runs"), "experiment_name": f"{kind}-{name}", "logger_backends": ["jsonl"]}
    return {
        "runner": {"max_steps": 2, "device": "cpu", "logger": logger},
        "micro_batch_size": 4,
        "global_batch_size": 8,
        "optim": {"lr": 1e-3, "lr_scheduler": "constant", "lr_warmup_steps": 0},
        "model": {"model_type": kind, "precision": "fp32", "options": OPTIONS[kind], **model},
        "data": {
            "train_data_paths": str(folder / "light"),
            "eval_data_paths": str(folder / "other"),
            "num_workers": 0,
            "cache_dir": str(folder / "cache"),
        },
    }


def policy_of(values: dict[str, Any], *overrides: str) -> Policy:
    found = find_adapter(load_recipe(values, overrides, in_memory=["data.train_data_paths"], files_must_exist=False))
    assert isinstance(found, Policy)
    return found


@pytest.mark.parametrize("kind", POLICIES)
def test_names_and_shapes_are_lerobots(folder: Path, kind: str) -> None:
    """`names.json` lists what LeRobot 0.4 saves for these options."""
    with init_empty_weights():
        module = policy_of(recipe(folder, kind)).build()
    expected = json.loads(Path(__file__).with_name("names.json").read_text())[kind]
    assert {name: list(tensor.shape) for name, tensor in module.state_dict().items()} == expected


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", POLICIES)
def test_sums_are_the_same_however_rows_are_cut(folder: Path, kind: str) -> None:
    """In training mode and fp64: dropout, noise and crops belong to the rows."""
    adapter = policy_of(recipe(folder, kind, precision="fp64"))
    data = adapter.recipe.data
    frames = FrameOptions(adapter.action_chunk, adapter.observation_steps)
    (source,) = resolve_sources(data.train_data_paths, data, frames=frames, report=lambda text: None)
    samples = [adapter.encode(row) for _, row in itertools.islice(source.rows(source.files[0]), 4)]
    root = adapter.root(adapter.build().double()).train()

    def losses(numbers: list[int]) -> dict[str, LossSum]:
        batch = adapter.collate([samples[number] for number in numbers], numbers, {})
        return root(replace(batch, key=7))

    together, apart = losses([0, 1, 2, 3]), [losses([2]), losses([0, 3]), losses([1])]
    weights = [adapter.weights(sample) for sample in samples]
    for term, found in together.items():
        assert found.weight == sum(one[term] for one in weights) == sum(one[term].weight for one in apart)
        assert found.total.item() == pytest.approx(sum(one[term].total.item() for one in apart), rel=1e-10)
    again = replace(adapter.collate(samples, [0, 1, 2, 3], {}), key=8)
    assert root(again)[term].total.item() != found.total.item()


@pytest.mark.slow
@pytest.mark.parametrize("kind", POLICIES)
def test_the_whole_kit(folder: Path, kind: str) -> None:
    """A plain loop in fp64, two ranks, resuming and a fresh process among it."""
    file = folder / f"{kind}.yaml"
    file.write_text(yaml.safe_dump(recipe(folder, kind)))
    report = verify_adapter(str(file), report=lambda text: None)
    assert not report.failures, "\n".join(map(str, report.failures))


def observations(steps: int, number: int = 3) -> list[Any]:
    random = np.random.default_rng(4)
    history, found = ObservationHistory(steps), []
    for _ in range(number):
        image = random.integers(0, 256, (28, 28, 3), dtype=np.uint8)
        state = random.normal(size=2).astype(np.float32)
        found.append(history.see({"images": {"wrist": image}, "instruction": "go", "state": state}))
    return found


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", slow_except(POLICIES, "diffusion"))
def test_what_is_saved_acts_without_the_data(folder: Path, kind: str, tmp_path: Path) -> None:
    """Sizes, statistics and weights are in the directory."""
    worker = SFTWorker(load_recipe(recipe(folder, kind)), report=lambda text: None)
    worker.setup()
    worker.run_training()
    worker.export(tmp_path, "auto")
    trained = load_file(tmp_path / "model.safetensors")
    worker.release()
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["type"] == kind
    assert stored["input_features"]["observation.images.wrist"] == {"type": "VISUAL", "shape": [3, 28, 28]}
    seen = observations(stored["n_obs_steps"])
    found = []
    for values in (recipe(folder, kind), {"model": {"model_type": kind, "model_path": str(tmp_path)}}):
        adapter = policy_of(values, "actor.model.precision=fp32")
        module = adapter.build()
        module.load_state_dict(trained)
        act = adapter.policy(adapter.root(module.eval()), torch.device("cpu"))
        found.append(act(seen))
        np.testing.assert_allclose(act(seen[1:2])[0], found[-1][1], atol=1e-5)  # what others see has no part in it
    assert found[0].shape == (3, 3, 3)
    np.testing.assert_allclose(found[1], found[0], atol=1e-6)
    for name in ((), ("policy.json", "normalizer.json")):  # the second time as LeRobot writes it
        for file in name:
            (tmp_path / file).unlink()
        policy = shardtune.load_policy(tmp_path)
        assert policy.unread == ("instruction",)
        given = [{key: one[key] for key in ("images", "state")} for one in seen]
        expected = [found[0][0, 0], found[0][0, 1], found[0][2, 0]]  # two of a chunk are executed
        for _ in range(2):
            policy.reset()
            np.testing.assert_allclose([policy.select_action(one) for one in given], expected, atol=1e-5)


@pytest.mark.slow
def test_an_adapter_is_exported_merged_and_acts_alone(folder: Path, tmp_path: Path) -> None:
    """The statistics in files of their own are no weights; sizes are those of the directory, not of training rows."""
    model = recipe(folder, "act", "lora", is_lora=True, lora={"r": 2})
    run = shardtune.train({**model, "runner": {**model["runner"], "max_steps": 1, "seed": 5}})  # draws the base, too
    told: list[str] = []
    merged = run.export(tmp_path / "merged", merge=True, report=told.append)
    assert re.search(r"read afresh, has the same \d+ tensors, bit by bit", told[0])
    (seen,) = observations(1, 1)
    chunk = run.policy().predict_action_chunk({key: seen[key] for key in ("images", "state")})
    shutil.copytree(run.dir / "final", tmp_path / "copy")
    (folder / "light").rename(folder / "elsewhere")
    try:
        for directory, exact in ((tmp_path / "copy", 0.0), (merged, 1e-5)):
            policy = shardtune.load_policy(directory)
            found = policy.predict_action_chunk({key: seen[key] for key in ("images", "state")})
            np.testing.assert_allclose(found, chunk, rtol=0, atol=exact)
    finally:
        (folder / "elsewhere").rename(folder / "light")


def test_statistics_among_the_weights(folder: Path, tmp_path: Path) -> None:
    """LeRobot before 0.4 kept them there."""
    adapter = policy_of(recipe(folder, "act"))
    files = adapter.saved_files()
    (tmp_path / "config.json").write_text(json.dumps(files["config.json"]))
    state, actions = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])
    buffers = {"normalize_inputs.buffer_observation_state": state, "normalize_targets.buffer_action": actions}
    buffers |= {"normalize_inputs.buffer_observation_images_wrist": torch.full((3, 1, 1), 0.5)}
    tensors = {f"{name}.{key}": value.clone() for name, value in buffers.items() for key in ("mean", "std")}
    save_file({"model.weight": torch.zeros(2), **tensors}, tmp_path / "model.safetensors")
    (tmp_path / "policy").mkdir()
    old = policy_of({"model": {"model_type": "act", "model_path": str(tmp_path)}})
    assert old.normalizer.actions.statistics["mean"].tolist() == [3.0, 4.0, 5.0]
    assert old.normalizer.state.statistics["std"].tolist() == [1.0, 2.0]
    assert old.normalizer.camera("wrist").statistics["mean"].ravel().tolist() == [0.5] * 3
    masked = policy_of(
        {"model": {"model_type": "act", "model_path": str(tmp_path), "action_normalization_mask": [True, False, True]}}
    )
    assert masked.normalizer.actions.normalise([9.0, 9.0, 9.0])[1] == 9.0
    content = load(masked.saved_files()["policy_preprocessor_step_3_normalizer_processor.safetensors"])
    assert content["action.mean"].tolist() == [3.0, 0.0, 5.0]  # LeRobot has no masks
    assert content["action.std"].tolist() == [3.0, 1.0, 5.0]
    source = old.initial_weights()
    assert isinstance(source, dict)
    assert list(source) == ["model.weight"]


@pytest.mark.parametrize(
    ("kind", "options", "what"),
    [
        ("act", {"chunk": 3}, "options.chunk is not an option of this model"),
        ("act", {"n_action_steps": 9, "chunk_size": 8}, r"n_action_steps \(9\) is more than chunk_size \(8\)"),
        ("act", {"vision_backbone": "vgg16"}, "vision_backbone = 'vgg16'"),
        ("act", {"pretrained_backbone_weights": "ResNet18_Weights.IMAGENET1K_V1"}, "none are downloaded"),
        ("act", {"temporal_ensemble_coeff": 0.01}, "goes with n_action_steps: 1"),
        ("diffusion", {"horizon": 10}, "horizon is no multiple of 2"),
        ("diffusion", {"crop_shape": [40, 40]}, r"crop_shape is \[40, 40\], the images are \[28, 28\]"),
        ("diffusion", {"crop_shape": [0, 20]}, "crop_shape.0 = 0: Input should be greater than or equal to 1"),
        ("diffusion", {"crop_shape": [9, 9], "resize_shape": [20, 20]}, "no effect with resize_shape; crop_ratio has"),
        ("diffusion", {"num_inference_steps": 200}, r"\(200\) is more than num_train_timesteps \(100\)"),
        ("diffusion", {"beta_schedule": "cosine"}, "DDPMScheduler of diffusers has no beta_schedule 'cosine'"),
        ("diffusion", {"beta_start": -1}, "beta_start = -1: Input should be greater than 0"),
        ("diffusion", {"clip_sample_range": -1}, "clip_sample_range = -1: Input should be greater than 0"),
        ("diffusion", {"kernel_size": 4}, r"kernel_size \(4\) is even"),
        ("diffusion", {"diffusion_step_embed_dim": 5}, "diffusion_step_embed_dim = 5"),
    ],
)
def test_what_cannot_be_built_is_refused(folder: Path, kind: str, options: dict[str, Any], what: str) -> None:
    values = recipe(folder, kind, options=options)

    def made() -> None:
        adapter = policy_of(values)
        with init_empty_weights():
            adapter.build()
        adapter.initial_weights()

    with pytest.raises(ConfigError, match=what):
        made()


def test_how_much_of_a_chunk_is_executed(folder: Path) -> None:
    """As the options have it, unless the recipe names it. What cannot be done is refused before training."""
    options = OPTIONS["act"] | {"n_action_steps": 1, "temporal_ensemble_coeff": 0.01}
    values = recipe(folder, "act", options=options) | {"eval": {"environment": f"{robot.__file__}:Dark"}}
    for overrides, expected in (((), (1, 0.01)), (("eval.action_steps=3",), (3, None))):
        loaded = load_recipe(values, overrides)
        found = episodes(loaded, find_adapter(loaded))
        assert found is not None
        assert (found.action_steps, found.temporal_ensembling) == expected
    for override, what in (("action_steps=4", "chunks of 3 actions"), ("environment_options.camera=eye", "only eye")):
        loaded = load_recipe(values, [f"eval.{override}"])
        with pytest.raises(ConfigError, match=what):
            episodes(loaded, find_adapter(loaded))


def test_features_have_the_names_of_a_lerobot_data_set(tmp_path: Path) -> None:
    """`image` may be observation.image, as in PushT, or observation.images.image, as in LIBERO."""
    shown = np.zeros((3, 28, 28, 3), np.uint8)
    made = [replace(one, images={"image": shown[: len(one.actions)]}) for one in robot.episodes(2, longest=3)]
    write_lerobot(tmp_path / "light", made, fps=10)
    values = recipe(tmp_path, "act")
    assert list(policy_of(values).features.cameras) == ["observation.images.image"]
    assert policy_of(values).cameras == ("image",)
    values["data"]["columns"] = {"images.eye": "observation.images.image"}
    assert list(policy_of(values).features.cameras) == ["observation.images.eye"]
    values["data"]["columns"] = {"images.image": "observation.images.image"}
    assert list(policy_of(values).features.cameras) == ["observation.images.image"]


@pytest.mark.parametrize("kind", POLICIES)
def test_keys_that_later_versions_write_for_their_training(folder: Path, kind: str, tmp_path: Path) -> None:
    config = policy_of(recipe(folder, kind)).saved_files()["config.json"]
    assert isinstance(config, dict)
    later = {"pretrained_revision": None, "compile_model": False, "compile_mode": "reduce-overhead"}
    later |= {"gradient_checkpointing": True} if kind == "diffusion" else {}
    (tmp_path / "config.json").write_text(json.dumps({**config, **later}))
    read = policy_of({"model": {"model_type": kind, "model_path": str(tmp_path)}})
    assert {key: value for key, value in read.options.model_dump(mode="json").items() if key in OPTIONS[kind]} == {
        key: config[key] for key in OPTIONS[kind]
    }


def test_another_policys_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"type": "diffusion"}')
    with pytest.raises(ModelError, match="holds a policy of type 'diffusion', not 'act'"):
        policy_of({"model": {"model_type": "act", "model_path": str(tmp_path)}})


def test_an_observation_without_its_history_is_refused(folder: Path) -> None:
    adapter = policy_of(recipe(folder, "diffusion"))
    act = adapter.policy(adapter.root(adapter.build().eval()), torch.device("cpu"))
    with pytest.raises(ModelError, match="has 0 earlier ones, the policy sees 2 frames"):
        act(observations(1))


@pytest.mark.parametrize("size", [(28, 28), (33, 97)])
def test_the_size_of_features(size: tuple[int, int]) -> None:
    with torch.device("meta"):
        network = ResNet("resnet18", FrozenBatchNorm)
        assert network(torch.empty(1, 3, *size)).shape[-2:] == feature_size(*size)


def test_what_a_policy_does_not_see_is_named(folder: Path) -> None:
    seen = {"observation.state": {"type": "STATE", "shape": [2]}}
    outputs = {"action": {"type": "ACTION", "shape": [3]}}
    options = {**OPTIONS["act"], "input_features": seen, "output_features": outputs}
    blind = find_adapter(load_recipe(recipe(folder, "act", options=options)))
    note = "of light the policy does not see the camera wrist: not in actor.model.options.input_features"
    assert note in blind.notes()
    assert not any("not see" in note for note in find_adapter(load_recipe(recipe(folder, "act"))).notes())


def test_a_camera_that_only_later_rows_have_is_named(tmp_path: Path) -> None:
    """It was left out without a word, as what a policy sees is that of the first row."""
    (tmp_path / "0.png").write_bytes(encode_image(robot.frame(0), "png"))
    shown = ["wrist", "wrist"], ["side", "wrist"]
    rows = [
        {"episode": number, "action": [number, frame], "state": [frame], "task": "go"}
        | {f"observation.images.{camera}": "0.png" for camera in cameras}
        for number, cameras in enumerate(shown)
        for frame in range(3)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy = policy_of(recipe(tmp_path, "act"), f"data.train_data_paths={tmp_path / 'rows.jsonl'}")
    encoder = policy.encoder(with_prompts=False)
    assert isinstance(encoder, PolicyEncoder)
    (source,) = resolve_sources(
        tmp_path / "rows.jsonl", policy.recipe.data, frames=encoder.frames, report=lambda _: None
    )
    (line,) = build_dataset([source], encoder, cache_dir=tmp_path / "cache").report.lines()
    assert line.endswith("not read are keys that some rows have: images.side (3 of 6, row 4)")


def test_which_statistics_several_data_sets_have_is_said(folder: Path) -> None:
    """A policy of LeRobot's has those of one."""
    values = recipe(folder, "act", unnorm_key="light")
    values["data"]["train_data_paths"] = [str(folder / "light"), str(folder / "other")]
    notes = policy_of(values).notes()
    assert "rows of other are normalised by the statistics of light, as model.unnorm_key says" in notes
    assert not any(note.startswith("other is normalised") for note in notes)


def test_the_statistics_of_a_directory_keep_the_name_of_their_data_set(folder: Path, tmp_path: Path) -> None:
    """A recipe that names it goes on from final/ as it is."""
    values = recipe(folder, "act", unnorm_key="other")
    values["data"]["train_data_paths"] = [str(folder / "light"), str(folder / "other")]
    before = policy_of(values)
    for name, content in before.saved_files().items():
        written = content if isinstance(content, bytes) else json.dumps(content).encode()
        (tmp_path / name).write_bytes(written)
    values["model"]["model_path"] = str(tmp_path)
    (name,) = (after := policy_of(values)).normalizers
    found, expected = (one.normalizer.actions.statistics["mean"] for one in (after, before))
    assert name == "other"
    assert found.tolist() == pytest.approx(expected.tolist())
    values["model"]["unnorm_key"] = "light"
    with pytest.raises(ConfigError, match=r"the statistics are those in .*, of other, not of 'light'"):
        policy_of(values).notes()


def test_a_row_of_another_size_is_described_in_words(folder: Path) -> None:
    """Without the name of an exception and a line of code."""
    adapter = policy_of(recipe(folder, "act"))
    frames = FrameOptions(adapter.action_chunk, adapter.observation_steps)
    (source,) = resolve_sources(str(folder / "light"), adapter.recipe.data, frames=frames, report=lambda text: None)
    row = next(iter(source.rows(source.files[0])))[1]
    assert not isinstance(row, RowError)
    picture = io.BytesIO()
    Image.new("RGB", (14, 28)).save(picture, "PNG")
    with pytest.raises(RowError, match=r"^the image of 'wrist' is 28 x 14, the policy takes 28 x 28"):
        adapter.encode({**row, "images": {"wrist": {"bytes": picture.getvalue()}}})
