"""SmolVLA and pi0 against LeRobot's own, on directories with random weights that it wrote.

    python bench/lerobot_vla.py --lerobot PYTHON

PYTHON is the interpreter of an environment with LeRobot 0.4 (`pip install 'lerobot[smolvla]==0.4.*'`), which needs an
older transformers and cannot share ours. There this file writes tiny policies, images, states, instructions, noise and
times, and what LeRobot makes of them: losses and actions. Here the same directories are read, and the largest
differences printed.

transformers 4.57, on which LeRobot 0.4 runs, places SmolVLM's patches one row and one column off (0, 0, 1, 2 in a grid
of 4); versions before it and transformers 5 do not, and here both sides place them as these do.

LeRobot's pi0 asks for a patched transformers that no registry has. What it needs of it for pi0 is made here: norms that
take a condition, which is none, and return a gate, which is none; a residual with a gate; features of images that are
not divided by the square root of the width. Its own loop of denoising runs on parts of the patch beyond these, so
that loop is Euler's method over its forward of training.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

ROWS, STATE, ACTION, CHUNK, SIDE = 3, 5, 4, 6, 32
CAMERAS = ("top", "wrist")
SPECIAL = ["<pad>", "</s>", "<image>", "<fake_token_around_image>", "<global-img>"]
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE,
    "patch_size": 8,
}  # fmt: skip
CASES = {
    "smolvla": {},
    "smolvla-special-tokens": {"add_image_special_tokens": True, "prefix_length": 64},
    "smolvla-empty-camera": {"add_image_special_tokens": True, "empty_cameras": 1},
    "smolvla-self-attention": {"attention_mode": "self_attn", "num_vlm_layers": 3},
    "smolvla-half-expert": {"num_expert_layers": 2, "self_attn_every_n_layers": -1},
    "smolvla-resized": {"resize_imgs_with_padding": [48, 48]},
    "pi0": {},
}
READ_AGAIN = [name for name in CASES if name != "pi0"]
"""Cases whose directories LeRobot reads again; tiny sizes of pi0 have no names in its config.json."""
WIDTH, VOCABULARY = 48, 300


INTRODUCTION = """\
Directories with random weights that LeRobot 0.4 wrote, in fp32, for the same images, noise and times: the largest
difference of an action, normalised, and of a loss (of one number of a chunk), relative to the largest; and the first
again for a directory that shardtune wrote and LeRobot read. "without wrist": one of the two cameras is missing."""
ENOUGH = 1e-5


def main() -> None:
    """Have LeRobot write, compare, and rewrite the section."""
    parser = argparse.ArgumentParser(description="SmolVLA and pi0 against LeRobot's own.")
    parser.add_argument("--lerobot", help="the Python of an environment with LeRobot 0.4")
    parser.add_argument("--out", type=Path, help="keep what LeRobot writes there")
    parser.add_argument("--dry", action="store_true", help="print the section instead of writing it")
    for name in ("write", "read"):
        parser.add_argument(f"--{name}", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write is not None:
        write(args.write)
        return
    if args.read is not None:
        read(args.read)
        return
    from results import machine, table, write_section

    with tempfile.TemporaryDirectory() as scratch:
        folder = args.out or Path(scratch)
        subprocess.run([args.lerobot, __file__, "--write", str(folder)], check=True)
        lines = compare(folder)
        subprocess.run([args.lerobot, __file__, "--read", str(folder)], check=True)
        for name in READ_AGAIN:
            theirs = torch.load(folder / f"{name}.pt")["actions"]
            lines[name].append(float((torch.load(folder / f"{name}-ours.pt") - theirs).abs().max()))
    heads = ["case", "action", "loss", "action, written here, loaded there"]
    rows = [[title(name), *(f"{number:.0e}" for number in numbers)] for name, numbers in lines.items()]
    text = "\n\n".join([f"{machine()}.", INTRODUCTION, table(heads, [[*row, ""][:4] for row in rows])])
    if args.dry:
        print(text)
    else:
        write_section("lerobot_vla", text)
    if max(number for numbers in lines.values() for number in numbers) > ENOUGH:
        raise SystemExit("a policy differs from LeRobot's")


def title(name: str) -> str:
    """The words of a case."""
    kind, _, rest = name.removesuffix("-missing").partition("-")
    parts = [kind, rest.replace("-", " "), "without wrist" * name.endswith("-missing")]
    return ", ".join(part for part in parts if part)


# In LeRobot's environment.


def write(folder: Path) -> None:
    """Write policies with random weights, inputs, and LeRobot's outputs."""
    make_vlm(folder / "vlm")
    torch.manual_seed(1)
    tokens = torch.randint(len(SPECIAL), VOCABULARY - 20, (ROWS, 9))
    words = torch.arange(9) < torch.tensor([[9], [5], [7]])
    given = {
        **{f"observation.images.{name}": torch.rand(ROWS, 3, SIDE, SIDE) for name in CAMERAS},
        "observation.state": torch.randn(ROWS, STATE),
        "observation.language.tokens": tokens * words,
        "observation.language.attention_mask": words,
        "action": torch.randn(ROWS, CHUNK, ACTION),
    }
    noise, time = torch.randn(ROWS, CHUNK, 8), torch.tensor([0.1, 0.55, 0.95])
    for name, options in CASES.items():
        torch.manual_seed(7)
        make = pi0 if name == "pi0" else smolvla
        policy, network = make(folder, options)
        for parameter in policy.parameters():
            parameter.data = torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5)
        policy.eval().save_pretrained(folder / name)
        for missing in ((), ("wrist",)):
            batch = {key: value for key, value in given.items() if not any(key.endswith(one) for one in missing)}
            if name.endswith("resized"):
                batch = {key: value[..., :20] if "images" in key else value for key, value in batch.items()}
            with torch.no_grad():
                found = network(policy, batch, noise, time)
            case = f"{name}-missing" if missing else name
            torch.save({"batch": batch, "noise": noise, "time": time, **found}, folder / f"{case}.pt")


