"""Tables of docs/results/surgery.md from the points of a folder.

python experiments/surgery/tables.py results/
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(folder: Path) -> None:
    lines = (folder / "points.jsonl").read_text(encoding="utf-8").splitlines()
    points = {(p["size"], p["choice"], p["recovery"]): p for p in map(json.loads, lines)}
    print("| attention parameters removed | choice | as it is | after the refit |")
    print("|---|---|---|---|")
    for size, choice in sorted({key[:2] for key in points}):
        cells = [points.get((size, choice, recovery)) for recovery in ("none", "refit")]
        written = [f"{p['change']:+.4f} ± {p['se']:.4f}" if p else "" for p in cells]
        share = next((p["share"] for p in cells if p), float("nan"))
        print(f"| {share:.1%} ({size} key groups) | {choice} | {' | '.join(written)} |")
    for (size, choice, recovery), point in sorted(points.items()):
        if recovery == "clock":
            before, after = point["flops"]
            print(
                f"\n{choice} {size}: parameters {point['parameters']}, operations per token {after / before - 1:+.2%}"
            )
            for one in point["latencies"]:
                times = f"{one['before_ms']:.1f} → {one['after_ms']:.1f} ms"
                ratios = f"{one['ratio']:.3f} ({one['ratio_low']:.2f} … {one['ratio_high']:.2f})"
                print(f"  {one['phase']} batch {one['batch']} at {one['length']} tokens: {times}, ratio {ratios}")
        elif "places" in point and recovery == "refit":
            print(f"\n{choice} {size}: {'; '.join(point['places'])}")
            print(f"  refit {point['refit_seconds']:.0f} s; predicted {point.get('predicted')}")
            for layer, strength, before, after in point["fits"]:
                print(f"  layer {layer}: error {before:.3f} → {after:.3f} of the variance, ridge {strength:g}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
