"""Edits of the feed-forward steering: what the FFN writes, what it reads, how much attention pulls, what comes before.

u is the direction of the stream that the feed-forward network reads: of resid_mid, of resid_pre in parallel blocks, and
in blocks with a norm on the stream (BERT) of that normed stream, which is what their own formula adds F to.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rheoscope.errors import Refused, RheoscopeError
from rheoscope.instruments.steering.steps import exact, tangential
from rheoscope.instruments.steering.strongest import strongest
from rheoscope.models.attention import Attention
from rheoscope.models.families import Residual
from rheoscope.models.field import ffn_is_parallel
from rheoscope.models.interface import Tap
from rheoscope.models.view import ModelView
from rheoscope.surgery.edits import Edit

MASSIVE = 20.0  # a token is massive where its length is above this many times the median of its window
SPARED = ("none", "first", "massive")


@dataclass(frozen=True)
class TermEdit(Edit):
    """One change of what attention or the feed-forward network writes.

    spare: tokens left alone. "first": the first of each window; "massive": also every one that in the layer, before or
    after what the term adds, is over MASSIVE times as long as the median token of its window.
    """

    spare: str = "none"
    site: ClassVar[str] = "ffn_out"

    @abstractmethod
    def kept(self, F: Float[Tensor, "*shape d_model"], y: Float[Tensor, "*shape d_model"]) -> Tensor:
        """What is written instead of F to the stream y."""

    def taps(self, view: ModelView) -> Mapping[str, Tap]:
        if self.spare not in SPARED:
            raise RheoscopeError(f"spare={self.spare!r} asked for; the choices are {', '.join(SPARED)}")
        seen: dict[str, Tensor] = {}

        def keep(layer: int, x: Tensor) -> None:
            seen["stream"] = x

        def keep_valid(layer: int, attention: Attention) -> None:
            seen["valid"] = _valid(attention)

        def write(layer: int, F: Tensor) -> Tensor:
            y = seen["stream"]
            new = self.kept(exact(F), exact(y)).to(F)
            if self.spare == "none":
                return new
            return torch.where(_spared(self.spare, y, y + F, seen["valid"])[..., None], F, new)

        before_attention = self.site == "attn_out" or ffn_is_parallel(view)
        taps: dict[str, Tap] = {"resid_pre" if before_attention else "resid_mid": keep, self.site: write}
        return taps if self.spare == "none" else {"attention": keep_valid, **taps}


@dataclass(frozen=True)
class ZeroFFN(TermEdit):
    """The feed-forward network writes nothing."""

    def kept(self, F: Float[Tensor, "*shape d_model"], y: Float[Tensor, "*shape d_model"]) -> Tensor:
        return torch.zeros_like(F)


@dataclass(frozen=True)
class RadialFFN(TermEdit):
    """The feed-forward network writes <u, F> u alone: lengths change, directions do not."""

    def kept(self, F: Float[Tensor, "*shape d_model"], y: Float[Tensor, "*shape d_model"]) -> Tensor:
        return F - tangential(F, y)


@dataclass(frozen=True)
class TangentialFFN(TermEdit):
    """The feed-forward network writes F - <u, F> u alone: directions turn, lengths change to second order only."""

    def kept(self, F: Float[Tensor, "*shape d_model"], y: Float[Tensor, "*shape d_model"]) -> Tensor:
        return tangential(F, y)


@dataclass(frozen=True)
class GateFFN(Edit):
    """What the feed-forward networks write, times one number per edited layer, in ascending order of the layers."""

    gates: tuple[float, ...] = ()

    def taps(self, view: ModelView) -> Mapping[str, Tap]:
        chosen = sorted(set(self.layers)) or list(range(view.n_layers))
        if len(self.gates) != len(chosen):
            raise RheoscopeError(f"{len(self.gates)} gates given for {len(chosen)} layers: give one for each")
        if not all(math.isfinite(gate) for gate in self.gates):
            raise RheoscopeError(f"gates {self.gates} given: give finite numbers")
        gate = dict(zip(chosen, self.gates, strict=True))
        return {"ffn_out": lambda layer, F: F * gate[layer]}


@dataclass(frozen=True)
class ZeroAttention(TermEdit):
    """Attention writes nothing."""

    site: ClassVar[str] = "attn_out"

    def kept(self, F: Float[Tensor, "*shape d_model"], y: Float[Tensor, "*shape d_model"]) -> Tensor:
        return torch.zeros_like(F)


@dataclass(frozen=True)
class AttentionGain(Edit):
    """What attention writes, times a gain: more pull of the tokens on one another, or less."""

    gain: float = 1.0

    def taps(self, view: ModelView) -> Mapping[str, Tap]:
        return {"attn_out": lambda layer, A: A * self.gain}


@dataclass(frozen=True)
class TopAttention(Edit):
    """Only the k largest attention weights of every row, scaled to the row's former sum."""

    k: int = 16

    def taps(self, view: ModelView) -> Mapping[str, Tap]:
        if self.k < 1:
            raise RheoscopeError(f"the {self.k} largest attention weights asked for; ask for at least 1")
        return {"attn_probs": lambda layer, probs: None if self.k >= probs.shape[-1] else strongest(probs, self.k)}


