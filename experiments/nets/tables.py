"""Tables of docs/results/networks.md as Markdown, from what run.py, measure.py and edits.py have left.

python experiments/nets/tables.py runs/ measured/ > tables.md
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float64

from rheoscope.nets.trainer import read_curve
from rheoscope.stats import paired_difference

Readings = dict[str, dict[int, dict]]  # network -> seed -> readings
GATED = ("softmax", "ega", "ega_published")


def main() -> None:
    """Print every table there is something for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("measured", type=Path)
    parser.add_argument("edited", type=Path)
    arguments = parser.parse_args()
    readings, edited = read(arguments.measured), read(arguments.edited)
    curves = {name: {s: read_curve(arguments.runs / f"{name}-{s}") for s in seeds} for name, seeds in readings.items()}
    sections = {
        "Losses": losses(readings),
        "Ranks by layer": ranks(curves),
        "Damping": dampings(curves),
        "Gates": gates(readings),
        "Head sizes": allocation(readings),
        "Routing and filtering taken away": truncations(edited),
        "Layers made linear": linearisations(edited),
    }
    for heading, lines in sections.items():
        if lines:
            print(f"\n### {heading}\n\n" + "\n".join(lines))


def read(folder: Path) -> Readings:
    """The JSON files of a folder, by network and seed."""
    readings: Readings = defaultdict(dict)
    for path in sorted(folder.glob("*.json")):
        name, seed = re.fullmatch(r"(.+)-(\d+)", path.stem).groups()
        readings[name][int(seed)] = json.loads(path.read_text(encoding="utf-8"))
    return dict(readings)


