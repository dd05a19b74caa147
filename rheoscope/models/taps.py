"""The sites of a forward pass: read them or replace them, always undone.

    with tapped(view, {"resid_mid": lambda layer, x: x * 0.5}):
        view.logits(tokens)

A tap is `tap(layer, value) -> replacement or None`. Taps of an outer block act first, so a measurement inside an edit
sees the edited model. Leaving the block, also by an exception or Ctrl-C, removes every hook.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rheoscope.errors import Refused, RheoscopeError
from rheoscope.models.families import Residual
from rheoscope.models.interface import PARTS, LayerTaps, Tap, attention_by, attention_tapped, replacement

if TYPE_CHECKING:
    from rheoscope.models.view import ModelView

# Residual sites [batch position d_model]; attn_in and ffn_in are what the two modules are given (after their norm).
RESIDUAL_SITES = ("resid_pre", "attn_in", "attn_out", "resid_mid", "ffn_in", "ffn_out", "resid_post")
# Attention sites: q k v and z [batch head position d], attn_scores and attn_probs [batch head query key].
# `call` is given the whole Attention once q, k, v are final and nothing is computed of them yet: a tap may set its
# scores and bias, or mix by other means; it returns nothing.
# `attn_mean` [batch query key] and `attention` are read only: the map averaged over heads, which takes no map of every
# head; and the whole Attention, after every replacement.
ATTENTION_SITES = (*PARTS, "attention")
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
        reason = refusal(view, site) or _edited_away(view, site, chosen)
        if reason:
            raise Refused(reason)
    with ExitStack() as undo:
        if any(site in taps for site in RESIDUAL_SITES):
            hook = view.blocks[0].register_forward_pre_hook(partial(_note_batch_size, view), with_kwargs=True)
            undo.callback(hook.remove)
        attention = {site: tap for site, tap in taps.items() if site in ATTENTION_SITES}
        if attention:
            _install_attention(view, attention, chosen, undo)
        for site, tap in taps.items():
            if site in RESIDUAL_SITES:
                for layer in chosen:
                    _install_residual(view, site, partial(tap, layer), layer, undo)
        yield


def refusal(view: ModelView, site: str) -> str | None:
    """Why this model has no such site, with the way out; None where it has it."""
    if site in ATTENTION_SITES:
        return None
    if not view.one_stream:
        return (
            f"{site} asked for; the layers of {view.model_type} do not hand one stream [batch position d_model] from "
            f"each to the next: use the attention sites {', '.join(ATTENTION_SITES)}"
        )
    if site in ("resid_pre", "resid_post"):
        return None
    if view.family is None:
        return (
            f"{site} asked for; the model type {view.model_type!r} has no row in rheoscope/models/families.py: "
            "use resid_pre, resid_post or the attention sites, or add a row"
        )
    if site == "resid_mid" and view.family.residual is Residual.PARALLEL:
        return f"{view.model_type} runs attention and FFN in parallel: there is no resid_mid; use resid_pre"
    return None


def _edited_away(view: ModelView, site: str, layers: Collection[int]) -> str | None:
    """Why a site cannot be tapped in some layer: an edit has taken what it belongs to away."""
    gone = [layer for layer in layers if not view.sizes[layer].n_heads]
    if site in ATTENTION_SITES and gone:
        return f"{site} asked for in layers {gone}; an edit has taken their attention away: ask for other layers"
    fused = [layer for layer in layers if getattr(view.blocks[layer], "fused", False)]
    if site in RESIDUAL_SITES[1:-1] and fused:
        return (
            f"{site} asked for in layers {fused}; an edit has fused their attention and FFN: use resid_pre, resid_post "
            "or the attention sites"
        )
    return None


def _install_attention(view: ModelView, taps: Mapping[str, Tap], layers: Collection[int], undo: ExitStack) -> None:
    """The attention taps of the chosen layers."""
    undo.enter_context(attention_by(view.model))
    for layer in layers:
        entry = LayerTaps(layer, taps, view.workspace)
        undo.enter_context(attention_tapped(view.attentions[layer], entry))


def _install_residual(view: ModelView, site: str, tap: Callable[[Tensor], Any], layer: int, undo: ExitStack) -> None:
    """One hook at one residual site of one layer."""
    module, where = _place(view, site, layer)
    scale = view.multiplier if site in ("attn_out", "ffn_out") else 1.0
    hook = _ResidualTap(view, site, tap, scale, in_place=where == "stream")
    if where == "output":
        undo.callback(module.register_forward_hook(hook.at_output).remove)
    else:
        undo.callback(module.register_forward_pre_hook(hook.at_input, with_kwargs=True).remove)


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


@dataclass(frozen=True)
class _ResidualTap:
    """A tap as a hook of a module, which sees [batch position d_model] times the family's residual multiplier."""

    view: ModelView
    site: str
    tap: Callable[[Tensor], Any]
    scale: float
    in_place: bool

    def at_input(self, _module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Hand the module's first input to the tap; put the replacement in its place."""
        x = args[0] if args else kwargs["hidden_states"]
        new = self._replacement(x)
        if new is None:
            return None
        if self.in_place:
            x.copy_(new)
            return None
        return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})

    def at_output(self, _module: nn.Module, _args: tuple, output: Any) -> Any:
        """Hand the module's output to the tap; put the replacement in its place."""
        new = self._replacement(output[0] if isinstance(output, tuple) else output)
        return (new, *output[1:]) if new is not None and isinstance(output, tuple) else new

    def _replacement(self, x: Tensor) -> Tensor | None:
        """What the tap makes of x, in the shape of x (OPT flattens batch and position)."""
        seen = x if x.dim() == 3 else x.unflatten(0, (self.view.batch_size, -1))
        seen = seen if self.scale == 1.0 else seen * self.scale
        if self.in_place:
            seen = seen.clone()  # what a tap keeps, or differentiates, must not change when x does
        new = replacement(self.site, self.tap(seen), seen)
        if new is None:
            return None
        return (new if self.scale == 1.0 else new / self.scale).reshape(x.shape)


def _note_batch_size(view: ModelView, _block: nn.Module, args: tuple, kwargs: dict) -> None:
    view.batch_size = (args[0] if args else kwargs["hidden_states"]).shape[0]
