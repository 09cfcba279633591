"""Compare ready policies with LeRobot: `python bench/lerobot_policies.py --lerobot PYTHON`, another environment's.

LeRobot 0.4 writes directories with random weights, one per case, with the actions and the losses it computes for given
images and draws. Each directory is loaded here: the same action and the same loss are expected. Then each is saved as
`final/` has it and loaded by LeRobot, whose actions are compared again. Rewrites the section `lerobot_policies` of
docs/benchmarks.md; ends with exit code 1 where a difference is above 1e-5.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
ENOUGH = 1e-5
ROWS, SIZE, STATE, ACTIONS = 3, (40, 56), 4, 3
CAMERAS = ("observation.images.top", "observation.images.wrist")
ACT = {
    "chunk_size": 8, "n_action_steps": 8, "dim_model": 32, "n_heads": 4, "dim_feedforward": 48, "latent_dim": 6,
    "n_encoder_layers": 2, "n_vae_encoder_layers": 2, "pretrained_backbone_weights": None, "dropout": 0.0,
}  # fmt: skip
DIFFUSION = {
    "horizon": 8, "n_action_steps": 7, "down_dims": (16, 32), "n_groups": 4, "diffusion_step_embed_dim": 16,
    "spatial_softmax_num_keypoints": 8, "num_train_timesteps": 20, "crop_is_random": False, "drop_n_last_frames": 0,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "act": ("act", ACT),
    "act, without VAE, pre-norm, gelu": (
        "act",
        ACT | {"use_vae": False, "pre_norm": True, "feedforward_activation": "gelu"},
    ),
    "act, resnet50 with dilation": (
        "act",
        ACT | {"vision_backbone": "resnet50", "replace_final_stride_with_dilation": True},
    ),
    "diffusion": ("diffusion", DIFFUSION | {"crop_shape": (36, 48)}),
    "diffusion, DDIM, an encoder per camera, predicts actions": (
        "diffusion",
        DIFFUSION
        | {"noise_scheduler_type": "DDIM", "num_inference_steps": 5, "prediction_type": "sample", "n_obs_steps": 1}
        | {"use_separate_rgb_encoder_per_camera": True, "use_film_scale_modulation": False, "n_action_steps": 8}
        | {"resize_shape": (36, 50), "crop_ratio": 0.9, "do_mask_loss_for_padding": True, "beta_schedule": "linear"},
    ),
}
"""By name: the policy and its options."""


def given(seed: int, frames: int, chunk: int) -> dict[str, np.ndarray]:
    """What both sides compute with: frames, true actions, and draws."""
    random = np.random.default_rng(seed)
    images = {name: random.integers(0, 256, (ROWS, frames, 3, *SIZE), dtype=np.uint8) for name in CAMERAS}
    padded = np.zeros((ROWS, chunk), bool)
    padded[1, -3:] = True
    return images | {
        "observation.state": random.standard_normal((ROWS, frames, STATE)).astype(np.float32),
        "action": random.standard_normal((ROWS, chunk, ACTIONS)).astype(np.float32),
        "action_is_pad": padded,
        "latent": random.standard_normal((ROWS, ACT["latent_dim"])).astype(np.float32),
        "noise": random.standard_normal((ROWS, chunk, ACTIONS)).astype(np.float32),
        "step": random.integers(0, 20, ROWS),
    }


def noise_of_step(shape: tuple[int, ...], count: list[int]) -> np.ndarray:
    """The draws of a step of sampling, for the patched scheduler of both sides."""
    count.append(1)
    return np.random.default_rng(len(count)).standard_normal(shape).astype(np.float32)


@contextmanager
def steps_drawn():
    """diffusers' schedulers draw the same numbers on both sides."""
    import torch
    from diffusers.schedulers import scheduling_ddpm

    count, own = [], scheduling_ddpm.randn_tensor
    scheduling_ddpm.randn_tensor = lambda shape, **_: torch.from_numpy(noise_of_step(tuple(shape), count))
    try:
        yield
    finally:
        scheduling_ddpm.randn_tensor = own


# LeRobot's side: run by the other environment's Python, without this package.


