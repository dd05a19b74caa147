"""The sites of a forward pass: read them or replace them, always undone.

    with tapped(view, {"resid_mid": lambda layer, x: x * 0.5}):
        view.logits(tokens)

A tap is `tap(layer, value) -> replacement or None`. Taps of an outer block act first, so a measurement inside an edit
sees the edited model. Leaving the block, also by an exception or Ctrl-C, removes every hook.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..errors import Refused, RheoscopeError
from .attention import Attention, attention_by, set_tap
from .families import Residual

if TYPE_CHECKING:
    from .view import ModelView

Tap = Callable[[int, Any], Any]

# Residual sites [batch position d_model]; attn_in and ffn_in are what the two modules are given (after their norm).
RESIDUAL_SITES = ("resid_pre", "attn_in", "attn_out", "resid_mid", "ffn_in", "ffn_out", "resid_post")
# Attention sites: q k v and z [batch head position d], attn_scores and attn_probs [batch head query key].
# `attention` is read only: the whole Attention, after every replacement.
ATTENTION_SITES = ("q", "k", "v", "attn_scores", "attn_probs", "z", "attention")
SITES = (*RESIDUAL_SITES, *ATTENTION_SITES)


@contextmanager
def tapped(view: ModelView, taps: Mapping[str, Tap], *, layers: Collection[int] | None = None) -> Iterator[None]:
    """Let each tap at its site in the given layers (all of them by default) while the block lasts.

    Raises RheoscopeError for a site or layer that does not exist, Refused for one this family does not have.
    """
    chosen = range(view.n_layers) if layers is None else sorted(set(layers))
    if chosen and not 0 <= min(chosen) <= max(chosen) < view.n_layers:
        raise RheoscopeError(f"layers {list(chosen)} asked for; the model has layers 0 to {view.n_layers - 1}")
    for site in taps:
        if site not in SITES:
            raise RheoscopeError(f"no site is called {site!r}; the sites are {', '.join(SITES)}")
        reason = refusal(view, site)
        if reason:
            raise Refused(reason)
    with ExitStack() as undo:
        attention = {site: tap for site, tap in taps.items() if site in ATTENTION_SITES}
        if attention:
            _install_attention(view, attention, chosen, undo)
        for site, tap in taps.items():
            if site in RESIDUAL_SITES:
                for layer in chosen:
                    _install_residual(view, site, partial(tap, layer), layer, undo)
        if any(site in taps for site in RESIDUAL_SITES):
            hook = view.blocks[0].register_forward_pre_hook(partial(_note_batch_size, view), with_kwargs=True)
            undo.callback(hook.remove)
        yield


def refusal(view: ModelView, site: str) -> str | None:
    """Why this model has no such site, with the way out; None where it has it."""
    if site in ("resid_pre", "resid_post", *ATTENTION_SITES):
        return None
    if view.family is None:
        return (
            f"{site} asked for; the model type {view.model_type!r} has no row in rheoscope/models/families.py: "
            "use resid_pre, resid_post or the attention sites, or add a row"
        )
    if site == "resid_mid" and view.family.residual is Residual.PARALLEL:
        return f"{view.model_type} runs attention and FFN in parallel: there is no resid_mid; use resid_pre"
    return None


def _install_attention(view: ModelView, taps: Mapping[str, Tap], layers: Collection[int], undo: ExitStack) -> None:
    entry = (taps, frozenset(layers))
    if not view.attention_taps:
        undo.enter_context(attention_by(view.model))
        for layer, module in enumerate(view.attentions):
            undo.callback(set_tap, module, None)
            set_tap(module, partial(_tap_attention, view, layer))
    view.attention_taps.append(entry)
    undo.callback(view.attention_taps.remove, entry)


def _tap_attention(view: ModelView, layer: int, _module: nn.Module, attention: Attention) -> None:
    """All attention taps of one layer, in the order of the computation, outer blocks first."""
    attention.workspace = view.workspace
    active = [taps for taps, layers in view.attention_taps if layer in layers]
    for name in ("q", "k", "v"):
        for taps in active:
            if name in taps and (new := taps[name](layer, getattr(attention, name))) is not None:
                attention.replace_input(name, new)
    for site, attribute in (("attn_scores", "scores"), ("attn_probs", "probs"), ("z", "z")):
        for taps in active:
            if site in taps and (new := taps[site](layer, getattr(attention, attribute))) is not None:
                setattr(attention, attribute, new)
    for taps in active:
        if "attention" in taps:
            taps["attention"](layer, attention)


def _install_residual(view: ModelView, site: str, tap: Callable[[Tensor], Any], layer: int, undo: ExitStack) -> None:
    """One hook at one residual site of one layer."""
    module, where = _place(view, site, layer)
    if where == "output":
        scale = view.multiplier if site in ("attn_out", "ffn_out") else 1.0
        undo.callback(module.register_forward_hook(partial(_on_output, tap, scale, view)).remove)
    else:
        hook = partial(_on_input, tap, view, where == "stream")
        undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _place(view: ModelView, site: str, layer: int) -> tuple[nn.Module, str]:
    """The module a site belongs to, and whether it is its input, its output, or the stream that enters it.

    `stream`: the tensor that enters the module is also the one the model adds to later, so it is replaced in place.
    """
    block, family = view.blocks[layer], view.family
    if site in ("resid_pre", "resid_post"):
        return block, "input" if site == "resid_pre" else "output"
    part = view.part
    if site == "attn_in":
        return part(layer, family.attn), "input"
    if site == "ffn_in":
        return part(layer, family.ffn[0]), "input"
    if site == "attn_out":
        return part(layer, family.attn_term or family.attn), "output"
    if site == "ffn_out":
        return part(layer, family.ffn_term or family.ffn[-1]), "output"
    if family.mid_output is not None:
        return part(layer, family.mid_output), "output"
    return part(layer, family.norm_ffn or family.ffn[0]), "stream"


def _on_input(tap: Callable, view: ModelView, in_place: bool, _module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Hand the first input to the tap; put the replacement in its place."""
    x = args[0] if args else kwargs["hidden_states"]
    new = tap(_as_batch(x, view))
    if new is None:
        return None
    new = new.reshape(x.shape)
    if in_place:
        x.copy_(new)
        return None
    return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})


def _on_output(tap: Callable, scale: float, view: ModelView, _module: nn.Module, _args: tuple, output: Any) -> Any:
    """Hand the output, times the family's residual multiplier, to the tap; put the replacement in its place."""
    x = output[0] if isinstance(output, tuple) else output
    seen = _as_batch(x, view)
    new = tap(seen if scale == 1.0 else seen * scale)
    if new is None:
        return None
    new = (new if scale == 1.0 else new / scale).reshape(x.shape)
    return (new, *output[1:]) if isinstance(output, tuple) else new


def _as_batch(x: Tensor, view: ModelView) -> Tensor:
    """[batch position d_model] also where a family flattens batch and position (OPT)."""
    return x if x.dim() == 3 else x.unflatten(0, (view.batch_size, -1))


def _note_batch_size(view: ModelView, _block: nn.Module, args: tuple, kwargs: dict) -> None:
    view.batch_size = (args[0] if args else kwargs["hidden_states"]).shape[0]
