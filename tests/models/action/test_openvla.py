"""OpenVLA's directories: loaded as they are, against a recomputation from the stored tensors, saved as they were."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn.functional import conv2d, gelu, layer_norm, linear
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import shardtune
from shardtune.errors import ConfigError, DataError, ModelError
from shardtune.models.action.openvla import (
    EMPTY_TOKEN,
    PROMPT,
    OpenVLAConfig,
    OpenVLAForActionPrediction,
    ending_empty,
)
from shardtune.models.action.openvla_processor import PrismaticImageProcessor, PrismaticProcessor
from shardtune.models.action.timm_vit import shape_of
from shardtune.run.policy import load_policy
from tests.support.tiny_openvla import (
    CONFIG,
    DINO,
    MEAN,
    PATCH,
    PATCHES,
    PREPROCESSOR,
    SIDE,
    SIGLIP,
    STATISTICS,
    STD,
    TEXT,
    save_openvla,
)

Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("openvla")
    save_openvla(made)
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return OpenVLAForActionPrediction.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def processor(folder: Path) -> PrismaticProcessor:
    images = PrismaticImageProcessor.from_pretrained(folder)
    return PrismaticProcessor(images, AutoTokenizer.from_pretrained(folder, padding_side="left"))


def picture(seed: int, size: tuple[int, int] = (40, 30)) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(values)


def inputs(processor: PrismaticProcessor, *instructions: str) -> dict[str, torch.Tensor]:
    prompts = [PROMPT.format(instruction=instruction) for instruction in instructions]
    pictures = [picture(len(instruction)) for instruction in instructions]
    return dict(processor(prompts, pictures, padding=True))


# -- what the stored tensors give, written out ---------------------------------------------------------------------


def attention(hidden: torch.Tensor, tensors: Tensors, name: str, heads: int) -> torch.Tensor:
    width = hidden.shape[1]
    query, key, value = linear(hidden, tensors[f"{name}.qkv.weight"], tensors[f"{name}.qkv.bias"]).chunk(3, dim=1)
    parts = []
    for head in range(heads):
        at = slice(head * width // heads, (head + 1) * width // heads)
        scores = query[:, at] @ key[:, at].T / math.sqrt(width // heads)
        parts.append(scores.softmax(-1) @ value[:, at])
    return linear(torch.cat(parts, 1), tensors[f"{name}.proj.weight"], tensors[f"{name}.proj.bias"])


def block(hidden: torch.Tensor, tensors: Tensors, name: str, shape: Mapping[str, Any]) -> torch.Tensor:
    def norm(number: int) -> torch.Tensor:
        weights = [tensors[f"{name}.norm{number}.{part}"] for part in ("weight", "bias")]
        return layer_norm(hidden, (shape["width"],), *weights, eps=1e-6)

    def scaled(number: int, change: torch.Tensor) -> torch.Tensor:
        return change * tensors[f"{name}.ls{number}.scale_factor"] if shape.get("layer_scale") else change

    hidden = hidden + scaled(1, attention(norm(1), tensors, f"{name}.attn", shape["heads"]))
    inner = gelu(linear(norm(2), tensors[f"{name}.mlp.fc1.weight"], tensors[f"{name}.mlp.fc1.bias"]))
    return hidden + scaled(2, linear(inner, tensors[f"{name}.mlp.fc2.weight"], tensors[f"{name}.mlp.fc2.bias"]))


def features(image: torch.Tensor, tensors: Tensors, name: str, shape: Mapping[str, Any]) -> torch.Tensor:
    """Of one image [3, side, side]: what the last block but one gives for each patch."""
    proj = conv2d(
        image[None], tensors[f"{name}.patch_embed.proj.weight"], tensors[f"{name}.patch_embed.proj.bias"], stride=PATCH
    )
    hidden = proj[0].reshape(shape["width"], PATCHES).T + tensors[f"{name}.pos_embed"][0]
    if shape.get("class_token"):
        hidden = torch.cat([tensors[f"{name}.cls_token"][0], tensors[f"{name}.reg_token"][0], hidden])
    for number in range(shape["depth"] - 1):
        hidden = block(hidden, tensors, f"{name}.blocks.{number}", shape)
    return hidden[-PATCHES:]


def recomputed(folder: Path, given: Mapping[str, torch.Tensor], row: int) -> torch.Tensor:
    """The logits of a row without its padding, patches after its first token."""
    tensors = load_file(folder / "model.safetensors")
    image = given["pixel_values"][row]
    joined = torch.cat(
        [
            features(image[:3], tensors, "vision_backbone.featurizer", DINO),
            features(image[3:], tensors, "vision_backbone.fused_featurizer", SIGLIP),
        ],
        dim=1,
    )
    for number in (1, 2, 3):
        joined = linear(joined, tensors[f"projector.fc{number}.weight"], tensors[f"projector.fc{number}.bias"])
        joined = gelu(joined) if number < 3 else joined
    language = LlamaForCausalLM(LlamaConfig(**{name: value for name, value in TEXT.items() if name != "torch_dtype"}))
    prefix = "language_model."
    language.load_state_dict({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})
    ids = given["input_ids"][row][given["attention_mask"][row].bool()]
    words = tensors["language_model.model.embed_tokens.weight"][ids]
    with torch.no_grad():
        return language(inputs_embeds=torch.cat([words[:1], joined, words[1:]])[None]).logits[0]


# -- the tests -----------------------------------------------------------------------------------------------------


def test_the_names_and_sizes_are_those_of_openvla_7b() -> None:
    """What its index says: 15,082,474,368 bytes in bfloat16."""
    text = {"model_type": "llama", "pad_token_id": 32000, "torch_dtype": "bfloat16", "vocab_size": 32064}
    with torch.device("meta"):
        whole = OpenVLAForActionPrediction(OpenVLAConfig(text_config=text))
    named = {name: list(tensor.shape) for name, tensor in whole.state_dict().items()}
    assert sum(2 * math.prod(shape) for shape in named.values()) == 15_082_474_368
    assert whole.config.num_patches == 256
    assert named["vision_backbone.featurizer.pos_embed"] == [1, 256, 1024]
    assert named["vision_backbone.featurizer.blocks.23.ls2.scale_factor"] == [1024]
    assert named["vision_backbone.fused_featurizer.blocks.26.mlp.fc1.weight"] == [4304, 1152]
    assert named["projector.fc1.weight"] == [8704, 2176]
    assert named["language_model.lm_head.weight"] == [32064, 4096]


def test_a_directory_loads_as_it_is(folder: Path, model: Any) -> None:
    stored = load_file(folder / "model.safetensors")
    held = model.state_dict()
    assert held.keys() == stored.keys()
    assert all(torch.equal(held[name], stored[name]) for name in stored)
    assert model.dtype == torch.float32
    assert (model.config.text_vocabulary, model.config.image_token_id) == (32000, 32001)


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.lengthy
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_forward_is_what_the_tensors_give(
    folder: Path, model: Any, processor: PrismaticProcessor, side: str
) -> None:
    processor.tokenizer.padding_side = side
    given = inputs(processor, "pick up the cup", "go")
    processor.tokenizer.padding_side = "left"
    logits = model(**given).logits
    length = given["input_ids"].shape[1] + PATCHES
    assert logits.shape == (2, length, 32064)
    for row in range(2):
        wanted = recomputed(folder, given, row)
        own = logits[row, length - len(wanted) :] if side == "left" else logits[row, : len(wanted)]
        torch.testing.assert_close(own, wanted, atol=2e-4, rtol=2e-4)
    assert float(logits[0].detach().std()) > 0.1


def test_labels_move_with_their_tokens(model: Any, processor: PrismaticProcessor) -> None:
    given = inputs(processor, "pick up the cup")
    labels = given["input_ids"].clone()
    labels[:, :10] = -100
    found = model(**given, labels=labels)
    tail = found.logits[0, PATCHES + 9 : -1]
    wanted = torch.nn.functional.cross_entropy(tail, labels[0, 10:])
    torch.testing.assert_close(found.loss, wanted)


def test_prompts_with_places_for_patches_give_the_same(model: Any, processor: PrismaticProcessor) -> None:
    given = inputs(processor, "pick up the cup")
    ids = given["input_ids"]
    places = torch.full((1, PATCHES), model.config.image_token_id)
    marked = torch.cat([ids[:, :1], places, ids[:, 1:]], dim=1)
    found = model(input_ids=marked, pixel_values=given["pixel_values"]).logits
    torch.testing.assert_close(found, model(**given).logits)
    with pytest.raises(ModelError, match=f"places for {PATCHES - 1} patches, the images have 1 x {PATCHES}"):
        model(input_ids=marked[:, 2:], pixel_values=given["pixel_values"])


def test_actions_are_predicted(folder: Path, model: Any, processor: PrismaticProcessor) -> None:
    """The likeliest action tokens, one after the other, by the recomputation above."""
    given = inputs(processor, "pick up the cup")
    found = model.predict_action_batch(**given, do_sample=False, unnorm_key="bridge_orig")
    assert found.actions.shape == (1, 1, 7)
    ended = torch.cat([given["input_ids"], torch.tensor([[EMPTY_TOKEN]])], dim=1)
    assert found.sequences[0, :-7].tolist() == ended[0].tolist()
    so_far = {**given, "input_ids": found.sequences[:, :-1]}
    so_far["attention_mask"] = torch.ones_like(so_far["input_ids"])
    wanted = recomputed(folder, so_far, 0)[-7:]
    torch.testing.assert_close(found.logits[0], wanted, atol=5e-4, rtol=5e-4)
    ids = wanted[:, 31744:32000].argmax(-1) + 31744
    assert found.sequences[0, -7:].tolist() == ids.tolist()
    statistics, centres = STATISTICS["bridge_orig"]["action"], np.linspace(-1, 1, 256)
    for number, token in enumerate(ids.tolist()):
        at = min(max(32000 - token - 1, 0), 254)
        value = (centres[at] + centres[at + 1]) / 2
        if statistics["mask"][number]:
            low, high = statistics["q01"][number], statistics["q99"][number]
            value = 0.5 * (value + 1) * (high - low) + low
        assert float(found.actions[0, 0, number]) == pytest.approx(value, abs=1e-6)
    alone = model.predict_action(**given, unnorm_key="bridge_orig", do_sample=False)
    assert alone.tolist() == found.actions[0, 0].tolist()


def test_a_batch_is_answered_as_each_row_alone(model: Any, processor: PrismaticProcessor) -> None:
    instructions = ("pick up the cup", "go", "turn left")
    together = model.predict_action_batch(**inputs(processor, *instructions), do_sample=False, unnorm_key="bridge_orig")
    for row, instruction in enumerate(instructions):
        alone = model.predict_action_batch(**inputs(processor, instruction), do_sample=False, unnorm_key="bridge_orig")
        assert torch.equal(alone.actions[0], together.actions[row])
        torch.testing.assert_close(alone.logits[0], together.logits[row], atol=5e-4, rtol=5e-4)
    assert len({tuple(row) for row in together.sequences[:, -7:].tolist()}) == 3


def test_data_sets_with_other_dimensions(model: Any, processor: PrismaticProcessor) -> None:
    found = model.predict_action_batch(**inputs(processor, "go"), do_sample=False, unnorm_key="two_arms")
    assert found.actions.shape == (1, 1, 3)
    with pytest.raises(ConfigError, match="2 datasets: bridge_orig, two_arms"):
        model.predict_action_batch(**inputs(processor, "go"))


def test_the_first_of_several_data_sets_is_no_choice(folder: Path) -> None:
    seen = {"images": {"image": np.zeros((SIDE, SIDE, 3), np.uint8)}, "instruction": "go", "state": None}
    shapes = {key: load_policy(folder, unnorm_key=key).predict_action_chunk(seen).shape for key in STATISTICS}
    assert shapes == {"bridge_orig": (1, 7), "two_arms": (1, 3)}
    with pytest.raises(DataError, match=r"unnorm_key is not given; .* bridge_orig, two_arms[\s\S]*load_policy"):
        load_policy(folder).predict_action_chunk(seen)


def test_the_empty_token_is_added_where_it_is_missing() -> None:
    ids = torch.tensor([[32000, 1, 5], [1, 6, EMPTY_TOKEN], [1, 7, 8]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1], [1, 1, 1]])
    longer, masks = ending_empty(ids, mask)
    assert longer[:, -1].tolist() == [EMPTY_TOKEN] * 3
    kept = [row[on.bool()].tolist() for row, on in zip(longer, masks, strict=True)]
    assert kept == [[1, 5, EMPTY_TOKEN], [1, 6, EMPTY_TOKEN], [1, 7, 8, EMPTY_TOKEN]]
    assert ending_empty(longer, masks)[0] is longer


def test_images_are_prepared_as_the_file_asks(processor: PrismaticProcessor) -> None:
    image = picture(3)
    pixels = processor.image_processor(image, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 6, SIDE, SIDE)
    small = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=np.float64) / 255
    for start, mean, std in ((0, MEAN, STD), (3, [0.5] * 3, [0.5] * 3)):
        wanted = ((small - np.array(mean)) / np.array(std)).transpose(2, 0, 1)
        assert np.abs(pixels[0, start : start + 3].numpy() - wanted).max() < 1e-5


def test_other_ways_to_resize() -> None:
    wide = Image.new("RGB", (40, 20), (255, 0, 0))
    sizes = {"input_sizes": [[3, 10, 10]], "means": [[0.0] * 3], "stds": [[1.0] * 3]}
    boxed = PrismaticImageProcessor(image_resize_strategy="letterbox", **sizes).apply(wide)
    assert boxed[0, 0, 0] == 0
    assert boxed[0, 5, 5] == 1
    middle = Image.new("RGB", (40, 20), (0, 0, 0))
    middle.paste((255, 255, 255), (10, 0, 30, 20))
    cropped = PrismaticImageProcessor(image_resize_strategy="resize-crop", **sizes).apply(middle)
    assert float(cropped[:, :, 1:9].min()) > 0.9


def test_saved_as_it_was(folder: Path, model: Any, processor: PrismaticProcessor, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    again = load_file(tmp_path / "model.safetensors")
    stored = load_file(folder / "model.safetensors")
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[name], stored[name]) for name in stored)
    written = json.loads((tmp_path / "config.json").read_text())
    moved = {"text_config", "torch_dtype", "transformers_version"}
    assert {name: written[name] for name in CONFIG.keys() - moved} == {
        name: CONFIG[name] for name in CONFIG.keys() - moved
    }
    assert {name: written["text_config"][name] for name in TEXT if name != "torch_dtype"} == {
        name: TEXT[name] for name in TEXT if name != "torch_dtype"
    }
    loaded: Any = OpenVLAForActionPrediction.from_pretrained(tmp_path).eval()
    given = inputs(processor, "go", "pick up the cup")
    wanted = model.predict_action_batch(**given, do_sample=False, unnorm_key="bridge_orig")
    found = loaded.predict_action_batch(**given, do_sample=False, unnorm_key="bridge_orig")
    assert torch.equal(found.actions, wanted.actions)
    asked = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert {name: asked[name] for name in PREPROCESSOR.keys() - {"auto_map", "processor_class"}} == {
        name: PREPROCESSOR[name] for name in PREPROCESSOR.keys() - {"auto_map", "processor_class"}
    }
    images = PrismaticImageProcessor.from_pretrained(tmp_path)
    assert images.tvf_normalize_params == PREPROCESSOR["tvf_normalize_params"]
    assert torch.equal(images.apply(picture(1)), processor.image_processor.apply(picture(1)))


def test_fresh_weights_are_real() -> None:
    config = OpenVLAConfig(
        **{name: value for name, value in CONFIG.items() if name not in ("torch_dtype", "architectures")}
    )
    torch.manual_seed(0)
    fresh = OpenVLAForActionPrediction(config)
    assert float(fresh.vision_backbone.featurizer.pos_embed.detach().std()) == pytest.approx(0.02, rel=0.2)
    scale = fresh.get_parameter("vision_backbone.featurizer.blocks.0.ls1.scale_factor")
    assert float(scale[0].detach()) == pytest.approx(1e-5)
    assert all(torch.isfinite(parameter).all() for parameter in fresh.parameters())


def test_backbones_that_are_not_known() -> None:
    assert shape_of("vit_large_patch14_reg4_dinov2.lvd142m").depth == 24
    with pytest.raises(ModelError, match="the vision backbone 'resnet50' is not known"):
        shape_of("resnet50")
    with pytest.raises(ModelError, match="the sizes of x cannot be used"):
        shape_of("x", {"patch": 14})
    with pytest.raises(ModelError, match="timm_override_act_layers"):
        _ = OpenVLAConfig(timm_override_act_layers=["quick_gelu", None]).vision_shapes


@pytest.mark.lengthy
def test_the_systems_own_name_needs_no_function(folder: Path) -> None:
    actor: Any = {
        "model": {"model_type": "vision_language_action", "model_path": str(folder), "hidden_size": 16},
        "tokenizer": {"tokenizer_model": str(folder)},
    }
    actor["model"] |= {"unnorm_key": "bridge_orig", "action_token_len": 7, "vocab_size": 32000, "image_size": [28, 28]}
    config, processor = shardtune.get_model_config_and_processor(actor)
    assert isinstance(config, OpenVLAConfig)
    assert isinstance(processor, PrismaticProcessor)
    model: Any = shardtune.get_model(actor["model"])
    assert model.action_settings.unnorm_key == "bridge_orig"
    assert next(model.parameters()).is_meta
    with pytest.raises(ConfigError, match="hidden_size is 4096"):
        shardtune.get_model_config_and_processor({"model": {**actor["model"], "hidden_size": 4096}})
