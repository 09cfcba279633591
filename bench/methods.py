"""Methods on the engine beside plain PyTorch, and the ready pieces beside TRL's, in fp64.

    python bench/methods.py [--save]

The first table needs nothing else. For the second, TRL has to be installed (`pip install -c constraints.txt trl`): the
loss of its trainers is called on the same random numbers, without a model, and compared in value and in gradient.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch  # noqa: E402
from results import machine, table, write_section  # noqa: E402

import shardtune  # noqa: E402
from shardtune.models.objectives.preference import PAIR_LOSSES  # noqa: E402
from shardtune.nn import functional as ours  # noqa: E402
from tests.support import methods  # noqa: E402

PAIRS, TOKENS, VOCABULARY, BETA = 6, 9, 50, 0.3
MODEL = torch.nn.Module()
MODEL.is_gradient_checkpointing = False  # pyright: ignore[reportArgumentType]


# Methods.


def beside_plain_pytorch() -> str:
    """A table of the differences on one rank and on two."""
    methods.STEPS = 20
    shardtune.init("local", device="cpu")
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        models = methods.make_models(Path(folder))
        with methods.builder(2)(methods.example("distillation").Teacher, models.blank) as two:
            for name, (by_engine, in_plain) in methods.METHODS.items():
                plain = in_plain(models)
                for ranks, build in ((1, methods.builder(1)), (2, methods.builder(2, two))):
                    began = time.process_time()
                    numbers, weights = by_engine(models, build).apart(plain)
                    lines.append((name, ranks, f"{numbers:.0e}", f"{weights:.0e}"))
                    print(*lines[-1], f"{time.process_time() - began:.1f} s", flush=True)
    return ".\n\n" + table(("method", "ranks", "losses apart by", "weights apart by"), lines)


# Pieces.

Losses = tuple[torch.Tensor, torch.Tensor]
Pair = tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor], torch.Tensor]
"""Ours, TRL's, and what gradients are taken of."""


