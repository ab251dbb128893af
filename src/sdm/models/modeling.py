"""The hybrid language model: pre-norm blocks of a sequence layer and a gated MLP.

Shapes: B batch, T time.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from sdm.layers import GatedMLP
from sdm.layers.attention import GatedAttention
from sdm.layers.interface import without_weight_decay
from sdm.layers.modules import MaskedBatchNorm
from sdm.models import reads
from sdm.models.arguments import check_extras, current_mask, document_offsets, select_positions
from sdm.models.cache import SDMCache
from sdm.models.configuration import SDMConfig
from sdm.models.layer_types import LAYER_TYPES
from sdm.models.layer_types.attention import rope_of
from sdm.models.likelihood import IGNORED, next_token_targets, nll, target_nll

logger = logging.getLogger(__name__)


class SDMBlock(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: SDMConfig, layer_idx: int) -> None:
        super().__init__()
        assert config.layer_types is not None
        assert config.intermediate_size is not None
        self.layer_idx = layer_idx
        self.layer_type = config.layer_types[layer_idx]
        self.mixer_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mixer = LAYER_TYPES[self.layer_type].build(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        past_key_values: SDMCache | None = None,
    ) -> Tensor:
        """Run the block on hidden_states [B,T,hidden_size], behind the tokens of the cache if there is one."""
        x = self.mixer_norm(hidden_states)
        if past_key_values is None:
            x = self.mixer(x, attention_mask=attention_mask, cu_seqlens=cu_seqlens)
        else:
            x = past_key_values.layers[self.layer_idx].mix(self.mixer, x, attention_mask)
        hidden_states = hidden_states + x
        return hidden_states + self.mlp(self.mlp_norm(hidden_states))

    @torch.no_grad()
    def attention_map(
        self, hidden_states: Tensor, attention_mask: Tensor | None, past_key_values: SDMCache | None
    ) -> Tensor:
        """Return which tokens the mixer reads, [B,H,T,tokens seen + T]. Call it before `forward` changes the cache.

        Args:
            hidden_states: [B,T,hidden_size], the input of the block.
            attention_mask: [B,T] or [B,tokens seen + T], zero on padding.
            past_key_values: the cache that the block continues from.
        """
        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        past = 0 if cache is None else cache.length
        reads.check_length(past + hidden_states.shape[1])
        x, state = self.mixer_norm(hidden_states), None if cache is None else cache.state
        if cache is not None and state is not None and cache.begins is not None:
            mixer: Any = self.mixer
            state = state.restarted(cache.begins, mixer.start_state(len(x)))
        past_mask = None
        if attention_mask is not None and attention_mask.shape[1] == past + x.shape[1]:
            past_mask = attention_mask[:, :past] != 0
        mask = current_mask(attention_mask, x)
        return reads.attention_map(self.mixer, x, state, mask, past_mask, past)


class SDMPreTrainedModel(PreTrainedModel):
    """What the model with and without a head share: initialisation, and what transformers needs to know."""

    config: SDMConfig
    config_class = SDMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _no_split_modules = ["SDMBlock"]  # noqa: RUF012, transformers' way of declaring it
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    # transformers' word for models whose cache cannot take tokens back; ours can.
    _is_stateful = False

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """A saved folder names its code anyway. For a class of your own, it is as in transformers."""
        if cls.__module__ != __name__:
            super().register_for_auto_class(auto_class)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """transformers passes over modules of other packages that have no parameters of their own, such as our blocks.
        It need not: `_init_weights` keeps what a checkpoint has brought."""
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, MaskedBatchNorm):
            for x in (module.weight, module.running_var):
                init.ones_(x)
            for x in (module.bias, module.running_mean):
                init.zeros_(x)
        elif isinstance(module, SDMBlock):
            LAYER_TYPES[module.layer_type].initialize(module.mixer, self.config)
        elif callable(reset := getattr(module, "reset_own_parameters", None)):
            _reset_unloaded(module, reset)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimizer should not decay, as `layers.interface` says."""
        return without_weight_decay(self)


