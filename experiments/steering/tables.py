"""Tables of docs/results/steering.md from the run files of a folder.

python experiments/steering/tables.py results/
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from scipy.stats import binomtest

from rheoscope.run import Run
from rheoscope.surgery.ablation import ablation_lines


def main(folder: Path) -> None:
    for path in sorted(folder.glob("*.nc")):
        run = Run.load(path)
        text = run.provenance["text"]
        print(f"\n## {path.stem}: {text['n_windows']} x {text['window']} tokens, {text['n_documents']} documents\n")
        if "steering" in run:
            print_readings(run)
        if "ablation" in run:
            print("\n".join(ablation_lines(run)))
            print_choices(run)
        if "criticals" in run:
            print_criticals(run)


def print_readings(run: Run) -> None:
    """By layer, with errors."""
    data = run["steering"]
    names = ("angular_deficit", "ffn_deficit", "attention_radial_share", "ffn_radial_share", "defect", "top_k_cosine")
    print("layer  " + "  ".join(f"{name:>24}" for name in names))
    for layer in data.layer.values:
        row = data.sel(layer=layer)
        cells = (f"{float(row[name]):.3f} ± {float(row[f'{name}_se']):.3f}" for name in names)
        print(f"{layer:>5}  " + "  ".join(f"{cell:>24}" for cell in cells))
    for name in ("angular_deficit_mean", "angular_deficit_slope"):
        line = f"{name} {float(data[name]):.4f} ± {float(data[f'{name}_se']):.4f}"
        print(line + (f", untrained {float(data[f'{name}_null']):.4f}" if f"{name}_null" in data else ""))
    print(f"orthogonal null, mean over layers {float(data.angular_deficit_null_orthogonal.mean()):.4f}")
    read = f"tokens {data.attrs['n_tokens']}, of the defect {data.attrs['n_defects']}"
    print(f"sum error {float(data.resid_sum_error.max()):.1e}; {read}")


def print_choices(run: Run) -> None:
    """Where low-defect-first stands among the random choices."""
    data = run["ablation"]
    if "parallel_change_low" not in data:
        return
    for size in data.n_parallel.values:
        row = data.sel(n_parallel=size)
        random = row.parallel_change_random.values
        named = {"low defect": row.parallel_change_low, "low displacement": row.parallel_change_displacement}
        beaten = {name: int((random > float(change)).sum()) for name, change in named.items()}
        middle = f"median {np.median(random):+.4f}, least {random.min():+.4f}, most {random.max():+.4f}"
        for name, number in beaten.items():
            low, high = binomtest(number, len(random)).proportion_ci(method="exact")
            share = f"{number / len(random):.3f} (95 % interval {low:.3f} to {high:.3f})"
            cheaper = f"is cheaper than {number} of {len(random)} random choices, {share}; {middle}"
            print(f"{size} layers: {name} costs {float(named[name]):+.4f}, {cheaper}")
    for name in ("parallel_defect", "parallel_displacement"):
        print(f"layers from the least {name} on: {np.argsort(data[name].values, kind='stable').tolist()}")
    if "parallel_change_by_layer" not in data:
        return
    cost = np.argsort(np.argsort(data.parallel_change_by_layer.values))
    for name in ("parallel_defect", "parallel_displacement"):
        ranks = np.argsort(np.argsort(data[name].values))
        print(f"rank correlation of {name} and cost over layers {np.corrcoef(ranks, cost)[0, 1]:.3f}")


def print_criticals(run: Run) -> None:
    data = run["criticals"]
    print(f"layer {data.attrs['layer']}, {data.attrs['n']} starts")
    for field in data.field.values:
        row = data.sel(field=field)
        counts = f"{int(row.critical_converged)} starts converged, {int(row.critical_distinct)} distinct"
        print(f"{field}: {counts}, rotational {float(row.critical_rotational_share):.2f}")
        for name in ("critical_kind_share", "critical_kind_share_null_directions", "critical_kind_share_null_weights"):
            shares = ", ".join(f"{kind} {float(row[name].sel(kind=kind)):.2f}" for kind in data.kind.values)
            print(f"    {name}: {shares}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
