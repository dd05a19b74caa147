"""Least norms of a bilinear score that shows a pattern with a margin, and of the values that copy: convex programs.

Tokens x_i (rows), score x_i M x_jᵀ. Every query must give its key more score, by γ, than each other key in its reach.
The Frobenius norm is a quadratic cone, the nuclear norm a semidefinite one: min ‖W_Q‖² + ‖W_K‖² over W_Q W_Kᵀ = M is
2 ‖M‖_*, so weight decay on the factors charges the nuclear norm. docs/sinks.md §5.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import cvxpy
import numpy as np
from jaxtyping import Float, Float64
from scipy import sparse
from scipy.stats import linregress, t

from rheoscope.errors import RheoscopeError

NORMS: dict[str, Callable[[cvxpy.Expression], cvxpy.Expression]] = {
    "frobenius": lambda M: cvxpy.norm(M, "fro"),
    "nuclear": cvxpy.normNuc,
}
ACCURACY = 1e-5  # of the first-order solver that semidefinite programs are given
ITERATIONS = 50_000


class Preference(NamedTuple):
    """One query that must prefer one key over another: vectors, not positions."""

    query: Float64[np.ndarray, " d"]
    key: Float64[np.ndarray, " d"]
    other: Float64[np.ndarray, " d"]


class Cost(NamedTuple):
    """Least norm, the matrix that has it, and whether the solver converged. NaN where it did not, or none exists."""

    value: float
    matrix: Float64[np.ndarray, "d d"] | None
    status: str


class Slope(NamedTuple):
    """Exponent of a power law by least squares in logarithms, with its standard error and 95 % interval."""

    value: float
    se: float
    low: float
    high: float


def sink_pattern(x: Float[np.ndarray, "token d"], *, sink: int = 0) -> list[Preference]:
    """Every query prefers the sink to every other key."""
    return [Preference(q, x[sink], x[j]) for q in x for j in range(len(x)) if j != sink]


def diagonal_pattern(x: Float[np.ndarray, "token d"]) -> list[Preference]:
    """Every query prefers itself to every other key."""
    return [Preference(x[i], x[i], x[j]) for i in range(len(x)) for j in range(len(x)) if j != i]


def backcopy_pattern(n_tokens: int, off: str) -> list[Preference]:
    """After a trigger, look at the token before it; anywhere else be off: at the first token, or at oneself.

    Causal. Position i has a unit vector of its own; a token adds one that says whether it is a trigger. Any one token
    but the first may be the trigger of a text, or none. off: "sink" (position 0) or "diagonal". Our own reading of the
    task: see docs/sinks.md §5 for how it compares.
    """
    preferences: dict[bytes, Preference] = {}
    for trigger in range(n_tokens):  # 0 stands for none
        x = np.zeros((n_tokens, n_tokens + 2))
        x[np.arange(n_tokens), np.arange(n_tokens)] = 1.0
        x[:, n_tokens] = 1.0
        if trigger:
            x[trigger, n_tokens:] = 0.0, 1.0
        for i in range(n_tokens):
            target = i - 1 if trigger and i == trigger else (0 if _is_sink(off) else i)
            for j in range(i + 1):
                one = Preference(x[i], x[target], x[j])
                if j != target:
                    preferences[one.query.tobytes() + (one.key - one.other).tobytes()] = one
    return list(preferences.values())


def copy_pattern(n_tokens: int, *, offset: int) -> list[Preference]:
    """Generic copy: every token looks `offset` tokens back, causally, over orthonormal positions."""
    x = np.eye(n_tokens)
    return [
        Preference(x[i], x[i - offset], x[j]) for i in range(offset, n_tokens) for j in range(i + 1) if j != i - offset
    ]


def _is_sink(off: str) -> bool:
    if off not in ("sink", "diagonal"):
        raise RheoscopeError(f"off state {off!r} asked for; there are sink and diagonal")
    return off == "sink"


def least_norm(preferences: Sequence[Preference], norm: str = "nuclear", *, margin: float = 1.0) -> Cost:
    """Least norm of M with q M (key - other)ᵀ >= margin for all preferences.

    norm: "frobenius" or "nuclear". An infeasible pattern (tokens that are mixtures of others) has cost NaN and says
    so in `status`, like a solver that did not converge.
    """
    if norm not in NORMS:
        raise RheoscopeError(f"norm {norm!r} asked for; there are {', '.join(NORMS)}")
    if not preferences:
        raise RheoscopeError("a pattern without preferences asked for: give at least two tokens")
    d = len(preferences[0].query)
    rows = np.stack([np.outer(p.query, p.key - p.other).ravel() for p in preferences])
    M = cvxpy.Variable((d, d))
    constraints = [sparse.csr_array(rows) @ cvxpy.vec(M, order="C") >= margin]
    return _solved(cvxpy.Problem(cvxpy.Minimize(NORMS[norm](M)), constraints), M)


def least_copying_norm(
    copied: Float[np.ndarray, "copied d"],
    targets: Float[np.ndarray, "copied d_out"],
    silent: Float[np.ndarray, "silent d"],
    norm: str = "nuclear",
) -> Cost:
    """Least norm of W_VO with x W_VO = target for copied tokens and x W_VO = 0 for those that must write nothing.

    silent: the sink alone (sink reading); every token that should be off (diagonal, "must vanish there"); no token
    (diagonal, "harmless there": what is added where nothing should be is tolerated).
    """
    if norm not in NORMS:
        raise RheoscopeError(f"norm {norm!r} asked for; there are {', '.join(NORMS)}")
    W = cvxpy.Variable((copied.shape[1], targets.shape[1]))
    constraints = [copied @ W == targets, *([silent @ W == 0] if len(silent) else [])]
    return _solved(cvxpy.Problem(cvxpy.Minimize(NORMS[norm](W)), constraints), W)


def closed_form(pattern: str, norm: str, n_tokens: int, *, margin: float = 1.0) -> float:
    """Least norm of the bare pattern over orthonormal tokens: γ sqrt(T - 1), but γ (T - 1) for a nuclear diagonal."""
    if pattern not in ("sink", "diagonal") or norm not in NORMS:
        raise RheoscopeError(f"closed form of {pattern!r} in norm {norm!r} asked for; there are sink and diagonal")
    return margin * (n_tokens - 1) ** (1.0 if (pattern, norm) == ("diagonal", "nuclear") else 0.5)


def slope(sizes: Sequence[float], costs: Sequence[float]) -> Slope:
    """Exponent b of cost ~ size^b. NaN error and interval below three sizes."""
    log_sizes, log_costs = np.log(sizes), np.log(costs)
    if len(sizes) < 2:
        raise RheoscopeError(f"a slope over {len(sizes)} sizes asked for: give at least two")
    if len(sizes) == 2:
        value = float(np.diff(log_costs)[0] / np.diff(log_sizes)[0])
        return Slope(value, np.nan, np.nan, np.nan)
    fit = linregress(log_sizes, log_costs)
    reach = float(t.ppf(0.975, len(sizes) - 2)) * fit.stderr
    return Slope(float(fit.slope), float(fit.stderr), float(fit.slope - reach), float(fit.slope + reach))


def _solved(problem: cvxpy.Problem, M: cvxpy.Variable) -> Cost:
    """The least value, by an interior-point solver for quadratic cones and a first-order one for semidefinite ones."""
    semidefinite = any(isinstance(atom, type) and atom.__name__ == "normNuc" for atom in problem.atoms())
    chosen = {"solver": "SCS", "eps": ACCURACY, "max_iters": ITERATIONS} if semidefinite else {"solver": "CLARABEL"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # inaccurate: the status says so, and it is refused
            problem.solve(**chosen)
    except cvxpy.SolverError as error:
        return Cost(np.nan, None, f"did not converge: {error}")
    if problem.status != cvxpy.OPTIMAL or M.value is None:
        return Cost(np.nan, None, problem.status)
    return Cost(float(problem.value), M.value, problem.status)