class SDMModel(SDMPreTrainedModel):
    """Embedding, blocks and final norm."""

    def __init__(self, config: SDMConfig) -> None:
        config.derive()
        config.validate_rope()
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(SDMBlock(config, layer_idx) for layer_idx in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self._rope_parameters = copy.deepcopy(config.rope_parameters)
        self._warned_of_length = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: SDMCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cu_seqlens: Tensor | None = None,
        **extras: object,
    ) -> BaseModelOutputWithPast:
        """Run the blocks.

        Args:
            input_ids: [B,T]; or inputs_embeds [B,T,hidden_size].
            attention_mask: [B,T], or [B,tokens seen + T] behind a cache; zero on padding, left or right.
            position_ids: only tell packed documents apart, as in transformers: without a mask and a cache, a row
                whose positions start anew at 0 holds several. The layers count positions themselves.
            past_key_values: the cache to continue from; it changes in place.
            use_cache: whether to return a cache. None: `config.use_cache`, but not while gradients are recorded.
            output_hidden_states: also return the input of every block, and the output of the final norm.
            output_attentions: also return the map [B,H,T,tokens seen + T] of every block from reading tokens to those
                that they read, for up to 4,096 tokens, without gradients. A mixer without a map gives no heads; for the
                past of a memory behind a cache it is NaN. See `sdm.models.reads`.
            cu_seqlens: [documents + 1] offsets of documents packed into one row (B = 1), without a cache.
            extras: what transformers passes to every model. `cu_seq_lens_q`, which `DataCollatorWithFlattening` and
                TRL add, are our cu_seqlens; the rest is ignored.
        """
        check_extras(self.forward, extras)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        self._follow_rope()
        if input_ids is not None:
            self._check_tokens(input_ids)
            inputs_embeds = self.embed_tokens(input_ids)
        assert inputs_embeds is not None
        if past_key_values is not None and not isinstance(past_key_values, SDMCache):
            raise TypeError(
                f"past_key_values must be an sdm.SDMCache, got {type(past_key_values).__name__}; make one with "
                "sdm.SDMCache(model.config), or leave it out"
            )
        if past_key_values is not None:
            past_key_values.check(self.config)
        cu_seqlens = document_offsets(cu_seqlens, extras, position_ids, attention_mask, past_key_values)
        if cu_seqlens is not None and past_key_values is not None:
            raise ValueError("cu_seqlens packs whole documents and takes no past_key_values")
        if cu_seqlens is not None and output_attentions:
            raise ValueError("output_attentions takes one text in each row, not documents packed by cu_seqlens")
        if use_cache is None:
            use_cache = bool(self.config.use_cache) and not torch.is_grad_enabled()
        use_cache = use_cache and cu_seqlens is None
        if use_cache and past_key_values is None:
            past_key_values = SDMCache(self.config)
        self._warn_of_length(inputs_embeds, past_key_values, cu_seqlens)
        mask = current_mask(attention_mask, inputs_embeds)

        x = inputs_embeds
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden_states: tuple[Tensor, ...] | None = () if output_hidden_states else None
        maps: tuple[Tensor, ...] | None = () if output_attentions else None
        for block in self.layers:
            if hidden_states is not None:
                hidden_states += (x,)
            if maps is not None:
                maps += (cast(SDMBlock, block).attention_map(x, attention_mask, past_key_values),)
            x = block(x, attention_mask=mask, cu_seqlens=cu_seqlens, past_key_values=past_key_values)
        x = self.norm(x)
        if hidden_states is not None:
            hidden_states += (x,)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=hidden_states,  # type: ignore[arg-type]
            attentions=maps,  # type: ignore[arg-type]
        )

    def _follow_rope(self) -> None:
        """Let `rope_parameters` that were set since take effect."""
        if self.config.rope_parameters == self._rope_parameters:
            return
        self.config.validate_rope()
        for kind, block in zip(self.config.layer_types or (), self.layers, strict=True):
            if isinstance(block.mixer, GatedAttention):
                block.mixer.rope = rope_of(self.config, kind)
        self._rope_parameters = copy.deepcopy(self.config.rope_parameters)

    def _check_tokens(self, input_ids: Tensor, name: str = "input_ids") -> None:
        # Reading the extremes would wait for a GPU, which relies on the embedding's own assertion.
        if torch.compiler.is_compiling() or not input_ids.is_cpu or not input_ids.numel():
            return
        low, high = (int(x) for x in input_ids.aminmax())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(
                f"{name} must be within 0 ... vocab_size - 1 = {self.config.vocab_size - 1}, "
                f"got {low if low < 0 else high}"
            )

    def _warn_of_length(self, x: Tensor, cache: SDMCache | None, cu_seqlens: Tensor | None) -> None:
        length = x.shape[1] + (0 if cache is None else cache.get_seq_length())
        limit = self.config.max_position_embeddings
        if torch.compiler.is_compiling() or limit is None or length <= limit:
            return
        if cu_seqlens is not None:
            if not cu_seqlens.is_cpu:
                return  # reading the longest would wait for a GPU
            length = int(cu_seqlens.diff().max())
        if length > limit and not self._warned_of_length:
            self._warned_of_length = True
            logger.warning(
                "a stream of %d tokens exceeds max_position_embeddings = %d; the model continues, beyond the lengths "
                "that it may have been trained on",
                length,
                limit,
            )


