"""The attention function that models call while they are tapped, and who taps it.

transformers hands every attention call of a model to a function registered under a name. Ours is `rheoscope`: it
builds an `Attention`, lets the taps of that module read or replace its parts, and returns z.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from rheoscope.errors import RheoscopeError
from rheoscope.models.attention import Attention, Workspace

IMPLEMENTATION = "rheoscope"

# `tap(layer, value) -> replacement or None`
Tap = Callable[[int, Any], Any]

# Site -> attribute of Attention, in the order of the computation.
PARTS = {
    "q": "q",
    "k": "k",
    "v": "v",
    "call": "",
    "attn_scores": "scores",
    "attn_probs": "probs",
    "attn_mean": "mean_probs",
    "z": "z",
}
READ_ONLY = ("attn_mean",)


@dataclass(eq=False)
class LayerTaps:
    """Taps at one attention module, and the layer number they are told."""

    layer: int
    taps: Mapping[str, Tap]
    workspace: Workspace = field(default_factory=Workspace)


# Attention module -> its taps, outermost first. Weak: a tap never keeps a model alive.
_TAPPED: weakref.WeakKeyDictionary[nn.Module, list[LayerTaps]] = weakref.WeakKeyDictionary()


def taps_of(module: nn.Module) -> Sequence[LayerTaps]:
    """The taps at an attention module at the moment, outermost first."""
    return _TAPPED.get(module, ())


@contextmanager
def attention_tapped(module: nn.Module, taps: LayerTaps) -> Iterator[None]:
    """Let `taps` at every attention call of a module while the block lasts, after those that are there already."""
    _TAPPED.setdefault(module, []).append(taps)
    try:
        yield
    finally:
        _TAPPED[module].remove(taps)
        if not _TAPPED[module]:
            del _TAPPED[module]


def act(taps: Sequence[LayerTaps], attention: Attention) -> None:
    """Let taps at every part of an attention call, in the order of the computation, the outermost first at each."""
    for site, name in PARTS.items():
        for tapped in taps:
            if site not in tapped.taps:
                continue
            if site == "call":
                tapped.taps[site](tapped.layer, attention)
                continue
            value = getattr(attention, name)
            new = replacement(site, tapped.taps[site](tapped.layer, value), value)
            if new is not None and site in READ_ONLY:
                raise RheoscopeError(f"the tap at {site} returned a replacement; it is read only: replace attn_probs")
            if new is not None and name in ("q", "k", "v"):
                attention.replace_input(name, new)
            elif new is not None:
                setattr(attention, name, new)
    for tapped in taps:
        if "attention" in tapped.taps:
            tapped.taps["attention"](tapped.layer, attention)


def replacement(site: str, new: Any, old: Tensor) -> Tensor | None:
    """What a tap returned, in the dtype of what it replaces; None for None. Refuses any other shape."""
    if new is None:
        return None
    if not isinstance(new, Tensor) or new.shape != old.shape:
        given = f"a tensor of shape {tuple(new.shape)}" if isinstance(new, Tensor) else f"a {type(new).__name__}"
        raise RheoscopeError(
            f"the tap at {site} returned {given} to replace one of shape {tuple(old.shape)}: return that shape, or None"
        )
    return new.to(old)


def _tapped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention call: build the `Attention`, let the taps at it, return z as [batch query head d]."""
    taps = taps_of(module)
    if taps:  # what reads the call takes products head by head, which strides over all heads make several times slower
        query, key, value = (part.contiguous() for part in (query, key, value))
    attention = Attention(
        q=query,
        k=key,
        v=value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=s_aux,
        window=sliding_window,
        causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        mask=attention_mask,
        bias=position_bias,
        dropout=dropout,
    )
    if taps:
        attention.workspace = taps[0].workspace
    mixing = getattr(module, "mixing", None)
    if mixing is not None:  # of a layer that an edit has made linear: it acts once q, k and v are final
        taps = [LayerTaps(-1, {"call": lambda _, call: call.mix(mixing.of(call))}), *taps]
    if taps:
        act(taps, attention)
    return attention.z.transpose(1, 2).contiguous(), None


@dataclass
class _Choice:
    """Implementations asked for by the blocks under way for one configuration; it has the last."""

    config: PreTrainedConfig
    before: str | None
    asked: list[list[str]] = field(default_factory=list)


_CHOICES: dict[int, _Choice] = {}  # by identity of the configuration, which several models may share


@contextmanager
def attention_by(model: nn.Module, implementation: str = IMPLEMENTATION) -> Iterator[None]:
    """Let a model attend by another implementation while the block lasts; its configurations are then as before.

    Blocks may end in any order. The mask function is registered with the attention function: without one transformers
    builds no mask and causality is silently lost.
    """
    AttentionInterface.register(IMPLEMENTATION, _tapped_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    owned = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in owned if isinstance(config, PreTrainedConfig)}
    mark = [implementation]
    try:
        for key, config in configs.items():
            choice = _CHOICES.setdefault(key, _Choice(config, config._attn_implementation_internal))
            choice.asked.append(mark)
            config._attn_implementation_internal = implementation
        yield
    finally:
        for key in configs:
            _withdraw(key, mark)


def _withdraw(key: int, mark: list[str]) -> None:
    """Forget what one block asked for; the configuration has what the last block left asks for, or what it had."""
    choice = _CHOICES[key]
    choice.asked = [other for other in choice.asked if other is not mark]
    choice.config._attn_implementation_internal = choice.asked[-1][0] if choice.asked else choice.before
    if not choice.asked:
        del _CHOICES[key]