class Theirs:
    """LeRobot's policies."""

    def __init__(self) -> None:
        from lerobot.configs.types import FeatureType, PolicyFeature
        from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors

        self._class, self._config, self._processors = get_policy_class, make_policy_config, make_pre_post_processors
        shapes = {"observation.state": (FeatureType.STATE, (STATE,))}
        shapes |= dict.fromkeys(CAMERAS, (FeatureType.VISUAL, (3, *SIZE)))
        self._inputs = {name: PolicyFeature(*one) for name, one in shapes.items()}
        self._outputs = {"action": PolicyFeature(FeatureType.ACTION, (ACTIONS,))}

    def write(self, number: int, kind: str, options: dict[str, Any], folder: Path) -> None:
        """A directory with random weights, what is given, and what LeRobot makes of it."""
        import torch

        torch.manual_seed(number)
        features = {"input_features": self._inputs, "output_features": self._outputs}
        config = self._config(kind, **features, device="cpu", push_to_hub=False, **options)
        policy = self._class(kind)(config)
        with torch.no_grad():
            for tensor in policy.state_dict().values():
                if tensor.is_floating_point() and tensor.ndim == 1:  # norms and biases, which begin as 1 and 0
                    tensor += 0.05 * torch.rand_like(tensor)
        sizes = {"action": (ACTIONS,), "observation.state": (STATE,), **dict.fromkeys(CAMERAS, (3, 1, 1))}
        begins = {"mean": 0.0, "std": 0.5, "min": -2.0, "max": 1.0}
        stats = {
            name: {key: torch.rand(shape) + begin for key, begin in begins.items()} for name, shape in sizes.items()
        }
        policy.save_pretrained(folder)
        for one in self._processors(config, dataset_stats=stats):
            one.save_pretrained(folder)
        values = given(number, config.n_obs_steps, getattr(config, "horizon", options.get("chunk_size")))
        before, after = self._processors(config, dataset_stats=stats)
        np.savez(folder / "given.npz", **values)
        loss = self._loss(kind, policy, before, values)
        np.savez(folder / "theirs.npz", loss=loss, actions=self._actions(kind, policy, before, after, values))

    def read(self, kind: str, folder: Path) -> None:
        """The actions of a directory that shardtune has written."""
        policy = self._class(kind).from_pretrained(folder)
        before, after = self._processors(policy.config, pretrained_path=str(folder))
        values = dict(np.load(folder / "given.npz"))
        np.savez(folder / "again.npz", actions=self._actions(kind, policy, before, after, values))

    @staticmethod
    def _batch(kind: str, before: Any, values: dict[str, np.ndarray]) -> dict[str, Any]:
        import torch

        names = [*CAMERAS, "observation.state", "action", "action_is_pad"]
        batch = {name: torch.from_numpy(values[name]) for name in names}
        batch |= {name: batch[name].float() / 255 for name in CAMERAS}
        if kind == "act":
            batch |= {name: batch[name][:, 0] for name in (*CAMERAS, "observation.state")}
        return before(batch)

    def _loss(self, kind: str, policy: Any, before: Any, values: dict[str, np.ndarray]) -> float:
        import torch

        drawn = {"randn_like": "latent", "randn": "noise", "randint": "step"}
        own = {name: getattr(torch, name) for name in drawn}
        policy.train()
        try:
            for name, key in drawn.items():
                setattr(torch, name, lambda *_, key=key, **__: torch.from_numpy(values[key]))
            return policy.forward(self._batch(kind, before, values))[0].item()
        finally:
            for name, function in own.items():
                setattr(torch, name, function)

    def _actions(self, kind: str, policy: Any, before: Any, after: Any, values: dict[str, np.ndarray]) -> np.ndarray:
        import torch

        policy.eval()
        batch = self._batch(kind, before, values)
        if kind == "act":
            return after(policy.predict_action_chunk(batch)).numpy()
        batch["observation.images"] = torch.stack([batch[name] for name in CAMERAS], dim=2)
        with torch.no_grad(), steps_drawn():
            found = policy.diffusion.generate_actions(batch, noise=torch.from_numpy(values["noise"]))
        return after(found).numpy()


# This side.


