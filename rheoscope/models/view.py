"""ModelView: the parts of any transformer in one convention. It wraps a live model and never alters it."""

from __future__ import annotations

import copy
import inspect
import re
from contextlib import AbstractContextManager
from functools import cached_property, reduce
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import Refused
from .attention import Attention, Workspace, attention_by, set_tap
from .families import FAMILIES, REFUSED, REFUSED_KINDS, Family
from .taps import Tap, tapped
from .weights import HeadWeights

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class ModelView:
    """A live transformer, its tokenizer and where its parts are.

    Convention: row vectors, `x @ W`. `family` is None for a model type without a row: then every site of attention
    and resid_pre, resid_post can still be read, and weights are refused. The model is put in evaluation mode.

    Attributes:
        n_layers, n_heads, n_kv_heads, d_head, d_model: sizes, read off one small forward pass, not off names.
        blocks, attentions: one module per layer; the attention modules are those that call the attention interface.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, ref: str = ""):
        self.model, self.tokenizer, self.ref = model.eval(), tokenizer, ref or type(model).__name__
        self.config = model.config
        self.model_type: str = model.config.model_type
        refuse_config(model.config)
        row = FAMILIES.get(self.model_type)
        self.family: Family | None = row.resolved(model.config) if row else None
        self.workspace = Workspace()
        self.batch_size = 1  # of the pass under way, noted by the taps
        self.attention_taps: list[tuple[Mapping[str, Tap], Collection[int]]] = []
        self._find_layers()

    def _find_layers(self) -> None:
        """Sizes, blocks and attention modules, from one forward pass of a few tokens through the tapped attention."""
        calls = _attention_calls(self.model)
        if not calls:
            raise Refused(
                f"{self.model_type} makes no call of transformers' attention interface, so there is no attention to "
                "read: it is recurrent, or it computes attention inside its own module"
            )
        names = {id(module): name for name, module in self.model.named_modules()}
        self.attentions = [module for module, _ in calls]
        if len({id(module) for module in self.attentions}) < len(self.attentions):
            raise Refused(f"{self.model_type} calls one attention module more than once; shared layers are not handled")
        if self.family is not None:
            self.blocks = list(part(self.model.base_model, self.family.blocks))
            n_blocks = len(self.blocks)
        else:
            paths = [_block_name(names[id(module)]) for module in self.attentions]
            self.blocks = [self.model.get_submodule(path) for path in paths]
            n_blocks = len(self.model.get_submodule(paths[0].rpartition(".")[0]))
        if n_blocks != len(self.attentions):
            raise Refused(
                f"{self.model_type} has {n_blocks} layers, {len(self.attentions)} of which call attention: "
                "hybrids with recurrent layers are not handled"
            )
        first = calls[0][1]
        self.n_layers = len(self.blocks)
        self.n_heads, self.n_kv_heads = first.q.shape[1], first.k.shape[1]
        self.d_head, self.d_value = first.q.shape[-1], first.v.shape[-1]
        shapes = {(a.q.shape[1], a.k.shape[1], a.q.shape[-1]) for _, a in calls}
        if len(shapes) > 1:
            raise Refused(
                f"{self.model_type} has layers of different head counts or sizes {sorted(shapes)}: not handled"
            )
        self.scales = [attention.scale for _, attention in calls]
        self.windows = [attention.window for _, attention in calls]
        self.causal = all(attention.causal for _, attention in calls)
        self.d_model: int = self.config.get_text_config().hidden_size

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def n_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def context(self) -> int | None:
        """The longest window the model takes; None where its positions have no bound."""
        text = self.config.get_text_config()
        limit = getattr(text, "max_position_embeddings", None)
        if limit and self.model_type == "roberta":
            limit -= text.pad_token_id + 1  # positions are numbered from the padding token's id on
        return limit

    @property
    def has_loss(self) -> bool:
        """Whether the model predicts the next token."""
        return self.causal and self.model.get_output_embeddings() is not None

    @property
    def multiplier(self) -> float:
        """What both residual terms are multiplied by before they are added (Granite)."""
        name = self.family.multiplier if self.family else None
        return float(getattr(self.config, name)) if name else 1.0

    @cached_property
    def weights(self) -> HeadWeights:
        """W_Q, W_K, W_V, W_O of every layer in one convention. Refused for a model type without a row."""
        if self.family is None:
            raise Refused(
                f"weights asked for; the model type {self.model_type!r} has no row in rheoscope/models/families.py: "
                "measure what needs only the forward pass, or add a row"
            )
        return HeadWeights(self)

    def part(self, layer: int, path: str) -> nn.Module:
        """A part of one block by its path in the family's row."""
        return part(self.blocks[layer], path)

    def ffn(self, layer: int, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        """What the feed-forward network of a layer adds to the stream for normed input x (a black box to us)."""
        for path in self.family.ffn:
            x = self.part(layer, path)(x)
            x = x[0] if isinstance(x, tuple) else x
        if self.family.ffn_term and self.family.ffn_term != self.family.ffn[-1]:
            x = self.part(layer, self.family.ffn_term)(x)
        return x * self.multiplier if self.multiplier != 1.0 else x

    def tapped(self, taps: Mapping[str, Tap], *, layers: Collection[int] | None = None) -> AbstractContextManager[None]:
        """`taps.tapped` on this model."""
        return tapped(self, taps, layers=layers)

    def forward(
        self, tokens: Int[Tensor, "batch position"], valid: Bool[Tensor, "batch position"] | None = None
    ) -> Float[Tensor, "batch position out"]:
        """Logits, or the last hidden state of a model without a head. Padding (`valid` False) may be left or right."""
        tokens = tokens.to(self.device)
        mask = torch.ones_like(tokens) if valid is None else valid.to(tokens)
        inputs: dict[str, Tensor] = {"input_ids": tokens, "attention_mask": mask}
        if not bool(mask[:, 0].all()) and "position_ids" in inspect.signature(self.model.forward).parameters:
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        if "use_cache" in inspect.signature(self.model.forward).parameters:
            inputs["use_cache"] = False
        output = self.model(**inputs)
        return output.logits if "logits" in output else output.last_hidden_state


def part(root: nn.Module, path: str) -> nn.Module:
    """The module at an attribute path."""
    return reduce(getattr, path.split("."), root)


def refuse_config(config: object) -> None:
    """Raise Refused for a configuration that cannot be read, before any weight is loaded."""
    kinds = [why for flag, why in REFUSED_KINDS.items() if getattr(config, flag, None)]
    for why in [*([REFUSED[config.model_type]] if config.model_type in REFUSED else []), *kinds]:
        raise Refused(f"{config.model_type} {why}: it cannot be read exactly; use a family of docs/families.md")


@torch.no_grad()
def _attention_calls(model: PreTrainedModel, n_tokens: int = 4) -> list[tuple[nn.Module, Attention]]:
    """Every module that calls the attention interface, in order, with its first call."""
    calls: list[tuple[nn.Module, Attention]] = []
    modules = list(model.modules())
    tokens = torch.zeros(1, n_tokens, dtype=torch.long, device=model.get_input_embeddings().weight.device)
    try:
        for module in modules:
            set_tap(module, lambda module, attention: calls.append((module, copy.copy(attention))))
        with attention_by(model):
            model.base_model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    finally:
        for module in modules:
            set_tap(module, None)
    return calls


def _block_name(attention: str) -> str:
    """The name of the block that holds an attention module: up to the last number in its path."""
    found = re.match(r"(.*\.\d+|\d+)(\.|$)", attention)
    if found is None:
        raise Refused(f"attention module {attention!r} stands in no numbered block: the layers cannot be told apart")
    return found.group(1)
