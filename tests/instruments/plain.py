"""The readings of `routing` and `loss` from their definitions, by plain transformers and dense N x N matrices.

Nothing here comes from the library: transformers' own eager attention is listened to, and every window goes through
the model alone and without padding.
"""

import math
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import naive
from tests.tiny import Float64Throughout


@dataclass
class Call:
    """One attention call of one window: queries, keys repeated for their group [head position d_head], and the map."""

    Q: Tensor
    K: Tensor
    scale: float
    probs: Tensor


@torch.no_grad()
def calls_of(model, tokens):
    """What transformers' eager attention is given and makes of it in every layer, and the logits, for one window."""
    calls = []
    homes = {type(module).__module__ for module in model.modules()}
    with pytest.MonkeyPatch.context() as patch:
        for home in map(sys.modules.get, homes):
            eager = getattr(home, "eager_attention_forward", None)
            if eager is not None:
                patch.setattr(home, "eager_attention_forward", _listening(eager, calls))
        with Float64Throughout():
            logits = model(input_ids=torch.as_tensor(tokens, dtype=torch.int64)[None], use_cache=False).logits
    return calls, logits[0].double()


def _listening(eager, calls):
    def attend(module, query, key, value, attention_mask, scaling, **others):
        output, probs = eager(module, query, key, value, attention_mask, scaling=scaling, **others)
        Q = query[0].double()
        calls.append(Call(Q, naive.repeated(key[0].double(), len(Q)), scaling, probs[0].double()))
        return output, probs

    return attend


def every_window(model, corpus):
    """Calls [window][layer] and logits [window] of the tokens of every window, padding cut off."""
    rows = [calls_of(model, window[:length]) for window, length in zip(corpus.tokens, corpus.lengths, strict=True)]
    return [calls for calls, _ in rows], [logits for _, logits in rows]


def ranks(values):
    """k90, k95, k99, entropy rank and participation ratio of each spectrum [head value], from their definitions."""
    shares = values**2 / (values**2).sum(-1, keepdim=True)
    readings = {
        f"k{level}": torch.tensor([naive.rank_at_share(one, level / 100) for one in values]).double()
        for level in (90, 95, 99)
    }
    readings["entropy_rank"] = torch.exp(-(shares * shares.clamp(min=1e-300).log()).sum(-1))
    readings["participation"] = (values**2).sum(-1) ** 2 / (values**4).sum(-1)
    return readings


def ranks_of(M, prefix="", *, gauge=True):
    """The ranks of the routing, the filtering and the whole of M, and of the routing without its gauge part."""
    S, F = naive.skew(M), naive.symmetric(M)
    parts = {"routing_{}": S, "filtering_{}": F, "score_{}": M}
    if gauge:
        parts["routing_{}_gauge_removed"] = S - naive.gauge_part(S)
    return {
        prefix + name.format(rank): value
        for name, part in parts.items()
        for rank, value in ranks(torch.linalg.svdvals(part)).items()
    }


def spectra_of(call):
    """Readings per head of one window that need its spectrum, and the eigenvalues of M that are not zero."""
    M = naive.scores(call.Q, call.K, call.scale)
    n, d_head = call.Q.shape[1:]
    readings = ranks_of(M)
    readings["utilisation"] = readings["routing_k90"] / min(n, 2 * d_head)
    eigenvalues = torch.linalg.eigvals(M)
    largest = eigenvalues.abs().argsort(-1, descending=True)[:, : min(n, d_head)]
    eigenvalues = eigenvalues.gather(-1, largest)
    readings["stability_max_re"] = eigenvalues.real.amax(-1)
    readings["stability_share_positive"] = (eigenvalues.real > 0).double().mean(-1)
    return readings, eigenvalues


def sums_of(call):
    """Numerator and denominator of every share of one window, per head."""
    M = naive.scores(call.Q, call.K, call.scale)
    S = naive.skew(M)
    diagonal = torch.stack([sum(M[:, i, i] ** 2 for i in range(M.shape[-1]))])[0]
    return {
        "routing_share": (naive.energy(S), naive.energy(M)),
        "diagonal_share": (diagonal, naive.energy(M)),
        "gauge_share": (naive.energy(naive.gauge_part(S)), naive.energy(S)),
    }


def sums_by_lag(call, lags):
    """Σ S² and Σ M² over all heads and all ordered pairs at each distance."""
    M = naive.scores(call.Q, call.K, call.scale)
    S, n = naive.skew(M), M.shape[-1]
    sums = np.zeros((2, len(lags)))
    for place, lag in enumerate(lags):
        for i, j in np.ndindex(n, n):
            if abs(i - j) == lag:
                sums[:, place] += float((S[:, i, j] ** 2).sum()), float((M[:, i, j] ** 2).sum())
    return sums


def attention_by_lag(call, window):
    """Attention mass of every head at each signed lag, query minus key, from -(window - 1) to window - 1."""
    mass = np.zeros((len(call.probs), 2 * window - 1))
    for i, j in np.ndindex(*call.probs.shape[1:]):
        mass[:, i - j + window - 1] += call.probs[:, i, j].numpy()
    return mass


def ratio(numerators, denominators, units):
    """Σn/Σd over units and its linearised standard error, unit by unit: [window *shape] → value, error."""
    numbers = sorted(set(units.tolist()))
    n = np.stack([sum(numerators[i] for i in np.flatnonzero(units == unit)) for unit in numbers])
    d = np.stack([sum(denominators[i] for i in np.flatnonzero(units == unit)) for unit in numbers])
    present, value = (n != 0) | (d != 0), n.sum(0) / d.sum(0)
    m = present.sum(0)
    return value, np.sqrt(m / (m - 1) * ((n - value * d) ** 2).sum(0)) / np.abs(d.sum(0))


def nll_of(logits, tokens):
    """Negative log-likelihood in nats of every token but the first."""
    return [-float(torch.log_softmax(logits[i - 1], -1)[tokens[i]]) for i in range(1, len(tokens))]


def bits(nats):
    return nats / math.log(2)