def compare(kind: str, folder: Path, target: Path) -> tuple[float, float]:
    """Load LeRobot's directory; returns the differences of action and loss, and saves it again into `target`."""
    import torch
    from safetensors.torch import load_file, save_file

    from shardtune.batch import Batch
    from shardtune.config import load_recipe
    from shardtune.models.policies.names import policy_class

    class Drawn(Batch):
        """A batch whose draws are given."""

        def randn_like(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(values[name])

        def rand_like(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy((values[name] + 0.5) / 20).float()

    recipe = load_recipe(
        {"model": {"model_type": kind, "model_path": str(folder)}},
        in_memory=["data.train_data_paths"],
        files_must_exist=False,
    )
    adapter = policy_class(kind).from_recipe(recipe)
    module = adapter.build()
    module.load_state_dict(load_file(folder / "model.safetensors"))
    values, theirs = dict(np.load(folder / "given.npz")), np.load(folder / "theirs.npz")
    fields = {name: torch.from_numpy(values[name]) for name in CAMERAS}
    state, actions = adapter.normalizer.state, adapter.normalizer.actions
    fields["observation.state"] = torch.from_numpy(state.normalise(values["observation.state"]))
    fields["action"] = torch.from_numpy(actions.normalise(values["action"]))
    fields["action_is_pad"] = torch.from_numpy(values["action_is_pad"])
    batch = Drawn(rows=tuple(range(ROWS)), fields=fields)
    found = adapter.loss(module.train(), batch)
    terms = list(found.values()) if isinstance(found, dict) else [found]
    loss = sum(term.total.item() / term.weight for term in terms)
    noise = [torch.from_numpy(values["noise"])] if kind == "diffusion" else []
    with torch.no_grad(), steps_drawn():
        chunk = adapter.predict(module.eval(), adapter.inputs(batch), *noise)
    own = actions.unnormalise(chunk.numpy())
    target.mkdir()
    for name, content in adapter.saved_files().items():
        path = target / name
        path.write_bytes(content) if isinstance(content, bytes) else path.write_text(json.dumps(content))
    save_file(module.state_dict(), target / "model.safetensors")
    (target / "given.npz").write_bytes((folder / "given.npz").read_bytes())
    np.savez(target / "ours.npz", actions=own)
    return float(np.abs(own - theirs["actions"]).max()), abs(loss - float(theirs["loss"])) / float(theirs["loss"])


def main() -> None:
    """Compare, write the section, and fail where it is not as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lerobot", metavar="PYTHON", help="the Python of an environment with lerobot 0.4")
    parser.add_argument("--dry", action="store_true", help="print the section instead of writing it")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    numbered = list(enumerate(CASES.values()))
    if args.write or args.read:
        theirs = Theirs()
        for number, (kind, options) in numbered:
            if args.write:
                theirs.write(number, kind, options, args.write / str(number))
            else:
                theirs.read(kind, args.read / str(number))
        return
    if not args.lerobot:
        parser.error("--lerobot is required: pip install 'lerobot==0.4.*' in an environment of its own")
    sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
    from results import machine, table, write_section

    with tempfile.TemporaryDirectory() as name:
        first, second = Path(name) / "theirs", Path(name) / "ours"
        first.mkdir()
        second.mkdir()
        command = [args.lerobot, str(Path(__file__).resolve())]
        subprocess.run([*command, "--write", str(first)], check=True, capture_output=True)
        found = [compare(kind, first / str(number), second / str(number)) for number, (kind, _) in numbered]
        subprocess.run([*command, "--read", str(second)], check=True, capture_output=True)
        again = []
        for number, _ in numbered:
            ours, theirs_again = (np.load(second / str(number) / f"{one}.npz")["actions"] for one in ("ours", "again"))
            again.append(float(np.abs(ours - theirs_again).max()))
    rows = [
        [name, *(f"{value:.0e}" for value in (*both, back))]
        for name, both, back in zip(CASES, found, again, strict=True)
    ]
    introduction = (
        "Directories with random weights that LeRobot 0.4 wrote, for two cameras, state and actions, in fp32: the "
        "largest difference of an action for the same images and noise, in the units of the robot; the relative "
        "difference of the loss for the same batch and draws; and the first again for a directory that shardtune wrote "
        "and LeRobot read."
    )
    text = "\n\n".join(
        [f"{machine()}.", introduction, table(["case", "action", "loss", "action, written here, loaded there"], rows)]
    )
    if args.dry:
        print(text)
    else:
        write_section("lerobot_policies", text)
    if not all(value <= ENOUGH for both, back in zip(found, again, strict=True) for value in (*both, back)):
        raise SystemExit(f"a difference is above {ENOUGH}")


if __name__ == "__main__":
    main()
