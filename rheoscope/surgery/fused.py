"""A parallel layer with one norm, one product for all that reads the stream and one for all that writes to it.

The family's own block and attention module still run; what they hold is exchanged. The norm before attention makes
queries, keys, values and what enters the feed-forward network by one product, with the gains of both norms folded into
it; the output projection writes for both. The feed-forward network that the block then calls writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rheoscope.errors import Refused
from rheoscope.models.families import Family, Residual
from rheoscope.models.view import part
from rheoscope.surgery.heads import FusedHeads, fused_heads, in_out, layout_of
from rheoscope.surgery.modules import NoAttention, Widened, linear_of

GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")  # of a feed-forward network act(gate x) * up x
EPSILONS = ("variance_epsilon", "eps")


class _Between:
    """What enters the feed-forward network, kept from the first product of a layer to its second."""

    hidden: Tensor | None = None


class FusedIn(nn.Module):
    """The norm without gain, and all that reads the stream. Hands on queries, keys and values."""

    def __init__(self, product: nn.Linear, n_qkv: int, eps: float, between: _Between):
        super().__init__()
        self.product, self.n_qkv, self.eps, self.between = product, n_qkv, eps, between

    def forward(self, x: Float[Tensor, "*shape d_model"]) -> Float[Tensor, "*shape qkv"]:
        made = self.product(nn.functional.rms_norm(x, x.shape[-1:], eps=self.eps))
        self.between.hidden = made[..., self.n_qkv :]
        return made[..., : self.n_qkv]


class Slice(nn.Module):
    """Some coordinates of what it is given."""

    def __init__(self, start: int, stop: int):
        super().__init__()
        self.start, self.stop = start, stop

    def forward(self, x: Float[Tensor, "*shape any"]) -> Float[Tensor, "*shape some"]:
        return x[..., self.start : self.stop]


class FusedOut(nn.Module):
    """All that writes to the stream: z of the heads and the activations of the feed-forward network, in one product."""

    def __init__(self, product: nn.Linear, act: nn.Module, between: _Between):
        super().__init__()
        self.product, self.act, self.between = product, act, between

    def forward(self, z: Float[Tensor, "*shape z"]) -> Float[Tensor, "*shape d_model"]:
        hidden, self.between.hidden = self.between.hidden, None
        gate, up = hidden.chunk(2, -1)
        return self.product(torch.cat([z, self.act(gate) * up], -1))


class Nothing(nn.Module):
    """Writes 0."""

    def forward(self, x: Float[Tensor, "*shape d_model"]) -> Float[Tensor, ""]:
        return x.new_zeros(())


def fuse(block: nn.Module, family: Family, name: str) -> None:
    """Make a block parallel and fused. Raises Refused where its family does not allow it."""
    refuse_fused(block, family, name)
    layout = layout_of(block, family)
    heads = FusedHeads(layout.n_heads, layout.n_kv_heads, layout.d_head, layout.o.bias is not None)
    norms = [part(block, path) for path in (family.norm_attn, family.norm_ffn)]
    ffn = part(block, family.ffn[0])
    offset = 1.0 if family.unit_offset else 0.0
    attention_gain, ffn_gain = (norm.weight.detach() + offset for norm in norms)
    paths = (family.q, family.k, family.v)
    qkv = [part(block, path) for path in paths]
    reads = [(module, attention_gain) for module in qkv] + [(ffn.gate_proj, ffn_gain), (ffn.up_proj, ffn_gain)]
    weight = torch.cat([gain[:, None] * in_out(module, family) for module, gain in reads], 1)
    sizes = [in_out(module, family).shape[1] for module in qkv]
    between = _Between()
    made = linear_of(weight, _joined([module for module, _ in reads], family))
    o, down = part(block, family.o), ffn.down_proj
    biases = [module.bias.detach() for module in (o, down) if module.bias is not None]
    written = linear_of(torch.cat([in_out(o, family), in_out(down, family)]), sum(biases) if biases else None)
    block.set_submodule(family.norm_attn, FusedIn(made, sum(sizes), _epsilon(norms[0]), between))
    block.set_submodule(family.o, FusedOut(written, ffn.act_fn, between))
    start = 0
    for path, size in zip(paths, sizes, strict=True):
        block.set_submodule(path, Slice(start, start + size))
        start += size
    block.set_submodule(family.norm_ffn, nn.Identity())
    block.set_submodule(family.ffn[0], Nothing())
    block.fused = heads


def refuse_fused(block: nn.Module, family: Family, name: str) -> None:
    """Raise Refused for a block that cannot be fused exactly."""
    attention = part(block, family.attn)
    plain = family.residual is Residual.SEQUENTIAL and family.norm_attn and family.norm_ffn
    reason = ""
    if not plain or family.attn_term or family.ffn_term or family.qkv or not family.o.startswith(f"{family.attn}."):
        reason = "its family is not built of one norm, separate projections and a sum"
    elif isinstance(attention, NoAttention) or len(getattr(attention, "token_maps", ())):
        reason = "an edit has taken attention of its heads away"
    elif any(isinstance(part(block, path), Widened) for path in (family.q, family.k)):
        reason = "an edit has made its queries and keys narrower"
    elif not all(hasattr(part(block, family.ffn[0]), part_of) for part_of in GATED):
        reason = "its feed-forward network is not a gated one"
    elif not _same_rms([part(block, path) for path in (family.norm_attn, family.norm_ffn)]):
        reason = "its two norms are no RMS norms of one kind"
    if reason:
        raise Refused(f"{name} asked to be made parallel and fused; {reason}: make it parallel without fused")


def is_fused(block: nn.Module) -> bool:
    """Whether a block was fused."""
    return fused_heads(block) is not None


def attention_share(block: nn.Module, family: Family) -> int:
    """Numbers of both products of a fused block that queries, keys, values and outputs had in their projections."""
    heads, reads = fused_heads(block), part(block, family.norm_attn)
    d_model = reads.product.in_features
    n_qkv = reads.n_qkv * (d_model + (reads.product.bias is not None))
    return n_qkv + d_model * (heads.n_heads * heads.d_head + heads.has_bias)


def _same_rms(norms: Sequence[nn.Module]) -> bool:
    named = all(type(norm).__name__.endswith("RMSNorm") for norm in norms)
    return named and len({_epsilon(norm) for norm in norms}) == 1


def _epsilon(norm: nn.Module) -> float:
    return next(getattr(norm, name) for name in EPSILONS if hasattr(norm, name))


def _joined(modules: list[nn.Module], family: Family) -> Float[Tensor, " outputs"] | None:
    """Biases one after the other, 0 where one has none; None where all have none."""
    if all(module.bias is None for module in modules):
        return None
    zeros = [in_out(module, family).new_zeros(in_out(module, family).shape[1]) for module in modules]
    biases = zip(modules, zeros, strict=True)
    return torch.cat([zero if module.bias is None else module.bias.detach() for module, zero in biases])
