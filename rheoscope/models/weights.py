"""W_Q, W_K, W_V, W_O of any family in one convention, and the queries and keys they make of a given input.

Row vectors, `x @ W`, one matrix per query head: W_Q [head d_model d_head], W_O [head d_head d_model]. Keys and values
of a group are repeated for each of its heads. Absent biases are zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from rheoscope.errors import Refused
from rheoscope.models.families import Packing, Rope
from rheoscope.models.placement import linear_map, numbers

if TYPE_CHECKING:
    from rheoscope.models.view import ModelView, Sizes


class HeadWeights:
    """Projection weights per head of a model whose family has a row."""

    def __init__(self, view: ModelView):
        self.view = view

    def W_Q(self, layer: int) -> Float[Tensor, "head d_model d_head"]:
        """Query weights, with the factor that OPT applies before the score. S-D layers: [W_Q W_K], as they attend."""
        return self._split(layer)[0]

    def W_K(self, layer: int) -> Float[Tensor, "head d_model d_head"]:
        """Key weights, repeated for every query head of a group. S-D layers: [W_K -W_Q]."""
        return self._repeated(layer, self._split(layer)[1])

    def W_V(self, layer: int) -> Float[Tensor, "head d_model d_value"]:
        """Value weights, repeated for every query head of a group."""
        return self._repeated(layer, self._split(layer)[2])

    def W_O(self, layer: int) -> Float[Tensor, "head d_value d_model"]:
        """Output weights."""
        size = self._size(layer)
        weight = self._in_out(self.view.part(layer, self.view.family.o))[: size.n_heads * size.d_value]
        return rearrange(weight, "(head d_value) d_model -> head d_value d_model", head=size.n_heads)

    def b_Q(self, layer: int) -> Float[Tensor, "head d_head"]:
        """Query biases; zero where the family has none."""
        return self._biases(layer)[0]

    def b_K(self, layer: int) -> Float[Tensor, "head d_head"]:
        """Key biases, repeated; zero where the family has none."""
        return self._repeated(layer, self._biases(layer)[1])

    def b_V(self, layer: int) -> Float[Tensor, "head d_value"]:
        """Value biases, repeated; zero where the family has none."""
        return self._repeated(layer, self._biases(layer)[2])

    def b_O(self, layer: int) -> Float[Tensor, " d_model"]:
        """Output bias; zero where the family has none."""
        bias = self._numbers(self.view.part(layer, self.view.family.o), "bias")
        return torch.zeros(self.view.d_model, dtype=self.view.dtype, device=self.view.device) if bias is None else bias

    def gain(self, layer: int) -> Float[Tensor, " d_model"]:
        """Gain of the norm before attention; ones where there is none or it has no weights.

        In a post-norm block (BERT) the norm that feeds attention belongs to the block before: its gain is not folded.
        """
        family = self.view.family
        path = family.norm_attn
        post = path is not None and family.residual.name == "POST_NORM"
        weight = None if path is None or post else self._numbers(self.view.part(layer, path), "weight")
        if weight is None:
            return torch.ones(self.view.d_model, dtype=self.view.dtype, device=self.view.device)
        return weight + 1 if family.unit_offset else weight

    def kernel(self, layer: int) -> tuple[Float[Tensor, "head d_model d_head"], Float[Tensor, "head d_model d_head"]]:
        """W_Q and W_K with the gains of the norm before attention and the linear part of the QK-norm folded in."""
        self._refuse_averaged(layer)
        gain, size, family = self.gain(layer)[:, None], self._size(layer), self.view.family
        W_Q = self._with_norm(layer, self.W_Q(layer), family.q_norm, size.n_heads)
        W_K = self._with_norm(layer, self.W_K(layer), family.k_norm, size.n_kv_heads)
        return gain * W_Q, gain * W_K

    def _with_norm(
        self, layer: int, W: Float[Tensor, "head d_model d_head"], path: str | None, heads: int
    ) -> Float[Tensor, "head d_model d_head"]:
        """What a QK-norm of so many heads does to W but for the division by a length: mean taken out, gain."""
        if path is None:
            return W
        if self._centres(layer, path, heads):
            W = W - W.mean(-1, keepdim=True)
        return W * self._qk_gain(layer, path, heads).repeat_interleave(len(W) // heads, 0)

    @torch.no_grad()
    def _centres(self, layer: int, path: str, heads: int) -> bool:
        """Whether a QK-norm takes the mean over its coordinates out of each head: constant heads are then all alike."""
        constant = torch.arange(1.0, heads + 1, dtype=self.view.dtype, device=self.view.device)
        constant = constant[None, None, :, None].expand(1, 1, heads, self.view.d_head)
        return torch.allclose(self._normed(layer, constant, path), self._normed(layer, -constant, path), atol=1e-3)

    def _qk_gain(self, layer: int, path: str, heads: int) -> Float[Tensor, "head 1 d_head"]:
        """Gain of a QK-norm per head and coordinate."""
        gain = torch.ones(heads, 1, self.view.d_head, dtype=self.view.dtype, device=self.view.device)
        parts = self.view.part(layer, path).modules()  # in the order of heads, where each has a norm of its own
        weights = [weight for part in parts if (weight := self._numbers(part, "weight")) is not None]
        weight = torch.cat([weight.detach().reshape(-1, self.view.d_head) for weight in weights])[:, None]
        return gain * (weight + 1 if self.view.family.unit_offset else weight)

    def projected(
        self, layer: int, x: Float[Tensor, "batch position d_model"], positions: Int[Tensor, " position"]
    ) -> tuple[Float[Tensor, "batch head position d_head"], Float[Tensor, "batch head position d_head"]]:
        """Queries and keys as they enter the score, rebuilt from the weights for attention input x.

        Bias, clipping, QK-norm and rotation come in the family's order; `check` compares with the model's own.
        """
        self._refuse_averaged(layer)
        (W_Q, W_K, _), (b_Q, b_K, _) = self._split(layer), self._biases(layer)
        q = torch.einsum("bpm,hmd->bphd", x, W_Q) + b_Q
        k = torch.einsum("bpm,hmd->bphd", x, W_K) + b_K
        q, k = self._clipped(q), self._clipped(k)
        q, k = self._normed(layer, q, self.view.family.q_norm), self._normed(layer, k, self.view.family.k_norm)
        cos, sin = self.rotation(layer, positions)
        q, k = (self.rotated(t.transpose(1, 2), cos, sin) for t in (q, k))
        return q, self._repeated(layer, k, 1)

    def values(
        self, layer: int, x: Float[Tensor, "batch position d_model"]
    ) -> Float[Tensor, "batch head position d_value"]:
        """Values, repeated, rebuilt from the weights for attention input x."""
        return self._clipped(torch.einsum("bpm,hmd->bhpd", x, self.W_V(layer)) + self.b_V(layer)[:, None])

    def rotation(
        self, layer: int, positions: Int[Tensor, " position"]
    ) -> tuple[Float[Tensor, "position pair"], Float[Tensor, "position pair"]]:
        """Cosine and sine of every coordinate pair, from the model's own rotary module; no pairs where it has none."""
        view, family = self.view, self.view.family
        turned = family.rope is not Rope.NONE and (
            family.rope_if is None or bool(getattr(view.part(layer, family.attn), family.rope_if))
        )
        if not turned:
            empty = torch.zeros(len(positions), 0, dtype=view.dtype, device=view.device)
            return empty, empty
        rotary = getattr(view.model.base_model, family.rotary)
        kinds = getattr(view.config, "layer_types", None)
        typed = any(name.endswith("attention_inv_freq") for name, _ in rotary.named_buffers())
        like = torch.zeros(1, dtype=view.dtype, device=view.device)
        tables = rotary(like, positions[None], *([kinds[layer]] if typed else []))
        cos, sin = (table[0] for table in (tables[::-1] if family.sine_first else tables))
        if family.half_tables:
            return cos, sin
        if family.rope is Rope.INTERLEAVED:
            return cos[:, ::2], sin[:, ::2]
        return cos[:, : cos.shape[1] // 2], sin[:, : sin.shape[1] // 2]

    def rotated(
        self, x: Float[Tensor, "*any d_head"], cos: Float[Tensor, "*#any pair"], sin: Float[Tensor, "*#any pair"]
    ) -> Float[Tensor, "*any d_head"]:
        """x with its first 2 * pair coordinates turned pairwise, in the family's pairing."""
        n_turned = 2 * cos.shape[-1]
        if self.view.family.damped_if and x.shape[-1] == 2 * n_turned:  # [q; k], each turned in the same way
            return torch.cat([self.rotated(half, cos, sin) for half in x.chunk(2, -1)], -1)
        head, rest = x[..., :n_turned], x[..., n_turned:]
        if self.view.family.rope is Rope.INTERLEAVED:
            first, second = head[..., ::2], head[..., 1::2]
            turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)
        else:
            first, second = head.chunk(2, -1)
            turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return torch.cat([turned, rest], -1)

    def _refuse_averaged(self, layer: int) -> None:
        if self.view.attention_has(layer, self.view.family.averaged_if):
            raise Refused(
                f"the kernel of layer {layer} asked for; its keys are averages over neighbouring tokens, so no kernel "
                "of two tokens makes its scores: read the scores themselves"
            )

    def _clipped(self, x: Tensor) -> Tensor:
        bound = getattr(self.view.config, self.view.family.clip) if self.view.family.clip else None
        return x if bound is None else x.clamp(-bound, bound)

    def _normed(self, layer: int, x: Tensor, path: str | None) -> Tensor:
        """QK-norm by the model's own module, on [batch position head d_head]."""
        if path is None:
            return x
        module, family = self.view.part(layer, path), self.view.family
        if family.norm_joint:
            return module(x.flatten(2)).view_as(x)
        return module(x.transpose(1, 2)).transpose(1, 2) if family.norm_head_first else module(x)

    def _split(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """W_Q, W_K, W_V as [its own heads, d_model, d_head]."""
        self._size(layer)  # refused where there is no attention
        family = self.view.family
        if family.qkv is None:
            weights = [self._in_out(self.view.part(layer, path)) for path in (family.q, family.k, family.v)]
            q, k, v = (rearrange(w, "m (h d) -> h m d", h=h) for w, h in zip(weights, self._heads(layer), strict=True))
        else:
            q, k, v = self._unpacked(layer, self._in_out(self.view.part(layer, family.qkv)))
        if self.view.is_damped(layer):
            q, k = torch.cat([q, k], -1), torch.cat([k, -q], -1)
        return q * self._prescale(layer), k, v

    def _biases(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        family, view = self.view.family, self.view
        if family.qkv is None:
            paths = (family.q, family.k, family.v)
            biases = [self._numbers(view.part(layer, path), "bias") for path in paths]
            sizes = (view.d_head, view.d_head, view.d_value)
            zeros = [
                torch.zeros(h * d, dtype=view.dtype, device=view.device)
                for h, d in zip(self._heads(layer), sizes, strict=True)
            ]
            biases = [zero if bias is None else bias for bias, zero in zip(biases, zeros, strict=True)]
            q, k, v = (rearrange(b, "(h d) -> h d", h=h) for b, h in zip(biases, self._heads(layer), strict=True))
        else:
            bias = self._numbers(view.part(layer, family.qkv), "bias")
            if bias is None:
                bias = torch.zeros(sum(self._heads(layer)) * view.d_head, dtype=view.dtype, device=view.device)
            q, k, v = (packed[:, 0] for packed in self._unpacked(layer, bias[None]))
        return q * self._prescale(layer), k, v

    def _unpacked(self, layer: int, packed: Float[Tensor, "m packed"]) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value columns of a fused projection, per head."""
        if self.view.family.packing is Packing.PER_HEAD:
            q, k, v = rearrange(packed, "m (h three d) -> three h m d", three=3, h=self._size(layer).n_heads)
            return q, k, v
        parts = packed.split([h * self.view.d_head for h in self._heads(layer)], dim=1)
        q, k, v = (rearrange(p, "m (h d) -> h m d", h=h) for p, h in zip(parts, self._heads(layer), strict=True))
        return q, k, v

    def _size(self, layer: int) -> Sizes:
        """Heads of a layer. Refused where an edit has taken them away."""
        size = self.view.sizes[layer]
        if not size.n_heads:
            raise Refused(f"weights of layer {layer} asked for; an edit has taken its attention away: use other layers")
        return size

    def _heads(self, layer: int) -> tuple[int, int, int]:
        size = self._size(layer)
        return size.n_heads, size.n_kv_heads, size.n_kv_heads

    def _prescale(self, layer: int) -> float:
        return self.view.part(layer, self.view.family.attn).scaling if self.view.family.prescaled else 1.0

    def _repeated(self, layer: int, per_group: Tensor, dim: int = 0) -> Tensor:
        size = self._size(layer)
        return per_group.repeat_interleave(size.n_heads // size.n_kv_heads, dim)

    def _in_out(self, module: nn.Module) -> Float[Tensor, "inputs outputs"]:
        """The weight of a projection as [in, out], wherever and however it is kept."""
        return linear_map(module, transposed=self.view.family.transposed).to(self.view.device)

    def _numbers(self, module: nn.Module, name: str) -> Tensor | None:
        """A bias or gain of a module; None where it has none."""
        found = numbers(module, name)
        return None if found is None else found.to(self.view.device)