@dataclass(frozen=True)
class ParallelFFN(Edit):
    """The feed-forward network reads what attention reads: x + A + Φ(x + A) becomes x + A + Φ(x).

    Changes nothing where a family's blocks are parallel as they are.
    """

    def taps(self, view: ModelView) -> Mapping[str, Tap]:
        if ffn_is_parallel(view):
            return {}
        if view.family is not None and view.family.residual is Residual.POST_NORM:
            raise Refused(
                f"parallel layers asked for; {view.model_type} norms the stream between attention and FFN, so what the "
                "FFN reads and what it is added to cannot be told apart: edit another model"
            )
        stream: dict[str, Tensor] = {}

        def keep(layer: int, x: Tensor) -> None:
            stream["x"] = x

        def read(layer: int, normed: Tensor) -> Tensor:
            norm = view.family.norm_ffn
            # past the hooks of the norm: those are taps of resid_mid, which is what it was
            return view.part(layer, norm).forward(stream["x"]) if norm else stream["x"]

        return {"resid_pre": keep, "ffn_in": read}


@dataclass(frozen=True)
class OtherPrefix(Edit):
    """All but the last `keep` positions hold another text: that of the next row of the batch, the last row's the first.

    Acts on the stream that enters the first layer, where a position holds its own token and nothing else, so it is
    right for any kind of embedding and position. Rows must be full windows: a batch of at least two, without padding.
    """

    layers: tuple[int, ...] = (0,)
    keep: int = 1

    def taps(self, view: ModelView) -> Mapping[str, Tap]:
        if self.keep < 1:
            raise RheoscopeError(f"a prefix that leaves {self.keep} positions asked for; leave at least 1")

        def swap(layer: int, x: Float[Tensor, "batch position d_model"]) -> Tensor:
            batch, length = x.shape[:2]
            if self.keep >= length:
                raise RheoscopeError(
                    f"a prefix before the last {self.keep} positions asked for; the windows have {length}: "
                    "keep fewer, or read longer windows"
                )
            if batch < 2:
                raise RheoscopeError("another prefix asked for in a batch of one window; give two or more at a time")
            prefix = slice(None, length - self.keep)
            return torch.cat([x.roll(-1, 0)[:, prefix], x[:, length - self.keep :]], 1)

        return {"resid_pre": swap}


def _valid(attention: Attention) -> Bool[Tensor, "#batch position"]:
    """Positions that hold a token: those that may be attended to from themselves."""
    n = attention.q.shape[2]
    if attention.mask is None or attention.allowed is None:
        return torch.ones(1, n, dtype=torch.bool, device=attention.q.device)
    return attention.allowed.diagonal(dim1=-2, dim2=-1)[:, 0]


def _spared(
    which: str, x: Float[Tensor, "batch position d"], after: Float[Tensor, "batch position d"], valid: Tensor
) -> Bool[Tensor, "batch position"]:
    """Tokens left alone: the first of each window, and with "massive" those that dwarf the median of their window."""
    valid = valid.expand(x.shape[:2])
    spared = valid & (valid.cumsum(1) == 1)
    if which == "massive":
        for place in (x, after):
            length = exact(place).norm(dim=-1)
            median = length.where(valid, torch.nan).nanmedian(1, keepdim=True).values
            spared = spared | (length > MASSIVE * median)
    return spared
