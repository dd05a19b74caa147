"""Exact spectra of the routing part S from its small factor, against dense `eigvals` and `svdvals`, in one run.

    python benchmarks/spectra.py [--threads 1] [--positions 1024]

On one thread the clock is the processor time of this process, so that other programs on the machine do not count.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from rheoscope import linalg

D_HEAD, HEADS, SCALE = 64, 9, 0.125


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--positions", type=int, default=1024)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    with threadpool_limits(options.threads):
        compare(options.positions, clock)
        growth(clock)


def compare(n: int, clock: Callable[[], float]) -> None:
    """One head by the small factor and by each dense routine; the fastest dense one of a kind counts."""
    Q, K = vectors(n)
    M = SCALE * Q[0] @ K[0].T
    S = (M - M.T) / 2
    print(f"N = {n}, d_head = {D_HEAD}, {HEADS} heads at once, {torch.get_num_threads()} thread(s); ms per head")
    ours = best(lambda: spectra(Q, K), clock, 15) / HEADS
    row("ours: factor and singular values of S", ours)
    T = linalg.score_factors(Q, K, scale=SCALE)
    row("      the factor alone", best(lambda: linalg.score_factors(Q, K, scale=SCALE), clock, 15) / HEADS)
    row("      then S without its gauge part", best(lambda: gauge_removed(T), clock, 15) / HEADS)
    row("      then F", best(lambda: linalg.filtering_singular_values(T), clock, 15) / HEADS)
    row("      then M", best(lambda: linalg.score_singular_values(T), clock, 15) / HEADS)
    singular = {
        "torch.linalg.svdvals": best(lambda: torch.linalg.svdvals(S), clock, 3),
        "numpy.linalg.svd(compute_uv=False)": best(lambda: np.linalg.svd(S.numpy(), compute_uv=False), clock, 3),
    }
    eigen = {
        "torch.linalg.eigvals": best(lambda: torch.linalg.eigvals(S), clock, 2),
        "numpy.linalg.eigvals": best(lambda: np.linalg.eigvals(S.numpy()), clock, 2),
    }
    for name, seconds in (singular | eigen).items():
        row(f"dense {name}", seconds)
    print(f"  {min(singular.values()) / ours:.0f}x faster than dense svdvals (floor 40)")
    print(f"  {min(eigen.values()) / ours:.0f}x faster than dense eigvals (floor 200)")
    print(f"  largest error over all singular values, relative to the largest: {error(spectra(Q, K)[0], S):.1e} (1e-9)")


def growth(clock: Callable[[], float]) -> None:
    """Exponents of the cost in N."""
    sizes = [512, 1024, 2048, 4096]
    ours = [best(lambda Q=Q, K=K: spectra(Q, K), clock, 7) / HEADS for Q, K in map(vectors, sizes)]
    dense_sizes = [256, 512, 1024]
    dense = [best(lambda S=S: torch.linalg.svdvals(S), clock, 2) for S in map(skew, dense_sizes)]
    for name, extents, seconds in (("ours", sizes, ours), ("dense svdvals", dense_sizes, dense)):
        slope = np.polyfit(np.log(extents), np.log(seconds), 1)[0]
        cells = ", ".join(f"{n}: {1e3 * value:.2f}" for n, value in zip(extents, seconds, strict=True))
        print(f"  {name}: cost ~ N^{slope:.2f} (ms at N = {cells})")


def vectors(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    Q, K = (torch.randn(HEADS, n, D_HEAD, generator=generator, dtype=torch.float64) for _ in range(2))
    return Q + 0.5, 0.5 * K + 0.3 * Q


def skew(n: int) -> torch.Tensor:
    Q, K = vectors(n)
    M = SCALE * Q[0] @ K[0].T
    return (M - M.T) / 2


def spectra(Q: torch.Tensor, K: torch.Tensor) -> torch.Tensor:
    return linalg.routing_singular_values(linalg.score_factors(Q, K, scale=SCALE))


def gauge_removed(T: torch.Tensor) -> torch.Tensor:
    return linalg.routing_singular_values(linalg.centred_factors(T))


def error(values: torch.Tensor, S: torch.Tensor) -> float:
    dense = torch.linalg.svdvals(S)
    padded = torch.nn.functional.pad(values, (0, len(dense) - len(values)))
    return ((padded - dense).abs().max() / dense[0]).item()


def best(task: Callable[[], object], clock: Callable[[], float], repeats: int) -> float:
    """Least seconds of several runs, after one that does not count."""
    task()
    seconds = []
    for _ in range(repeats):
        start = clock()
        task()
        seconds.append(clock() - start)
    return min(seconds)


def row(name: str, seconds: float) -> None:
    print(f"  {name:<48} {1e3 * seconds:9.2f}")


if __name__ == "__main__":
    main()
