"""The algebraic identities that `check` tries: each gives its error, and the rounding errors it may have."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial

import torch
from einops import rearrange
from torch import Tensor, nn

from rheoscope.errors import Refused
from rheoscope.models.attention import Attention
from rheoscope.models.families import Residual
from rheoscope.models.interface import attention_by
from rheoscope.models.taps import SITES, refusal
from rheoscope.models.view import ModelView

LOCAL = 16.0  # rounding errors of one layer's arithmetic, in units of the dtype's epsilon
DEEP = 256.0  # the same carried through all layers to the logits

Measured = tuple[float, float]  # largest difference over the largest number compared, and the epsilons it may have


def _largest(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The largest difference of all pairs, each over the largest entry of its reference; NaN if any of them is."""
    if any(a.shape != b.shape for a, b in pairs):
        return math.inf
    errors = [float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs]
    return math.nan if any(math.isnan(error) for error in errors) else max(errors)


def _caught(view: ModelView, tokens: Tensor, *sites: str) -> dict[str, list]:
    """Copies of every layer's sites in one pass."""
    caught: dict[str, list] = {site: [] for site in sites}

    def keep(site: str, layer: int, value: Tensor | Attention) -> None:
        caught[site].append(copy.copy(value) if isinstance(value, Attention) else value.clone())

    with view.tapped({site: partial(keep, site) for site in sites}):
        view.forward(tokens)
    return caught


def _own_maps(view: ModelView, tokens: Tensor) -> tuple[Tensor, ...]:
    """The attention maps that the model's own eager code reports."""
    with attention_by(view.model, "eager"):
        output = view.model(input_ids=tokens.to(view.device), output_attentions=True)
    maps = output.attentions
    if not maps or any(a is None for a in maps):
        raise Refused(f"{view.model_type} reports no attention maps of its own to compare with")
    return maps


def maps_are_the_models_own(view: ModelView, tokens: Tensor) -> Measured:
    """Attention maps read by the taps against those of the model's eager code."""
    own = _own_maps(view, tokens)
    read = _caught(view, tokens, "attn_probs")["attn_probs"]
    return _largest(list(zip(read, own, strict=True))), DEEP


def scores_rebuild_from_weights(view: ModelView, tokens: Tensor) -> Measured:
    """Maps rebuilt per head from W_Q, W_K, biases, norms and rotation against those of the model's eager code."""
    weights, own = view.weights, _own_maps(view, tokens)
    caught = _caught(view, tokens, "attn_in", "attention")
    positions = torch.arange(tokens.shape[1], device=view.device)
    pairs = []
    for layer, attention in enumerate(caught["attention"]):
        q, k = weights.projected(layer, caught["attn_in"][layer], positions)
        attention.replace_input("q", q)
        attention.replace_input("k", k)
        pairs.append((attention.probs.clone(), own[layer]))
    return _largest(pairs), DEEP


