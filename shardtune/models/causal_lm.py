"""Every Hugging Face causal language model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from shardtune.batch import Batch, LossSum, Metric, PackedBatch, Sample
from shardtune.config import DataConfig
from shardtune.config.rank_layout import Layout
from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.chat.template import load_template
from shardtune.data.encoder import Row
from shardtune.data.loader.packing import NO_ROW, pack
from shardtune.errors import ModelError
from shardtune.models.activation_checkpointing import checkpoint_arguments
from shardtune.models.adapter import (
    AdapterRoot,
    Evaluation,
    LanguageModel,
    LanguageRoot,
    WeightSource,
    cannot_share_sequences,
)
from shardtune.models.loss import (
    IDENTITY,
    PLAIN,
    CrossEntropy,
    LogitTransform,
    TokenLoss,
    accumulation_dtype,
    chunk_rows,
    head_cross_entropy,
    linear_cross_entropy,
    router_balance,
)
from shardtune.models.packed_attention import DOCUMENTS
from shardtune.models.packing_probe import probe_packing
from shardtune.models.pretrained import model_directory
from shardtune.models.user_metrics import Measure, Prediction
from shardtune.parallel.collectives import sum_over
from shardtune.parallel.meta_init import init_empty_weights
from shardtune.parallel.model_parallel import ModelParallel, apply_model_parallel
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.sequence_parallel import TokenShare
from shardtune.parallel.shard_units import choose_units, outermost
from shardtune.parallel.tensor_parallel import Heads, check_heads

BALANCE = "router_balance"
TOKENS = "ce"


class CausalLM(LanguageModel):
    """A causal language model of transformers, trained on packed rows.

    Args:
        config: the model's config.
        attn_implementation: auto (documents kept apart by our own attention, where the model takes one) or a name that
            transformers knows.
        wrap: class names of the modules that shard as a unit; None: as the model declares.
        trust_remote_code: let the config's own code define the model.
        compile: compile the units.
        gradient_checkpointing: compute the units again in the backward pass; selective: but for matrix products.
        precision: bf16 | fp16 | fp32 | fp64; no grouped kernel takes fp64, so there experts are computed one by one.
        model: a model in memory instead of one built from `config`.
        make: makes the model instead of `config`.
        model_path: where the weights are; None: in memory, or drawn from the seed.
        data: how rows are encoded.
    """

    _auto: ClassVar[Any] = AutoModelForCausalLM
    _kind = "causal language model"

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        attn_implementation: str = "auto",
        wrap: list[str] | None = None,
        trust_remote_code: bool = False,
        compile: bool = False,
        gradient_checkpointing: bool | str = False,
        precision: str = "fp32",
        model: PreTrainedModel | None = None,
        make: Callable[[], nn.Module] | None = None,
        model_path: str | None = None,
        data: DataConfig | None = None,
    ) -> None:
        self.config = config
        self._tokenizer = None
        self._model = model
        self._make = make
        self._model_path = model_path
        self._data = data or DataConfig()
        self._wrap = wrap
        self._trust_remote_code = trust_remote_code
        self._compile = compile
        self._gradient_checkpointing = gradient_checkpointing
        self._asked = attn_implementation
        self._precision = precision
        self._own_attention = ""
        self._attention = ""
        self._sequence: DeviceMesh | None = None
        self.packs = self._by_length = False
        self._transform = _declared_transform(config)
        self._through_own_head = False
        text = config.get_text_config().to_dict()
        self._balance_factor = (
            float(text.get("router_aux_loss_coef") or 0.0) if text.get("output_router_logits") else 0.0
        )
        self._experts_per_token = int(text.get("num_experts_per_tok") or 0)

    def build(self) -> PreTrainedModel:
        model = self._model if self._model is not None else self._from_config()
        takes = inspect.signature(model.base_model.forward).parameters
        self._own_attention = _attention_name(model) or "eager"
        self.packs = "position_ids" in takes and any(p.kind is p.VAR_KEYWORD for p in takes.values())
        self._attention = self._own_attention
        if self._asked == "auto":
            self.packs = self.packs and model._can_set_attn_implementation()
            self._attention = DOCUMENTS if self.packs else self._own_attention
        _set_attention(model, self._attention)
        if self._precision == "fp64" and model.config._experts_implementation is not None:
            model.set_experts_implementation("eager")
        if self._gradient_checkpointing:
            if not model.supports_gradient_checkpointing:
                raise ModelError(
                    f"{type(model).__name__} does not support gradient checkpointing",
                    where=f"actor.model.gradient_checkpointing: {str(self._gradient_checkpointing).lower()}",
                    remedy="set actor.model.gradient_checkpointing: false",
                )
            model.activation_checkpointing_enable(checkpoint_arguments(self._gradient_checkpointing))
        if self._compile:
            for unit in outermost(self.shard_units(model)[0]):
                unit.compile(dynamic=True)
        return model

    def set_execution(self, model: nn.Module) -> None:
        """`build` has done it."""

    def restore_model(self, model: nn.Module) -> None:
        """Undo what `build` changed in a model that its caller goes on using."""
        if model is not self._model:
            return
        _set_attention(model, self._own_attention)
        if self._gradient_checkpointing:
            _hf(model).activation_checkpointing_disable()

    def _from_config(self) -> PreTrainedModel:
        implementation = None if self._asked == "auto" else self._asked
        try:
            with init_empty_weights():
                if self._make is not None:
                    return _hf(self._make())
                return self._auto.from_config(
                    self.config,
                    dtype=torch.float32,
                    attn_implementation=implementation,
                    trust_remote_code=self._trust_remote_code,
                )
        except (ValueError, ImportError, KeyError) as error:
            raise ModelError(
                f"transformers cannot build a {self._kind} of type {self.config.model_type!r}: {error}",
                where=f"actor.model.model_path, actor.model.attn_implementation: {self._asked}",
                remedy="check the model directory's config.json and actor.model.attn_implementation",
            ) from error

    @property
    def has_experts(self) -> bool:
        """Whether tokens go to experts, in groups whose sizes depend on all tokens of a forward."""
        return self._experts_per_token > 0

    @property
    def sliding_window(self) -> int | None:
        """The tokens that a layer with a sliding window sees; None where all layers see all."""
        text = self.config.get_text_config().to_dict()
        if not text.get("use_sliding_window", True):
            return None
        return text.get("sliding_window")

    def one_row_per_forward(self, model: nn.Module) -> None:
        """Give up packing: from now on each forward holds one row, under the model's own attention."""
        self.packs, self._attention = False, self._own_attention
        _set_attention(model, self._attention)

    def use_own_head(self) -> None:
        """Give up the chunked head: logits come from the model's own forward, at supervised positions only."""
        self._through_own_head = True

    @property
    def rows_share_forwards(self) -> bool:
        return self.packs

    @property
    def rows_of_one_length(self) -> bool:
        return self._by_length

    def share_by_length(self, on: bool) -> bool:
        """Compute rows of one length side by side, without packing; returns whether that is so now."""
        self._by_length = on and not self.packs and not self._through_own_head
        return self._by_length

    def _sequences(self, batch: PackedBatch) -> int:
        """How many sequences a forward is given: one, or rows of one length side by side."""
        rows = len(batch.document_weights)
        return rows if self._by_length and rows * batch.max_length == len(batch.input_ids) else 1

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise ModelError("this adapter was made without a tokenizer")
        return self._tokenizer

    def take_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Encode rows with this tokenizer."""
        self._tokenizer = tokenizer

    def initial_weights(self) -> WeightSource:
        return None if self._model_path is None or self._model is not None else model_directory(self._model_path)

    def encode(self, row: Row) -> Sample:
        return self.encoder(with_prompts=False).encode(row)

    def encoder(self, *, with_prompts: bool) -> ChatEncoder:
        template = load_template(self._data.chat_template, self.tokenizer)
        return ChatEncoder(self.tokenizer, template, with_prompts=with_prompts, **self._encoding)

    @property
    def _encoding(self) -> dict[str, Any]:
        """What the recipe says of how rows become tokens."""
        data = self._data
        return {
            "train_on": data.train_on,
            "system_prompt": data.system_prompt,
            "max_length": data.max_length,
            "on_too_long": data.on_too_long,
        }

    def collate(self, samples: Sequence[Sample], rows: Sequence[int], weights: Mapping[str, float]) -> PackedBatch:
        return pack(samples, rows, weights)

    def filler(self, sample: Sample) -> Sample:
        return NO_ROW

    def shortened(self, sample: Sample, most: int) -> Sample:
        """A row's first tokens, for a probe."""
        return replace(sample, input_ids=sample.input_ids[:most], loss_weights=sample.loss_weights[:most])

    def changed(self, sample: Sample) -> Sample:
        """A row of other tokens and the same shape, for a probe."""
        other = sample.input_ids
        return replace(sample, input_ids=np.roll(other, 1) if len(set(other.tolist())) > 1 else other * 0)

    def check_layout(self, layout: Layout) -> None:
        if layout.tensor > 1 or layout.sequence > 1:
            check_heads(self._heads(), layout.tensor, layout.sequence)

    def _heads(self) -> Heads:
        values = self.config.get_text_config().to_dict()
        query = int(values["num_attention_heads"])
        size = int(values.get("head_dim") or values["hidden_size"] // query)
        return Heads(query, int(values.get("num_key_value_heads") or query), size)

    def apply_model_parallel(self, model: nn.Module, ranks: Ranks) -> ModelParallel:
        """Spread the model over the ranks that work on the same rows, by the plans that transformers has for it."""
        layout = ranks.layout
        if layout.sequence > 1:
            if self._attention != DOCUMENTS:
                raise cannot_share_sequences(
                    f"{type(model).__name__} with attn_implementation {self._attention}", "attention is not ours"
                )
            self._sequence = ranks.sequence_mesh
        return apply_model_parallel(
            model, _hf(model).tp_plan, _hf(model).ep_plan, ranks, self._heads() if layout.tensor > 1 else None
        )

    def row_terms(self) -> Mapping[str, float]:
        return {BALANCE: 1.0} if self._balance_factor else {}

    def shard_units(self, model: nn.Module) -> tuple[list[nn.Module], str]:
        return choose_units(model, wrap=self._wrap)

    def probe_assumptions(
        self, root: AdapterRoot, samples: Sequence[Sample], device: torch.device, dtype: torch.dtype
    ) -> list[str]:
        """Prove, on real rows, that packing is exact for this model; otherwise do without."""
        assert isinstance(root, LanguageRoot)
        return probe_packing(root, self, samples, device, dtype)

    def check_rows(self, lengths: np.ndarray, locate: Callable[[int], str]) -> None:
        """Refuse rows of more tokens than the model has positions for."""
        text = self.config.get_text_config()
        own_name = text.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        positions = text.to_dict().get(own_name)
        longest = int(lengths.argmax())
        if isinstance(positions, int) and lengths[longest] > positions:
            raise ModelError(
                f"a row has {int(lengths[longest]):,} tokens, the model takes {positions:,} ({own_name})",
                where=locate(longest),
                remedy=f"lower data.max_length to {positions}",
            )

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, LossSum]:
        return self.train_loss(model, batch, None)

    def train_loss(self, model: nn.Module, batch: Batch, token_loss: TokenLoss | None) -> dict[str, LossSum]:
        return self._measure(model, batch, token_loss or PLAIN).losses

    def evaluate(self, model: nn.Module, batch: Batch, measure: Measure | None = None) -> Evaluation:
        return self._measure(model, batch, PLAIN, measure or _nothing)

    def predictions(self, model: nn.Module, batch: Batch) -> Iterator[Prediction]:
        """The logits of the supervised positions, as many at a time as the loss holds."""
        assert isinstance(batch, PackedBatch)
        at = self._to_head(model, batch, batch.target_positions)
        return self._pieces(at.everywhere(), at.head, batch)

    def _pieces(self, hidden: torch.Tensor, head: nn.Module | None, batch: PackedBatch) -> Iterator[Prediction]:
        size = chunk_rows(hidden.device, self._vocabulary)
        for start in range(0, hidden.shape[0], size):
            part = slice(start, start + size)
            logits = hidden[part] if head is None else self._transform(head(hidden[part]))
            acc = accumulation_dtype(logits.dtype)
            yield Prediction(logits.to(acc), batch.targets[part], batch.target_weights[part])

    @property
    def _vocabulary(self) -> int:
        return self.config.get_text_config().vocab_size

    def _to_head(self, model: nn.Module, batch: PackedBatch, positions: torch.Tensor) -> _AtHead:
        """Run the model up to its head, at some tokens."""
        assert isinstance(model, PreTrainedModel)
        arguments: dict[str, Any] = {"output_router_logits": True} if self._balance_factor else {}
        share = TokenShare.of(len(batch.input_ids), self._sequence) if self._sequence is not None else None
        input_ids, position_ids, mine = batch.input_ids, batch.position_ids, None
        if share is not None:
            arguments["token_share"] = share
            input_ids, position_ids, mine = share.cut(input_ids), share.cut(position_ids), share.mine(positions)
            positions = positions[mine] - share.start
        if self.packs:
            arguments["position_ids"] = position_ids.unsqueeze(-2)
        if batch.fields:
            arguments |= self._further_inputs(batch)
        if self._attention == DOCUMENTS or self._attention.startswith("flash"):
            arguments |= {"cu_seq_lens_q": batch.cu_seqlens, "cu_seq_lens_k": batch.cu_seqlens}
            arguments |= {"max_length_q": batch.max_length, "max_length_k": batch.max_length}
        if self._through_own_head:
            outputs = model(input_ids=input_ids[None], use_cache=False, logits_to_keep=positions, **arguments)
            return _AtHead(outputs, outputs.logits[0], None, share, mine)
        head = model.get_output_embeddings()
        if head is None:
            raise ModelError(
                f"{type(model).__name__} has no language-model head",
                where="actor.model.model_path",
                remedy="give the directory of a causal language model",
            )
        sequences = input_ids.view(self._sequences(batch) if self._by_length else 1, -1)
        outputs = model.base_model(input_ids=sequences, use_cache=False, **arguments)
        # In the head's dtype: models that add up their residuals in fp32 (Mamba) leave them so.
        hidden = outputs[0].flatten(0, 1).index_select(0, positions)
        return _AtHead(outputs, hidden.to(next(head.parameters(), hidden).dtype), head, share, mine)

    def _measure(
        self, model: nn.Module, batch: Batch, token_loss: TokenLoss, measure: Measure | None = None
    ) -> Evaluation:
        """The losses; with `measure` also metrics: which predictions are right, and what it makes of them."""
        assert isinstance(batch, PackedBatch)
        at = self._to_head(model, batch, batch.target_positions)
        targets, weights, counts = batch.targets, batch.target_weights, measure is not None
        if at.mine is not None:
            targets, weights = targets[at.mine], weights[at.mine]
        if type(at.head) is nn.Linear and isinstance(token_loss, CrossEntropy):
            total, correct = linear_cross_entropy(
                at.hidden, at.head.weight, targets, weights, bias=at.head.bias, transform=self._transform,
                loss=token_loss, count_correct=counts,
            )  # fmt: skip
        else:
            total, correct = head_cross_entropy(
                at.hidden, _same if at.head is None else at.head, self._vocabulary, targets, weights,
                transform=IDENTITY if at.head is None else self._transform, token_loss=token_loss, count_correct=counts,
            )  # fmt: skip
        if at.share is not None:  # the same on all ranks that share the sequences
            total, correct = sum_over(total, at.share.ranks), sum_over(correct, at.share.ranks)
        losses = {TOKENS: LossSum(total, batch.target_weight)}
        if self._balance_factor:
            routers = at.outputs.router_logits
            if at.share is not None:
                routers = tuple(at.share.whole(logits) for logits in routers)
            balance = router_balance(routers, batch.cu_seqlens, batch.document_weights, self._experts_per_token)
            losses[BALANCE] = LossSum(self._balance_factor * balance, float(batch.num_rows))
        if measure is None:
            return Evaluation(losses, {})
        accuracy = Metric(float(correct), float(batch.targets.numel()))
        further = measure(self._pieces(at.everywhere(), at.head, batch)) if measure is not _nothing else {}
        return Evaluation(losses, {"token_accuracy": accuracy, **further})

    def logits(self, model: nn.Module, batch: PackedBatch, positions: torch.Tensor) -> torch.Tensor:
        at = self._to_head(model, batch, positions)
        return at.everywhere(at.hidden if at.head is None else self._transform(at.head(at.hidden)))

    def reference_logits(self, model: nn.Module, batch: PackedBatch, positions: torch.Tensor) -> torch.Tensor:
        arguments = {"input_ids": batch.input_ids[None], "use_cache": False, **self._further_inputs(batch)}
        with under_attention(model, "eager"), torch.compiler.set_stance("force_eager"):
            if "logits_to_keep" in inspect.signature(model.forward).parameters:
                return model(**arguments, logits_to_keep=positions).logits[0]
            return model(**arguments).logits[0].index_select(0, positions)

    def _further_inputs(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        """What the model takes besides tokens and their positions."""
        return {}

    def generate(
        self, model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, arguments: Mapping[str, object]
    ) -> torch.Tensor:
        model = _hf(model)
        with under_attention(model, self._own_attention), torch.compiler.set_stance("force_eager"):
            generate: Any = model.generate
            # With a cache, a router's logits are those of the newest tokens: no balance loss can be made of them.
            routers = {"output_router_logits": False} if self._balance_factor else {}
            return generate(input_ids=input_ids, attention_mask=attention_mask, **arguments, **routers)


@dataclass(frozen=True, slots=True)
class _AtHead:
    """Where a model's head begins.

    Attributes:
        outputs: the model's.
        hidden: [tokens, width], what the head takes; the logits where there is no head left.
        head: the head, or None.
        share: which tokens are this rank's, where ranks share them.
        mine: bool [tokens asked for]: which of those are.
    """

    outputs: Any
    hidden: torch.Tensor
    head: nn.Module | None
    share: TokenShare | None
    mine: torch.Tensor | None

    def everywhere(self, values: torch.Tensor | None = None) -> torch.Tensor:
        """What this rank has of the tokens asked for (by default `hidden`) to that of all of them."""
        values = self.hidden if values is None else values
        return values if self.share is None or self.mine is None else self.share.gather(values, self.mine)


def _hf(model: nn.Module) -> PreTrainedModel:
    """What this adapter built, as the type that it is."""
    assert isinstance(model, PreTrainedModel)
    return model


def _same(logits: torch.Tensor) -> torch.Tensor:
    return logits


def _nothing(predictions: Iterator[Prediction]) -> Mapping[str, Metric]:
    return {}


def _declared_transform(config: PreTrainedConfig) -> LogitTransform:
    """What the model's config says is done to the logits; a probe compares it with the model's own forward."""
    values = config.get_text_config().to_dict()
    scale = float(values.get("logit_scale") or 1.0) / float(values.get("logits_scaling") or 1.0)
    softcap = values.get("final_logit_softcapping")
    return LogitTransform(scale, softcap) if scale != 1.0 or softcap else IDENTITY


def _attention_name(model: nn.Module) -> str | None:
    """How the language model computes attention."""
    return _hf(model).config.get_text_config()._attn_implementation


def _set_attention(model: nn.Module, name: str) -> None:
    """Let the language model compute attention in another way; eyes keep theirs."""
    config = _hf(model).config
    if _attention_name(model) == name:
        return
    inner = [key for key in config.sub_configs if config.get_text_config() is getattr(config, key)]
    _hf(model).set_attn_implementation({inner[0]: name} if inner else name)


@contextmanager
def under_attention(model: nn.Module, name: str) -> Iterator[None]:
    """Another attention implementation for a while."""
    before = _attention_name(model) or "eager"
    _set_attention(model, name)
    try:
        yield
    finally:
        _set_attention(model, before)
