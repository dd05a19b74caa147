"""The fields of one layer on the sphere of directions: what attention and FFN write when every token is the same.

For a stream of length r all of whose tokens point along u, attention writes V u, with V = Σ_h W_V W_O behind the norm's
gain, and the feed-forward network Φ(r u). Biases of attention, which point one way whatever u, are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

from rheoscope.corpus import Corpus, batches
from rheoscope.errors import Refused
from rheoscope.models.field import ffn_field, refuse_field
from rheoscope.models.view import ModelView
from rheoscope.theory.criticals import Field

FIELDS = ("FFN only", "attention only", "full")


@torch.no_grad()
def attention_matrix(view: ModelView, layer: int) -> Float[Tensor, "d_model d_model"]:
    """V of a layer, for rows: unit u times V is what attention writes when all tokens point along u.

    The norm before attention divides by the root mean square, which on the sphere is 1/√d_model; LayerNorm takes the
    mean off first. Refused where a norm follows attention or none comes before it: then it is no linear map of u.
    """
    refuse_field(view, "the attention field")
    family, weights = view.family, view.weights
    if family.norm_attn is None or family.attn_term not in (None, family.attn):
        raise Refused(
            f"the attention field asked for; {view.model_type} norms what attention writes, so it is no linear map of "
            "the direction: ask for the field of the FFN only"
        )
    V = torch.einsum("hdv,hvm->dm", weights.W_V(layer), weights.W_O(layer))
    V = weights.gain(layer)[:, None] * V * view.d_model**0.5 * view.multiplier
    return V - V.mean(0) if _takes_mean_off(view, layer) else V


def layer_field(view: ModelView, layer: int, which: str, *, radius: float, strength: float = 1.0) -> Field:
    """One of FIELDS as a map of unit rows: V u + αΦ(r u), or one term of it. α is `strength`."""
    V = None if which == "FFN only" else attention_matrix(view, layer)

    def field(u: Float[Tensor, "direction d_model"]) -> Float[Tensor, "direction d_model"]:
        steering = 0.0 if which == "attention only" else strength * ffn_field(view, layer, radius * u)
        return steering if V is None else u @ V + steering

    return field


@torch.no_grad()
def token_directions(
    view: ModelView, layer: int, corpus: Corpus, *, n: int, seed: int
) -> tuple[Float[Tensor, "n d_model"], float]:
    """Directions of n tokens of a text where they enter a layer, the first of each window left out; median length."""
    caught: list[Tensor] = []
    with view.tapped({"resid_pre": lambda _, x: caught.append(x[:, 1:].clone())}, layers=[layer]):
        for batch in batches(corpus, 1):
            view.forward(batch.tokens, batch.valid, head=False)
            caught[-1] = caught[-1][batch.valid[:, 1:].to(view.device)]
    x = torch.cat(caught)
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:n]
    lengths = x.norm(dim=-1)
    return x[chosen] / lengths[chosen, None], float(lengths.median())


@torch.no_grad()
def starts(
    view: ModelView, layer: int, corpus: Corpus, *, n: int, seed: int
) -> tuple[Float[Tensor, "start d_model"], float]:
    """n token directions, n random ones, n eigenvectors of V with both signs; and the median length of the stream."""
    tokens, radius = token_directions(view, layer, corpus, n=n, seed=seed)
    drawn = random_directions(view, n, seed=seed)
    V = attention_matrix(view, layer)
    values, vectors = torch.linalg.eig(V.mT.double())
    leading = values.abs().argsort(descending=True)[: (n + 1) // 2]
    ends = vectors[:, leading].real.mT.to(tokens)
    ends = torch.cat([ends, -ends])[:n]
    return torch.cat([tokens, drawn, ends / ends.norm(dim=-1, keepdim=True)]), radius


def random_directions(view: ModelView, n: int, *, seed: int) -> Float[Tensor, "n d_model"]:
    """Uniform random unit vectors, reproducible to the seed."""
    drawn = torch.randn(n, view.d_model, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn / drawn.norm(dim=-1, keepdim=True)).to(view.device, view.dtype)


@contextmanager
def shuffled_ffn(view: ModelView, layer: int, *, seed: int) -> Iterator[None]:
    """The feed-forward network of a layer with the entries of every weight in random order, while the block lasts."""
    generator = torch.Generator().manual_seed(seed)
    modules = [view.part(layer, path) for path in view.family.ffn]
    parameters = {id(p): p for module in modules for p in module.parameters()}.values()
    kept = {parameter: parameter.data for parameter in parameters}
    try:
        for parameter, data in kept.items():
            order = torch.randperm(data.numel(), generator=generator).to(data.device)
            parameter.data = data.flatten()[order].reshape(data.shape)
        yield
    finally:
        for parameter, data in kept.items():
            parameter.data = data


def _takes_mean_off(view: ModelView, layer: int) -> bool:
    """Whether the norm before attention is blind to a constant added to all coordinates, as LayerNorm is."""
    norm = view.part(layer, view.family.norm_attn)
    x = random_directions(view, 1, seed=0)[None]
    return bool(torch.allclose(norm.forward(x), norm.forward(x + 1), rtol=1e-3, atol=1e-3))
