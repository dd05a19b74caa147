"""How the scores of pretrained models split into routing and filtering, model by model, as one table.

    python experiments/split/run.py --text wiki.test.txt --out split-runs                       # the published models
    python experiments/split/run.py --text wiki.test.txt --out split-runs --model FOLDER ...    # others

Every model's run is kept in the folder; run the command again and only what is missing is measured. A model that cannot
be opened is named at the end and does not stop the others.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np
import xarray as xr
import yaml

import rheoscope

CONFIG = Path(__file__).with_name("published.yaml")
HEADINGS = (
    "model", "heads", "windows", "loss", "routing share", "untrained", "below 0.5", "k90 routing", "key bias removed",
    "untrained k90", "capacity", "key-bias share", "a growing direction",
)  # fmt: skip


def main() -> None:
    """Measure what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", action="append", help="instead of the published ones")
    parser.add_argument("--config", type=Path, default=CONFIG)
    arguments = parser.parse_args()
    config = yaml.safe_load(arguments.config.read_text(encoding="utf-8"))
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows, failed = [], {}
    for ref in arguments.model or config["models"]:
        file = arguments.out / (re.sub(r"[^\w.-]+", "_", ref).strip("_") + ".nc")
        try:
            run = rheoscope.Run.load(file) if file.exists() else measured(ref, arguments.text, config, file)
        except rheoscope.RheoscopeError as error:
            failed[ref] = error
            continue
        rows.append(row(ref, run))
    print("| " + " | ".join(HEADINGS) + " |\n|" + "---|" * len(HEADINGS))
    for cells in rows:
        print("| " + " | ".join(cells) + " |")
    for ref, error in failed.items():
        print(f"\nnot measured: {ref}: {error}")


def measured(ref: str, text: str, config: dict, file: Path) -> rheoscope.Run:
    """One model's run, saved."""
    view = rheoscope.load(ref)
    corpus = rheoscope.read(
        text,
        tokenizer=view.tokenizer,
        window=min(config["window"], view.context or config["window"]),
        n_windows=config["windows"],
        windows_per_document=config["windows_per_document"],
        split=config["split"],
    )
    names = ["loss", "routing"] if view.has_loss else ["routing"]
    run = rheoscope.measure(view, corpus, instruments=names, seed=config["seed"])
    run.save(file)
    return run


def row(ref: str, run: rheoscope.Run) -> list[str]:
    """One line of the table: medians over heads, and the spread that holds 80 % of them."""
    routing, provenance = run["routing"], run.provenance
    share = routing.routing_share.values.ravel()
    loss = "" if "loss" not in run else f"{run['loss'].nll_mean.item():.3f} ± {run['loss'].nll_mean_se.item():.3f}"
    return [
        Path(ref).name,
        str(share.size),
        f"{provenance['text']['n_windows']} x {provenance['text']['window']}",
        loss,
        spread(routing.routing_share),
        f"{np.median(routing.routing_share_null):.3f}",
        f"{np.mean(share < routing.routing_share_null_gaussian.item()):.0%}",
        spread(routing.routing_k90),
        spread(routing.routing_k90_gauge_removed),
        f"{np.median(routing.routing_k90_null):.1f}",
        f"{routing.capacity.values[0]:.0f}",
        spread(routing.gauge_share),
        f"{np.mean(routing.stability_share_positive > 0):.0%}",
    ]


def spread(values: xr.DataArray) -> str:
    """Median over heads, and the 10th and 90th percentile."""
    low, middle, high = np.nanpercentile(values, [10, 50, 90])
    return f"{middle:.3g} ({low:.3g}–{high:.3g})"


if __name__ == "__main__":
    main()
