"""The worker that drives an adapter: packed rows from the cache, its loss, evaluation by loss and by answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from omegaconf import DictConfig
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardtune.batch import Batch, LossSum, Metric
from shardtune.checkpoint.huggingface import check_weights, save_pretrained
from shardtune.config import Recipe, load_recipe
from shardtune.construction import freeze
from shardtune.data.dataset import TokenDataset
from shardtune.data.loader import BatchMaker, Limits, StepLoader
from shardtune.data.order import DataOrder, OrderSource
from shardtune.data.prepare import PreparedData, WeighedRows, prepare_data
from shardtune.errors import ConfigError, ModelError
from shardtune.evaluate import BLOCK_MICRO_BATCHES, check_monitors, evaluation_batches, sum_evaluation, summarize
from shardtune.functions import load_function
from shardtune.generate import Generator, Matcher, Sampling
from shardtune.models.adapter import AdapterRoot
from shardtune.models.causal_lm import TOKENS, CausalLM
from shardtune.models.probe import probe_packing
from shardtune.models.registry import causal_lm, check_vocabulary, load_tokenizer, model_directory, no_model_path
from shardtune.optim import build_optimizer, check_optimizer
from shardtune.parallel.mesh import num_ranks
from shardtune.parallel.shard import COMPUTE_DTYPE
from shardtune.worker import FSDPSftWorker

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
GENERATION_ROWS = 64


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """One evaluation set as this rank sees it: its rows, and what cuts them into micro-batches."""

    rows: TokenDataset
    maker: BatchMaker
    rows_per_block: int

    def __iter__(self):
        return evaluation_batches(len(self.rows), self.maker, self.rows_per_block)


@final
class SFTWorker(FSDPSftWorker):
    """Fine-tunes a causal language model on the rows that the recipe names.

    Making it tokenises the data, before this process joins the others.

    Args:
        cfg: the recipe.
        model: a model in memory instead of `actor.model.model_path`.
        tokenizer: a tokenizer in memory.
        train_data: rows in memory.
        eval_data: rows in memory, or named sets of them.
        prepared: data that is tokenised already.
        training: False for a worker that only evaluates and answers.
        say: told what is found while the data is prepared.
    """

    entry_points = AdapterRoot.ENTRY_POINTS

    def __init__(
        self,
        cfg: DictConfig | Recipe,
        *,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        train_data: Any = None,
        eval_data: Any = None,
        prepared: PreparedData | None = None,
        training: bool = True,
        say: Callable[[str], None] = print,
    ) -> None:
        recipe = cfg if isinstance(cfg, Recipe) else load_recipe(cfg)
        config = recipe.actor.model
        if config.options:
            raise ConfigError(
                f"actor.model.options = {config.options}: no part of {config.model_type} reads them",
                where="actor.model.options",
                remedy="leave them out; they are for a worker of your own",
            )
        self.adapter: CausalLM = (
            causal_lm(config, wrap=recipe.actor.fsdp_config.wrap)
            if model is None
            else CausalLM(
                model.config,
                attn_implementation=config.attn_implementation,
                compile=config.compile,
                gradient_checkpointing=config.gradient_checkpointing,
                precision=config.precision,
                model=model,
            )
        )
        if tokenizer is None:
            source = recipe.actor.tokenizer.tokenizer_model or config.model_path
            if source is None:
                raise no_model_path()
            tokenizer = load_tokenizer(source, trust_remote_code=config.trust_remote_code)
        check_vocabulary(tokenizer, self.adapter.config)
        check_optimizer(recipe.actor.optim, num_ranks(recipe.runner.nproc_per_node))
        self._matcher = _matcher(recipe)
        self.prepared: PreparedData = prepared or prepare_data(
            recipe, tokenizer, train_data=train_data, eval_data=eval_data, training=training, say=say
        )
        self._check_lengths()
        super().__init__(recipe)
        self.tokenizer = tokenizer
        self.say = say
        self.notes: list[str] = []
        self.samples: list[dict[str, Any]] = []
        self.samples_dir: Path | None = None

    def _check_lengths(self) -> None:
        """Refuse rows of more tokens than the model has positions for."""
        text = self.adapter.config.get_text_config()
        own_name = text.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        positions = text.to_dict().get(own_name)
        for rows in (self.prepared.train, *self.prepared.evals.values()):
            if rows is None or not isinstance(positions, int):
                continue
            longest = int(rows.lengths.argmax())
            if rows.lengths[longest] > positions:
                raise ModelError(
                    f"a row has {int(rows.lengths[longest]):,} tokens, the model takes {positions:,} ({own_name})",
                    where=rows.locate(longest),
                    remedy=f"lower data.max_length to {positions}",
                )

    def check(self) -> None:
        """Find what is wrong with model, weights, optimizer and monitors; builds nothing that takes memory.

        For a process that starts ranks: what they would find one after the other is known before.
        """
        config = self.recipe.actor.model
        model = self.adapter.build()
        freeze(model, config.freeze)
        self.adapter.shard_units(model)
        if not config.from_scratch:
            assert config.model_path is not None
            check_weights(model, model_directory(config.model_path))
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        build_optimizer(trainable, self.recipe.actor.optim)
        check_monitors(self.recipe.runner, self.evaluation_metrics())

    def data_files(self) -> list[dict[str, Any]]:
        return self.prepared.files()

    def evaluation_metrics(self) -> list[str]:
        terms = self.adapter.terms()
        names = ["loss", "perplexity", "token_accuracy", *(f"loss/{term}" for term in terms if len(terms) > 1)]
        if self.recipe.eval.generate:
            names += ["eval_accuracy", "unparsed"]
        return [f"eval/{name}/{key}" if name else f"eval/{key}" for name in self.prepared.evals for key in names]

    def model_provider_func(self) -> nn.Module:
        return AdapterRoot(self.adapter, self.adapter.build())

    def hf_model(self) -> PreTrainedModel:
        assert isinstance(self.model, AdapterRoot)
        assert isinstance(self.model.model, PreTrainedModel)
        return self.model.model

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        return self.adapter.shard_units(model)

    def evaluation_sets(self) -> dict[str, list[str]]:
        return {name: [] for name in self.prepared.evals}

    def hand_back(self) -> None:
        self.adapter.hand_back(self.hf_model())

    def prove(self) -> None:
        """Prove, on two real rows, that packing is exact for this model; otherwise do without."""
        rows = next((rows for rows in (self.prepared.train, *self.prepared.evals.values()) if rows is not None), None)
        if rows is None:
            return
        longest = np.argpartition(rows.lengths, -min(2, len(rows)))[-2:]
        samples = [rows.row(int(index)) for index in longest]
        assert isinstance(self.model, AdapterRoot)
        dtype = COMPUTE_DTYPE[self.recipe.actor.model.precision]
        self.notes = probe_packing(self.model, self.adapter, samples, self.device, dtype)

    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> tuple[Any, dict[str, Any]]:
        """The training rows in steps. (Evaluation sets are built by name.)"""
        rows = self.prepared.train
        actor, data = self.recipe.actor, self.recipe.data
        if rows is None:
            raise ConfigError("this worker was made to evaluate: it has no training rows", where="training=False")
        order = DataOrder(
            [OrderSource(span.name, span.start, span.stop, span.weight) for span in rows.sources],
            seed=self.recipe.runner.seed,
            shuffle=data.shuffle,
            global_batch_size=actor.global_batch_size if actor.global_batch_tokens is None else None,
            global_batch_tokens=actor.global_batch_tokens,
            lengths=rows.lengths,
        )
        weighed = WeighedRows(rows, self.adapter.terms())
        maker = self._maker(weighed, actor.micro_batch_size)
        loader = StepLoader(weighed, order, maker, token_term=TOKENS)
        return loader, {"num_samples": len(rows), "sharded": True}

    def build_evaluation(self, name: str, paths: list[str]) -> tuple[Any, dict[str, Any]]:
        actor = self.recipe.actor
        rows = self.prepared.evals[name]
        max_rows = actor.eval_micro_batch_size or actor.micro_batch_size
        per_forward = (max_rows or 16) if self.adapter.packs else 1
        maker = self._maker(WeighedRows(rows, self.adapter.terms()), max_rows)
        block = per_forward * BLOCK_MICRO_BATCHES * self.ranks.world_size
        return EvaluationSet(rows, maker, block), {"num_samples": len(rows), "sharded": True}

    def _maker(self, rows: WeighedRows, max_rows: int | None) -> BatchMaker:
        limits = Limits(max_rows if self.adapter.packs else 1, self.recipe.actor.max_tokens_per_micro_batch)
        return BatchMaker(rows, limits, rank=self.ranks.rank, num_ranks=self.ranks.world_size)

    def get_train_model_output(self, batch: Batch) -> Mapping[str, LossSum]:
        return self.model(batch.to(self.device))

    def get_eval_model_output(self, batch: Batch) -> Mapping[str, Metric]:
        assert isinstance(self.model, AdapterRoot)
        result = self.model.evaluate(batch.to(self.device))
        return {
            **{name: Metric(float(term.total), term.weight) for name, term in result.losses.items()},
            "token_accuracy": Metric(float(result.correct), float(result.targets)),
        }

    def evaluate_set(self, name: str, loader: Iterable[Any], info: Mapping[str, Any]) -> dict[str, float]:
        assert isinstance(loader, EvaluationSet)
        sums = sum_evaluation(self.get_eval_model_output, iter(loader), self.ranks, poll=self.poll)
        metrics = summarize(sums)
        if self.recipe.eval.generate:
            metrics |= self._generated(name, loader.rows)
        return metrics

    # Answers.

    def generator(self) -> Generator:
        """Answers prompts with the model as it stands."""
        assert isinstance(self.model, AdapterRoot)
        assert self.tokenizer is not None
        return Generator(self.model, self.tokenizer, self.prepared.encoder.stop_token_ids, self.ranks, GENERATION_ROWS)

    def _generated(self, name: str, rows: TokenDataset) -> dict[str, float]:
        """Answer the set's rows and compare; answers in which the pattern is not found count as wrong."""
        config = self.recipe.eval
        wanted = [index for index in range(len(rows)) if rows.row(index).prompt_ids is not None]
        wanted = wanted[: config.num_samples] if config.num_samples else wanted
        if not wanted:
            raise ConfigError(
                "eval.generate is on, but no evaluation row has a question to answer",
                where=f"data.eval_data_paths{': ' + name if name else ''}",
                remedy="set eval.generate: false, or give rows with an assistant's answer",
            )
        samples = [rows.row(index) for index in wanted]
        sampling = Sampling(config.max_new_tokens, config.temperature, seed=self.recipe.runner.seed)
        prompts = [sample.prompt_ids for sample in samples if sample.prompt_ids is not None]
        answers = self.generator().answers(prompts, sampling, poll=self.poll)
        verdicts = [
            self._matcher.correct(answer, sample.reference or "")
            for answer, sample in zip(answers, samples, strict=True)
        ]
        self._keep_samples(name, rows, wanted, answers, verdicts)
        return {
            "eval_accuracy": sum(verdict is True for verdict in verdicts) / len(verdicts),
            "unparsed": float(sum(verdict is None for verdict in verdicts)),
        }

    def _keep_samples(
        self,
        name: str,
        rows: TokenDataset,
        indices: Sequence[int],
        answers: Sequence[str],
        verdicts: Sequence[bool | None],
    ) -> None:
        """The answers of this evaluation, all of them, as `samples/step_N[_name].jsonl` in the run directory."""
        assert self.tokenizer is not None
        self.samples = []
        for index, answer, verdict in zip(indices, answers, verdicts, strict=True):
            sample = rows.row(index)
            assert sample.prompt_ids is not None
            self.samples.append(
                {
                    "row": rows.locate(index),
                    "prompt": self.tokenizer.decode(sample.prompt_ids),
                    "reference": sample.reference,
                    "answer": answer,
                    "correct": verdict,
                }
            )
        if self.samples_dir is not None and self.ranks.is_main:
            self.samples_dir.mkdir(parents=True, exist_ok=True)
            file = self.samples_dir / f"step_{self.step}{'_' + name if name else ''}.jsonl"
            lines = [json.dumps(sample, ensure_ascii=False) for sample in self.samples]
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")

    # Export.

    def export(self, directory: Path, dtype: str) -> None:
        """Write the model as it stands as a Hugging Face directory; every rank calls it.

        Args:
            directory: to write into.
            dtype: fp32 | bf16 | fp16 | fp64, or auto: that of the base model.
        """
        chosen = self.adapter.config.dtype if dtype == "auto" else DTYPES[dtype]
        save_pretrained(
            self.hf_model(),
            directory,
            dtype=chosen if isinstance(chosen, torch.dtype) else torch.float32,
            tokenizer=self.tokenizer,
            chat_template=self.prepared.template,
            end_of_turn_ids=self.prepared.encoder.stop_token_ids,
            tensors=self.weights.tensors(),
        )


def _matcher(recipe: Recipe) -> Matcher:
    config = recipe.eval
    pattern = re.compile(config.answer_pattern) if config.answer_pattern else None
    match = config.match if config.match in ("exact", "numeric") else load_function(config.match, "eval.match")
    return Matcher(pattern, match)
