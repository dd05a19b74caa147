"""Prefix sensitivity: how a token's direction, and what turns it, answer when the text long before it is another.

Read at the last token of every window. The text before its last `keep` tokens is exchanged for that of another window.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Float64
from torch import Tensor

from rheoscope.corpus import Batch, batches
from rheoscope.errors import RheoscopeError
from rheoscope.instruments.steering.steering import EPSILON
from rheoscope.instruments.steering.steps import angle, deficit, exact, tangential
from rheoscope.models.field import derivative, ffn_field, layer_is_parallel
from rheoscope.models.view import ModelView
from rheoscope.stats import ratio_of_sums
from rheoscope.surgery.edits import Edit, edited
from rheoscope.surgery.edits_steering import OtherPrefix
from rheoscope.surgery.passes import Passes

READINGS = ("prefix_turn", "prefix_deficit_change", "prefix_defect_change")
N_PROBES = 2  # random directions per source of the response
N_SOURCES = 6  # positions whose influence is followed
N_WINDOWS = 4  # windows the response is read on


def prefix_readings(passes: Passes, *, keeps: Sequence[int] | None = None, seed: int = 0) -> xr.Dataset:
    """Turn of the last token, and change of its deficit and defect, for every length of kept text; response by lag.

    Raises RheoscopeError for a kept length that leaves no prefix, and for windows that are not full.
    """
    view, corpus = passes.view, passes.corpus
    keeps = default_keeps(corpus.window) if keeps is None else sorted(set(keeps))
    if not keeps or not 1 <= keeps[0] <= keeps[-1] < corpus.window:
        raise RheoscopeError(
            f"a prefix before the last {keeps} tokens asked for; the windows have {corpus.window}: keep fewer of them"
        )
    if (corpus.lengths < corpus.window).any() or corpus.n_windows < 2:
        raise RheoscopeError('another prefix needs two or more full windows: read the text with tail="drop"')
    size = max(2, min(passes.batch_size, corpus.n_windows))
    values: dict[int, list[np.ndarray]] = {keep: [] for keep in keeps}
    units = []
    for batch in _pairs_at_least(list(batches(corpus, size))):
        plain = _last_tokens(view, batch)
        units.append(corpus.units[batch.windows.numpy()])
        for keep in keeps:
            values[keep].append(_changes(plain, _last_tokens(view, batch, OtherPrefix(keep=keep))))
        passes.n_run += 1 + len(keeps)
    response, lags = attention_response(view, corpus.tokens[:N_WINDOWS], seed=seed)
    data = _by_unit(values, np.concatenate(units)) | {"attention_response": (("layer", "lag"), response)}
    return xr.Dataset(data, coords={"keep": keeps, "layer": np.arange(view.n_layers), "lag": lags})


def default_keeps(window: int) -> list[int]:
    """Powers of two below the window."""
    return [2**k for k in range(window.bit_length()) if 2**k < window]


@torch.no_grad()
def attention_response(
    view: ModelView, tokens: np.ndarray, *, n_sources: int = N_SOURCES, n_probes: int = N_PROBES, seed: int = 0
) -> tuple[Float64[np.ndarray, "layer lag"], np.ndarray]:
    """K by lag: ‖P_u ∂A_t/∂x_s‖, root mean square over the windows, some sources s and all t = s + lag.

    The Frobenius norm from random probes: E‖J w‖² = ‖J‖² for w of unit covariance. Whatever lies ahead of t has no
    influence on a causal model, so lags are 0 or more.
    """
    text = torch.tensor(tokens, dtype=torch.int64)
    window = text.shape[1]
    generator = torch.Generator().manual_seed(seed)
    sources = np.unique(np.linspace(0, window - 2, n_sources).round().astype(int))
    sums, counts = np.zeros((view.n_layers, window)), np.zeros(window)
    for source in sources:
        counts[: window - source] += len(text)
        rows = source_response(view, text, source=int(source), n_probes=n_probes, generator=generator)
        sums[:, : window - source] += rows[..., source:].square().sum(1).double().cpu().numpy()
    lags = np.flatnonzero(counts)
    return np.sqrt(sums[:, lags] / counts[lags]), lags


def source_response(
    view: ModelView, text: Tensor, *, source: int, n_probes: int = N_PROBES, generator: torch.Generator | None = None
) -> Float[Tensor, "layer window position"]:
    """K(t, s) = ‖P_u ∂A_t/∂x_s‖ of every layer for one source s and every t, estimated from random probes.

    Every layer is given its own stream again, with a direction to differentiate in, so one pass does for all of them.
    """
    stream: list[Tensor] = []
    with view.tapped({"resid_pre": lambda _, x: stream.append(x.clone())}):
        view.forward(text, head=False)
    x = torch.stack(stream)

    def written(places: Tensor) -> Tensor:
        kept: list[Tensor] = []
        taps = {
            "resid_pre": lambda layer, _: places[layer],
            "attn_probs": lambda _, probs: None,  # maps: fused attention has no forward derivative
            "attn_out": lambda _, A: kept.append(A.clone()),
            "ffn_in": lambda _, y: y.detach(),  # what the FFN makes of it goes nowhere
        }
        with view.tapped(taps):
            view.forward(text, head=False)
        return torch.stack(kept)

    total = torch.zeros(x.shape[:3], dtype=exact(x).dtype, device=x.device)
    for _ in range(n_probes):
        probe = torch.zeros_like(x)
        drawn = torch.randn(len(x), x.shape[1], x.shape[3], generator=generator, dtype=torch.float64)
        probe[:, :, source] = drawn.to(x)
        with torch.enable_grad():  # maps are then made anew rather than in a workspace, as derivatives need
            change = derivative(written, x, probe)[1].detach()
        total += tangential(exact(change), exact(x)).square().sum(-1)
    return (total / n_probes).sqrt()


@torch.no_grad()
def _last_tokens(view: ModelView, batch: Batch, *edits: Edit) -> dict[str, Float[Tensor, "layer window d_model"]]:
    """x, A, F and Φ(x) of the last token of every window, by layer."""
    kept: dict[str, list[Tensor]] = {site: [] for site in ("resid_pre", "attn_out", "ffn_out")}
    taps = {site: lambda _, value, site=site: kept[site].append(value[:, -1].clone()) for site in kept}
    with edited(view, *edits), view.tapped(taps):
        view.forward(batch.tokens, batch.valid, head=False)
    x, A, F = (torch.stack([exact(row) for row in rows]) for rows in kept.values())
    alone = torch.stack(
        [F[k] if layer_is_parallel(view, k) else exact(ffn_field(view, k, row)) for k, row in enumerate(x)]
    )
    return {"x": x, "deficit": deficit(A, A + F, x), "defect": _defect(F, alone)}


def _defect(F: Tensor, alone: Tensor) -> Tensor:
    return (F - alone).norm(dim=-1) / (alone.norm(dim=-1) + EPSILON)


def _changes(plain: dict[str, Tensor], other: dict[str, Tensor]) -> Float64[np.ndarray, "window reading layer"]:
    """Turn of the stream, and absolute changes of deficit and defect."""
    turn = angle(plain["x"], other["x"])
    changes = [turn, *((other[name] - plain[name]).abs() for name in ("deficit", "defect"))]
    return torch.stack(changes).double().cpu().numpy().transpose(2, 0, 1)


def _by_unit(values: dict[int, list[np.ndarray]], units: np.ndarray) -> dict[str, tuple]:
    """Means over windows with errors over units."""
    stacked = np.stack([np.concatenate(parts) for parts in values.values()], 1)  # window keep reading layer
    sums, counts = np.zeros((units.max() + 1, *stacked.shape[1:])), np.zeros(units.max() + 1)
    np.add.at(sums, units, stacked)
    np.add.at(counts, units, 1)
    estimate = ratio_of_sums(sums, counts)
    data = {}
    for index, name in enumerate(READINGS):
        data[name] = ("keep", "layer"), estimate.value[:, index]
        data[f"{name}_se"] = ("keep", "layer"), estimate.se[:, index]
    return data


def _pairs_at_least(parts: list[Batch]) -> list[Batch]:
    """Batches of two windows or more: a last one of a single window is left out, as it has no other text beside it."""
    return [batch for batch in parts if len(batch.tokens) > 1]
