"""Losses by name and noise on embeddings, against a plain loop in fp64, on one rank and on two."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, BloomForCausalLM

from shardtune.batch.row_draws import RowDraws
from shardtune.batch.seeds import derive_seed
from shardtune.config import load_recipe
from shardtune.errors import CheckpointError, ConfigError
from shardtune.models.find_adapter import find_adapter
from shardtune.models.recipe_hooks import Hooks
from shardtune.models.teacher import unknown_tokens
from shardtune.run.choose_worker import Objects
from shardtune.run.inputs import check_same_teacher, run_inputs
from shardtune.training.build.teacher_targets import TargetTable
from shardtune.training.step import ROW_DRAWS
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import VOCABULARY, quiet, recipe, run_recipes, save_model, save_rows

TOP = 5
STEPS, RATE, ALPHA, TEMPERATURE, SHARE = 2, 0.5, 20.0, 2.0, 0.25
Losses = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Logits, the teacher's, and targets to losses."""


def entropy(logits: torch.Tensor, _theirs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets, reduction="none")


def dynamic(logits: torch.Tensor, _theirs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    log_p = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return -log_p.exp().detach() * log_p


def distilled(divergence: str) -> Losses:
    def losses(logits: torch.Tensor, theirs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        both = min(logits.shape[-1], theirs.shape[-1])
        q, p = ((each[:, :both] / TEMPERATURE).softmax(-1) for each in (logits, theirs))
        m = (p + q) / 2

        def kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return F.kl_div(other.log(), one, reduction="none").sum(-1)

        distance = {"forward_kl": kl(p, q), "reverse_kl": kl(q, p), "jensen_shannon": (kl(p, m) + kl(q, m)) / 2}
        return SHARE * entropy(logits, theirs, targets) + (1 - SHARE) * TEMPERATURE**2 * distance[divergence]

    return losses


def plainly(
    values: Mapping[str, Any], losses: Losses, teacher: Path | None, alpha: float
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of each step, and the weights at the end: row by row, with transformers and `torch.optim.SGD`."""
    worker = SFTWorker(load_recipe(dict(values)), report=quiet)
    assert worker.prepared.train is not None
    rows = [worker.prepared.train.row(index) for index in range(len(worker.prepared.train))]
    model = AutoModelForCausalLM.from_pretrained(values["actor"]["model"]["model_path"], dtype=torch.float64)
    other = None if teacher is None else AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=RATE), []
    for step in range(STEPS):
        total, number = torch.zeros((), dtype=torch.float64), 0
        for index, row in enumerate(rows):
            ids, mask = torch.tensor(row.input_ids, dtype=torch.long), torch.tensor(row.loss_weights[1:]) > 0
            embedded = model.get_input_embeddings()(ids[None])
            if alpha:
                draws = RowDraws(derive_seed(worker.recipe.runner.seed, step, ROW_DRAWS), [index])
                noise = 2 * draws.rand_like("neftune", embedded) - 1
                embedded = embedded + noise * alpha / math.sqrt(embedded[0].numel())
            logits = model(inputs_embeds=embedded).logits[0, :-1][mask]
            with torch.no_grad():
                theirs = logits if other is None else other(ids[None]).logits[0, :-1][mask]
            total = total + losses(logits, theirs, ids[1:][mask]).sum()
            number += int(mask.sum())
        (total / number).backward()
        found.append(float(total.detach() / number))
        optimizer.step()
        optimizer.zero_grad()
    return found, dict(model.named_parameters())


def topped(logits: torch.Tensor, theirs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    kept, tokens = theirs.topk(TOP, dim=-1)
    log_p = (kept / TEMPERATURE).log_softmax(-1)
    log_q = (logits / TEMPERATURE).log_softmax(-1).gather(1, tokens)
    distance = (log_p.exp() * (log_p - log_q)).sum(-1)
    return SHARE * entropy(logits, theirs, targets) + (1 - SHARE) * TEMPERATURE**2 * distance


@pytest.mark.lengthy
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_equals_a_plain_loop_on_one_rank_and_on_two(tmp_path: Path, ranks: int) -> None:
    rows = save_rows(tmp_path / "rows.jsonl", 7)  # ragged: several micro-batches of at most two rows on each rank
    model, capped = save_model("mistral", tmp_path / "model"), save_model("gemma", tmp_path / "capped")
    small = save_model("mistral", tmp_path / "small", hidden_size=16, num_hidden_layers=1)
    soft = save_model("gemma", tmp_path / "soft", hidden_size=16, num_hidden_layers=1, layer_types=["full_attention"])
    padded = tmp_path / "padded"
    AutoTokenizer.from_pretrained(small).save_pretrained(padded)
    AutoModelForCausalLM.from_pretrained(small).save_pretrained(padded)
    longer = AutoModelForCausalLM.from_pretrained(small)
    longer.resize_token_embeddings(VOCABULARY + 24, mean_resizing=False)
    longer.save_pretrained(padded)
    keys: dict[str, Any] = {
        "runner__max_steps": STEPS,
        "actor__micro_batch_size": 2,
        "actor__optim": {"name": "SGD", "lr": RATE, "lr_scheduler": "constant", "clip_grad": None, "weight_decay": 0.0},
    }
    distil = {"temperature": TEMPERATURE, "ce_share": SHARE}
    cases: Sequence[tuple[Path, dict[str, Any], Losses, Path | None]] = [
        (model, {"loss": "dft", "neftune_alpha": ALPHA}, dynamic, None),
        (model, {"loss": "distill", "teacher": {"model_path": str(small), **distil}}, distilled("forward_kl"), small),
        (
            capped,
            {"loss": "distill", "teacher": {"model_path": str(soft), "divergence": "reverse_kl", **distil}},
            distilled("reverse_kl"),
            soft,
        ),
        (
            model,
            {"loss": "distill", "teacher": {"model_path": str(padded), "divergence": "jensen_shannon", **distil}},
            distilled("jensen_shannon"),
            padded,
        ),
        (
            model,
            {"loss": "distill", "teacher": {"model_path": str(small), "top_k": TOP, **distil}},
            topped,
            small,
        ),
    ]
    recipes = [recipe(path, rows, **keys) for path, *_ in cases]
    for values, (_, actor, _, _) in zip(recipes, cases, strict=True):
        values["actor"] |= actor
    alone = run_recipes(recipes)
    (stored,) = (tmp_path / "cache" / "teachers").iterdir()
    written = (stored / "done.json").stat().st_mtime_ns
    all_turns = load_recipe({**recipes[4], "data": {**recipes[4]["data"], "train_on": "all"}})
    other_targets = SFTWorker(all_turns, report=quiet).prepared.train
    assert other_targets is not None
    assert TargetTable.of(all_turns, other_targets, VOCABULARY).folder != stored
    found = [*enumerate(alone)]
    if ranks == 2:
        divided = [(0, "sequence"), (2, "sequence"), (4, "sequence"), (0, "tensor"), (1, "tensor"), (4, "tensor")]
        parallel = [(n, {axis: 2}) for n, axis in divided]
        rings = [0, 2]
        parallel += [(n, {"sequence": 2, "sequence_method": "ring"}) for n in rings]
        divided += [(n, "ring") for n in rings]
        further = [{**recipes[n], "actor": {**recipes[n]["actor"], "parallel": sizes}} for n, sizes in parallel]
        on_two = run_ranks(run_recipes, 2, [*recipes, *further])[0]
        assert (stored / "done.json").stat().st_mtime_ns == written  # the ranks read what one process has written
        shutil.rmtree(stored)
        recipes_of_two = [recipes[4], {**recipes[4], "actor": {**recipes[4]["actor"], "parallel": {"tensor": 2}}}]
        for number, (axis, path) in enumerate([("sequence", small), ("tensor", padded)]):  # computed in this layout
            values = deepcopy(recipes[4])
            values["data"]["cache_dir"] = str(tmp_path / f"cache_{number}")
            values["actor"] |= {"parallel": {axis: 2}}
            values["actor"]["teacher"]["model_path"] = str(path)
            recipes_of_two.append(values)
        on_two += run_ranks(run_recipes, 2, recipes_of_two)[0]
        divided += [(4, "")] * 4
        found += zip([*range(len(cases)), *(n for n, _ in divided)], on_two, strict=True)
    plain = [
        plainly(values, losses, teacher, actor.get("neftune_alpha", 0.0))
        for values, (_, actor, losses, teacher) in zip(recipes, cases, strict=True)
    ]
    for number, trace in found:
        losses, weights = plain[number]
        _, actor, _, teacher = cases[number]
        limit = 1e-6 if capped in (cases[number][0], teacher) else 1e-10  # Gemma's norms compute in fp32
        assert trace.losses == pytest.approx(losses, rel=limit), actor
        for name, tensor in trace.weights.items():
            expected = weights[name].detach()
            torch.testing.assert_close(tensor, expected, rtol=10 * limit, atol=limit, msg=f"{number} {name}")


@pytest.mark.parametrize(
    ("actor", "message"),
    [
        ({"loss": "distill"}, r"actor.loss: distill needs a teacher"),
        ({"teacher": {"temperature": 2.0}}, r"actor.teacher.temperature has no effect without actor.loss: distill"),
        ({"loss": "dft", "z_loss": 0.1}, r"actor.z_loss \(0.1\) is part of the built-in cross-entropy.*\(dft\)"),
        ({"loss": "focal"}, r"actor.loss"),
        (
            {"loss": "distill", "teacher": {"model_path": "a/b", "top_k": 4, "divergence": "reverse_kl"}},
            r"top_k: 4 keeps no probabilities for actor.teacher.divergence: reverse_kl",
        ),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, actor: dict[str, Any], message: str) -> None:
    values = recipe(tmp_path, save_rows(tmp_path / "rows.jsonl", 1))
    values["actor"] |= actor
    with pytest.raises(ConfigError, match=message):
        load_recipe(values)


def test_a_teacher_is_found_whatever_chooses_the_rows_of_evaluation(tmp_path: Path) -> None:
    values = recipe(save_model("dense", tmp_path / "model"), save_rows(tmp_path / "rows.jsonl", 4))
    values["actor"] |= {"loss": "distill", "teacher": {"model_path": str(save_model("dense", tmp_path / "other"))}}
    values["data"]["eval_split"] = 0.5
    assert hooks(values).teacher is not None


def test_a_model_is_packed_whether_its_teachers_tokens_are_computed_or_stored(tmp_path: Path) -> None:
    """The rows of this teacher cannot be packed, which is of no interest once its tokens are stored."""
    teacher, rows = save_model("dense", tmp_path / "teacher"), save_rows(tmp_path / "rows.jsonl")
    torch.manual_seed(3)
    BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(teacher)
    values = recipe(save_model("dense", tmp_path / "model"), rows)
    values["actor"] |= {"loss": "distill", "teacher": {"model_path": str(teacher), "top_k": 4}}
    found = []
    for _ in range(2):
        worker = SFTWorker(load_recipe(values), report=quiet)
        worker.setup()
        assert worker.adapter.rows_share_forwards
        found.append([worker.run_training()["train/loss"] for _ in range(2)])
        worker.release()
    assert found[0] == found[1]


def test_a_teacher_with_another_vocabulary_or_other_weights_is_refused_before_ranks_start(tmp_path: Path) -> None:
    rows = save_rows(tmp_path / "rows.jsonl", 1)
    model, other = save_model("dense", tmp_path / "model"), save_model("dense", tmp_path / "other")
    values = recipe(model, rows)
    values["actor"] |= {"loss": "distill", "teacher": {"model_path": str(other)}}
    (other / "config.json").rename(other / "kept.json")
    with pytest.raises(ConfigError, match=r"the teacher .*other: .*config.json"):
        hooks(values)
    (other / "kept.json").rename(other / "config.json")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(model)
    found = hooks(values).teacher  # which has a row of its embedding for it
    assert found is not None
    assert unknown_tokens(tokenizer, found.tokenizer) == ["teacher: its tokenizer lacks '<new>'"]
    theirs = AutoTokenizer.from_pretrained(other)
    theirs.add_tokens(["<other>"])
    theirs.save_pretrained(other)
    message = r"another vocabulary than the model: 1 token differs, as '<new>', whose number is 25\d, and '<other>' of"
    with pytest.raises(ConfigError, match=message):
        hooks(values)
    run, weights = tmp_path / "run", other / "model.safetensors"
    run.mkdir()
    made_with, known = load_recipe(values), Objects()
    (run / "manifest.json").write_text(json.dumps({"inputs": run_inputs(made_with, known, {}), "models_in_memory": []}))
    check_same_teacher(run, made_with)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"not the one that this run was trained with so far:\n.*model.safetens"):
        check_same_teacher(run, made_with)
    values["runner"]["allow_changes"] = ["teacher.model_path"]
    check_same_teacher(run, load_recipe(values))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).unlink()
    assert hooks(values).teacher is not None  # the sizes are the same, and nothing else is known


def test_a_teacher_shares_sequences_as_the_model_does(tmp_path: Path) -> None:
    model, teacher = save_model("three_heads", tmp_path / "model"), save_model("dense", tmp_path / "teacher")
    values = recipe(model, save_rows(tmp_path / "rows.jsonl", 1), runner__nproc_per_node=2)
    values["actor"] |= {"loss": "distill", "teacher": {"model_path": str(teacher)}, "parallel": {"sequence": 2}}
    with pytest.raises(ConfigError, match=r"need different ways to share sequences among 2 ranks"):
        hooks(values)
    values["actor"]["parallel"]["sequence_method"] = "ring"
    assert hooks(values).teacher is not None


def test_ranks_that_share_matrices_need_as_many_logits_or_stored_tokens(tmp_path: Path) -> None:
    model, teacher = save_model("dense", tmp_path / "model"), save_model("dense", tmp_path / "teacher")
    longer = AutoModelForCausalLM.from_pretrained(teacher)
    longer.resize_token_embeddings(VOCABULARY + 24, mean_resizing=False)
    longer.save_pretrained(teacher)
    values = recipe(model, save_rows(tmp_path / "rows.jsonl", 1), runner__nproc_per_node=2)
    values["actor"] |= {"loss": "distill", "teacher": {"model_path": str(teacher)}}
    assert hooks(values).teacher is not None
    values["actor"]["parallel"] = {"tensor": 2}
    with pytest.raises(ConfigError, match=r"(?s)logits, the teacher \d+ .* parts of one size.*set .*top_k"):
        hooks(values)
    values["actor"]["teacher"]["top_k"] = 4
    assert hooks(values).teacher is not None


def hooks(values: Mapping[str, Any]) -> Hooks:
    found = load_recipe(dict(values))
    return Hooks.of(found, find_adapter(found), training=True)
