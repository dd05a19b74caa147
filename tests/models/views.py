"""Views of the tiny models, and what must be as before after a model has been tapped."""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn

from rheoscope.models.attention import Attention
from rheoscope.models.interface import taps_of
from rheoscope.models.precision import Float64Throughout
from rheoscope.models.taps import ATTENTION_SITES, SITES, refusal
from rheoscope.models.view import ModelView
from tests.tiny import VARIANTS, input_ids, tiny

# An expert multiplies all its tokens at once, and the size of a product may change its rounding.
EXPERTS = {"mixtral", "qwen3_moe", "gpt_oss"}
PARTS = [site for site in SITES if site not in ("call", "attn_mean", "attention")]  # what can be replaced


@cache
def view_of(name: str) -> ModelView:
    """The view of a tiny model, shared by all tests: they must leave it as it was."""
    model = tiny(name)  # outside: the mode would change how parameters are drawn
    with Float64Throughout():
        return ModelView(model)


def sites_of(view: ModelView) -> list[str]:
    """The sites this model has and that can be replaced."""
    return [site for site in PARTS if refusal(view, site) is None]


@torch.no_grad()
def outputs(view: ModelView, tokens: Tensor, taps: dict | None = None, valid: Tensor | None = None, **where) -> Tensor:
    """Logits under taps, in float64 throughout."""
    with Float64Throughout(), view.tapped(taps or {}, **where):
        return view.forward(tokens, valid)


def tokens_of(view: ModelView, **options) -> Tensor:
    """Random tokens, special ones left out."""
    return input_ids(view.model, **options)


def caught(
    view: ModelView, tokens: Tensor, *sites: str, valid: Tensor | None = None, edits: dict | None = None
) -> dict:
    """Site -> copies of its value in every layer, of one pass under edits."""
    kept: dict[str, list] = {site: [] for site in sites}

    def keep(site: str, _layer: int, value: Tensor | Attention) -> None:
        kept[site].append(value.clone() if isinstance(value, Tensor) else value)

    with view.tapped(edits or {}):
        outputs(view, tokens, {site: partial(keep, site) for site in sites}, valid)
    return kept


def own_maps(view: ModelView, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, ...]:
    """The attention maps that the eager model itself reports."""
    assert view.model.config._attn_implementation == "eager"
    with torch.no_grad(), Float64Throughout():
        mask = torch.ones_like(tokens) if valid is None else valid.to(tokens)
        return view.model(input_ids=tokens, attention_mask=mask, output_attentions=True).attentions


def marks(model: nn.Module) -> tuple:
    """Everything about a model that a tap may touch: hooks and attention taps per module, implementation per config."""
    modules = dict(model.named_modules())
    hooks = {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in modules.items()}
    taps = {n: len(taps_of(m)) for n, m in modules.items()}
    chosen = {n: m.config._attn_implementation for n, m in modules.items() if hasattr(m, "config")}
    return hooks, taps, chosen


def replacing(new: Callable[[Tensor], Tensor]) -> Callable[[int, Tensor], Tensor]:
    """A tap that puts `new(value)` in place, the layer being none of its business."""
    return lambda _layer, value: new(value)


def is_attention(site: str) -> bool:
    return site in ATTENTION_SITES


def has_experts(name: str) -> bool:
    return VARIANTS[name].family in EXPERTS
