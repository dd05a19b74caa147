"""What routing and filtering are worth in finished networks, and how many layers bear to be made linear as they are.

    python experiments/nets/edits.py runs/ --text tinyshakespeare.txt --out edited/

Every network of the kinds softmax and S-D gives one JSON file; those that are there are left as they are, and single
passes of the others are kept in passes.jsonl. Calibration on training windows, losses on held-out ones, errors over
windows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import xarray as xr
from text import each_finished, parted

import rheoscope
from rheoscope.corpus import Corpus
from rheoscope.surgery.calibration import calibrated
from rheoscope.surgery.passes import Passes
from rheoscope.surgery.score_curves import linearisation_curve, score_edit_table, truncation_curve

WINDOWS = 64  # held out, evenly spaced
CALIBRATION = 32  # trained on, evenly spaced
KINDS = ("softmax", "sd")


def main() -> None:
    """Measure what is missing."""
    each_finished(__doc__, edited_losses)


def edited_losses(folder: Path, record: dict, arguments: argparse.Namespace) -> dict | None:
    """Loss change of one network under every edit; None for those that are not edited."""
    recipe = record["recipe"]
    if recipe["kind"] not in KINDS or recipe["head_dims"] is not None:
        return None
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