class Cases:
    """Random tensors in fp64, and the losses of both computed from them."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.per_token = (-torch.rand(2 * PAIRS, TOKENS, generator=draw).double() * 0.4 - 0.01).requires_grad_()
        self.reference = -torch.rand(2 * PAIRS, TOKENS, generator=draw).double() * 0.4 - 0.01
        lengths = torch.randint(2, TOKENS + 1, (2 * PAIRS, 1), generator=draw)
        self.mask = (torch.arange(TOKENS) < lengths).long()
        self.advantages = torch.randn(2 * PAIRS, generator=draw).double()
        self.logits = torch.randn(3, TOKENS, VOCABULARY, generator=draw).double().requires_grad_()
        self.targets = torch.randint(VOCABULARY, (3, TOKENS), generator=draw)

    def sums(self, per_token: torch.Tensor, *, mean: bool = False) -> Losses:
        """Of the answers of pairs, chosen and rejected."""
        masked = ours.masked_mean if mean else ours.masked_sum
        chosen, rejected = masked(per_token, self.mask, 1).chunk(2)
        return chosen, rejected

    # Ours beside TRL's, by name.

    def dpo(self, kind: str, smoothing: float) -> Pair:
        from trl import DPOTrainer

        mean = kind == "ipo"

        def our_loss() -> torch.Tensor:
            given = (*self.sums(self.per_token, mean=mean), *self.sums(self.reference, mean=mean))
            return ours.dpo_loss(*given, beta=BETA, loss_type=kind, label_smoothing=smoothing).mean()

        # TRL's masks have the prompt, too: one token here, which no position predicts.
        mask = torch.cat([torch.zeros_like(self.mask[:, :1]), self.mask], dim=1)
        states = [self.per_token * self.mask, self.reference * self.mask]

        def forward(index: int) -> Callable[..., SimpleNamespace]:
            zeros = torch.zeros(2 * PAIRS, TOKENS)
            return lambda **_: SimpleNamespace(
                log_probs=states[index], entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
            )

        trainer = _trainer(
            model=MODEL, ref_model=forward(1), loss_types=[kind], loss_weights=[1.0],
            label_smoothing=smoothing, f_divergence_type="reverse_kl", precompute_ref_logps=False, ld_alpha=None,
            use_weighting=False,
        )  # fmt: skip
        inputs = {"input_ids": torch.zeros_like(mask), "completion_mask": mask, "attention_mask": mask}
        return our_loss, lambda: DPOTrainer._compute_loss(trainer, forward(0), inputs, False), self.per_token

    def kto(self) -> Pair:
        from trl import KTOTrainer

        desirable = torch.arange(2 * PAIRS) % 2 == 0
        weights = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
        apart = torch.full((2 * PAIRS,), 0.4, dtype=torch.float64)

        def our_loss() -> torch.Tensor:
            found, reference = (ours.masked_sum(of, self.mask, 1) for of in (self.per_token, self.reference))
            return ours.kto_loss(found, reference, desirable, 0.4, beta=BETA, **weights).mean()

        mask = torch.cat([torch.zeros_like(self.mask[:, :1]), self.mask], dim=1)
        states, zeros = self.per_token * self.mask, torch.zeros(2 * PAIRS, TOKENS)
        trainer = _trainer(
            model=MODEL, loss_type="kto", calculate_KL=True, precompute_ref_logps=True,
            _compute_kl_logps=lambda *_: apart, **weights,
        )  # fmt: skip
        batch = {
            "label": desirable, "input_ids": torch.zeros_like(mask), "attention_mask": mask, "completion_mask": mask,
            "ref_logps": (self.reference * self.mask).sum(1), "ref_KL_logps": torch.zeros_like(apart),
        }  # fmt: skip

        def model(**_: object) -> SimpleNamespace:
            return SimpleNamespace(log_probs=states, entropy=zeros, mean_logits=zeros)

        return our_loss, lambda: KTOTrainer._compute_loss(trainer, model, batch, False), self.per_token

    def cpo(self, kind: str) -> Pair:
        from trl.experimental.cpo import CPOTrainer

        mean = kind == "simpo"
        trainer = _trainer(loss_type=kind, simpo_gamma=0.5, label_smoothing=0.1, alpha=0.0)

        def our_loss() -> torch.Tensor:
            chosen, rejected = self.sums(self.per_token, mean=mean)
            if mean:
                return ours.simpo_loss(chosen, rejected, beta=BETA, gamma=0.5, label_smoothing=0.1).mean()
            return ours.cpo_loss(chosen, rejected, beta=BETA, label_smoothing=0.1).mean()

        given = self.sums(self.per_token, mean=mean)
        return our_loss, lambda: CPOTrainer.cpo_loss(trainer, *given)[0].mean(), self.per_token

    def orpo(self) -> Pair:
        from trl.experimental.orpo import ORPOTrainer

        given = self.sums(self.per_token, mean=True)
        return (
            lambda: ours.orpo_loss(*self.sums(self.per_token, mean=True), beta=BETA).mean(),
            lambda: -ORPOTrainer.odds_ratio_loss(_trainer(), *given)[0].mean(),
            self.per_token,
        )

    def reward(self) -> Pair:
        from trl import RewardTrainer

        given, margin = self.sums(self.per_token), torch.arange(PAIRS).double() / 4

        def model(**_: object) -> SimpleNamespace:
            return SimpleNamespace(logits=torch.cat(given)[:, None])

        trainer = _trainer(
            args=SimpleNamespace(center_rewards_coefficient=0.01), model=MODEL,
            aux_loss_enabled=False,
        )  # fmt: skip
        inputs = {"attention_mask": torch.ones(2 * PAIRS, 1), "margin": margin}
        return (
            lambda: ours.reward_loss(*self.sums(self.per_token), margin=margin, center=0.01).mean(),
            lambda: RewardTrainer.compute_loss(trainer, model, inputs),
            self.per_token,
        )

    def grpo(self, kind: str, per: Any, level: Any, *, kl: float = 0.0, cispo: bool = False) -> Pair:
        from trl import GRPOTrainer

        clip = {"clip": 0.2, "clip_high": 0.28}
        old = self.reference + 0.05

        def our_loss() -> torch.Tensor:
            given = (self.per_token, old, self.advantages)
            losses = (
                ours.cispo_loss(*given, max_ratio=1.05)
                if cispo
                else ours.policy_loss(*given, self.mask, level=level, max_ratio=1.5, **clip)
            )
            losses = losses + kl * ours.kl_estimate(self.per_token, self.reference)
            total, weight = ours.loss_sum(losses, self.mask, per, length=20 if per == "length" else None)
            return total / weight

        trainer = _trainer(
            model=MODEL, beta=kl, loss_type=kind, importance_sampling_level=level,
            epsilon_low=0.2, epsilon_high=1.05 if cispo else 0.28, max_completion_length=20,
            off_policy_mask_threshold=None, top_entropy_quantile=1.0, use_vllm=False, _entropy_bonus_enabled=False,
            current_gradient_accumulation_steps=1,
            _get_per_token_logps_and_entropies=lambda *_, **__: (self.per_token, torch.zeros_like(old), None),
            args=SimpleNamespace(
                delta=1.5, use_bias_correction_kl=False, steps_per_generation=1, gradient_accumulation_steps=1
            ),
        )  # fmt: skip
        inputs = {
            "prompt_ids": self.mask[:, :1], "prompt_mask": self.mask[:, :1], "completion_ids": self.mask,
            "completion_mask": self.mask, "advantages": self.advantages, "old_per_token_logps": old,
            "ref_per_token_logps": self.reference, "num_items_in_batch": self.mask.sum(),
        }  # fmt: skip
        return our_loss, lambda: GRPOTrainer._compute_loss(trainer, None, inputs), self.per_token

    def tokens(self, what: str) -> Pair:
        from trl.trainer import utils

        ones = torch.linspace(0.5, 1.5, self.targets.numel()).double().view(self.targets.shape)
        if what == "entropy":
            pair = (lambda: ours.entropy(self.logits), lambda: utils.entropy_from_logits(self.logits))
        else:
            pair = (
                lambda: ours.log_probs(self.logits, self.targets, temperature=0.7),
                lambda: utils.selective_log_softmax(self.logits / 0.7, self.targets),
            )
        return (lambda: (ones * pair[0]()).sum()), (lambda: (ones * pair[1]()).sum()), self.logits


class _Accelerator:
    device, num_processes, is_main_process = torch.device("cpu"), 1, True

    def gather_for_metrics(self, values: torch.Tensor, **_: object) -> torch.Tensor:
        return values

    gather = reduce = gather_for_metrics


class _Metrics(dict):
    def __missing__(self, key: str) -> Any:
        self[key] = value = _Metrics() if key in ("train", "eval") else []
        return value


def _trainer(**attributes: Any) -> Any:
    """What a loss of TRL's reads of its trainer."""
    common = {
        "accelerator": _Accelerator(), "beta": BETA, "_metrics": _Metrics(), "aux_loss_enabled": False,
        "_total_train_tokens": 0, "_tp_size": 1, "state": SimpleNamespace(num_input_tokens_seen=0),
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None),
    }  # fmt: skip
    return SimpleNamespace(**{**common, **attributes})


