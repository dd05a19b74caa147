"""Modules that stand in an edited model in place of what was taken out.

Classes with a mixin are made of the family's own: paths, names of weights and `isinstance` stay as they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class OutputBias(nn.Module):
    """What is left of an output projection whose heads are gone: its bias, or nothing, for every token."""

    def __init__(self, d_model: int, bias: Tensor | None):
        super().__init__()
        self.d_model = d_model
        self.bias = bias if bias is None else nn.Parameter(bias.detach())

    def forward(self, x: Float[Tensor, "*shape any"]) -> Float[Tensor, "*shape d_model"]:
        shape = (*x.shape[:-1], self.d_model)
        return x.new_zeros(shape) if self.bias is None else self.bias.to(x.dtype).expand(shape)


class NoAttention(nn.Module):
    """An attention module that is gone: nothing of one token reaches another.

    output: what it writes for every token; None in families whose output projection is another module (BERT).
    """

    head_dim = 0  # our own decoder asks for it to choose rotary angles: there are none of this width

    def __init__(self, output: OutputBias | None):
        super().__init__()
        self.output = output

    def forward(self, hidden_states: Float[Tensor, "*shape d"], *_: Any, **__: Any) -> tuple[Tensor, None]:
        return hidden_states[..., :0] if self.output is None else self.output(hidden_states), None


class TokenMap(nn.Module):
    """Heads as a map of each token alone: x W_V + b_V, clipped where the family clips, times W_O.

    One value serves all heads of its group, so their W_O are added. Without `o` (BERT) the values themselves.
    """

    def __init__(self, v: nn.Linear, o: nn.Linear | None, clip: float | None):
        super().__init__()
        self.v, self.o, self.clip = v, o, clip

    @property
    def n_beside(self) -> int:
        """Inputs of the output projection that it fills."""
        return self.v.out_features if self.o is None else 0

    def forward(self, x: Float[Tensor, "*shape d_model"]) -> Float[Tensor, "*shape out"]:
        value = self.v(x)
        value = value if self.clip is None else value.clamp(-self.clip, self.clip)
        return value if self.o is None else self.o(value)


class Widened(nn.Module):
    """A projection to fewer coordinates, which are put in their places among the former ones; the others are 0.

    Stands where modules of the family expect the former width. `weight` and `bias` are those of that width.
    """

    def __init__(self, narrow: nn.Linear, places: Int[Tensor, " narrow"], n_out: int, *, transposed: bool):
        super().__init__()
        self.narrow, self.n_out, self.transposed = narrow, n_out, transposed
        self.register_buffer("places", places)

    @property
    def weight(self) -> Tensor:
        wide = self._wide(self.narrow.weight.T)
        return wide if self.transposed else wide.T

    @property
    def bias(self) -> Tensor | None:
        return None if self.narrow.bias is None else self._wide(self.narrow.bias)

    def forward(self, x: Float[Tensor, "*shape d_model"]) -> Float[Tensor, "*shape out"]:
        return self._wide(self.narrow(x))

    def _wide(self, y: Tensor) -> Tensor:
        return y.new_zeros(*y.shape[:-1], self.n_out).index_copy(-1, self.places, y)


class WithTokenMaps:
    """Mixin of an attention module: what its `token_maps` write is added to what it writes, or set beside its z."""

    token_maps: nn.ModuleList

    def forward(self, hidden_states: Float[Tensor, "*shape d_model"], *args: Any, **kwargs: Any) -> tuple:
        out, *rest = super().forward(hidden_states, *args, **kwargs)
        for token_map in self.token_maps:
            mapped = token_map(hidden_states)
            out = torch.cat([out, mapped], -1) if token_map.n_beside else out + mapped
        return (out, *rest)


class ParallelBlock:
    """Mixin of a block: its feed-forward network reads the stream that entered the block.

    Only the output of the norm before it is exchanged: what enters that norm is still the stream with attention added.
    """

    parallel_norm: str

    def forward(self, hidden_states: Float[Tensor, "batch position d_model"], *args: Any, **kwargs: Any) -> Any:
        norm = self.get_submodule(self.parallel_norm)
        norm.stream = hidden_states
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            norm.stream = None


def norm_of_stream(norm: nn.Module, _args: tuple, output: Tensor) -> Tensor:
    """Hook of the norm before a parallel feed-forward network: the norm of the stream that its block has put there."""
    return output if norm.stream is None else norm.forward(norm.stream).reshape(output.shape)  # OPT flattens


def linear_of(in_out: Float[Tensor, "inputs outputs"], bias: Tensor | None) -> nn.Linear:
    """A linear module that holds copies of the given numbers."""
    module = nn.Linear(1, 1, bias=False, device="meta")  # of no size yet: torch warns of initialising an empty one
    module.in_features, module.out_features = in_out.shape
    module.weight = nn.Parameter(in_out.T.contiguous().clone())
    set_bias(module, bias)
    return module


def set_bias(projection: nn.Module, bias: Tensor | None) -> None:
    """Give a projection a copy of a bias, or none."""
    projection.bias = None if bias is None else nn.Parameter(bias.detach().clone())


@cache
def _mixed(mixin: type, kind: type) -> type:
    return type(f"{mixin.__name__}{kind.__name__}", (mixin, kind), {"__module__": kind.__module__})


def mix_in(module: nn.Module, mixin: type) -> None:
    """Make a module of its own class and a mixin."""
    if not isinstance(module, mixin):
        module.__class__ = _mixed(mixin, type(module))
