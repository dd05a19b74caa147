"""Positions: added to the token embeddings (learned, Morlet) or turned into queries and keys (rotary)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

LOWEST_FREQUENCY = 1.0  # radians per token, as published
HIGHEST_AT_START = 0.99 * math.pi
HIGHEST_ALLOWED = 0.95 * math.pi
ADMISSIBLE = 5.0  # a Morlet wavelet's frequency times its width


class MorletPositions(nn.Module):
    """Damped waves exp(-p²/2σ_k²) (cos ω_k p, sin ω_k p) in coordinates 2k and 2k + 1, σ_k = 5/ω_k, ω_k learned.

    The published form: the envelope decays from absolute position 0, so beyond some twenty tokens all positions look
    alike. ω starts log-spaced from 1 to 0.99 π and is held at or below 0.95 π when used.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.log_frequency = nn.Parameter(torch.empty(d_model // 2))

    def start(self) -> Float[Tensor, " pair"]:
        """Logarithms of the frequencies before training."""
        return torch.linspace(math.log(LOWEST_FREQUENCY), math.log(HIGHEST_AT_START), len(self.log_frequency))

    def forward(self, position_ids: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d_model"]:
        frequency = self.log_frequency.exp().clamp_max(HIGHEST_ALLOWED)
        phase = position_ids[..., None].to(frequency.dtype) * frequency
        envelope = torch.exp(-0.5 * (phase / ADMISSIBLE) ** 2)
        return torch.stack([envelope * phase.cos(), envelope * phase.sin()], -1).flatten(-2)


class RotaryPositions(nn.Module):
    """Cosines and sines of the rotary angles, coordinate i paired with i + d_head/2, in float32 or wider."""

    def __init__(self, d_head: int, theta: float) -> None:
        super().__init__()
        self.d_head, self.theta = d_head, theta

    def forward(
        self,
        x: Float[Tensor, "batch position d_model"],
        position_ids: Int[Tensor, "batch position"],
        d_head: int | None = None,
    ) -> tuple[Float[Tensor, "batch position d_head"], Float[Tensor, "batch position d_head"]]:
        """For heads of `d_head`, by default those of the first layer; x gives device and precision."""
        size = d_head or self.d_head
        exact = torch.promote_types(x.dtype, torch.float32)
        steps = torch.arange(0, size, 2, device=x.device, dtype=exact) / size
        angles = position_ids[..., None].to(exact) * self.theta**-steps
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


def rotated(
    x: Float[Tensor, "batch head position d_head"],
    cos: Float[Tensor, "batch position d_head"],
    sin: Float[Tensor, "batch position d_head"],
) -> Float[Tensor, "batch head position d_head"]:
    """x turned by the rotary angle of its position."""
    first, second = x.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return x * cos[:, None].to(x.dtype) + turned * sin[:, None].to(x.dtype)