def _own_projections(view: ModelView, tokens: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Input and output of every layer's W_O in a pass without taps: [batch position head*d_value], [… d_model]."""
    path = view.weights.view.family.o
    given: list[Tensor] = []
    written: list[Tensor] = []

    def keep(_module: nn.Module, args: tuple, output: Tensor) -> None:
        given.append(args[0].clone())
        written.append(output.clone())

    hooks = [view.part(layer, path).register_forward_hook(keep) for layer in range(view.n_layers)]
    try:
        view.forward(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return given, written


def maps_times_values_are_z(view: ModelView, tokens: Tensor) -> Measured:
    """attn_probs @ v, with v rebuilt from W_V, against what the untapped model hands to W_O."""
    own, _ = _own_projections(view, tokens)
    caught = _caught(view, tokens, "attn_in", "attn_probs")
    pairs = []
    for layer, probs in enumerate(caught["attn_probs"]):
        v = view.weights.values(layer, caught["attn_in"][layer])
        pairs.append((rearrange(probs @ v, "batch head query d -> batch query (head d)"), own[layer]))
    return _largest(pairs), DEEP


def z_times_W_O_is_written(view: ModelView, tokens: Tensor) -> Measured:
    """z @ W_O + b_O, summed over heads, against the output of the model's own projection."""
    given, written = _own_projections(view, tokens)
    pairs = []
    for layer, z in enumerate(given):
        heads = rearrange(z, "batch query (head d) -> batch head query d", head=view.n_heads)
        rebuilt = torch.einsum("bhqd,hdm->bqm", heads, view.weights.W_O(layer)) + view.weights.b_O(layer)
        pairs.append((rebuilt, written[layer]))
    return _largest(pairs), LOCAL


def terms_add_up(view: ModelView, tokens: Tensor) -> Measured:
    """resid_pre + attn_out = resid_mid, + ffn_out = resid_post, in magnitude; post-norm blocks norm each sum."""
    sites = ["resid_pre", "attn_out", "ffn_out", "resid_post"]
    has_mid = refusal(view, "resid_mid") is None
    post_norm = view.family is not None and view.family.residual is Residual.POST_NORM
    caught = _caught(view, tokens, *sites, *(["resid_mid"] if has_mid else []))
    pairs = []
    for layer in range(view.n_layers):
        pre, attn, ffn, post = (caught[site][layer] for site in sites)
        if not has_mid:
            pairs.append((pre + attn + ffn, post))
            continue
        mid = caught["resid_mid"][layer]
        first = second = nn.Identity()
        if post_norm:
            first, second = view.part(layer, view.family.norm_attn), view.part(layer, view.family.norm_ffn)
        pairs += [(first(pre + attn), mid), (second(mid + ffn), post)]
    return _largest(pairs), LOCAL


def the_past_is_untouched(view: ModelView, tokens: Tensor) -> Measured:
    """Outputs before a changed token, tapped and untapped: bit-equal, but for experts, which batch tokens together."""
    if not view.causal:
        raise Refused(f"{view.model_type} reads both ways: nothing is causal about it")
    if view.family and any(view.attention_has(layer, view.family.leaks_if) for layer in range(view.n_layers)):
        raise Refused(f"{view.ref} has layers of a kind that lets later tokens act on earlier ones by its definition")
    place = tokens.shape[1] // 2
    changed = tokens.clone()
    changed[0, place] = tokens[0, place - 1] if tokens[0, place - 1] != tokens[0, place] else tokens[0, 0]
    pairs = []
    for taps in ({}, {"attn_probs": lambda layer, probs: None}):
        with view.tapped(taps):
            before, after = view.forward(tokens), view.forward(changed)
        if bool((before[:, place:] == after[:, place:]).all()):
            raise Refused(f"the outputs of {view.ref} do not depend on token {place}, so that nothing can be told")
        pairs.append((after[:, :place], before[:, :place]))
    experts = any(hasattr(module, "experts") for module in view.model.modules())
    return _largest(pairs), DEEP if experts else 0.0


def taps_change_nothing(view: ModelView, tokens: Tensor) -> Measured:
    """Outputs with every site tapped against those of the untouched model."""
    plain = view.forward(tokens)
    with view.tapped({site: (lambda layer, value: None) for site in SITES if refusal(view, site) is None}):
        tapped = view.forward(tokens)
    return _largest([(tapped, plain)]), DEEP


def batching_and_padding_change_nothing(view: ModelView, tokens: Tensor) -> Measured:
    """Outputs of a text alone, in a batch, padded on the right and (models that take position ids) on the left."""
    alone = view.forward(tokens)
    n_pad, length = 5, tokens.shape[1]
    if view.context is not None and length + n_pad > view.context:
        tokens, alone, length = tokens[:, :-n_pad], view.forward(tokens[:, :-n_pad]), length - n_pad
    pad = torch.full_like(tokens[:, :n_pad], view.pad_token)
    other = torch.cat([tokens.flip(1), tokens[:, :n_pad]], 1)
    pairs = []
    for side in ("right", "left") if view.takes_positions else ("right",):
        row = torch.cat([tokens, pad] if side == "right" else [pad, tokens], 1)
        valid = torch.ones(2, length + n_pad, dtype=torch.bool)
        place = slice(0, length) if side == "right" else slice(n_pad, None)
        valid[0, length:] = side == "left"
        valid[0, :n_pad] &= side == "right"
        pairs.append((view.forward(torch.cat([row, other]), valid)[:1, place], alone))
    return _largest(pairs), DEEP


IDENTITIES: dict[str, Callable[[ModelView, Tensor], Measured]] = {
    "attention maps read = the model's own": maps_are_the_models_own,
    "maps rebuilt from W_Q, W_K = the model's own": scores_rebuild_from_weights,
    "attn_probs @ v = z": maps_times_values_are_z,
    "z @ W_O = what attention writes": z_times_W_O_is_written,
    "resid_pre + attn_out + ffn_out = resid_post": terms_add_up,
    "a changed token leaves the past bit-equal": the_past_is_untouched,
    "tapped outputs = untapped outputs": taps_change_nothing,
    "batching and padding change nothing": batching_and_padding_change_nothing,
}