def read(folder: Path) -> None:
    """Have LeRobot compute the actions of the policies that shardtune wrote."""
    smolvla(folder, {})  # for the parts that it replaces
    modeling: Any = import_module("lerobot.policies.smolvla.modeling_smolvla")
    for name in READ_AGAIN:
        policy = modeling.SmolVLAPolicy.from_pretrained(folder / f"{name}-ours", strict=True).eval()
        given = torch.load(folder / f"{name}.pt")
        with torch.no_grad():
            found = run_smolvla(policy, given["batch"], given["noise"], given["time"])
        torch.save(found["actions"], folder / f"{name}-ours.pt")


def make_vlm(folder: Path) -> None:
    """A tokenizer and a config of SmolVLM, tiny."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, SmolVLMConfig

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["touch the red ball\n", "move to the blue disc\n"], trainer)
    names = dict(zip(("image_token", "fake_image_token", "global_image_token"), SPECIAL[2:], strict=True))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[1], pad_token=SPECIAL[0], extra_special_tokens=names
    )
    fast.save_pretrained(folder)
    text = {
        "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "pad_token_id": 0,
    }  # fmt: skip
    SmolVLMConfig(vision_config=VISION, text_config=text, scale_factor=2, image_token_id=2).save_pretrained(folder)


def features() -> dict[str, Any]:
    types_of: Any = import_module("lerobot.configs.types")
    FeatureType, PolicyFeature = types_of.FeatureType, types_of.PolicyFeature
    images = {f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, SIDE, SIDE)) for name in CAMERAS}
    return {
        "input_features": {**images, "observation.state": PolicyFeature(FeatureType.STATE, (STATE,))},
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (ACTION,))},
        "device": "cpu", "push_to_hub": False, "chunk_size": CHUNK, "n_action_steps": CHUNK, "max_state_dim": 7,
        "max_action_dim": 8, "empty_cameras": 0, "tokenizer_max_length": 9,
    }  # fmt: skip


def smolvla(folder: Path, options: dict[str, Any]) -> Any:
    backbone: Any = import_module("lerobot.policies.smolvla.smolvlm_with_expert")
    configuration: Any = import_module("lerobot.policies.smolvla.configuration_smolvla")
    modeling: Any = import_module("lerobot.policies.smolvla.modeling_smolvla")
    from transformers import AutoTokenizer
    from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionEmbeddings

    class Processors:
        @staticmethod
        def from_pretrained(path: str) -> Any:
            return types.SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(path))

    backbone.AutoProcessor = Processors  # its own needs torchcodec or decord for videos
    SmolVLMVisionEmbeddings.forward = embed_patches
    size = {"resize_imgs_with_padding": [SIDE, SIDE], **options}
    config = configuration.SmolVLAConfig(vlm_model_name=str(folder / "vlm"), num_steps=4, **{**features(), **size})
    return modeling.SmolVLAPolicy(config), run_smolvla


def embed_patches(self: Any, pixel_values: torch.Tensor, patch_attention_mask: torch.Tensor) -> torch.Tensor:
    """SmolVLM's patches with their places in the trained grid, as transformers 5 has them, and had before 4.57."""
    patches = self.patch_embedding(pixel_values)
    side = self.num_patches_per_side
    down, along = (torch.arange(size) * side // size for size in patches.shape[-2:])
    return patches.flatten(2).transpose(1, 2) + self.position_embedding(down[:, None] * side + along).flatten(0, 1)


def run_smolvla(policy: Any, batch: dict[str, torch.Tensor], noise: torch.Tensor, time: torch.Tensor) -> dict[str, Any]:
    images, masks = policy.prepare_images(batch)
    seen = images, masks, batch["observation.language.tokens"], batch["observation.language.attention_mask"]
    state, actions = policy.prepare_state(batch), policy.prepare_action(batch)
    losses = policy.model.forward(*seen, state, actions, noise=noise, time=time)
    return {"losses": losses, "actions": policy.model.sample_actions(*seen, state, noise=noise)}


def pi0(folder: Path, options: dict[str, Any]) -> Any:
    transformers: Any = import_module("transformers")
    siglip: Any = import_module("transformers.models.siglip")
    modeling_gemma: Any = import_module("transformers.models.gemma.modeling_gemma")
    modeling_paligemma: Any = import_module("transformers.models.paligemma.modeling_paligemma")
    check: Any = types.ModuleType("transformers.models.siglip.check")
    check.check_whether_transformers_replace_is_installed_correctly = lambda: True
    sys.modules[check.__name__] = siglip.check = check
    plain = modeling_gemma.GemmaRMSNorm.forward
    modeling_gemma.GemmaRMSNorm.forward = lambda self, x, cond=None: (plain(self, x), None)
    modeling_gemma._gated_residual = lambda x, y, gate: x + y
    scaled = modeling_paligemma.PaliGemmaModel.get_image_features
    modeling_paligemma.PaliGemmaModel.get_image_features = lambda self, images: (
        scaled(self, images) * self.config.text_config.hidden_size**0.5
    )
    modeling_pi0: Any = import_module("lerobot.policies.pi0.modeling_pi0")
    configuration: Any = import_module("lerobot.policies.pi0.configuration_pi0")

    def tiny_paligemma(config: Any) -> Any:
        config.vision_config.update({**VISION, "projection_dim": WIDTH})
        config.text_config.vocab_size, config.projection_dim, config.hidden_size = VOCABULARY, WIDTH, WIDTH
        config.image_token_index = VOCABULARY - 1
        return transformers.PaliGemmaForConditionalGeneration(config)

    def tiny_gemma(config: Any) -> Any:
        config.vocab_size = VOCABULARY
        return transformers.GemmaForCausalLM(config)

    sizes = {
        "gemma_2b": modeling_pi0.GemmaConfig(WIDTH, 3, 64, 8, 1, 16),
        "gemma_300m": modeling_pi0.GemmaConfig(24, 3, 40, 8, 1, 16),
    }
    modeling_pi0.get_gemma_config = sizes.__getitem__
    modeling_pi0.PaliGemmaForConditionalGeneration = tiny_paligemma
    modeling_pi0.GemmaForCausalLM = tiny_gemma
    size = {"image_resolution": (SIDE, SIDE), "num_inference_steps": 4, **options}
    return modeling_pi0.PI0Policy(configuration.PI0Config(**features(), **size)), run_pi0


def run_pi0(policy: Any, batch: dict[str, torch.Tensor], noise: torch.Tensor, time: torch.Tensor) -> dict[str, Any]:
    images, masks = policy._preprocess_images(batch)
    seen = images, masks, batch["observation.language.tokens"], batch["observation.language.attention_mask"]
    state, actions = policy.prepare_state(batch), policy.prepare_action(batch)
    losses = policy.model.forward(*seen, state, actions, noise=noise, time=time)
    on_its_way, steps = noise, policy.config.num_inference_steps
    for step in range(steps):
        now = torch.full((ROWS,), 1 - step / steps)
        on_its_way = on_its_way - velocity_pi0(policy, seen, state, on_its_way, now) / steps
    return {"losses": losses, "actions": on_its_way}


def velocity_pi0(policy: Any, seen: Any, state: torch.Tensor, chunk: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    """The velocity that its forward of training computes on the way to the loss."""
    found: list[torch.Tensor] = []
    hook = policy.model.action_out_proj.register_forward_hook(lambda module, inputs, output: found.append(output))
    # x_t = t noise + (1 - t) actions is the chunk where both are the chunk
    policy.model.forward(*seen, state, chunk, noise=chunk, time=time)
    hook.remove()
    return found[0]


# In ours.


def compare(folder: Path) -> dict[str, list[float]]:
    """By case: the largest differences of an action and of a loss."""
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, PaliGemmaConfig

    from shardtune.config import load_recipe
    from shardtune.models.find_adapter import find_adapter
    from shardtune.models.policies.features import STATE
    from shardtune.models.policies.flow_matching import PRESENT, TOKENS, WORDS, FlowPolicy

    text = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16, "hidden_size": WIDTH}
    text |= {"intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
    config = PaliGemmaConfig(
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **VISION},
        text_config={"model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh", **text},
        projection_dim=WIDTH,
        hidden_size=WIDTH,
        image_token_index=VOCABULARY - 1,
    )
    config.save_pretrained(folder / "paligemma")
    AutoTokenizer.from_pretrained(folder / "vlm").save_pretrained(folder / "paligemma")
    expert = {"width": 24, "depth": 3, "mlp_dim": 40, "num_heads": 8, "num_kv_heads": 1, "head_dim": 16}
    lines: dict[str, list[float]] = {}
    for name in CASES:
        kind = name.partition("-")[0]
        own = {"paligemma_variant": str(folder / "paligemma"), "action_expert_variant": expert} if kind == "pi0" else {}
        model = {"model_type": kind, "model_path": str(folder / name), "precision": "fp32"}
        identity = {"normalization_mapping": dict.fromkeys(("VISUAL", "STATE", "ACTION"), "IDENTITY")}
        options = {**own, **identity}
        values = {"model": {**model, "options": options}}
        adapter = find_adapter(load_recipe(values, in_memory=["data.train_data_paths"], files_must_exist=False))
        assert isinstance(adapter, FlowPolicy)
        adapter._normalizers = {kind: identity_normalizer()}
        module = adapter.build()
        load(module, folder / name / "model.safetensors")
        module.eval()
        written = folder / f"{name}-ours"
        written.mkdir(exist_ok=True)
        for file, content in adapter.saved_files().items():
            whole = content if isinstance(content, bytes) else json.dumps(content).encode()
            (written / file).write_bytes(whole)
        save_file({key: one.clone() for key, one in module.state_dict().items()}, written / "model.safetensors")
        for case in (name, f"{name}-missing"):
            theirs = torch.load(folder / f"{case}.pt")
            batch = theirs["batch"]
            images = {one: batch.get(one) for one in adapter.features.cameras}
            some = next(one for one in images.values() if one is not None)
            fields = {one: torch.zeros_like(some) if image is None else image for one, image in images.items()}
            present = torch.tensor([[image is not None for image in images.values()]] * ROWS)
            words = batch["observation.language.attention_mask"].sum(1)
            fields |= {PRESENT: present, TOKENS: batch["observation.language.tokens"], WORDS: words}
            seen = adapter.seen({**fields, STATE: batch["observation.state"]})
            noise, time = theirs["noise"], theirs["time"]
            actions = torch.nn.functional.pad(batch["action"], (0, noise.shape[-1] - ACTION))
            with torch.no_grad():
                velocity = module(seen, torch.lerp(actions, noise, time[:, None, None]), adapter.clock(module, time))
                losses = (velocity - (noise - actions)) ** 2
                chunk = adapter.predict(module, seen, noise)
            apart = [(losses - theirs["losses"]).abs().max(), (chunk - theirs["actions"][..., :ACTION]).abs().max()]
            lines[case] = [float(apart[1]), float(apart[0] / theirs["losses"].abs().max())]
    return lines


def identity_normalizer() -> Any:
    from shardtune.models.action.normalizer import Normalizer

    return Normalizer.of({"action": {}}, {})


def load(module: torch.nn.Module, file: Path) -> None:
    """Fill a module by the names of the file, each of which has to be the module's."""
    from safetensors.torch import load_file

    lacking, unknown = module.load_state_dict(load_file(file), strict=False)
    tied = [
        name for name in lacking if name.endswith("embed_tokens.weight")
    ]  # the file has the head, which is the same
    assert not unknown, unknown
    assert lacking == tied, lacking


if __name__ == "__main__":
    main()
