"""How routing looks while a network trains: effective ranks of S by layer, and the spread of the damping."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor

from rheoscope.linalg import centred_factors, rank_at_share, routing_singular_values, score_factors
from rheoscope.nets.decoder import RheoscopeForCausalLM
from rheoscope.nets.kinds import Damped, SelfAttention

SHARE = 0.90


@torch.no_grad()
def training_ranks(model: RheoscopeForCausalLM, tokens: Int[Tensor, "window position"]) -> dict[str, float]:
    """Readings of every layer l, as a probe for `train`: medians over heads of means over windows.

    `routing_k90_l`, `routing_k90_gauge_removed_l`: least number of singular values of S that hold 90 % of its energy
    (2 at least), raw and with the row means removed. `damping_mean_l`, `damping_spread_l`: mean of d_i over tokens,
    and standard deviation over mean, where the layer has a damping.
    """
    readings: dict[str, float] = {}
    modules = [layer.self_attn for layer in model.model.layers]
    hooks = [
        module.register_forward_pre_hook(partial(_read, readings, layer), with_kwargs=True)
        for layer, module in enumerate(modules)
    ]
    try:
        model(tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return readings


def _read(readings: dict[str, float], layer: int, module: SelfAttention, inputs: tuple[Tensor], named: dict) -> None:
    """Readings of one layer, taken from the input of its attention before it runs."""
    hidden = inputs[0]
    q, k, scale = module.routing_vectors(hidden, named["rotation"])
    T = score_factors(q, k, scale=scale)
    for name, factors in (("", T), ("_gauge_removed", centred_factors(T))):
        ranks = rank_at_share(routing_singular_values(factors), SHARE)
        readings[f"routing_k90{name}_{layer}"] = ranks.mean(0).median().item()
    if isinstance(module, Damped):
        damping = module.damping_of(hidden).double()
        mean, spread = damping.mean((0, 2)), damping.std((0, 2))
        readings[f"damping_mean_{layer}"] = mean.median().item()
        readings[f"damping_spread_{layer}"] = (spread / mean).median().item()
