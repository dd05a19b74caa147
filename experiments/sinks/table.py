"""The passes of `run.py` as tables in Markdown: what each way to rank heads costs, and which heads attention can leave.

python experiments/sinks/table.py FOLDER [--tolerance 0.005]
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from rheoscope.run import Run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--tolerance", type=float, default=0.005, help="nats per token that a replaced head may cost")
    options = parser.parse_args()
    lines = (Path(options.folder) / "passes.jsonl").read_text(encoding="utf-8").splitlines()
    passes = {entry["name"]: entry for entry in map(json.loads, lines)}
    sets(passes)
    heads(passes, options.tolerance)
    predictors(passes, Run.load(Path(options.folder) / "readings.nc"))


def sets(passes: dict[str, dict]) -> None:
    """Change of loss and cosine by edit, count and choice; random choices as their mean and spread over draws."""
    rows: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for name, entry in passes.items():
        if name.startswith("head "):
            continue
        edit, rest = name.split(", ")
        count, choice = rest.split(" ", 1)
        random = choice.removeprefix("by ").startswith("random")
        rows[f"{edit}, {count} heads", "random" if random else choice.removeprefix("by ")].append(entry)
    print("| edit | chosen by | Δloss (nats/token) | Δcosine |\n|---|---|---|---|")
    for (edit, choice), entries in sorted(rows.items()):
        loss, cosine = (_with_spread(entries, part) for part in ("loss", "cosine"))
        draws = f", {len(entries)} draws" if len(entries) > 1 else ""
        print(f"| {edit} | {choice}{draws} | {loss} | {cosine} |")


def heads(passes: dict[str, dict], tolerance: float) -> None:
    """Heads that a constant, or a map of each token alone, can stand in for, two standard errors to spare."""
    for kind in ("constant", "mlp"):
        of_kind = {name: e for name, e in passes.items() if name.startswith("head ") and name.endswith(f" {kind}")}
        if not of_kind:
            continue
        found = [n.split()[1] for n, e in of_kind.items() if e["loss"] + 2 * e["loss_se"] <= tolerance]
        costs = np.array([entry["loss"] for entry in of_kind.values()])
        print(f"\n{kind}: {len(found)} of {len(of_kind)} heads at most {tolerance} nats dearer: {', '.join(found)}")
        print(f"median cost of one head {np.median(costs):.4f}, 90th percentile {np.quantile(costs, 0.9):.4f}")


def predictors(passes: dict[str, dict], run: Run) -> None:
    """Rank correlation of readings with what one head made constant costs; interval by resampling heads, seed 0."""
    data = run["sinks"]
    costs = {name.split()[1]: entry["loss"] for name, entry in passes.items() if name.endswith(" constant")}
    pairs = [tuple(map(int, pair.split("."))) for pair in costs]
    generator = np.random.default_rng(0)
    drawn = generator.integers(0, len(pairs), (1000, len(pairs)))
    for name in ("sink_mass", "value_ratio", "diagonal_mass", "previous_mass"):
        values, cost = np.array([float(data[name].values[pair]) for pair in pairs]), np.array(list(costs.values()))
        low, high = np.quantile([spearmanr(values[rows], cost[rows]).statistic for rows in drawn], [0.025, 0.975])
        middle = spearmanr(values, cost).statistic
        print(
            f"{name} and the cost of one constant head, {len(pairs)} heads: {middle:+.2f} ({low:+.2f} to {high:+.2f})"
        )


def _with_spread(entries: list[dict], part: str) -> str:
    values = np.array([entry[part] for entry in entries])
    if len(values) == 1:
        return f"{values[0]:.3f} ± {entries[0][f'{part}_se']:.3f}"
    return f"{values.mean():.3f} ({values.min():.3f} to {values.max():.3f})"


if __name__ == "__main__":
    main()
