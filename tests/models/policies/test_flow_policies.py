"""SmolVLA and pi0: training equal to a plain loop, acting, cameras that are missing, padding, LeRobot's names.

`bench/lerobot_vla.py` compares actions and losses with LeRobot itself.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import PaliGemmaForConditionalGeneration, SmolVLMForConditionalGeneration

import shardtune
from examples.policies.make_vlm import make
from shardtune.config import load_recipe
from shardtune.data.loader.packing import stack
from shardtune.data.robot.episode import Episode
from shardtune.data.robot.lerobot_writer import write_lerobot
from shardtune.errors import ConfigError, ModelError
from shardtune.models.find_adapter import find_adapter
from shardtune.models.policies.action_expert import Seen
from shardtune.models.policies.flow_matching import FlowPolicy
from shardtune.verify.adapter import verify_adapter
from tests.support.robot import NAMES, episodes

SIDE, STATE, ACTION, CHUNK = 24, 2, 3, 3
SIZES = {"width": 16, "layers": 2, "vocabulary": 270, "side": SIDE, "patch": 8}
KINDS = ("pi0", "smolvla")
ONE_FAST = [pytest.param("pi0", marks=pytest.mark.slow), "smolvla"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("flow")
    make(made, **SIZES)
    for name, count, seed in (("light", 12, 0), ("other", 3, 9)):
        found = (two_cameras(one) for one in episodes(count, seed))
        write_lerobot(made / name, found, fps=10, action_names=NAMES)
    return made


def two_cameras(episode: Episode) -> Episode:
    """With a second camera, whose images are half as wide."""
    wrist = episode.images["wrist"]
    return replace(episode, images={"top": 255 - wrist[:, :, :14], "wrist": wrist})


def recipe(folder: Path, kind: str, *, name: str = "run", options: Any = None, **model: Any) -> dict[str, Any]:
    common = {"chunk_size": CHUNK, "n_action_steps": 2, "max_state_dim": 4, "max_action_dim": 5}
    own = {
        "smolvla": {
            "vlm_model_name": str(folder / "smolvlm"), "resize_imgs_with_padding": [SIDE, SIDE], "num_steps": 2,
            "train_expert_only": False, "freeze_vision_encoder": False, "add_image_special_tokens": True,
            "prefix_length": 40,
        },
        "pi0": {
            "paligemma_variant": str(folder / "paligemma"), "image_resolution": [SIDE, SIDE], "num_inference_steps": 2,
            "action_expert_variant": {
                "width": 8, "depth": 2, "mlp_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4,
            },
        },
    }  # fmt: skip
    logger = {"log_path": str(folder / "runs"), "experiment_name": f"{kind}-{name}", "logger_backends": ["jsonl"]}
    return {
        "runner": {"max_steps": 2, "device": "cpu", "logger": logger},
        "micro_batch_size": 4,
        "global_batch_size": 8,
        "optim": {"lr": 1e-3, "lr_scheduler": "constant", "lr_warmup_steps": 0},
        "model": {
            "model_type": kind, "precision": "fp32", "options": {**common, **own[kind], **(options or {})}, **model,
        },
        "data": {
            "train_data_paths": str(folder / "light"),
            "eval_data_paths": str(folder / "other"),
            "num_workers": 0,
            "cache_dir": str(folder / "cache"),
        },
    }  # fmt: skip


def policy_of(values: dict[str, Any]) -> FlowPolicy:
    found = find_adapter(load_recipe(values, in_memory=["data.train_data_paths"], files_must_exist=False))
    assert isinstance(found, FlowPolicy)
    return found


def check(folder: Path, kind: str, *only: str) -> None:
    file = folder / f"{kind}.yaml"
    file.write_text(yaml.safe_dump(recipe(folder, kind)))
    report = verify_adapter(str(file), only=only, processes=not only, report=lambda text: None)
    assert not report.failures, "\n".join(map(str, report.failures))


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", ONE_FAST)
def test_sums_and_steps_equal_a_plain_loop(folder: Path, kind: str) -> None:
    check(folder, kind, "encode", "sums", "parity")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_kit(folder: Path, kind: str) -> None:
    """Two ranks, resuming and a fresh process among it."""
    check(folder, kind)


def observation(value: float = 0.5, **changed: Any) -> Any:
    wrist = np.full((28, 28, 3), int(127 + 120 * value), np.uint8)
    images = {"wrist": wrist, "top": 255 - wrist[:, :14]}
    return {
        "images": images,
        "instruction": "Follow the light 1",
        "state": np.array([value, value**2], np.float32),
        **changed,
    }


BACKBONES: dict[str, Any] = {
    "smolvla": ("smolvlm", SmolVLMForConditionalGeneration, "model.vlm_with_expert.vlm.", "model.text_model"),
    "pi0": (
        "paligemma", PaliGemmaForConditionalGeneration, "model.paligemma_with_expert.paligemma.",
        "model.language_model",
    ),
}  # fmt: skip


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", ONE_FAST)
def test_final_acts_without_data_and_backbone(folder: Path, kind: str) -> None:
    """From the weights of a vision-language model; sizes, statistics, tokenizer and weights are in the directory."""
    name, made, prefix, language = BACKBONES[kind]
    before = policy_of(recipe(folder, kind))
    torch.manual_seed(3)
    vlm = made(before.vlm_config)
    vlm.save_pretrained(folder / name)
    options = {"load_vlm_weights": True}
    run = shardtune.train(recipe(folder, kind, options=options), "actor.optim.lr=1.0e-12")
    final = run.dir / "final"
    config = json.loads((final / "config.json").read_text())
    assert (config["type"], config.get("load_vlm_weights", False)) == (kind, False)
    with pytest.raises(ModelError, match=r"instruction has 60\d tokens, and 48 are read"):  # no length was given
        shardtune.load_policy(final).select_action(observation(instruction="%&" * 300))
    steps = json.loads((final / "policy_preprocessor.json").read_text())["steps"]
    assert [step["registry_name"] for step in steps][2:4] == [f"{kind}_new_line_processor", "tokenizer_processor"]
    weights = load_file(final / "model.safetensors")
    tensor = f"{language}.layers.1.self_attn.v_proj.weight"
    torch.testing.assert_close(weights[prefix + tensor], vlm.state_dict()[tensor])
    assert "use_relative_actions" not in config
    later = {"use_relative_actions": False, "relative_exclude_joints": ["gripper"], "action_feature_names": None}
    written = {**config, "pretrained_revision": None, **(later if kind == "pi0" else {})}
    (final / "config.json").write_text(json.dumps(written))  # as LeRobot after 0.4
    gone = {"vlm_model_name": "nowhere/at-all"} if kind == "smolvla" else {"paligemma_variant": "nowhere/at-all"}
    model = {"model_type": kind, "model_path": str(final), "precision": "fp32", "options": gone}
    found = []
    for adapter in (before, policy_of({"model": model})):
        module = adapter.build()
        module.load_state_dict(weights, strict=False)
        act = adapter.policy(adapter.root(module.eval()), torch.device("cpu"))
        found.append(act([observation(), observation(-0.5, instruction="Follow a much longer instruction")]))
        alone = act([observation()])
        np.testing.assert_allclose(alone[0], found[-1][0], atol=1e-5)  # what others see has no part in it
    assert found[0].shape == (2, CHUNK, ACTION)
    np.testing.assert_allclose(found[1], found[0], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_over_drawn_weights_has_the_config_of_its_backbone(folder: Path, tmp_path: Path, kind: str) -> None:
    """The directory of the vision-language model, of which nothing else is needed, may be gone."""
    config = policy_of(recipe(folder, kind)).vlm_config
    (tmp_path / "vlm_config.json").write_text(json.dumps(config.to_dict()))
    option = "vlm_model_name" if kind == "smolvla" else "paligemma_variant"
    gone = {option: str(tmp_path / "gone")}
    over = {"is_lora": True, "lora": {"load_from": str(tmp_path)}}
    assert policy_of(recipe(folder, kind, options=gone, **over)).vlm_config.to_dict() == config.to_dict()
    with pytest.raises(ModelError, match="gone holds no config"):  # its weights are read, from nowhere else
        _ = policy_of(recipe(folder, kind, options={**gone, "load_vlm_weights": True}, **over)).vlm_config


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_padded_has_no_part(folder: Path, kind: str) -> None:
    """Tokens, a camera that is missing, dimensions of actions, and actions after an episode's end."""
    adapter = policy_of(recipe(folder, kind, options={"empty_cameras": 1}))
    torch.manual_seed(0)
    model = adapter.build().double()
    actions, padded = np.ones((CHUNK, ACTION), np.float32), np.array([False, False, True])
    seen = adapter._fields(observation()["images"], np.array([1, 2], np.float32), "go")
    lacks = adapter._fields({"wrist": observation()["images"]["wrist"]}, np.array([1, 2], np.float32), "go on and on")
    more = {"action": actions, "action_is_pad": padded}
    samples = [shardtune.Sample(fields=fields | more) for fields in (seen, lacks)]
    assert adapter.weights(samples[0]) == {"loss": 2.0 * ACTION}
    batch = stack(samples, [0, 1], {"loss": 12.0}, adapter.padding).widened()
    inputs = adapter.seen(batch.fields)
    assert inputs.present.tolist() == [[True, True, False], [False, True, False]]
    assert inputs.words.sum(1).tolist() == [int(fields["words"]) for fields in (seen, lacks)]
    total, weight = adapter.loss(model, batch)
    total.backward()
    assert weight == 12.0
    others = inputs._replace(
        images=torch.where(inputs.present[..., None, None, None], inputs.images, 0.3),
        tokens=torch.where(inputs.words, inputs.tokens, 7),
    )
    chunk, time = torch.randn(2, CHUNK, 5).double(), adapter.clock(model, torch.tensor([0.2, 0.9]).double())
    with torch.no_grad():
        assert torch.equal(model(others, chunk, time), model(inputs, chunk, time))
    last: Any = model.get_submodule("model.action_out_proj")
    assert last.weight.grad[:ACTION].abs().min() > 0
    assert not last.weight.grad[ACTION:].any()
    idle = [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]
    assert not idle