def beside_trl() -> str:
    """A table of the largest relative differences of a loss and of its gradient."""
    from importlib.metadata import version

    cases = Cases()
    smoothed = {"robust": 0.1, "exo_pair": 0.1}
    found: dict[str, Pair] = {f'dpo_loss, "{kind}"': cases.dpo(kind, smoothed.get(kind, 0.0)) for kind in PAIR_LOSSES}
    found["kto_loss"] = cases.kto()
    found["cpo_loss"], found["simpo_loss"] = cases.cpo("sigmoid"), cases.cpo("simpo")
    found["orpo_loss (TRL computes it in fp32)"] = cases.orpo()
    found["reward_loss, margin and centre"] = cases.reward()
    found['policy_loss per token, k3, loss_sum "sequence" (grpo)'] = cases.grpo("grpo", "sequence", "token", kl=0.04)
    found['policy_loss, loss_sum "token" (dapo)'] = cases.grpo("dapo", "token", "token")
    found['policy_loss, loss_sum "length" (dr_grpo)'] = cases.grpo("dr_grpo", "length", "token")
    found["policy_loss per sequence (GSPO)"] = cases.grpo("grpo", "sequence", "sequence")
    found["cispo_loss"] = cases.grpo("cispo", "token", "token", cispo=True)
    found["log_probs, temperature 0.7"], found["entropy"] = cases.tokens("log_probs"), cases.tokens("entropy")
    lines = []
    for name, (our_loss, their_loss, of) in found.items():
        values, gradients = [], []
        for loss in (our_loss(), their_loss()):
            values.append(loss)
            gradients.append(torch.autograd.grad(loss, of, retain_graph=True)[0])
        apart = [float((ours_ - theirs).abs().max() / theirs.abs().max()) for ours_, theirs in (values, gradients)]
        lines.append((name, *(f"{value:.0e}" for value in apart)))
        print(*lines[-1], flush=True)
    return f", TRL {version('trl')}.\n\n" + table(("piece", "loss apart by", "gradient apart by"), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["methods", "pieces"])
    parser.add_argument("--save", action="store_true", help="write the results into docs/benchmarks.md")
    arguments = parser.parse_args()
    for name, run in (("methods", beside_plain_pytorch), ("pieces", beside_trl)):
        if arguments.only not in (None, name):
            continue
        if name == "pieces" and find_spec("trl") is None:
            print("TRL is not installed: pip install -c constraints.txt trl")
            continue
        text = f"{machine()}{run()}"
        print(text)
        if arguments.save:
            write_section(f"methods-{name}", text)


if __name__ == "__main__":
    main()
