"""Tables of docs/results/surgery.md from the points of a folder.

python experiments/surgery/tables.py results/
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rheoscope.stats import paired_difference

Points = dict[tuple[int, str, str], dict[str, Any]]
RECOVERIES = ("none", "refit", "distilled")


def main(folder: Path) -> None:
    lines = (folder / "points.jsonl").read_text(encoding="utf-8").splitlines()
    points: Points = {(p["size"], p["choice"], p["recovery"]): p for p in map(json.loads, lines)}
    losses(points)
    times(points)
    fits(points)


def losses(points: Points) -> None:
    """Change of the loss by size, choice and recovery; the trained models also beside the original trained alike."""
    print("| attention parameters removed | choice | as it is | after the refit | after distillation | ", end="")
    print("beside the original trained alike |\n|---|---|---|---|---|---|")
    control = points.get((0, "original", "distilled"))
    for size, choice in sorted({key[:2] for key in points}):
        cells = [points.get((size, choice, recovery)) for recovery in RECOVERIES]
        written = [f"{p['change']:+.4f} ± {p['se']:.4f}" if p else "" for p in cells]
        written.append(beside(cells[2], control) if cells[2] and control and size else "")
        share = next((p["share"] for p in cells if p), float("nan"))
        print(f"| {share:.1%} ({size} key groups) | {choice} | {' | '.join(written)} |")


def beside(point: dict[str, Any], other: dict[str, Any]) -> str:
    """Paired change of the loss from one trained model to another; one window is one document."""
    nll = [np.array(p["window_nll"]) for p in (point, other)]
    change = paired_difference(*nll, denominators=np.array(point["window_tokens"], float))
    return f"{float(change.value):+.4f} ± {float(change.se):.4f}"


def times(points: Points) -> None:
    """Parameters, operations and measured times of the measured choice."""
    for (size, choice, recovery), point in sorted(points.items()):
        if recovery != "clock":
            continue
        operations, all_of_them = (after / before - 1 for before, after in (point["flops"], point["parameters"]))
        print(f"\n{choice} {size}: operations per token {operations:+.2%}, parameters {all_of_them:+.2%}")
        for one in point["latencies"]:
            milliseconds = f"{one['before_ms']:.1f} → {one['after_ms']:.1f} ms"
            ratios = f"{one['ratio']:.3f} ({one['ratio_low']:.2f} … {one['ratio_high']:.2f})"
            print(f"  {one['phase']} batch {one['batch']} at {one['length']} tokens: {milliseconds}, ratio {ratios}")


def fits(points: Points) -> None:
    """What was chosen, how well its change was predicted, and what the refit did to each layer."""
    for (size, choice, recovery), point in sorted(points.items()):
        if recovery != "refit":
            continue
        print(f"\n{choice} {size}: {'; '.join(point['places'])}")
        print(f"  refit {point['refit_seconds']:.0f} s; predicted {point.get('predicted')}")
        for layer, strength, before, after in point["fits"]:
            print(f"  layer {layer}: error {before:.3f} → {after:.3f} of the variance, ridge {strength:g}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