@pytest.mark.parametrize("kind", KINDS)
def test_the_prefix_is_computed_once(folder: Path, kind: str) -> None:
    """Denoising with its keys and values equals computing all of it at each step."""
    adapter = policy_of(recipe(folder, kind))
    torch.manual_seed(0)
    model = adapter.build().double().eval()
    fields = adapter._fields(observation()["images"], np.array([1, 2], np.float32), "go")
    inputs = adapter.seen({name: torch.from_numpy(np.stack([one])) for name, one in fields.items()})
    inputs = Seen(*(one.double() if one.is_floating_point() else one for one in inputs))
    noise = torch.randn(1, CHUNK, 5).double()
    with torch.no_grad():
        chunk = noise
        for step in range(2):
            chunk = chunk - model(inputs, chunk, adapter.clock(model, torch.tensor([1 - step / 2]).double())) / 2
        found = adapter.predict(model, inputs, noise)
    torch.testing.assert_close(found, chunk[..., :ACTION], atol=1e-12, rtol=0)


def test_times_have_their_distribution(folder: Path) -> None:
    """Beta(1.5, 1) has the mean 0.6."""
    uniform = (torch.arange(100_000).double() + 0.5) / 100_000
    for kind in KINDS:
        times = policy_of(recipe(folder, kind)).times(uniform)
        assert times.mean().item() == pytest.approx(0.001 + 0.999 * 0.6, abs=1e-5)
        assert 0.001 <= times.min() < times.max() <= 1


