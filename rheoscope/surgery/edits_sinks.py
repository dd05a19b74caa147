"""Edits of attention patterns: send a head to the sink or to itself, mix evenly, freeze it, or take it out.

Heads are pairs (layer, head). Which keys a query may attend to is read off the maps: those that some head of the layer
gives more than 0. Positions count from the start of the row, so windows must not be padded on the left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rheoscope.errors import RheoscopeError
from rheoscope.models.interface import Tap
from rheoscope.models.view import ModelView
from rheoscope.surgery.edits import Edit

Heads = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class HeadEdit(Edit):
    """One change of some heads. heads: pairs (layer, head); `layers` follows from them and need not be given."""

    heads: Heads = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(sorted({layer for layer, _ in self.heads})))

    def of_layer(self, layer: int) -> list[int]:
        """The heads of one layer that change."""
        return sorted({head for of, head in self.heads if of == layer})

    def refuse_unknown(self, view: ModelView) -> None:
        """Raise RheoscopeError where there is no head to change, or one that the model does not have."""
        if not self.heads:
            raise RheoscopeError(f"{type(self).__name__} asked for without heads: give pairs (layer, head)")
        for layer, head in self.heads:
            if not 0 <= layer < view.n_layers:
                raise RheoscopeError(f"head {layer, head} asked for; the model has layers 0 to {view.n_layers - 1}")
            n_heads = view.sizes[layer].n_heads
            if not 0 <= head < n_heads:
                has = f"heads 0 to {n_heads - 1}" if n_heads else "no heads left"
                raise RheoscopeError(f"head {layer, head} asked for; layer {layer} has {has}")


@dataclass(frozen=True)
class SinkOneHot(HeadEdit):
    """All attention on one key. Queries that may not attend to it keep their own pattern."""

    position: int = 0

    def taps(self, view: ModelView) -> Mapping[str, Tap]:
        self.refuse_unknown(view)

        def tap(layer: int, probs: Tensor) -> Tensor:
            if not 0 <= self.position < probs.shape[-1]:
                raise RheoscopeError(
                    f"a sink at position {self.position} asked for in rows of {probs.shape[-1]} tokens: "
                    "give a position inside"
                )
            changed, heads = probs.clone(), self.of_layer(layer)
            sees = visible(probs)[:, None, :, self.position, None]
            one_hot = torch.zeros_like(probs[:, heads])
            one_hot[..., self.position] = 1.0
            changed[:, heads] = torch.where(sees, one_hot, probs[:, heads])
            return changed

        return {"attn_probs": tap}


@dataclass(frozen=True)
class IdentityHeads(HeadEdit):
    """All attention of every token on itself: A = I."""

    def taps(self, view: ModelView) -> Mapping[str, Tap]:
        self.refuse_unknown(view)

        def tap(layer: int, probs: Tensor) -> Tensor:
            changed = probs.clone()
            changed[:, self.of_layer(layer)] = torch.eye(probs.shape[-1], dtype=probs.dtype, device=probs.device)
            return changed

        return {"attn_probs": tap}


@dataclass(frozen=True)
class DiagonalHeads(HeadEdit):
    """The head as a map of each token alone, x W_V W_O, computed from the weights: attention is not needed for it."""

    def taps(self, view: ModelView) -> Mapping[str, Tap]:
        self.refuse_unknown(view)
        values: dict[int, Tensor] = {}

        def keep(layer: int, x: Tensor) -> None:
            values[layer] = view.weights.values(layer, x)

        def tap(layer: int, z: Tensor) -> Tensor:
            return with_heads(z, self.of_layer(layer), lambda heads: values.pop(layer)[:, heads])

        return {"attn_in": keep, "z": tap}


@dataclass(frozen=True)
class DropHeads(HeadEdit):
    """Heads that write nothing. What the layer's output bias adds stays."""

    def taps(self, view: ModelView) -> Mapping[str, Tap]:
        self.refuse_unknown(view)
        return {"z": lambda layer, z: with_heads(z, self.of_layer(layer), lambda heads: torch.zeros_like(z[:, heads]))}


@dataclass(frozen=True)
class ConstantHeads(HeadEdit):
    """Heads that write the same at every token. constants: z of each head, in the order of `heads`."""

    constants: tuple[tuple[float, ...], ...] = ()

    def taps(self, view: ModelView) -> Mapping[str, Tap]:
        self.refuse_unknown(view)
        if len(self.constants) != len(self.heads) or any(len(c) != view.d_value for c in self.constants):
            raise RheoscopeError(
                f"{len(self.heads)} constant heads asked for with {len(self.constants)} constants: give one of "
                f"{view.d_value} numbers for each head"
            )
        by_head = dict(zip(self.heads, self.constants, strict=True))

        def tap(layer: int, z: Tensor) -> Tensor:
            def constant(heads: list[int]) -> Tensor:
                return z.new_tensor([by_head[layer, head] for head in heads])[:, None].expand_as(z[:, heads])

            return with_heads(z, self.of_layer(layer), constant)

        return {"z": tap}


@dataclass(frozen=True)
class UniformMixing(Edit):
    """All heads of the layers attend by A_a = (1 - a) I + a U, with U even over the keys that a query may attend to."""

    a: float = 1.0

    def taps(self, view: ModelView) -> Mapping[str, Tap]:
        if not 0 <= self.a <= 1:
            raise RheoscopeError(f"mixing a = {self.a} asked for: give a number from 0 to 1")

        def tap(_layer: int, probs: Tensor) -> Tensor:
            seen = visible(probs).to(probs)
            even = seen / seen.sum(-1, keepdim=True).clamp(min=1)
            own = torch.eye(probs.shape[-1], dtype=probs.dtype, device=probs.device)
            return ((1 - self.a) * own + self.a * even)[:, None].expand_as(probs)

        return {"attn_probs": tap}


def visible(probs: Float[Tensor, "batch head query key"]) -> Bool[Tensor, "batch query key"]:
    """Keys to which some head of the layer gives more than 0: all that the mask allows, short of underflow in all."""
    return (probs > 0).any(1)


def with_heads(
    z: Float[Tensor, "batch head query d_value"],
    heads: list[int],
    replacement: Callable[[list[int]], Float[Tensor, "batch chosen query d_value"]],
) -> Float[Tensor, "batch head query d_value"]:
    """z with some heads replaced."""
    changed = z.clone()
    changed[:, heads] = replacement(heads)
    return changed
