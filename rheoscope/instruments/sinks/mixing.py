"""Cosines between tokens after one attention step: natural, and with the maps replaced by A_a = (1 - a) I + a U.

The step is the layer's own: its values, its output projection, its norm on what attention adds. The first token is left
out of the cosines, since its length would outweigh all others; it is attended to like any other.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rheoscope.instruments.sinks.patterns import SKIPPED
from rheoscope.models.attention import Attention
from rheoscope.models.view import ModelView
from rheoscope.theory.smoothing import MIXING, mean_cosine, mixed, predicted_cosine, smoothing_conditions
from rheoscope.theory.visible import visible_keys


def linear_step(view: ModelView) -> bool:
    """Whether what attention adds to the stream is linear in its values, as the closed form supposes."""
    family = view.family
    return family is not None and family.attn_term in (None, family.o, family.attn)


def attention_step(
    view: ModelView, layer: int, z: Float[Tensor, "head query d_value"]
) -> Float[Tensor, "query d_model"]:
    """What a layer's attention adds to the stream if its heads hand over z.

    By `forward` of the model's own modules: a call would set off the taps that are in place.
    """
    family = view.family
    added = view.part(layer, family.o).forward(z.transpose(0, 1).flatten(1))
    if not linear_step(view):
        added = view.part(layer, family.attn_term).forward(added)
    return added * view.multiplier


def mixing_cosines(
    view: ModelView,
    layer: int,
    x: Float[Tensor, "token d_model"],
    step: Float[Tensor, "token d_model"],
    v: Float[Tensor, "kv_head token d_value"],
) -> dict[str, np.ndarray]:
    """Mean cosine before the step, after the natural one, and after A_a for every a, measured and predicted.

    A_1 is even over the keys that the layer sees. Not predicted where a sliding window hides some of those before.
    """
    sees = {"causal": view.causal, "width": view.windows[layer]}
    repeated = v.repeat_interleave(view.n_heads // view.n_kv_heads, 0)
    u = attention_step(view, layer, repeated)
    if linear_step(view):  # A_a is linear in a, and so are the steps
        evenly = attention_step(view, layer, mixed(repeated, 1.0, **sees))
        steps = ((1 - a) * u + a * evenly for a in MIXING)
    else:
        steps = (attention_step(view, layer, mixed(repeated, a, **sees)) for a in MIXING)
    measured = [mean_cosine((x + after)[1:]) for after in steps]
    found = {
        "cosine_before": mean_cosine(x[1:]),
        "cosine_after": mean_cosine((x + step)[1:]),
        "cosine_measured": torch.stack(measured),
    }
    if linear_step(view):
        conditions = smoothing_conditions(x[1:], u[1:])
        hidden = (view.windows[layer] or len(x)) < len(x)
        predicted = predicted_cosine(x[1:], u[1:], attended_mean=u.mean(0))
        found["cosine_predicted"] = torch.full_like(predicted, torch.nan) if hidden else predicted
        found |= {"dense_gain": conditions.dense_gain, "mean_gain": conditions.mean_gain}
    return {name: value.cpu().numpy() for name, value in found.items()}


def density_correlation(
    attention: Attention, x: Float[Tensor, "token d_model"], step: Float[Tensor, "token d_model"]
) -> float:
    """Correlation over tokens of how densely a query attends with how its cosine to the other tokens changes.

    Density is 1 / ΣA², relative to the number of keys that may be attended to, mean over heads. NaN in a window of
    fewer than SKIPPED + 3 tokens.
    """
    length = len(x)
    if length < SKIPPED + 3:
        return np.nan
    first, stop = visible_keys(length, causal=attention.causal, width=attention.window)
    visible = torch.from_numpy(stop - first).to(x.device)
    squares = [block.probs[0, :, :, :length].double().square().sum(-1) for _, block in attention.blocks()]
    density = (1 / torch.cat(squares, -1)[:, :length].clamp(min=1e-12) / visible).mean(0)
    change = token_cosines(x + step) - token_cosines(x)
    pairs = torch.stack([density[SKIPPED:], change[SKIPPED:]]).cpu().numpy()
    return float(np.corrcoef(pairs)[0, 1]) if (pairs.std(1) > 0).all() else np.nan


def token_cosines(y: Float[Tensor, "token d_model"]) -> Float[Tensor, " token"]:
    """Mean cosine of every token to all others but the first."""
    unit = torch.nn.functional.normalize(y.double(), dim=-1)
    return (unit @ unit[1:].sum(0) - 1) / max(len(y) - 2, 1)
