"""ModelView: the parts of any transformer in one convention. It wraps a live model and never alters it."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rheoscope.errors import Refused
from rheoscope.models.attention import Workspace
from rheoscope.models.families import FAMILIES, REFUSED, REFUSED_KINDS, Family
from rheoscope.models.interface import Tap
from rheoscope.models.placement import execution_device
from rheoscope.models.probe import attention_calls, numbered_blocks, one_stream, sees_the_future
from rheoscope.models.taps import tapped
from rheoscope.models.weights import HeadWeights

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class Sizes(NamedTuple):
    """Heads of one layer; all 0 where an edit has taken its attention away."""

    n_heads: int = 0
    n_kv_heads: int = 0
    d_head: int = 0
    d_value: int = 0


class ModelView:
    """A live transformer, its tokenizer and where its parts are.

    Convention: row vectors, `x @ W`. `family` is None for a model type without a row: then every site of attention
    and resid_pre, resid_post can still be read, and weights are refused. The model is put in evaluation mode.

    Attributes:
        inner: the model of the family inside one restructured by edits; the model itself everywhere else.
        n_layers, n_heads, n_kv_heads, d_head, d_model: sizes, read off one small forward pass, not off names.
        sizes: the same of every layer.
        own_hooks: forward hooks that the model came with, as code of its own and some edits have.
        blocks, attentions: one module per layer; the attention modules are those that call the attention interface.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, ref: str = ""):
        self.model, self.tokenizer, self.ref = model.eval(), tokenizer, ref or type(model).__name__
        self.inner: PreTrainedModel = getattr(model, "edited", model)
        self.config = self.inner.config
        self.model_type: str = self.config.model_type
        refuse_config(self.config)
        row = FAMILIES.get(self.model_type)
        self.family: Family | None = row.resolved(self.config) if row else None
        self.workspace = Workspace()
        self.own_hooks = forward_hooks(model)
        self.batch_size = 1  # of the pass under way, noted by the taps
        self._find_layers()

    def _find_layers(self) -> None:
        """Sizes, blocks and attention modules, from what the model does with a few tokens."""
        restructured = self.inner is not self.model
        calls = attention_calls(self.inner, needed=not restructured)
        self.attentions = [module for module, _ in calls]
        if len({id(module) for module in self.attentions}) < len(self.attentions):
            raise Refused(
                f"{self.model_type} calls one attention module more than once: shared layers are not handled; "
                "use a family of docs/families.md"
            )
        if self.family is not None:
            self.blocks = list(part(self.inner.base_model, self.family.blocks))
            n_blocks = len(self.blocks)
        else:
            self.blocks, n_blocks = numbered_blocks(self.inner, self.attentions)
        if restructured:
            self.attentions = [part(block, self.family.attn) for block in self.blocks]
        if n_blocks != len(self.attentions):
            raise Refused(
                f"{self.model_type} has {n_blocks} layers and calls attention {len(self.attentions)} times: hybrids "
                "with recurrent layers and blocks with several attentions are not handled; "
                "use a family of docs/families.md"
            )
        of = {id(module): attention for module, attention in calls}
        by_layer = [of.get(id(module)) for module in self.attentions]
        self.sizes = [
            Sizes() if a is None else Sizes(a.q.shape[1], a.k.shape[1], a.q.shape[-1], a.v.shape[-1]) for a in by_layer
        ]
        if len(set(self.sizes)) > 1 and not restructured:
            shapes = sorted({tuple(size) for size in self.sizes})
            raise Refused(
                f"{self.model_type} has layers of different head counts or sizes {shapes}: "
                "not handled; use a family of docs/families.md"
            )
        self.n_layers = len(self.blocks)
        self.d_head, self.d_value = max(((size.d_head, size.d_value) for size in self.sizes), default=(0, 0))
        self.scales = [0.0 if attention is None else attention.scale for attention in by_layer]
        self.windows = [None if attention is None else attention.window for attention in by_layer]
        self.needs_maps = any(
            attention.softcap or attention.sinks is not None or attention.bias is not None for _, attention in calls
        )  # for its own output
        self.causal = not any(sees_the_future(attention) for _, attention in calls)
        self.one_stream = one_stream(self.inner, self.blocks)
        self.d_model: int = self.config.get_text_config().hidden_size

    @property
    def n_heads(self) -> int:
        """Query heads of every layer. Refused where layers differ."""
        return self._equal([size.n_heads for size in self.sizes])

    @property
    def n_kv_heads(self) -> int:
        """Key heads of every layer. Refused where layers differ."""
        return self._equal([size.n_kv_heads for size in self.sizes])

    @staticmethod
    def _equal(counts: list[int]) -> int:
        if len(set(counts)) > 1:
            raise Refused(
                f"the number of heads asked for; after its edits this model has {', '.join(map(str, counts))} in its "
                "layers: read loss and the residual stream, or the model before its edits"
            )
        return counts[0]

    @property
    def device(self) -> torch.device:
        """Where tokens go in, whether or not the embedding is there at the moment."""
        embeddings = self.model.get_input_embeddings()
        return execution_device(embeddings, embeddings.weight)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def n_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def context(self) -> int | None:
        """The longest window the model takes; None where its positions have no bound."""
        limit = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return limit - self.first_position if limit else None

    @cached_property
    def first_position(self) -> int:
        """The id of the first position: past the padding token's where the position table has a row for padding."""
        words = self.model.get_input_embeddings()
        length = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        tables = [m for m in self.model.modules() if isinstance(m, nn.Embedding) and m is not words]
        padding = [m.padding_idx for m in tables if m.padding_idx is not None and m.num_embeddings == length]
        return max(padding, default=-1) + 1

    @property
    def pad_token(self) -> int:
        """The configuration's padding token; 0 where it names none, or none of its words, such as -1."""
        named = getattr(self.config.get_text_config(), "pad_token_id", None) or 0
        return named if 0 <= named < self.model.get_input_embeddings().weight.shape[0] else 0

    @property
    def takes_positions(self) -> bool:
        """Whether the model can be told positions, as padding on the left needs."""
        return "position_ids" in inspect.signature(self.inner.forward).parameters

    @property
    def has_head(self) -> bool:
        """Whether the model gives a logit to every word at every position."""
        return self.model.get_output_embeddings() is not None

    @property
    def has_loss(self) -> bool:
        """Whether the model predicts the next token."""
        return self.causal and self.has_head

    @property
    def multiplier(self) -> float:
        """What both residual terms are multiplied by before they are added (Granite)."""
        name = self.family.multiplier if self.family else None
        return float(getattr(self.config, name)) if name else 1.0

    def is_damped(self, layer: int) -> bool:
        """Whether a layer is S-D attention: it attends by [q; k] and [k; -q], with -D added to its scores."""
        return self.attention_has(layer, self.family.damped_if if self.family else None)

    def routing_capacity(self, layer: int) -> int:
        """The largest rank that the routing part of a head's scores can have: 2 d_head of the q and k it is made of."""
        return self.d_head if self.is_damped(layer) else 2 * self.d_head

    def attention_has(self, layer: int, name: str | None) -> bool:
        """Whether the attention module of a layer has an attribute that a family's row names, and it is not False."""
        return name is not None and getattr(self.attentions[layer], name, False) is not False

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

    def tapped(self, taps: Mapping[str, Tap], *, layers: Collection[int] | None = None) -> AbstractContextManager[None]:
        """`taps.tapped` on this model."""
        return tapped(self, taps, layers=layers)

    def forward(
        self,
        tokens: Int[Tensor, "batch position"],
        valid: Bool[Tensor, "batch position"] | None = None,
        *,
        head: bool = True,
    ) -> Float[Tensor, "batch position out"]:
        """Logits; the last hidden state without `head`, or where the model has none. Padding may be left or right.

        Raises Refused for padding on the left of a model that counts positions from the start of the row.
        """
        head = head and self.has_head
        model = self.model if head else self.inner.base_model
        accepted = inspect.signature((self.inner if head else model).forward).parameters
        tokens = tokens.to(self.device)
        mask = torch.ones_like(tokens) if valid is None else valid.to(tokens)
        inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask}
        if not bool(mask[:, 0].all()):
            if not self.takes_positions:
                raise Refused(f"padding on the left given; {self.model_type} takes no position ids: pad on the right")
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0) + self.first_position
        if "use_cache" in accepted:
            inputs["use_cache"] = False
        output = model(**inputs)
        if not head:
            return output.last_hidden_state
        return output.logits if "logits" in output else output.prediction_logits


def forward_hooks(model: nn.Module) -> dict[int, str]:
    """The forward hooks of a model at the moment, by their number: where they are, and the names of their functions."""
    return {
        number: f"{name}: {getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', type(hook).__name__)}"
        for name, module in model.named_modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for number, hook in hooks.items()
    }


def part(root: nn.Module, path: str) -> nn.Module:
    """The module at an attribute path."""
    return reduce(getattr, path.split("."), root)


def refuse_config(config: object) -> None:
    """Raise Refused for a configuration that cannot be read, before any weight is loaded."""
    kinds = [why for flag, why in REFUSED_KINDS.items() if getattr(config, flag, None)]
    for why in [*([REFUSED[config.model_type]] if config.model_type in REFUSED else []), *kinds]:
        raise Refused(f"{config.model_type} {why}: it cannot be read exactly; use a family of docs/families.md")
