"""Every Hugging Face causal language model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from shardtune.batch import Batch, LossSum
from shardtune.errors import ModelError
from shardtune.loss import IDENTITY, LogitTransform, head_cross_entropy, linear_cross_entropy, router_balance
from shardtune.models.adapter import Adapter, Evaluation
from shardtune.models.attention import DOCUMENTS
from shardtune.parallel.materialise import init_empty_weights

BALANCE = "router_balance"
TOKENS = "ce"


class CausalLM(Adapter):
    """A causal language model of transformers, trained on packed rows.

    Args:
        config: the model's config.
        attn_implementation: auto (documents kept apart by our own attention, where the model takes one) or a name that
            transformers knows.
        wrap: class names of the modules that shard as a unit; None: as the model declares.
        trust_remote_code: let the config's own code define the model.
        compile: compile the units.
        gradient_checkpointing: compute the units again in the backward pass.
        precision: bf16 | fp16 | fp32 | fp64; no grouped kernel takes fp64, so there experts are computed one by one.
        model: a model in memory instead of one built from `config`.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        attn_implementation: str = "auto",
        wrap: list[str] | None = None,
        trust_remote_code: bool = False,
        compile: bool = False,
        gradient_checkpointing: bool = False,
        precision: str = "fp32",
        model: PreTrainedModel | None = None,
    ) -> None:
        self.config = config
        self._model = model
        self._wrap = wrap
        self._trust_remote_code = trust_remote_code
        self._compile = compile
        self._gradient_checkpointing = gradient_checkpointing
        self._asked = attn_implementation
        self._precision = precision
        self._own_attention = ""
        self._attention = ""
        self.packs = False
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
        self._own_attention = model.config._attn_implementation or "eager"
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
                    where="actor.model.gradient_checkpointing: true",
                    remedy="set actor.model.gradient_checkpointing: false",
                )
            model.activation_checkpointing_enable({"use_reentrant": False})
        if self._compile:
            for unit in _outermost(self.shard_units(model)):
                unit.compile(dynamic=True)
        return model

    def hand_back(self, model: PreTrainedModel) -> None:
        """Undo what `build` changed in a model that its caller goes on using."""
        if model is not self._model:
            return
        _set_attention(model, self._own_attention)
        if self._gradient_checkpointing:
            model.activation_checkpointing_disable()

    def _from_config(self) -> PreTrainedModel:
        implementation = None if self._asked == "auto" else self._asked
        try:
            with init_empty_weights():
                return AutoModelForCausalLM.from_config(
                    self.config,
                    dtype=torch.float32,
                    attn_implementation=implementation,
                    trust_remote_code=self._trust_remote_code,
                )
        except (ValueError, ImportError, KeyError) as error:
            raise ModelError(
                f"transformers cannot build a causal language model of type {self.config.model_type!r}: {error}",
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

    def terms(self) -> Mapping[str, float | None]:
        return {TOKENS: None, **({BALANCE: 1.0} if self._balance_factor else {})}

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        return declared_units(model, self._wrap)

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, LossSum]:
        return self._measure(model, batch, count_correct=False).losses

    def evaluate(self, model: nn.Module, batch: Batch) -> Evaluation:
        return self._measure(model, batch, count_correct=True)

    def _measure(self, model: nn.Module, batch: Batch, *, count_correct: bool) -> Evaluation:
        model, arguments = _hf(model), (batch.targets, batch.target_weights)
        if self._through_own_head:
            outputs = self._call(model, batch, logits_to_keep=batch.target_positions)
            total, correct = head_cross_entropy(
                outputs.logits[0], _same, outputs.logits.shape[-1], *arguments, count_correct=count_correct
            )
        else:
            outputs = self._call(model.base_model, batch)
            head = _head(model)
            hidden = _for_head(outputs[0][0].index_select(0, batch.target_positions), head)
            if type(head) is nn.Linear:
                total, correct = linear_cross_entropy(
                    hidden, head.weight, *arguments, bias=head.bias, transform=self._transform,
                    count_correct=count_correct,
                )  # fmt: skip
            else:
                total, correct = head_cross_entropy(
                    hidden, head, self.config.get_text_config().vocab_size, *arguments,
                    transform=self._transform, count_correct=count_correct,
                )  # fmt: skip
        losses = {TOKENS: LossSum(total, batch.target_weight)}
        if self._balance_factor:
            balance = router_balance(
                outputs.router_logits, batch.cu_seqlens, batch.document_weights, self._experts_per_token
            )
            losses[BALANCE] = LossSum(self._balance_factor * balance, float(batch.num_documents))
        return Evaluation(losses, correct, batch.targets.numel())

    def _call(self, module: nn.Module, batch: Batch, **further: Any) -> Any:
        """A forward over packed documents; several documents need their boundaries, one needs none."""
        if self._balance_factor:
            further["output_router_logits"] = True
        if self.packs:
            further["position_ids"] = batch.position_ids[None]
        if self._attention == DOCUMENTS or self._attention.startswith("flash"):
            further.update(
                cu_seq_lens_q=batch.cu_seqlens,
                cu_seq_lens_k=batch.cu_seqlens,
                max_length_q=batch.max_length,
                max_length_k=batch.max_length,
            )
        return module(input_ids=batch.input_ids[None], use_cache=False, **further)

    def logits(self, model: nn.Module, batch: Batch, positions: torch.Tensor) -> torch.Tensor:
        model = _hf(model)
        if self._through_own_head:
            return self._call(model, batch, logits_to_keep=positions).logits[0]
        hidden, head = self._call(model.base_model, batch)[0][0], _head(model)
        return self._transform(head(_for_head(hidden.index_select(0, positions), head)))

    def reference_logits(self, model: nn.Module, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with _attention(model, "eager"), torch.compiler.set_stance("force_eager"):
            if "logits_to_keep" in inspect.signature(model.forward).parameters:
                return model(input_ids=input_ids[None], use_cache=False, logits_to_keep=positions).logits[0]
            return model(input_ids=input_ids[None], use_cache=False).logits[0].index_select(0, positions)

    def generate(
        self, model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, arguments: Mapping[str, object]
    ) -> torch.Tensor:
        model = _hf(model)
        with _attention(model, self._own_attention), torch.compiler.set_stance("force_eager"):
            generate: Any = model.generate
            return generate(input_ids=input_ids, attention_mask=attention_mask, **arguments)


def declared_units(model: nn.Module, wrap: list[str] | None = None) -> list[nn.Module]:
    """The modules that shard as a unit: of the classes in `wrap`, else as the model declares, else its largest list.

    Args:
        model: a model of transformers.
        wrap: class names, `actor.fsdp_config.wrap`.
    """
    declared = set(wrap or (model._no_split_modules if isinstance(model, PreTrainedModel) else None) or ())
    units = [module for module in model.modules() if type(module).__name__ in declared]
    if wrap and not units:
        raise ModelError(
            f"actor.fsdp_config.wrap: no module of the model is a {' or a '.join(sorted(declared))}",
            where="actor.fsdp_config.wrap",
            remedy=f"class names here are {', '.join(sorted({type(m).__name__ for m in model.modules()}))}",
        )
    if any(isinstance(unit, (nn.ModuleList, nn.ModuleDict)) for unit in units):
        raise ModelError(
            "actor.fsdp_config.wrap names a list of modules, which cannot shard as a unit: it has no forward",
            where="actor.fsdp_config.wrap",
            remedy="name the class of the modules in it",
        )
    if units:
        return units if wrap else _outermost(units)
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    return list(max(stacks, key=lambda stack: sum(p.numel() for p in stack.parameters()))) if stacks else []


def _outermost(units: list[nn.Module]) -> list[nn.Module]:
    """Those that are not inside another."""
    inside = {module for unit in units for module in unit.modules() if module is not unit}
    return [unit for unit in units if unit not in inside]


def _hf(model: nn.Module) -> PreTrainedModel:
    """What this adapter built, as the type that it is."""
    assert isinstance(model, PreTrainedModel)
    return model


def _head(model: PreTrainedModel) -> nn.Module:
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(
            f"{type(model).__name__} has no language-model head",
            where="actor.model.model_path",
            remedy="give the directory of a causal language model",
        )
    return head


def _for_head(hidden: torch.Tensor, head: nn.Module) -> torch.Tensor:
    """In the head's dtype: models that add up their residuals in fp32 (Mamba) leave them so."""
    return hidden.to(next(head.parameters(), hidden).dtype)


def _same(logits: torch.Tensor) -> torch.Tensor:
    return logits


def _declared_transform(config: PreTrainedConfig) -> LogitTransform:
    """What the model's config says is done to the logits; a probe compares it with the model's own forward."""
    values = config.get_text_config().to_dict()
    scale = float(values.get("logit_scale") or 1.0) / float(values.get("logits_scaling") or 1.0)
    softcap = values.get("final_logit_softcapping")
    return LogitTransform(scale, softcap) if scale != 1.0 or softcap else IDENTITY


def _set_attention(model: nn.Module, name: str) -> None:
    if _hf(model).config._attn_implementation != name:
        _hf(model).set_attn_implementation(name)


@contextmanager
def _attention(model: nn.Module, name: str) -> Iterator[None]:
    """Another attention implementation for a while."""
    before = _hf(model).config._attn_implementation or "eager"
    _set_attention(model, name)
    try:
        yield
    finally:
        _set_attention(model, before)