@pytest.mark.parametrize(
    ("kind", "options", "what"),
    [
        ("smolvla", {"max_state_dim": 1}, "2 dimensions of state, .*max_state_dim is 1"),
        ("smolvla", {"n_action_steps": 9}, "n_action_steps is more than chunk_size = 3"),
        ("smolvla", {"num_vlm_layers": 2, "num_expert_layers": 3}, "the expert has 3 layers, the language model 2"),
        ("pi0", {"vlm_model_name": "x"}, "options.vlm_model_name is not an option"),
        ("pi0", {"time_sampling_beta_beta": 2.0}, "time_sampling_beta_beta"),
        ("pi0", {"use_relative_actions": True}, "use_relative_actions is not read; model.action_representation"),
        ("pi0", {"image_resolution": [0, 0]}, "image_resolution.0 = 0"),
        ("smolvla", {"resize_imgs_with_padding": [0, 28]}, "resize_imgs_with_padding.0 = 0"),
        ("pi0", {"paligemma_variant": "gemma_2b"}, "differ in layers, heads or their size"),
    ],
)
def test_what_cannot_be_built_is_refused(folder: Path, kind: str, options: dict[str, Any], what: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=what), torch.device("meta"):
        policy_of(recipe(folder, kind, options=options)).build()


def test_a_camera_that_rows_lack_is_named(folder: Path) -> None:
    """It may be misspelt, and `empty_cameras` lets every row do without it."""
    seen: Any = policy_of(recipe(folder, "smolvla")).features.cameras
    cameras = {name.replace("wrist", "wirst"): {"type": "VISUAL", "shape": [3, *size]} for name, size in seen.items()}
    inputs = {**cameras, "observation.state": {"type": "STATE", "shape": [2]}}
    given = {"input_features": inputs, "output_features": {"action": {"type": "ACTION", "shape": [len(NAMES)]}}}
    values = recipe(folder, "smolvla", options={"empty_cameras": 1, **given})
    (line,) = (line for line in policy_of(values).notes() if "empty_cameras" in line)
    assert "has no camera wirst, as" in line
    assert line.endswith("its first row has top, wrist")
    assert not any("empty_cameras" in line for line in policy_of(recipe(folder, "smolvla")).notes())


