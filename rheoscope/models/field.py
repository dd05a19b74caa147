"""The feed-forward network of a layer as a field on the stream: Φ(x) for any x, past every tap."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from rheoscope.errors import Refused
from rheoscope.models.families import Residual
from rheoscope.models.placement import at_hand

if TYPE_CHECKING:
    from rheoscope.models.view import ModelView


def ffn_field(view: ModelView, layer: int, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
    """Φ(x): what the layer's feed-forward network adds to the stream when x is what it is given, before its norm.

    Norms, post-norms, experts and multipliers are the model's own modules, called past their hooks: taps neither see
    nor change it, so it is the field of the model as it was loaded. In the dtype of the model.
    """
    norm = view.family.norm_ffn
    x = x.to(view.dtype)
    return ffn_of_normed(view, layer, view.part(layer, norm).forward(x) if norm else x)


def ffn_of_normed(view: ModelView, layer: int, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
    """What the layer's feed-forward network adds to the stream for x = ffn_in, after its norm; as `ffn_field`."""
    family, shape = view.family, x.shape
    term = family.ffn_term
    paths = (*family.ffn, term) if term and term != family.ffn[-1] else family.ffn
    x = x if x.dim() == 3 else x.reshape(1, -1, shape[-1])  # experts take nothing else
    for path in paths:
        x = view.part(layer, path).forward(x)
        x = x[0] if isinstance(x, tuple) else x
    x = x.reshape(shape)
    return x * view.multiplier if view.multiplier != 1.0 else x


def ffn_derivative(
    view: ModelView, layer: int, x: Float[Tensor, "... d_model"], direction: Float[Tensor, "... d_model"]
) -> tuple[Float[Tensor, "... d_model"], Float[Tensor, "... d_model"]]:
    """Φ(x) and its derivative DΦ(x)·direction, by forward differentiation of the model's own modules."""
    with at_hand(view.blocks[layer]):
        return derivative(lambda place: ffn_field(view, layer, place), x.to(view.dtype), direction.to(view.dtype))


def derivative(
    function: Callable[[Tensor], Tensor], x: Float[Tensor, "*shape"], direction: Float[Tensor, "*shape"]
) -> tuple[Tensor, Tensor]:
    """Value of a function at x and its derivative in a direction, by forward differentiation."""
    with warnings.catch_warnings():  # PyTorch's forward differentiation calls what PyTorch has deprecated
        warnings.filterwarnings("ignore", message="`torch.jit.script`", category=DeprecationWarning)
        return torch.func.jvp(function, (x,), (direction,))


def ffn_is_parallel(view: ModelView) -> bool:
    """Whether the feed-forward network reads resid_pre, as attention does, rather than what attention has written."""
    return view.family is not None and view.family.residual is Residual.PARALLEL


def layer_is_parallel(view: ModelView, layer: int) -> bool:
    """The same of one layer, which an edit may have made parallel."""
    return ffn_is_parallel(view) or hasattr(view.blocks[layer], "parallel_norm")


def refuse_field(view: ModelView, what: str) -> None:
    """Raise Refused where a layer is not x + attention + FFN, or where its parts are not known."""
    if view.family is None:
        raise Refused(
            f"{what} asked for; the model type {view.model_type!r} has no row in rheoscope/models/families.py, so its "
            "feed-forward network is a black box without a site: add a row, or measure routing"
        )
    if view.family.residual is Residual.POST_NORM:
        raise Refused(
            f"{what} asked for; {view.model_type} norms the stream after every addition, so a layer is not "
            "x + attention + FFN and the stream has no free length: measure other instruments"
        )
    if not view.one_stream:
        raise Refused(f"{what} asked for; the layers of {view.model_type} hand on more than one stream: use routing")
