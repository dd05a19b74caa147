"""Readings of the backcopy task beside the reference costs that are not reproduced (docs/results/sinks.md).

    python experiments/sinks/backcopy.py            the nearest readings, T = 4 and 8
    python experiments/sinks/backcopy.py --search   all of them at T = 4, those near either pattern also at T = 8

After a trigger a token looks at the one before it; any other token is off, at the sink or at itself. How tokens are
embedded, and which queries and keys are asked for, is not written down. Nothing here is random.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rheoscope.theory.costs import Preference, backcopy_pattern, least_norm

REFERENCE = {4: (3.33, 4.55), 8: (6.96, 9.97), 16: (14.46, 21.59)}  # sink, diagonal; nuclear norm
NEAR = 2.0  # per cent


class Reading(NamedTuple):
    """One way to read the task."""

    query: str  # product: a vector for every position and class; else the position's, and for the class: two vectors,
    key: str  # one for triggers (flag), one for plain tokens (plain), one of either sign (sign), none (position)
    causal: bool = True
    first_apart: bool = False  # a first token besides the T
    first_trigger: int = 1
    first_plain: int = 0
    other_triggers: bool = False  # keys before the query may be triggers as well
    constant: bool = False  # queries share a coordinate
    sink_class: bool = False  # the first key has a class of its own


NEAREST = (
    Reading("product", "two", False, True, 1, 1, True, True, True),
    Reading("plain", "position", True, True, 2, 0, False, False, True),
    Reading("product", "position", False, True, 2, 1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8])
    options = parser.parse_args()
    for n_tokens in options.sizes:
        ours = [least_norm(backcopy_pattern(n_tokens, off)).value for off in ("sink", "diagonal")]
        print(
            f"T = {n_tokens}: {np.round(ours, 3)}, {distance(ours, n_tokens).round(1)} %  backcopy_pattern", flush=True
        )
    for reading in everything() if options.search else NEAREST:
        for n_tokens in options.sizes:
            found = np.array([cost(reading, n_tokens, off) for off in ("sink", "diagonal")])
            error = distance(found, n_tokens)
            if options.search and not (np.abs(error) < NEAR).any():
                break
            print(f"T = {n_tokens}: {found.round(3)}, {error.round(1)} %  {tuple(reading)}", flush=True)


def distance(found: Sequence[float], n_tokens: int) -> np.ndarray:
    """Per cent above the reference: sink, diagonal."""
    return 100 * (np.array(found) / REFERENCE[n_tokens] - 1)


def everything() -> Iterator[Reading]:
    """All readings that differ in what is asked for at T = 4."""
    kinds, yes_no = ("two", "flag", "plain", "sign", "position"), (False, True)
    axes = ((*kinds, "product"), (*kinds, "product"), yes_no, yes_no, (1, 2), (0, 1), yes_no, yes_no, yes_no)
    seen = set()
    for choice in itertools.product(*axes):
        reading = Reading(*choice)
        if reading.query == reading.key == "position":
            continue
        asked = [preferences(reading, 4, off) for off in ("sink", "diagonal")]
        key = tuple(frozenset(np.outer(p.query, p.key - p.other).tobytes() for p in part) for part in asked)
        if key not in seen:
            seen.add(key)
            yield reading


def cost(reading: Reading, n_tokens: int, off: str) -> float:
    """Least nuclear norm; NaN where no score does it."""
    return least_norm(preferences(reading, n_tokens, off)).value


def preferences(reading: Reading, n_tokens: int, off: str) -> list[Preference]:
    """What every query must prefer, over the coordinates that are used."""
    n = n_tokens + reading.first_apart
    found = {}
    for i, trigger in itertools.product(range(n), (False, True)):
        if i < (reading.first_trigger if trigger else reading.first_plain):
            continue
        target = i - 1 if trigger else (0 if off == "sink" else i)
        query = vector(reading.query, i, trigger, n)
        query[-1] = reading.constant

        def keys(j: int, i: int = i, trigger: bool = trigger) -> list[np.ndarray]:
            classes = (trigger,) if j == i else ((False, True) if reading.other_triggers else (False,))
            return [key_vector(reading, j, is_trigger, n) for is_trigger in classes]

        for j in range(i + 1 if reading.causal else n):
            for key, other in itertools.product(keys(target), keys(j)) if j != target else ():
                found[query.tobytes() + (key - other).tobytes()] = query, key, other
    used = np.flatnonzero(sum(np.abs(q) + np.abs(k - o) for q, k, o in found.values()))
    return [Preference(q[used], k[used], o[used]) for q, k, o in found.values()]


def key_vector(reading: Reading, j: int, trigger: bool, n: int) -> np.ndarray:
    key = vector(reading.key, j, trigger, n)
    if reading.sink_class and j == 0:
        key[3 * n :] = 0
        key[3 * n + 2] = 1
    return key


def vector(kind: str, i: int, trigger: bool, n: int) -> np.ndarray:
    """Positions, then positions times classes, then classes, the sink's class and the constant."""
    x = np.zeros(3 * n + 4)
    if kind == "product":
        x[n + 2 * i + trigger] = 1
        return x
    x[i] = 1
    if kind == "two" or (kind == "flag" and trigger) or (kind == "plain" and not trigger):
        x[3 * n + trigger] = 1
    if kind == "sign":
        x[3 * n] = 1 if trigger else -1
    return x


if __name__ == "__main__":
    main()
