"""The decoder as transformers knows it: from_pretrained, save_pretrained, generate, gradient checkpointing.

Importing this module registers it with the Auto classes.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
    initialization,
)
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from rheoscope.errors import RheoscopeError
from rheoscope.nets.config import LINEAR_KINDS, RheoscopeConfig
from rheoscope.nets.kinds import EnergyGatedAttention, LagConvolution, ResidualLinear, Rotation, SelfAttention
from rheoscope.nets.layers import DecoderLayer, norm_of
from rheoscope.nets.positions import MorletPositions, RotaryPositions
from rheoscope.nets.states import only_states, refuse_foreign, tokens_seen

GATE_SLOPE = 2.0  # of the energy gate before training, as published; its threshold starts at 0


class RheoscopePreTrainedModel(PreTrainedModel):
    """What transformers needs to know about the decoder."""

    config: RheoscopeConfig
    config_class = RheoscopeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012  transformers' own form
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": DecoderLayer,
        "attentions": OutputRecorder(SelfAttention, index=1),
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ResidualLinear):
            # The residual stream adds 2 L terms; each starts smaller by the root of that.
            spread = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
            initialization.normal_(module.weight, std=spread)
        else:
            super()._init_weights(module)
        if isinstance(module, EnergyGatedAttention):
            initialization.constant_(module.gate_slope, GATE_SLOPE)
            initialization.zeros_(module.gate_threshold)
        if isinstance(module, LagConvolution):
            initialization.zeros_(module.lag_logits)
        if isinstance(module, MorletPositions):
            initialization.copy_(module.log_frequency, module.start())


class RheoscopeModel(RheoscopePreTrainedModel):
    """Embeddings, blocks and final norm."""

    def __init__(self, config: RheoscopeConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        elif config.positions == "morlet":
            self.embed_positions = MorletPositions(config.hidden_size)
        else:
            self.rotary_emb = RotaryPositions(config.head_dims[0], config.rope_theta)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList([DecoderLayer(config, layer) for layer in range(config.num_hidden_layers)])
        self.norm = norm_of(config)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Int[Tensor, "batch query"] | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Int[Tensor, "batch query"] | None = None,
        cache: Cache | None = None,
        inputs_embeds: Float[Tensor, "batch query d_model"] | None = None,
        use_cache: bool | None = None,
        **_: object,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if cache is None and use_cache and not self.training:
            cache = DynamicCache(config=self.config)
        if cache is not None:
            refuse_foreign(cache, self.config.attention, LINEAR_KINDS)
        valid = valid_keys(attention_mask)
        if position_ids is None:
            position_ids = places(hidden, valid, cache)
        mask = None
        if cache is None or not only_states(cache):  # states need no mask, and know no length to make one of
            mask = create_causal_mask(
                config=self.config, inputs_embeds=hidden, attention_mask=attention_mask, cache=cache
            )
        hidden = self.dropout(self._placed(hidden, position_ids))
        rotations = self._rotations(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(
                hidden, rotations=rotations, attention_mask=mask, valid=valid, cache=cache, use_cache=use_cache
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), cache=cache)

    def _rotations(self, hidden: Tensor, position_ids: Tensor) -> dict[int, Rotation]:
        """Rotary angles of every token for each size of head; none where positions are added."""
        if self.config.positions != "rotary":
            return {}
        return {size: self.rotary_emb(hidden, position_ids, size) for size in set(self.config.head_dims)}

    def _placed(self, hidden: Tensor, position_ids: Tensor) -> Tensor:
        """Token embeddings with their positions added, where positions are added."""
        if self.config.positions == "rotary":
            return hidden
        limit, n_query = self.config.max_position_embeddings, hidden.shape[1]
        # In training the length alone is looked at: reading positions back would make a GPU wait.
        last = n_query - 1 if self.training or n_query > limit else int(position_ids.max())
        if self.config.positions == "learned" and last >= limit:
            raise RheoscopeError(
                f"position {last} asked for; the model has {limit} learned positions: use a shorter text or window"
            )
        return hidden + self.embed_positions(position_ids).to(hidden.dtype)


class RheoscopeForCausalLM(RheoscopePreTrainedModel, GenerationMixin):
    """The decoder with its head over the vocabulary, tied to the embeddings unless the configuration says otherwise."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: RheoscopeConfig) -> None:
        super().__init__(config)
        self.model = RheoscopeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "batch query"] | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Int[Tensor, "batch query"] | None = None,
        cache: Cache | None = None,
        inputs_embeds: Float[Tensor, "batch query d_model"] | None = None,
        labels: Int[Tensor, "batch query"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: object,
    ) -> CausalLMOutputWithPast:
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, cache=out.cache, hidden_states=out.hidden_states, attentions=out.attentions
        )


def valid_keys(attention_mask: Tensor | dict[str, Tensor | None] | None) -> Bool[Tensor, "batch key"] | None:
    """Which keys are not padding; None where none is. Raises RheoscopeError for a mask that is not per key."""
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        raise RheoscopeError(
            f"an attention mask with {attention_mask.ndim} dimensions was given; this decoder needs one entry per token"
        )
    valid = attention_mask.bool()
    return None if bool(valid.all()) else valid


def places(hidden: Tensor, valid: Tensor | None, cache: Cache | None) -> Int[Tensor, "batch query"]:
    """Position of each token among the valid ones of its row, so that padding on either side shifts nothing."""
    batch, n_query = hidden.shape[:2]
    if valid is not None:
        return (valid.cumsum(-1) - 1).clamp_min(0)[:, -n_query:]
    past = 0 if cache is None else tokens_seen(cache)
    return (torch.arange(n_query, device=hidden.device)[None] + past).expand(batch, -1)


AutoConfig.register(RheoscopeConfig.model_type, RheoscopeConfig)
AutoModel.register(RheoscopeConfig, RheoscopeModel)
AutoModelForCausalLM.register(RheoscopeConfig, RheoscopeForCausalLM)
