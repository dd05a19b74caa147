"""Queries and keys of fewer coordinates: which to keep, and the projections that make only those.

Without RoPE every pair of q and k of one key head is turned into the basis in which their products from the weights
alone, b included, are largest, and the first `rank` coordinates stay: the best approximation of W_Q W_K' of that rank.
RoPE turns pairs of coordinates by the distance of two tokens, and no other basis goes with it: there whole pairs stay,
those with the largest weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rheoscope.errors import Refused
from rheoscope.models.families import Rope
from rheoscope.surgery.fused import is_fused
from rheoscope.surgery.heads import Layout, in_out, rows_of
from rheoscope.surgery.modules import Widened, linear_of


@dataclass(frozen=True)
class Basis:
    """What becomes of q and k of every key head: q P_q and k P_k, in some places among the former coordinates."""

    P_q: Float[Tensor, "kv_head d_head rank"]
    P_k: Float[Tensor, "kv_head d_head rank"]
    places: Int[Tensor, "kv_head rank"]


def refuse_shrink(layout: Layout, config: object, rank: int, name: str) -> None:
    """Raise Refused where no narrower q and k give the scores of a narrower q and k exactly."""
    family, d = layout.family, layout.d_head
    if is_fused(layout.block):
        raise Refused(f"narrower q and k asked for in {name}; its parts were fused: edit first, fuse last")
    if not 0 < rank < d:
        raise Refused(f"q and k of {rank} coordinates asked for in {name}; heads have {d}: ask for fewer, from 1")
    if family.q_norm or family.k_norm:
        raise Refused(
            f"narrower q and k asked for in {name}; a norm over all coordinates of a head follows them, so those left "
            "out would change the others: use a family without QK-norm"
        )
    if family.damped_if is not None and getattr(layout.attention, family.damped_if, False) is not False:
        raise Refused(f"narrower q and k asked for in {name}; S-D attention needs both in one basis: leave it out")
    turned = n_turned(layout, config)
    if turned and (rank % 2 or d % 2):
        raise Refused(f"q and k of {rank} coordinates asked for in {name}; RoPE turns pairs: give an even number")
    if not turned and family.clip is not None and getattr(config, family.clip) is not None:
        raise Refused(f"narrower q and k asked for in {name}; they are clipped, which no other basis goes with")


def n_turned(layout: Layout, config: object) -> int:
    """How many coordinates of a head RoPE turns; 0 in layers without."""
    family = layout.family
    if family.rope is Rope.NONE or (family.rope_if and not getattr(layout.attention, family.rope_if)):
        return 0
    if getattr(config, "rotary_dim", None):
        return config.rotary_dim
    share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    return int(layout.d_head * share)


def basis_of(layout: Layout, config: object, rank: int) -> Basis:
    """The basis of a layer, from its weights alone."""
    d, kv_heads = layout.d_head, range(layout.n_kv_heads)
    turned = n_turned(layout, config)
    W_Q = _augmented(layout, 0, range(layout.n_heads)).unflatten(0, (layout.n_kv_heads, layout.n_rep))
    W_K = _augmented(layout, 1, kv_heads)
    if turned:
        weight = W_Q.square().sum((1, 2)) * W_K.square().sum(1)
        pairs = _pairs(layout, turned).to(weight.device)
        kept = weight[:, pairs].sum(-1).topk(rank // 2, -1).indices
        places = pairs[kept].flatten(1).sort(-1).values
        chosen = torch.eye(d, dtype=W_K.dtype, device=W_K.device)[places].mT
        return Basis(chosen, chosen, places)
    R_Q = torch.linalg.qr(W_Q.flatten(1, 2), mode="r").R
    R_K = torch.linalg.qr(W_K, mode="r").R
    U, S, Vh = torch.linalg.svd(R_Q @ R_K.mT)
    root = S[:, None, :rank].sqrt()
    P_q = torch.linalg.pinv(R_Q) @ U[..., :rank] * root
    P_k = torch.linalg.pinv(R_K) @ Vh.mT[..., :rank] * root
    return Basis(P_q, P_k, torch.arange(rank, device=S.device).expand(len(kv_heads), -1))


def shrink(layout: Layout, config: object, rank: int, name: str) -> None:
    """Put narrower projections to q and k in place."""
    refuse_shrink(layout, config, rank, name)
    basis = basis_of(layout, config, rank)
    n_rep, kv_heads = layout.n_rep, range(layout.n_kv_heads)
    per_head = (x.repeat_interleave(n_rep, 0) for x in (basis.P_q, basis.places))
    parts = [_part(layout, 0, *per_head), _part(layout, 1, basis.P_k, basis.places)]
    family = layout.family
    if family.qkv is None:
        for path, (projection, weight, bias, places) in zip((family.q, family.k), parts, strict=True):
            layout.block.set_submodule(path, _widened(layout, projection, weight, bias, places))
        return
    projection, rows = rows_of(layout, 2, kv_heads)
    bias = getattr(projection, "bias", None)
    places = torch.tensor(rows, device=projection.weight.device)
    parts.append((projection, in_out(projection, family)[:, places], None if bias is None else bias[places], places))
    weight, places = torch.cat([part[1] for part in parts], 1), torch.cat([part[3] for part in parts])
    bias = None if bias is None else torch.cat([part[2] for part in parts])
    layout.block.set_submodule(family.qkv, _widened(layout, projection, weight, bias, places))


def _part(
    layout: Layout, which: int, P: Float[Tensor, "head d_head rank"], places: Int[Tensor, "head rank"]
) -> tuple[nn.Module, Tensor, Tensor | None, Tensor]:
    """Projection, narrow weight [in, out], narrow bias and the places of its outputs, of queries or keys."""
    heads, d = range(len(P)), layout.d_head
    projection, rows = rows_of(layout, which, heads)
    index = torch.tensor(rows, device=P.device)
    dtype = projection.weight.dtype
    weight = in_out(projection, layout.family)[:, index].unflatten(1, (-1, d)).to(P.dtype)
    narrow = torch.einsum("mhd,hdr->mhr", weight, P).flatten(1).to(dtype)
    bias = getattr(projection, "bias", None)
    if bias is not None:
        bias = torch.einsum("hd,hdr->hr", bias.detach()[index].unflatten(0, (-1, d)).to(P.dtype), P).flatten().to(dtype)
    return projection, narrow, bias, index.unflatten(0, (-1, d)).gather(1, places).flatten()


def _augmented(layout: Layout, which: int, heads: range) -> Float[Tensor, "head d_model_and_one d_head"]:
    """Weights and biases of queries or keys, in float64."""
    projection, rows = rows_of(layout, which, heads)
    weight = in_out(projection, layout.family).double()
    bias = getattr(projection, "bias", None)
    bias = weight.new_zeros(weight.shape[1]) if bias is None else bias.detach().double()
    index = torch.tensor(rows, device=weight.device)
    return torch.cat([weight, bias[None]])[:, index].unflatten(1, (-1, layout.d_head)).transpose(0, 1)


def _pairs(layout: Layout, turned: int) -> Int[Tensor, "pair two"]:
    """Coordinates that go together: those that RoPE turns, then the rest two by two."""
    rest = torch.arange(turned, layout.d_head).unflatten(0, (-1, 2)) if turned < layout.d_head else None
    order = torch.arange(turned)
    interleaved = layout.family.rope is Rope.INTERLEAVED
    pairs = order.unflatten(0, (-1, 2)) if interleaved else order.unflatten(0, (2, -1)).T
    return pairs if rest is None else torch.cat([pairs, rest])


def _widened(layout: Layout, former: nn.Module, weight: Tensor, bias: Tensor | None, places: Tensor) -> Widened:
    n_out = in_out(former, layout.family).shape[1]
    return Widened(linear_of(weight, bias), places, n_out, transposed=layout.family.transposed)
