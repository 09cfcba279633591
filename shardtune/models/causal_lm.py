"""Every Hugging Face causal language model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, TypedDict, cast

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from shardtune.batch import TOKENS, Batch, LossSum, Metric, PackedBatch, Sample
from shardtune.config import DataConfig
from shardtune.config.rank_layout import Layout
from shardtune.data.chat.encoder import ChatEncoder, TrainOn
from shardtune.data.chat.prompt_check import PromptMismatch
from shardtune.data.chat.reasoning import Thinking
from shardtune.data.chat.template import load_template
from shardtune.data.encoder import Row, TooLong
from shardtune.data.loader.packing import NO_ROW, pack
from shardtune.errors import ModelError
from shardtune.models.activation_checkpointing import checkpoint_pretrained
from shardtune.models.adapter import AdapterRoot, Evaluation, WeightSource, cannot_share_sequences
from shardtune.models.attention_heads import check_heads_of, forms_ring, shared_heads
from shardtune.models.attention_implementation import (
    pretrained,
)
from shardtune.models.distillation import Distillation, Distilled, TeacherLogits, logits_of
from shardtune.models.embedding_noise import embedding_noise
from shardtune.models.generation_settings import one_text_each, reads_padding
from shardtune.models.language_head import AtHead, declared_transform, own_forward, target_predictions
from shardtune.models.language_model import LanguageModel, LanguageRoot
from shardtune.models.loss import (
    IDENTITY,
    PLAIN,
    CrossEntropy,
    TokenLoss,
    accumulation_dtype,
    head_cross_entropy,
    linear_cross_entropy,
    router_balance,
)
from shardtune.models.mixed_precision import NarrowedBuffer, narrow_buffers
from shardtune.models.packed_attention import DOCUMENTS
from shardtune.models.packing_limit import PackingLimit
from shardtune.models.packing_probe import AGREEMENT, probe_packing
from shardtune.models.pretrained import model_directory
from shardtune.models.rescaling import keep_weights, restore_rescaling
from shardtune.models.router_loss import RouterLoss
from shardtune.models.row_sharing import RowSharing
from shardtune.models.source_losses import TargetLosses
from shardtune.models.user_metrics import Measure, Prediction
from shardtune.models.value_loss import VALUE, ValueLoss
from shardtune.parallel.fp32_compute import in_fp32
from shardtune.parallel.model_parallel import ModelParallel, apply_model_parallel
from shardtune.parallel.precision import COMPUTE_DTYPE, MASTER_DTYPE
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.shard_units import choose_units, outermost

BALANCE = "router_balance"


class CausalLMSettings(TypedDict, total=False):
    """What a recipe sets of a `CausalLM`; its arguments of the same names."""

    attn_implementation: str
    wrap: list[str] | None
    trust_remote_code: bool
    compile: bool
    gradient_checkpointing: bool | str
    precision: str
    model: PreTrainedModel | None
    model_path: str | None
    data: DataConfig | None


class EncodingSettings(TypedDict):
    """What a recipe sets of a `ChatEncoder`; its arguments of the same names."""

    train_on: TrainOn
    system_prompt: str | None
    max_length: int
    on_too_long: TooLong
    split_stride: int | None
    thinking: Thinking | None
    ignored_keys: list[str]
    template_kwargs: dict[str, object]
    on_prompt_mismatch: PromptMismatch


class CausalLM(LanguageModel):
    """A causal language model of transformers, trained on packed rows.

    Args:
        config: the model's config.
        attn_implementation: auto (shardtune's document attention, where the model's attention can be replaced) or a
            name of transformers.
        wrap: class names of the modules that shard as a unit; None: as the model declares.
        trust_remote_code: let the config's own code define the model.
        compile: compile the units.
        gradient_checkpointing: recompute the units in the backward pass; selective: except for matrix products.
        precision: bf16 | pure_bf16 | fp16 | fp32 | fp64; no grouped kernel takes fp64, so there experts are computed
            one by one.
        model: a model in memory instead of one built from `config`.
        make: function that makes the model, instead of `config`.
        model_path: of the weights; None: they are in memory, or drawn from the seed.
        data: how rows are encoded.

    Attributes:
        sharing: which rows share a forward.
        source_losses: reads the training loss of each target; None: nothing does.
        value_loss: of the model's value head; None: none is trained.
        noise_alpha: the scale of the noise on embeddings in training; 0: none.
    """

    token_term = TOKENS
    source_losses: TargetLosses | None = None
    value_loss: ValueLoss | None = None
    noise_alpha: float = 0.0

    _auto: ClassVar[type[_BaseAutoModelClass]] = AutoModelForCausalLM
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
        self._requested_attention = attn_implementation
        self._precision = precision
        self.sharing = RowSharing(attn_implementation, PackingLimit.of(config))
        self._padding_changes: bool | None = None  # of prompts, once it has been computed
        self._transform, self._other_transform = declared_transform(config), IDENTITY
        self._through_own_head = False
        self._narrowed: dict[str, NarrowedBuffer] = {}
        self._leads = False  # whether the model's outputs may begin with positions that are no tokens
        self._router = RouterLoss.of(config)
        self._with_routers: dict[str, object] = {"output_router_logits": True} if self._router.factor else {}

    def build(self) -> PreTrainedModel:
        model = self._model if self._model is not None else self._from_config()
        keep_weights(model)
        self.sharing.prepare(model)
        if self._precision == "fp64" and model.config._experts_implementation is not None:
            model.set_experts_implementation("eager")
        if self._gradient_checkpointing:
            if not model.supports_gradient_checkpointing:
                raise ModelError(
                    f"{type(model).__name__} does not support gradient checkpointing",
                    where=f"actor.model.gradient_checkpointing: {str(self._gradient_checkpointing).lower()}",
                    remedy="set actor.model.gradient_checkpointing: false",
                )
            checkpoint_pretrained(model, self._gradient_checkpointing, compiles=self._compile)
        if self._compile:
            for unit in outermost(self.shard_units(model)[0]):
                unit.compile(dynamic=True)
        return model

    @property
    def builds_by_class(self) -> bool:
        """Whether neither a registered function nor a `build` of a user's class makes the model."""
        return self._make is None and type(self).build.__module__.startswith("shardtune.")

    @property
    def auto_class(self) -> str:
        """The name of the class of transformers whose `from_pretrained` makes the model."""
        return self._auto.__name__

    def set_execution(self, model: nn.Module) -> None:
        """Nothing: `build` has done it already."""

    def restore_model(self, model: nn.Module) -> None:
        """Undo the changes of `build` to a model that the caller continues to use."""
        if model is not self._model:
            return
        self.sharing.restore(model)
        for buffer in self._narrowed.values():
            buffer.remove()
        restore_rescaling(pretrained(model))
        if self._gradient_checkpointing:
            pretrained(model).activation_checkpointing_disable()

    def narrow_buffers(self, model: nn.Module, dtype: torch.dtype) -> Sequence[str]:
        """Let the model have those buffers in a half precision that `from_pretrained` has in it; returns their names.

        None of a model that a registered function makes: what it gives in another precision is not known.
        """
        if self._make is None and not self._narrowed:
            self._narrowed = narrow_buffers(pretrained(model), dtype, self._from_config)
            return list(self._narrowed)
        return []

    def _from_config(self, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """The model that the config describes, in the dtype of trained weights or another."""
        implementation = None if self._requested_attention == "auto" else self._requested_attention
        try:
            if self._make is not None:
                return pretrained(self._make())
            return self._auto.from_config(
                self.config if dtype is None else copy.deepcopy(self.config),
                dtype=dtype or MASTER_DTYPE[self._precision],
                attn_implementation=implementation,
                trust_remote_code=self._trust_remote_code,
            )
        except (ValueError, ImportError, KeyError) as error:
            raise ModelError(
                f"transformers cannot build a {self._kind} of type {self.config.model_type!r}: {error}",
                where=f"actor.model.model_path, actor.model.attn_implementation: {self._requested_attention}",
                remedy="check the model directory's config.json and actor.model.attn_implementation",
            ) from error

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts, whose group sizes depend on all tokens of a forward."""
        return self._router.experts_per_token > 0

    @property
    def sliding_window(self) -> int | None:
        """Size of the sliding window in tokens; None where no layer has one."""
        text = self.config.get_text_config().to_dict()
        if not text.get("use_sliding_window", True):
            return None
        return text.get("sliding_window")

    def use_own_head(self) -> None:
        """Stop using the chunked head: logits come from the model's own forward, at supervised positions only."""
        self._through_own_head = True

    def exchange_transform(self) -> bool:
        """Take the logits as the head gives them instead of as the config declares, or the reverse; returns whether
        there are two ways. A text part of a larger model may declare a scale that the whole does not apply."""
        self._transform, self._other_transform = self._other_transform, self._transform
        return self._transform != self._other_transform

    @property
    def rows_share_forwards(self) -> bool:
        return self.sharing.packs

    @property
    def may_be_filled(self) -> bool:
        """Not where a layer's state is computed row by row, nor where a class of a user's, or fields of rows, may count
        documents."""
        own = (type(self).collate, type(self).loss, type(self).train_loss)
        as_here = own == (CausalLM.collate, CausalLM.loss, CausalLM.train_loss)
        return self.sharing.packs and not self.sharing.mixes and as_here

    @property
    def rows_of_one_length(self) -> bool:
        return self.sharing.by_length

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise ModelError("this adapter was made without a tokenizer")
        return self._tokenizer

    def take_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Encode rows with this tokenizer."""
        self._tokenizer = tokenizer

    def initial_weights(self) -> WeightSource:
        """The values that a user's function gives its model; otherwise the model's directory."""
        if self._make is not None and self._model_path is not None:
            return dict(pretrained(self._make()).state_dict())
        return None if self._model_path is None or self._model is not None else model_directory(self._model_path)

    def encode(self, row: Row) -> Sample:
        return self.encoder(with_prompts=False).encode(row)

    def encoder(self, *, with_prompts: bool) -> ChatEncoder:
        template = load_template(self._data.chat_template, self.tokenizer)
        return ChatEncoder(self.tokenizer, template, with_prompts=with_prompts, **self._encoding)

    @property
    def _encoding(self) -> EncodingSettings:
        data = self._data
        return {
            "train_on": data.train_on,
            "system_prompt": data.system_prompt,
            "max_length": data.max_length,
            "on_too_long": data.on_too_long,
            "split_stride": data.split_stride,
            "thinking": data.thinking,
            "ignored_keys": data.ignored_keys,
            "template_kwargs": data.template_kwargs,
            "on_prompt_mismatch": data.on_prompt_mismatch,
        }

    def collate(self, samples: Sequence[Sample], rows: Sequence[int], weights: Mapping[str, float]) -> PackedBatch:
        return pack(samples, rows, weights)

    def filler(self, sample: Sample) -> Sample:
        return NO_ROW

    def shortened(self, sample: Sample, most: int) -> Sample:
        """A row's first tokens, for the packing probe."""
        return replace(sample, input_ids=sample.input_ids[:most], loss_weights=sample.loss_weights[:most])

    def changed(self, sample: Sample) -> Sample:
        """A row of the same shape with other tokens, for the packing probe."""
        other = sample.input_ids
        return replace(sample, input_ids=np.roll(other, 1) if len(set(other.tolist())) > 1 else other * 0)

    def check_layout(self, layout: Layout) -> None:
        if layout.sequence > 1 and self._requested_attention not in ("auto", DOCUMENTS):
            raise cannot_share_sequences(
                f"a model with attn_implementation {self._requested_attention}", "its attention is not ours"
            )
        check_heads_of(self.config, layout)

    def rings(self, layout: Layout) -> bool:
        """Whether ranks that share sequences send each other keys and values instead of heads."""
        return forms_ring(self.config, layout)

    def check_parallel(self, model: nn.Module, layout: Layout) -> None:
        super().check_parallel(model, layout)
        if layout.sequence > 1:
            self.sharing.check_sequences(model)

    def apply_model_parallel(self, model: nn.Module, ranks: Ranks) -> ModelParallel:
        """Split the model among the ranks that share rows, by the plans that transformers declares for it."""
        layout = ranks.layout
        self.check_layout(layout)
        self.check_parallel(model, layout)
        if ranks.sequence_mesh is not None:
            self.sharing.share_sequences(model, ranks.sequence_mesh, rings=self.rings(layout))
        declared, heads = pretrained(model), shared_heads(self.config) if layout.tensor > 1 else None
        return apply_model_parallel(model, declared.tp_plan, declared.ep_plan, ranks, heads)

    def row_terms(self) -> Mapping[str, float]:
        return {BALANCE: 1.0} if self._router.factor else {}

    def shard_units(self, model: nn.Module) -> tuple[list[nn.Module], str]:
        return choose_units(model, wrap=self._wrap)

    def probe_assumptions(
        self, root: AdapterRoot, samples: Sequence[Sample], device: torch.device, dtype: torch.dtype
    ) -> list[str]:
        """Check on real rows that packing is exact for this model; otherwise stop packing."""
        assert isinstance(root, LanguageRoot)
        too_long = self.sharing.too_long if self.sharing.packs else ""
        if too_long:
            self.sharing.one_row_per_forward(root.model, too_long)
        found = probe_packing(root, self, samples, device, dtype)
        self.sharing.prove()
        if self.sharing.rings:
            heads = shared_heads(self.config)
            found.append(f"sequences are shared by ring attention ({heads.query} heads, {heads.key_value} of keys)")
        return [f"{too_long}: one row per forward", *found] if too_long else found

    def _positions(self) -> tuple[str, int | None]:
        """The name of the key by which the config limits positions, and how many there are; None: any number."""
        text = self.config.get_text_config()
        own_name = text.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        positions = text.to_dict().get(own_name)
        return own_name, positions if isinstance(positions, int) and positions > 0 else None

    @property
    def max_positions(self) -> int | None:
        return self._positions()[1]

    def check_rows(self, lengths: np.ndarray, locate: Callable[[int], str]) -> None:
        """Refuse rows of more tokens than the model has positions for, and keep the length of the longest."""
        own_name, positions = self._positions()
        longest = int(lengths.argmax())
        self.sharing.check_longest(int(lengths[longest]), lambda: locate(longest))
        if positions is not None and lengths[longest] > positions:
            raise ModelError(
                f"a row has {int(lengths[longest]):,} tokens, the model takes {positions:,} ({own_name})",
                where=locate(longest),
                remedy=f"lower data.max_length to {positions}",
            )

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, LossSum]:
        return self.train_loss(model, batch, None)

    def train_loss(self, model: nn.Module, batch: Batch, token_loss: TokenLoss | None) -> dict[str, LossSum]:
        packed = cast(PackedBatch, batch)  # as `collate` has made it
        with self._noise(model, packed) if self.noise_alpha else nullcontext():
            at = self._to_head(model, packed, packed.target_positions)
        if isinstance(token_loss, Distillation):
            losses = token_loss.beside(packed, lambda loss: self._losses(at, packed, loss, training=True)[0])
        else:
            losses = self._losses(at, packed, token_loss or PLAIN, training=True)[0]
        traced = losses[TOKENS].total.requires_grad or any(term.total.requires_grad for term in losses.values())
        if torch.is_grad_enabled() and not traced:
            return self.without_graph(model, packed, losses)
        return losses

    def without_graph(self, model: nn.Module, _batch: PackedBatch, _losses: dict[str, LossSum]) -> dict[str, LossSum]:
        """The losses of a micro-batch that depend on nothing that is trained.

        Raises:
            ModelError: always, where the rows of every micro-batch call all parts of the model.
        """
        raise ModelError(
            f"the loss of {type(model).__name__} has no graph: nothing that is trained has a part in it",
            where="actor.model.is_lora, actor.model.freeze",
            remedy="reversible layers compute no gradient behind frozen embeddings: train the embeddings too "
            "(actor.model.lora.modules_to_save), or everything",
        )

    def _noise(self, model: nn.Module, batch: PackedBatch) -> AbstractContextManager[None]:
        """Noise on the embeddings of a training forward."""
        part = self.sharing.part(batch, batch.target_positions) if self.sharing.among_ranks else None
        return embedding_noise(pretrained(model).get_input_embeddings(), batch, self.noise_alpha, part)

    def target_logits(self, model: nn.Module, batch: PackedBatch) -> TeacherLogits:
        """The logits of a micro-batch's targets (of this rank, where ranks share sequences), computed when needed."""
        return logits_of(self._to_head(model, batch, batch.target_positions))

    def evaluate(self, model: nn.Module, batch: Batch, measure: Measure | None = None) -> Evaluation:
        packed = cast(PackedBatch, batch)  # as `collate` has made it
        at = self._to_head(model, packed, packed.target_positions)
        losses, correct = self._losses(at, packed, PLAIN, training=False)
        accuracy = {"token_accuracy": Metric(float(correct), float(packed.targets.numel()))}
        if self.value_loss is not None and at.values is not None:
            accuracy |= self.value_loss.measured(at.values, packed)
        further = {} if measure is None else measure(target_predictions(at, packed, self.vocabulary))
        return Evaluation(losses, {**accuracy, **further})

    def predictions(self, model: nn.Module, batch: Batch) -> Iterator[Prediction]:
        """The logits at the supervised positions, in chunks of the loss's size."""
        packed = cast(PackedBatch, batch)  # as `collate` has made it
        return target_predictions(self._to_head(model, packed, packed.target_positions), packed, self.vocabulary)

    @property
    def vocabulary(self) -> int:
        """The number of logits."""
        return self.config.get_text_config().vocab_size

    def _to_head(self, model: nn.Module, batch: PackedBatch, positions: torch.Tensor) -> AtHead:
        """Run the model up to its head, at some tokens."""
        model = cast(PreTrainedModel, model)  # as `build` has made it
        input_ids, position_ids, part = batch.input_ids, batch.position_ids, None
        arguments = {**self._with_routers}
        if self.sharing.among_ranks:
            part = self.sharing.part(batch, positions)
            arguments["token_share"] = part.share
            input_ids, position_ids, positions = part.cut(input_ids), part.cut(position_ids), part.positions
        arguments |= self.sharing.arguments(batch, position_ids)
        if batch.fields:
            arguments |= self.further_inputs(batch)
        sequences = input_ids.view(self.sharing.sequences(batch) if self.sharing.by_length else 1, -1)
        if self._through_own_head:
            if self.value_loss is not None:
                arguments["output_hidden_states"] = True
            outputs, logits = own_forward(model, sequences, positions, arguments, leads=self._leads)
            routers = outputs["router_logits"] if self._router.factor else ()
            values = None
            if self.value_loss is not None:
                states = outputs["hidden_states"][-1][:, -sequences.shape[1] :]
                values = self.value_loss.values(model, states.flatten(0, 1).index_select(0, positions))
            return AtHead(logits, None, IDENTITY, routers, part, values)
        head = model.get_output_embeddings()
        if head is None:
            raise ModelError(
                f"{type(model).__name__} has no language-model head",
                where="actor.model.model_path",
                remedy="give the directory of a causal language model",
            )
        # Some classes (Llama 4's) name another attribute than the one that holds the model without its head.
        inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
        body = inner[0] if model.base_model is model and len(inner) == 1 else model.base_model
        outputs = body(input_ids=sequences, use_cache=False, **arguments)
        # In the head's dtype: models that add up their residuals in fp32 (Mamba) return fp32.
        states = outputs[0][:, -sequences.shape[1] :] if self._leads else outputs[0]
        hidden = states.flatten(0, 1).index_select(0, positions)
        hidden = hidden.to(next(head.parameters(), hidden).dtype)
        values = None if self.value_loss is None else self.value_loss.values(model, hidden)
        routers = outputs["router_logits"] if self._router.factor else ()
        return AtHead(hidden, head, self._transform, routers, part, values)

    def _losses(
        self, at: AtHead, batch: PackedBatch, token_loss: TokenLoss | Distilled, *, training: bool
    ) -> tuple[dict[str, LossSum], torch.Tensor]:
        """The losses by term, and the number of targets with the largest logit (0 in training)."""
        targets, weights, count_correct = batch.targets, batch.target_weights, not training
        if at.part is not None:
            targets, weights = at.part.select(targets), at.part.select(weights)
            token_loss = token_loss.of(at.part.mine) if isinstance(token_loss, Distilled) else token_loss
        by_source, each = self.source_losses if training else None, None
        if by_source is not None:
            each = torch.zeros(len(targets), dtype=accumulation_dtype(at.hidden.dtype), device=targets.device)
        if isinstance(token_loss, Distilled) and type(at.head) is not nn.Linear:
            total, correct = linear_cross_entropy(
                at.logits, None, targets, weights, loss=token_loss, count_correct=count_correct, each=each
            )
        elif type(at.head) is nn.Linear and isinstance(token_loss, CrossEntropy | Distilled):
            total, correct = linear_cross_entropy(
                at.hidden, at.head.weight, targets, weights, bias=at.head.bias, transform=at.transform,
                loss=token_loss, count_correct=count_correct, each=each,
            )  # fmt: skip
        else:
            assert not isinstance(token_loss, Distilled)
            total, correct = head_cross_entropy(
                at.hidden, nn.Identity() if at.head is None else at.head, self.vocabulary, targets, weights,
                transform=at.transform, token_loss=token_loss, count_correct=count_correct, each=each,
            )  # fmt: skip
        if by_source is not None and each is not None:
            by_source.add(batch, each if at.part is None else at.part.gather(each))
        if at.part is not None:  # the same on all ranks that share the sequences
            total, correct = at.part.sum(total), at.part.sum(correct)
        losses = {TOKENS: LossSum(total, batch.target_weight)}
        if self._router.factor:
            routers = at.routers if at.part is None else tuple(at.part.whole(logits) for logits in at.routers)
            balance = router_balance(routers, batch.cu_seqlens, batch.document_weights, self._router.experts_per_token)
            losses[BALANCE] = LossSum(self._router.factor * balance, float(batch.num_rows))
        if self.value_loss is not None and at.values is not None:
            losses[VALUE] = self.value_loss.loss(at.values, batch, training=training)
        return losses, correct

    def logits(self, model: nn.Module, batch: PackedBatch, positions: torch.Tensor) -> torch.Tensor:
        at = self._to_head(model, batch, positions)
        return at.logits if at.part is None else at.part.gather(at.logits)

    def reference_logits(self, model: nn.Module, batch: PackedBatch, positions: torch.Tensor) -> torch.Tensor:
        with self.sharing.unpacked(model, "eager"):
            further: dict[str, object] = {**self.further_inputs(batch), **self._with_routers}
            outputs, logits = own_forward(model, batch.input_ids[None], positions, further, leads=self._leads)
        if self._router.factor:
            self._router.check(type(model).__name__, outputs, AGREEMENT[logits.dtype])
        return logits

    def further_inputs(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        """Inputs of the model's own forward besides tokens and their positions."""
        return {}

    def padding_changes(self, model: nn.Module, alone: Mapping[str, Any], padded: Mapping[str, Any]) -> bool:
        if reads_padding(model):
            return True
        if self._padding_changes is None:

            def distance() -> float:
                first, other = (self._next_logits(model, inputs) for inputs in (alone, padded))
                return float((other - first).abs().max() / first.abs().max())

            found, dtype = in_fp32(distance, COMPUTE_DTYPE[self._precision])
            self._padding_changes = not found <= AGREEMENT[dtype]  # nor is NaN
        return self._padding_changes

    def _next_logits(self, model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        """[vocabulary]: of the first prompt's next token."""
        further = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
        settings = {"max_new_tokens": 1, "do_sample": False, "num_beams": 1, "stop_strings": None}
        settings |= {"return_dict_in_generate": True, "output_logits": True}
        made: Any = self.generate(model, inputs["input_ids"], inputs["attention_mask"], {**further, **settings})
        return made.logits[0][0]

    def generate(
        self, model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, arguments: Mapping[str, object]
    ) -> torch.Tensor:
        model = pretrained(model)
        with self.sharing.unpacked(model):
            generate: Any = model.generate
            # With a cache, router logits are those of the newest tokens only: no balance loss can be computed.
            routers = {"output_router_logits": False} if self._router.factor else {}
            given = {**one_text_each(model), **arguments, **routers}
            return generate(input_ids=input_ids, attention_mask=attention_mask, **given)