class SDMForCausalLM(SDMPreTrainedModel, GenerationMixin):
    """The model with an output projection to the vocabulary."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    nll = nll  # as a method FSDP can have the weights at hand for it

    def __init__(self, config: SDMConfig) -> None:
        super().__init__(config)
        self.model = SDMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: SDMCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool | None = None,
        **extras: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and the loss if there are labels. The arguments that are not listed are those of `SDMModel`.

        Args:
            labels: [B,T], the input_ids again; the model shifts them. -100 is ignored. The loss is computed
                `config.loss_chunk_size` tokens at a time.
            logits_to_keep: compute only the last so many logits, or those at these places; 0 computes all.
            skip_logits: whether to leave out the logits beside a loss. None leaves them out while gradients are
                recorded, unless logits_to_keep asks for some or the chunk size is None: they are in memory then.
            num_items_in_batch: divides the summed loss instead of the number of labels; `transformers.Trainer` passes
                it when it accumulates gradients.
        """
        check_extras(self.forward, extras)
        cu_seqlens = document_offsets(cu_seqlens, extras, position_ids, attention_mask, past_key_values)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            cu_seqlens=cu_seqlens,
            return_dict=True,
        )
        x = outputs.last_hidden_state
        loss, logits = None, None
        chunk_size = self.config.loss_chunk_size
        # Targets of sequences cut over ranks. `Trainer` would take a parameter of this name for a required label.
        shift_labels = extras.get("shift_labels")
        name, given = ("labels", labels) if shift_labels is None else ("shift_labels", shift_labels)
        if given is not None:
            if given.shape != x.shape[:2]:
                raise ValueError(f"{name} must be [B,T] = {list(x.shape[:2])}, got shape {list(given.shape)}")
            self.model._check_tokens(given.masked_fill(given == IGNORED, 0), name)
            targets = next_token_targets(given, cu_seqlens) if shift_labels is None else given
            total = target_nll(x, self.lm_head, targets, chunk_size)
            items = (targets != IGNORED).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            loss = total / (items.to(total.device) if isinstance(items, Tensor) else items)
        if skip_logits is None:
            wanted = isinstance(logits_to_keep, Tensor) or logits_to_keep > 0 or chunk_size is None
            skip_logits = torch.is_grad_enabled() and not wanted
        if given is None or not skip_logits:
            logits = self.lm_head(select_positions(x, logits_to_keep))
        return CausalLMOutputWithPast(
            loss=loss,  # type: ignore[arg-type]
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def init_continuous_batching(self, *args: object, **kwargs: object) -> NoReturn:
        """All ways to continuous batching begin here."""
        raise NotImplementedError(
            "continuous batching pages keys and values, which most layers of this model do not have; use generate()"
        )

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """transformers drops the value "hybrid" here, so that it is checked before."""
        given = self.generation_config if generation_config is None else generation_config
        _check_cache_implementation(kwargs.get("cache_implementation", getattr(given, "cache_implementation", None)))
        return super()._prepare_generation_config(generation_config, **kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(  # type: ignore[override]
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """`generate()` asks for a cache here; transformers' own would lose the states."""
        _check_cache_implementation(generation_config.cache_implementation)
        cache = model_kwargs.get("past_key_values")
        if cache is None and generation_config.use_cache:
            model_kwargs["past_key_values"] = SDMCache(self.config)
            if generation_config.is_assistant:
                model_kwargs["past_key_values"].activate_past_recording()
        # Without a mask, the tokens that are given are the whole stream.
        stream = model_kwargs.get("attention_mask")
        stream = model_kwargs.get("position_ids") if stream is None else stream
        if cache is not None and stream is not None and stream.shape[-1] <= cache.get_seq_length():
            raise ValueError(
                f"past_key_values has seen {cache.get_seq_length()} tokens, but the stream has {stream.shape[-1]}: "
                "pass all of its tokens, or the new ones with an attention_mask that is as long as the whole stream"
            )


class SDMForSequenceClassification(GenericForSequenceClassification, SDMPreTrainedModel):
    """The model with a classifier on the last token of each row that is not padding, as transformers' own models have.

    `config.num_labels` is the number of classes; 1 makes it a regression or a reward model. Batches of more than one
    row need `config.pad_token_id`.
    """


class SDMForTokenClassification(GenericForTokenClassification, SDMPreTrainedModel):
    """The model with a classifier on every token, as transformers' own models have."""


def _check_cache_implementation(name: str | None) -> None:
    if name not in (None, "dynamic"):
        raise ValueError(
            f"cache_implementation = {name!r} is not available for this model, whose cache is an sdm.SDMCache; leave "
            "it out"
        )


def _reset_unloaded(module: nn.Module, reset: Callable[[], None]) -> None:
    """Let a layer draw its own parameters, gates and initial state, but keep what a checkpoint has brought."""
    own = dict(module.named_parameters(recurse=False))
    loaded = {name: x.clone() for name, x in own.items() if getattr(x, "_is_hf_initialized", False)}
    if len(loaded) < len(own):
        reset()
        for name, x in loaded.items():
            own[name].copy_(x)
