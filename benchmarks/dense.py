"""What a notebook reads off a layer once it holds q, k, the map, the stream and what was written to it: plain torch,
float32, whole tables.

Scores are M = scale Q K^T, S and F their skew and symmetric parts. Dense spectra: `svdvals` of S, of S without its
gauge part and of M, `eigvalsh` of F (half the time of `svdvals`), `eigvals` of M; one call for all heads of a window.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

FEWEST_QUERIES, LATE, OFF = 32, 8, 0.9  # as `measure` has them
Sums = dict[str, tuple[Tensor, Tensor]]


class Notebook:
    """Sums of every reading by layer, divided once, and the seconds that dense spectra took, by `clock`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.sums: dict[str, dict[int, list[Tensor]]] = defaultdict(dict)
        self.seconds: dict[str, float] = defaultdict(float)

    def add(self, layer: int, sums: Sums) -> None:
        """Add numerators and denominators of some windows of a layer, [window] or [window head]."""
        for name, pair in sums.items():
            totals = [part.double().sum(0) for part in pair]
            before = self.sums[name].get(layer, (0, 0))
            self.sums[name][layer] = [old + new for old, new in zip(before, totals, strict=True)]

    def readings(self) -> dict[str, list]:
        """Values by layer, or by layer and head."""
        return {
            name: torch.stack([layers[layer][0] / layers[layer][1] for layer in sorted(layers)]).tolist()
            for name, layers in self.sums.items()
        }

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Seconds of a part of the work, added to those before."""
        started = self.clock()
        yield
        self.seconds[part] += self.clock() - started


def shares(M: Tensor) -> Sums:
    """Energies of S, of the diagonal and of the gauge part, in that of M and of S: [window head]."""
    S = (M - M.mT) / 2
    routing, score = S.square().sum((-2, -1)), M.square().sum((-2, -1))
    gauge = 2 * M.shape[-1] * S.mean(-1).square().sum(-1)
    diagonal = M.diagonal(dim1=-2, dim2=-1).square().sum(-1)
    return {"routing_share": (routing, score), "diagonal_share": (diagonal, score), "gauge_share": (gauge, routing)}


def spectra(M: Tensor, d_head: int, notebook: Notebook) -> Sums:
    """Ranks of S, F, M and of S without its gauge part, and the stability of M, by dense routines."""
    S, F = (M - M.mT) / 2, (M + M.mT) / 2
    f = S.mean(-1)
    values = {}
    with notebook.timed("svdvals of S"):
        values["routing"] = torch.linalg.svdvals(S)
    with notebook.timed("svdvals of S without its gauge part"):
        values["gauge_removed"] = torch.linalg.svdvals(S - f[..., :, None] + f[..., None, :])
    with notebook.timed("eigvalsh of F"):
        values["filtering"] = torch.linalg.eigvalsh(F).abs().sort(descending=True).values
    with notebook.timed("svdvals of M"):
        values["score"] = torch.linalg.svdvals(M)
    with notebook.timed("eigvals of M"):
        eigenvalues = torch.linalg.eigvals(M)
    largest = eigenvalues.gather(-1, eigenvalues.abs().topk(d_head).indices).real
    found = {f"{part}_{name}": value for part in values for name, value in ranks(values[part]).items()}
    found |= {"stability_max_re": largest.amax(-1), "stability_share_positive": (largest > 0).double().mean(-1)}
    return {name: (value, torch.ones_like(value)) for name, value in found.items()}


def ranks(values: Tensor) -> dict[str, Tensor]:
    """k90, k95, k99, entropy rank and participation ratio of singular values in falling order."""
    energy = values.square() / values.square().sum(-1, keepdim=True)
    running = energy.cumsum(-1)
    found = {f"k{level}": (running < level / 100).sum(-1) + 1 for level in (90, 95, 99)}
    found["entropy_rank"] = torch.special.entr(energy).sum(-1).exp()
    found["participation"] = 1 / energy.square().sum(-1)
    return found


def sinks(maps: Tensor, value_lengths: Tensor) -> Sums:
    """Masses of the sink, of the first keys, of the diagonal and of the previous token, switches, and value ratio."""
    n = maps.shape[-1]
    counts = (n - torch.arange(n)).clamp(max=n - 1)
    column_means = maps[..., 1:, :].sum(-2) / counts
    mass, key = column_means[..., : n - FEWEST_QUERIES + 1].max(-1)
    at_sink = maps.gather(-1, key[..., None, None].expand(*maps.shape[:-1], 1))[..., 0]
    late = (torch.arange(n) >= key[..., None].clamp(min=LATE)).double()
    diagonal, previous = maps.diagonal(dim1=-2, dim2=-1)[..., LATE:], maps.diagonal(-1, -2, -1)[..., LATE - 1 :]
    one = torch.ones_like(mass)
    others = (value_lengths.sum(-1) - value_lengths.gather(-1, key[..., None])[..., 0]) / (n - 1)
    return {
        "sink_mass": (mass * counts[key], counts[key]),
        "first_key_mass": (column_means[..., 0], one),
        "diagonal_mass": (diagonal.mean(-1), one),
        "previous_mass": (previous.mean(-1), one),
        "hard_switch_share": (((at_sink > OFF) * late).sum(-1), late.sum(-1)),
        "soft_switch_share": ((diagonal > OFF).double().mean(-1), one),
        "value_ratio": (value_lengths.gather(-1, key[..., None])[..., 0], others),
        "sink_at_first_share": ((key == 0).double(), one),
    }


def steering(x: Tensor, A: Tensor, F: Tensor) -> Sums:
    """Deficits, radial shares, lengths and turns of all tokens but the first of each window, and diversities."""
    x, A, F = x[:, 1:], A[:, 1:], F[:, 1:]
    mid, post = x + A, x + A + F
    step = across(A + F, x)
    values = {
        "angular_deficit": 1 - cosine(across(A, x), step),
        "ffn_deficit": 1 - cosine(across(F, x), step),
        "attention_radial_share": cosine(A, x).square(),
        "ffn_radial_share": cosine(F, mid).square(),
        "resid_norm": x.norm(dim=-1),
        "attention_norm": A.norm(dim=-1),
        "ffn_norm": F.norm(dim=-1),
        "turning": angle(x, post),
        "turning_attention": angle(x, mid),
        "turning_ffn": angle(mid, post),
    }
    sums = {name: (value.sum(-1), torch.full(value.shape[:1], value.shape[1])) for name, value in values.items()}
    for name, place in (("diversity_pre", x), ("diversity_mid", mid), ("diversity_post", post)):
        diversity = 1 - torch.nn.functional.normalize(place, dim=-1).mean(1).square().sum(-1)
        sums[name] = diversity, torch.ones_like(diversity)
    return sums


def defect(F: Tensor, alone: Tensor) -> Sums:
    """How far the feed-forward network's answer is from its answer to x alone, at all positions but the first."""
    away, length = (F - alone)[:, 1:].norm(dim=-1), alone[:, 1:].norm(dim=-1)
    value = away / (length + 1e-6)
    return {"defect": (value.sum(-1), torch.full(value.shape[:1], value.shape[1]))}


def across(v: Tensor, x: Tensor) -> Tensor:
    """The part of v at right angles to x."""
    u = torch.nn.functional.normalize(x, dim=-1)
    return v - (v * u).sum(-1, keepdim=True) * u


def cosine(u: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(u, v, dim=-1)


def angle(u: Tensor, v: Tensor) -> Tensor:
    """Degrees."""
    return torch.rad2deg(torch.acos(cosine(u, v).clamp(-1, 1)))
