"""What routing and filtering are worth in finished networks, and how many layers bear to be made linear as they are.

    python experiments/nets/edits.py runs/ --text tinyshakespeare.txt --out edited/

Every network of the kinds softmax and S-D gives one JSON file; those that are there are left as they are, and single
passes of the others are kept in passes.jsonl. Calibration on training windows, losses on held-out ones, errors over
windows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import xarray as xr
from text import finished, parted

import rheoscope
from rheoscope.corpus import Corpus
from rheoscope.nets.folder import write_text
from rheoscope.surgery.calibration import calibrated
from rheoscope.surgery.passes import Passes
from rheoscope.surgery.score_curves import linearisation_curve, score_edit_table, truncation_curve

WINDOWS = 64  # held out, evenly spaced
CALIBRATION = 32  # trained on, evenly spaced
KINDS = ("softmax", "sd")


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--text", required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name, record in finished(arguments.runs).items():
        path = arguments.out / f"{name}.json"
        recipe = record["recipe"]
        if recipe["kind"] in KINDS and recipe["head_dims"] is None and not path.exists():
            write_text(path, json.dumps(edited_losses(arguments.runs / name, arguments)) + "\n")
            print(name, flush=True)


def edited_losses(folder: Path, arguments: argparse.Namespace) -> dict:
    """Loss change of one network under every edit."""
    view = rheoscope.load(folder)
    training, held_out = parted(folder, arguments.text)
    calibration = calibrated(view, spaced(training, CALIBRATION))
    passes = Passes(view, spaced(held_out, WINDOWS), arguments.out / "passes.jsonl")
    plain = passes.losses(task="unedited")
    curves = {
        "truncation": truncation_curve(passes, calibration),
        "edits": score_edit_table(passes, calibration),
        "linear": linearisation_curve(passes),
        "linear_scaled": linearisation_curve(passes, scaled=True),
    }
    loss = plain.window_nll.sum() / plain.window_tokens.sum()
    return {"loss": float(loss)} | {name: plain_numbers(curve) for name, curve in curves.items()}


def spaced(corpus: Corpus, n: int) -> Corpus:
    """That many windows, evenly spaced."""
    return corpus.of_windows(np.linspace(0, corpus.n_windows - 1, min(n, corpus.n_windows)).astype(int))


def plain_numbers(curve: xr.Dataset) -> dict[str, list]:
    """Coordinates and variables as lists."""
    return {str(name): curve[name].values.tolist() for name in curve.variables}


if __name__ == "__main__":
    main()