@pytest.mark.parametrize("number", [0, 1])
def test_data_without_a_camera_are_refused(folder: Path, number: int) -> None:
    """A camera that may be missing is none that there is."""
    blind = (replace(one, images={}) for one in episodes(1))
    source = write_lerobot(folder / f"blind-{number}", blind, fps=10, action_names=NAMES)
    values = recipe(folder, "smolvla", options={"empty_cameras": number})
    values["data"]["train_data_paths"] = str(source)
    with pytest.raises(ConfigError, match="the data have no images"), torch.device("meta"):
        policy_of(values).build()


def test_an_observation_without_a_camera_or_an_instruction_is_refused(folder: Path) -> None:
    adapter = policy_of(recipe(folder, "smolvla"))
    act = adapter.policy(adapter.root(adapter.build().eval()), torch.device("cpu"))
    seen: Any = observation()
    with pytest.raises(ModelError, match=r"no camera top, only wrist .*empty_cameras: 1 lets the policy do without"):
        act([observation(images={"wrist": seen["images"]["wrist"]})])
    lenient = policy_of(recipe(folder, "smolvla", options={"empty_cameras": 2}))
    assert (lenient.cameras, lenient.spare_cameras, len(lenient.features.cameras)) == (("top", "wrist"), 2, 4)
    with pytest.raises(ModelError, match="there is no camera top, wrist, and the policy needs one at least"):
        lenient.check_observation(observation(images={}))
    with pytest.raises(ModelError, match="the instruction is empty") as error:
        act([observation(instruction=" ")])
    assert error.value.where == "observation['instruction']"
    with pytest.raises(ModelError, match=r"the state is \[1\.\], the policy takes 2 numbers") as error:
        act([observation(state=np.ones(1, np.float32))])
    assert error.value.where == "observation['state']"
    with pytest.raises(ModelError, match=r"the instruction has 60\d tokens, and 48 are read: give .*_max_length: 60\d"):
        act([observation(instruction="%&" * 300)])
    assert len(policy_of(recipe(folder, "smolvla", options={"tokenizer_max_length": 4}))._words("lift it up")) == 4