def markdown(headings: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table; no lines for no rows."""
    if not rows:
        return []
    return [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows)]


def with_error(values: list[float] | Float64[np.ndarray, " seed"], sign: str = "") -> str:
    """Mean and standard error over seeds; one seed has none. `sign` "+" for changes."""
    mean = f"{np.mean(values):{sign}.3f}"
    return mean if len(values) < 2 else f"{mean} ± {np.std(values, ddof=1) / math.sqrt(len(values)):.3f}"


def losses(readings: Readings) -> list[str]:
    """Held-out loss of every network beside what counting gives."""
    rows = []
    for name, seeds in readings.items():
        one = next(iter(seeds.values()))
        held_out = [np.mean(found["held_out"]) for found in seeds.values()]
        shape = [f"{one['parameters']:,}", f"{one['attention_parameters']:,}"]
        rows.append([name, *shape, with_error(held_out), ", ".join(f"{loss:.3f}" for loss in held_out)])
    for name, loss in next(iter(next(iter(readings.values())).values()))["baselines"].items():
        rows.append([name, "", "", f"{loss:.3f}", ""])
    return markdown(["network", "parameters", "attention", "held-out loss, nats/byte", "by seed"], rows)


def at_end(curve: pd.DataFrame, reading: str) -> list[float]:
    """The last reading of every layer."""
    names = sorted(name for name in curve if re.fullmatch(rf"{reading}_\d+", name))
    return [curve[name].dropna().iloc[-1] for name in names]


def ranks(curves: dict[str, dict[int, pd.DataFrame]]) -> list[str]:
    """k90 of S by layer at the end of training, median of the seeds and their range."""
    rows, n_layers = [], 0
    for name, seeds in curves.items():
        for reading, label in (("routing_k90", "k90"), ("routing_k90_gauge_removed", "key bias removed")):
            ends = np.array([at_end(curve, reading) for curve in seeds.values()])
            n_layers = ends.shape[1]
            rows.append([name, label, *(ranged(column) for column in ends.T), str(len(seeds))])
    return markdown(["network", "", *(f"layer {layer}" for layer in range(n_layers)), "seeds"], rows)


def ranged(values: Float64[np.ndarray, " seed"]) -> str:
    """Median, and the least and most."""
    return f"{np.median(values):.1f} ({values.min():.1f}–{values.max():.1f})"


def dampings(curves: dict[str, dict[int, pd.DataFrame]]) -> list[str]:
    """Mean of d_i and its spread over tokens (standard deviation over mean), median of the seeds and their range."""
    rows, n_layers = [], 0
    for name, seeds in curves.items():
        for reading, label in (("damping_mean", "mean d"), ("damping_spread", "spread / mean")):
            ends = np.array([at_end(curve, reading) for curve in seeds.values()])
            if not ends.size:
                continue
            n_layers = ends.shape[1]
            cells = (f"{np.median(x):.2f} ({x.min():.2f}–{x.max():.2f})" for x in ends.T)
            rows.append([name, label, *cells, str(len(seeds))])
    return markdown(["network", "", *(f"layer {layer}" for layer in range(n_layers)), "seeds"], rows)


def gates(readings: Readings) -> list[str]:
    """Loss of gated attention against softmax of the same seed: the whole window given, and the past alone.

    `leak`: the largest change of a probability in the first half of a window when the second half is reversed.
    """
    base = readings.get("softmax", {})
    rows = []
    for name in (name for name in GATED if name in readings and base):
        seeds = sorted(set(readings[name]) & set(base))
        pairs = [(readings[name][seed], base[seed]) for seed in seeds]
        cells = []
        for reading in ("held_out", "prefix_held_out"):
            changes = [np.mean(one[reading]) - np.mean(other[reading]) for one, other in pairs]
            errors = [window_error(one[reading], other[reading]) for one, other in pairs]
            by_seed = ", ".join(f"{change:+.3f} ± {error:.3f}" for change, error in zip(changes, errors, strict=True))
            cells.append(with_error([np.mean(one[reading]) for one, _ in pairs]))
            cells += ["", ""] if name == "softmax" else [with_error(changes, "+"), by_seed]
        rows.append([name, *cells, f"{max(one['leak'] for one, _ in pairs):.1e}"])
    headings = ["kind", "whole window", "against softmax", "by seed ± windows", "past alone", "against softmax",
                "by seed ± windows", "leak"]  # fmt: skip
    return markdown(headings, rows)


def window_error(after: list[float], before: list[float]) -> float:
    """Standard error over windows of the paired difference of two networks' losses."""
    return float(paired_difference(np.array(after), np.array(before), denominators=np.ones(len(after))).se)


def allocation(readings: Readings) -> list[str]:
    """Loss against attention parameters for other head sizes than the baseline's, paired by seed."""
    base = readings.get("sd_no_norm", {})
    rows = []
    for name, seeds in readings.items():
        one = next(iter(seeds.values()))
        if one["recipe"]["head_dims"] is None:
            continue
        shared = sorted(set(seeds) & set(base))
        changes = np.array([np.mean(seeds[s]["held_out"]) - np.mean(base[s]["held_out"]) for s in shared])
        saved = 1 - one["attention_parameters"] / base[shared[0]]["attention_parameters"]
        rows.append([
            name,
            ", ".join(map(str, one["recipe"]["head_dims"])),
            f"-{saved:.1%}",
            with_error(changes, "+"),
            ", ".join(f"{change:+.3f}" for change in changes),
            f"{np.expm1(changes.mean()):+.1%}",
        ])  # fmt: skip
    return markdown(["network", "d_head", "attention parameters", "loss change", "by seed", "perplexity"], rows)


def truncations(edited: Readings) -> list[str]:
    """Loss change of every edit of the scores; of each part the ranks that were tried."""
    changes: dict[str, dict[str, str]] = defaultdict(dict)
    for name, seeds in edited.items():
        found = list(seeds.values())
        changes["unedited loss"][name] = with_error([one["loss"] for one in found])
        curves, edits = [one["truncation"] for one in found], [one["edits"] for one in found]
        for part in (part for part in ("routing", "filtering") if f"{part}_change" in curves[0]):
            for i, rank in enumerate(curves[0]["rank"]):
                changes[f"{part}, rank {rank}"][name] = change(curves, f"{part}_change", i)
        for i, edit in enumerate(edits[0]["score_edit"]):
            changes[edit][name] = change(edits, "score_edit_change", i)
    rows = [[edit, *(row.get(name, "–") for name in edited)] for edit, row in changes.items()]
    return markdown(["loss change", *edited], rows)


def linearisations(edited: Readings) -> list[str]:
    """Loss change with the first n layers linear, and what it makes of the perplexity."""
    rows = []
    for name, seeds in edited.items():
        for protocol, label in (("linear", "as published"), ("linear_scaled", "with the score scale")):
            found = [one[protocol] for one in seeds.values()]
            rows.append([name, label, *(change(found, "linear_change", i) for i in range(len(found[0]["n_linear"])))])
    n_layers = len(rows[0]) - 2 if rows else 0
    return markdown(["network", "features", *(f"first {n}" for n in range(1, n_layers + 1))], rows)


def change(found: list[dict[str, list[float]]], variable: str, i: int) -> str:
    """Mean change over seeds with the larger of its error over seeds and its mean error over windows."""
    values = [one[variable][i] for one in found]
    over_windows = np.mean([one[f"{variable}_se"][i] for one in found])
    over_seeds = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{np.mean(values):+.3f} ± {max(over_seeds, over_windows):.3f}"


if __name__ == "__main__":
    main()
